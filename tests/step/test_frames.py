"""The step's depth: the frames of this package from the train step's body to attention's matmuls."""

import sys

import jax
import jax.numpy as jnp
import pytest

import spmd_lm
from spmd_lm.ops import dense_attention
from spmd_lm.step.program import Program
from tests.helpers import FLOAT32, make_config

MOST_FRAMES = 14
PACKAGE = spmd_lm.__path__[0]


def package_frames() -> list[str]:
    """`file:function` of the package's frames on the stack, innermost first, up to the body of the train step."""
    frames, frame = [], sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            frames.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return frames[: frames.index("/step/train_step.py:train_step") + 1]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("scan", "microbatches"),
    [(True, 1), (False, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, 2), (False, 1)])],
)
def test_the_step_is_shallow(scan, microbatches, remat, monkeypatch):
    """The products of queries, keys and values in ops/dense_attention.py are einsums, which jax makes dot_general."""
    paths, einsum = [], jnp.einsum

    def recording_einsum(*args, **options):
        if sys._getframe(1).f_code.co_filename == dense_attention.__file__:
            paths.append(package_frames())
        return einsum(*args, **options)

    monkeypatch.setattr(jnp, "einsum", recording_einsum)
    sections = {"model": {"scan": scan, "dropout": 0.1, "attention_dropout": 0.1}, "remat": {"policy": remat}}
    p = Program(make_config(precision=FLOAT32, parallel={"microbatches": microbatches}, **sections), jax.devices()[:1])
    p.train_step.trace(p.abstract_state(), p.abstract_batch())
    deepest = max(paths, key=len)
    assert len(deepest) <= MOST_FRAMES, deepest
    assert not [name for name in deepest if "lambda" in name], deepest
