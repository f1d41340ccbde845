"""Residuals of a loop go into arrays that a GPU allocates and does not fill."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmd_lm.parallel import compiler_workarounds
from spmd_lm.step import train_step
from spmd_lm.step.program import Program
from tests.helpers import FLOAT32, degrees, make_config, train_steps, trained_reference
from tests.planning.test_audit import compilable
from tests.step.test_train_step import assert_same_run

PREFETCH = {"data": 2, "zero": 3, "prefetch": "on"}
ONE_F_ONE_B = {"pipe": 2, "data": 2, "microbatches": 2, "schedule": "1f1b"}


SLOW = pytest.mark.slow


@pytest.mark.mutants
@pytest.mark.parametrize(
    "parallel",
    [
        PREFETCH,
        pytest.param(PREFETCH | {"partitioner": "types", "model": 2}, marks=SLOW),
        pytest.param(ONE_F_ONE_B, marks=SLOW),
    ],
    ids=["prefetch", "types", "1f1b"],
)
@pytest.mark.slow
def test_what_was_in_the_arrays_reaches_nothing(parallel, monkeypatch, x64):
    """Arrays of NaN, in a step made as for a GPU, change nothing."""
    layers = 4 if "pipe" in parallel else 3
    config = make_config(model={"layers": layers}, parallel={"data": 1} | parallel, optim={"eps": 1e-6})
    model_fns, allocate, allocated = train_step.model_fns, compiler_workarounds._allocate, []

    def filled(length, entry):
        allocated.append(entry.shape)
        return lax.full_like(allocate(length, entry), jnp.nan if jnp.issubdtype(entry.dtype, jnp.inexact) else 1)

    monkeypatch.setattr(train_step, "model_fns", lambda *args, **keys: model_fns(*args, **keys | {"allocated": True}))
    monkeypatch.setattr(compiler_workarounds, "_allocate", filled)
    got = train_steps(Program(config, jax.devices()[: degrees(config).devices]))
    assert allocated
    assert_same_run(got, trained_reference(config.model_copy(update={"parallel": make_config().parallel})))


@pytest.mark.parametrize(("topology", "allocates"), [("h200:1x4", True), ("v4:2x2x1", False)])
def test_gpus_alone_allocate(topology, allocates):
    config = make_config(model={"layers": 4}, parallel=PREFETCH | {"data": 4}, precision=FLOAT32)
    program = Program(config, compilable(topology).devices())
    text = program.train_step.lower(program.abstract_state(), program.abstract_batch()).as_text()
    assert ("AllocateBuffer" in text) == allocates
