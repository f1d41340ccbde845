"""Directories to import: models of transformers with random parameters, and one made without it."""

import functools
from pathlib import Path

import pytest

from tests.huggingface.small_models import MODELS, make_directory, make_tensors, random_model


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """A model of transformers with random parameters, biases and norms included, and the directory it is saved in.

    (a name in MODELS, dtype) -> (its directory, the model in that dtype)."""
    reason = "the extra `hf` is not installed"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip("transformers", reason=reason)

    @functools.cache
    def make(which: str, dtype: str):
        model = random_model(*MODELS[which], dtype)
        directory = tmp_path_factory.mktemp(which)
        model.save_pretrained(directory)
        return directory, model

    return make


@pytest.fixture
def directory(tmp_path) -> Path:
    return make_directory(tmp_path / "model", make_tensors())
