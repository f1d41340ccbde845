"""Residuals of a loop go into arrays that a GPU allocates and does not fill."""

import math
import re

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
    ("parallel", "remat"),
    [
        (PREFETCH, "none"),
        pytest.param(PREFETCH | {"partitioner": "types", "model": 2}, "none", marks=SLOW),
        pytest.param(PREFETCH, "offload", marks=SLOW),
        pytest.param(ONE_F_ONE_B, "none", marks=SLOW),
    ],
    ids=["prefetch", "types", "offload", "1f1b"],
)
@pytest.mark.slow
def test_what_was_in_the_arrays_reaches_nothing(parallel, remat, monkeypatch, x64):
    """Arrays of NaN, in a step made as for a GPU, change nothing."""
    sections = {"model": {"layers": 4 if "pipe" in parallel else 3}, "optim": {"eps": 1e-6}}
    config = make_config(parallel={"data": 1} | parallel, remat={"policy": remat}, **sections)
    model_fns, allocate, allocated = train_step.model_fns, compiler_workarounds._allocate, []

    def filled(length, entry):
        allocated.append(entry.shape)
        return lax.full_like(allocate(length, entry), jnp.nan if jnp.issubdtype(entry.dtype, jnp.inexact) else 1)

    monkeypatch.setattr(train_step, "model_fns", lambda *args, **keys: model_fns(*args, **keys | {"allocated": True}))
    monkeypatch.setattr(compiler_workarounds, "_allocate", filled)
    got = train_steps(Program(config, jax.devices()[: degrees(config).devices]))
    assert allocated
    assert_same_run(got, trained_reference(make_config(**sections)))


@pytest.mark.parametrize(("topology", "allocates"), [("h200:1x4", True), ("v4:2x2x1", False)])
def test_gpus_alone_allocate(topology, allocates):
    config = make_config(model={"layers": 4}, parallel=PREFETCH | {"data": 4}, precision=FLOAT32)
    program = Program(config, compilable(topology).devices())
    text = program.train_step.lower(program.abstract_state(), program.abstract_batch()).as_text()
    assert ("AllocateBuffer" in text) == allocates


@SLOW
def test_each_device_allocates_its_shard():
    """With types, and with dropout, whose scalars have no sharding."""
    sizes = []
    for partitioner in ("types", "manual"):
        parallel = PREFETCH | {"model": 2, "partitioner": partitioner}
        config = make_config(model={"layers": 4}, parallel=parallel, precision=FLOAT32)
        program = Program(config, compilable("h200:1x4").devices())
        text = program.train_step.lower(program.abstract_state(), program.abstract_batch()).as_text()
        shapes = re.findall(r"@AllocateBuffer.*-> tensor<([\dx]+)x\w+>", text)
        sizes.append(max(math.prod(map(int, shape.split("x"))) for shape in shapes))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_what_is_allocated_takes_no_more_than_in_a_manual_step():
    """Were the whole arrays allocated, a step would take 3 times as much."""
    sizes = {"layers": 8, "width": 256, "heads": 4, "context": 256, "attention_dropout": 0.0, "dropout": 0.0}
    temporaries = []
    for partitioner in ("types", "manual"):
        config = make_config(
            model=sizes,
            parallel=PREFETCH | {"model": 4, "partitioner": partitioner},
            precision=FLOAT32 | {"compute": "bfloat16"},
            train={"batch": 64},
        )
        program = Program(config, compilable("h200:1x8").devices())
        temporaries.append(program.compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[0] < 1.1 * temporaries[1]
