"""Directories to import: models of transformers with random parameters, and one made without it."""

import functools
from pathlib import Path

import pytest

from tests.huggingface.small_models import MODELS, make_directory, make_tensors


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """A model of transformers with random parameters, biases and norms included, and the directory it is saved in.

    (a name in MODELS, dtype) -> (its directory, the model in that dtype)."""
    reason = "the extra `hf` is not installed"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)

    @functools.cache
    def make(which: str, dtype: str):
        name, hf_config = MODELS[which]
        config = getattr(transformers, name).config_class(**hf_config, bos_token_id=1, eos_token_id=2)
        model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for path, p in model.named_parameters():
                norm = p.ndim == 1 and path.endswith("weight")
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2 + norm)
        model = model.to(getattr(torch, dtype))
        directory = tmp_path_factory.mktemp(which)
        model.save_pretrained(directory)
        return directory, model

    return make


@pytest.fixture
def directory(tmp_path) -> Path:
    return make_directory(tmp_path / "model", make_tensors())
