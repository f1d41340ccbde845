"""Layers of several kinds, in periods: every layout computes the reference, whatever is cut short."""

import jax
import numpy as np
import pytest

from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.resolve import make_model
from tests import reference
from tests.helpers import assert_states_close, make_config, program, trained, trained_reference

pytestmark = pytest.mark.usefixtures("x64")

SLOW = pytest.mark.slow

WINDOW = {"kind": "window", "span": 5}
OWN_SIZES = {"kind": "block", "heads": 4, "kv_heads": 2, "mlp_width": 40, "rope_theta": 50.0}
MODELS = {
    "1:1": {"layers": 8, "period": [WINDOW, OWN_SIZES]},
    "1:1, cut short": {"layers": 5, "period": [WINDOW, OWN_SIZES]},
    "5:1": {"layers": 12, "period": [WINDOW] * 5 + ["block"]},
    "5:1, cut short": {"layers": 8, "period": [WINDOW] * 5 + ["block"]},
}
COMMON = {"width": 16, "heads": 4, "positions": "rotary", "use_bias": False, "attention_dropout": 0.1}
"""Keys of all MODELS.  Rotary positions: `rope_theta` of a kind has an effect."""


def run(name: str, scan: bool = True, remat: str = "none", **parallel):
    return make_config(
        model=COMMON | MODELS[name] | {"scan": scan}, parallel=parallel, remat={"policy": remat}, optim={"eps": 1e-6}
    )


@pytest.mark.parametrize(
    ("name", "scan", "remat", "parallel"),
    [
        pytest.param(
            *("1:1, cut short", True, "full", {"data": 2, "model": 2, "sequence": True, "zero": 3, "prefetch": "on"}),
            marks=pytest.mark.mutants,
        ),
        pytest.param("1:1", False, "none", {"pipe": 2, "data": 2, "zero": 1, "microbatches": 2}, marks=SLOW),
        pytest.param("1:1, cut short", False, "none", {"data": 1}, marks=SLOW),
        pytest.param("1:1, cut short", True, "selective", {"data": 4, "model": 2, "microbatches": 2}, marks=SLOW),
        pytest.param(
            "1:1, cut short", True, "none", {"data": 2, "model": 2, "zero": 2, "partitioner": "types"}, marks=SLOW
        ),
        pytest.param("1:1, cut short", False, "residual", {"replica": 2, "data": 4, "zero": 3}, marks=SLOW),
        pytest.param("1:1, cut short", True, "none", {"data": 4, "zero": 1, "microbatches": 2}, marks=SLOW),
        pytest.param("1:1", True, "none", {"pipe": 2, "data": 2, "zero": 3, "microbatches": 2}, marks=SLOW),
        pytest.param("5:1", True, "full", {"pipe": 2, "microbatches": 2}, marks=SLOW),
        pytest.param(
            "1:1", True, "none", {"pipe": 2, "microbatches": 2, "schedule": "interleaved", "chunks": 2}, marks=SLOW
        ),
        pytest.param(
            "5:1",
            True,
            "none",
            {"pipe": 2, "data": 2, "zero": 2, "microbatches": 2, "schedule": "breadth_first"},
            marks=SLOW,
        ),
        pytest.param("5:1, cut short", True, "full", {"data": 8, "zero": 3}, marks=SLOW),
        pytest.param("1:1, cut short", True, "offload", {"data": 8, "zero": 3}, marks=SLOW),
        pytest.param("5:1, cut short", False, "none", {"data": 2, "model": 4, "sequence": True, "zero": 2}, marks=SLOW),
        pytest.param(
            "5:1, cut short",
            True,
            "none",
            {"data": 2, "model": 2, "sequence": True, "collective_matmul": "on"},
            marks=SLOW,
        ),
    ],
)
@pytest.mark.slow
def test_every_layout_computes_the_reference(name, scan, remat, parallel):
    got, want = trained(run(name, scan, remat, **parallel)), trained_reference(run(name, data=1))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


@pytest.mark.slow
def test_layers_are_frozen_by_their_own_index():
    """Layers 1 and 4 are of two places; a pipeline equals one device."""
    optim = {"eps": 1e-6, "freeze": "blocks.[14].* *.mlp.up"}
    sections = {"model": COMMON | MODELS["1:1"], "optim": optim}
    parallel = {"pipe": 2, "data": 2, "zero": 2, "microbatches": 2, "schedule": "breadth_first"}
    got, want = trained(make_config(parallel=parallel, **sections)), trained_reference(make_config(**sections))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)
    first, last = (state.params["blocks"] for state in (got.first, got.last))
    for place, moves in ("0_window", [True, True, False, True]), ("1_block", [False, True, True, True]):
        assert (first[place]["mlp"]["down"] != last[place]["mlp"]["down"]).any((1, 2)).tolist() == moves


@pytest.mark.slow
def test_text_is_that_of_full_forward_passes():
    """Kinds of layers have caches of their own size; texts are longer than the window, up to the context."""
    p = program(run("1:1, cut short", data=2, model=2, zero=3))
    params, c = jax.tree.map(lambda x: x * 8, p.init().params), p.config.model
    prompts = [np.arange(n, dtype=np.int32) for n in (1, 9)]
    texts = Generator(p, 2, Sampling(tokens=7, greedy=True)).generate(params, prompts)
    weights = p.plan.canonical(jax.device_get(params))
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.shape == (len(prompt) + 7,)
        for end in range(len(prompt), len(text)):
            padded = np.pad(text[:end], (0, c.context - end))[None]
            assert text[end] == reference.logits(weights, c, padded)[0, end - 1].argmax()


def test_two_layers_alike_are_one_kind():
    """The tree, checkpoints and pipeline stages are those of the shorter period."""

    def names(period, layers=4):
        return make_model(make_config(model={"layers": layers, "period": period}), "cpu").names["blocks"].keys()

    assert names([WINDOW, WINDOW]) == names([WINDOW]) == names(None) == names([WINDOW] * 5 + ["block"])
    assert names([WINDOW, "block"] * 2) == names([WINDOW, "block"], 3) == {"0_window", "1_block"}
