"""Programs that benchmarks start find this package, and what the caller's PYTHONPATH has."""

import os
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOT = str(BENCHMARKS.parent)


@pytest.mark.parametrize(
    ("caller_s", "expected"), [(None, [ROOT]), ("", [ROOT]), ("/patched:/more", [ROOT, "/patched", "/more"])]
)
def test_programs_get_this_package_before_the_caller_s_pythonpath(benchmark_script, monkeypatch, caller_s, expected):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if caller_s is not None:
        monkeypatch.setenv("PYTHONPATH", caller_s)
    gpu_step, cpu_step, children = map(benchmark_script, ("gpu_step", "cpu_step", "children"))
    made = [gpu_step.environment(True), gpu_step.environment(False), cpu_step.environment("tuned")]
    for environment in [*made, children.environment()]:
        assert environment["PYTHONPATH"].split(os.pathsep) == expected


def test_no_script_replaces_the_caller_s_pythonpath():
    owners = [path.name for path in BENCHMARKS.glob("*.py") if "PYTHONPATH" in path.read_text()]
    assert owners == ["children.py"]
