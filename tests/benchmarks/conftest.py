"""The scripts of benchmarks/, as modules."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def benchmark_script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    before = set(sys.modules)
    yield importlib.import_module
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path(__file__).parents[2] / "benchmarks")):
            del sys.modules[name]
