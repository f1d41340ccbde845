"""The effect of run.deterministic on a GPU's program, compiled without a GPU."""

import re

import jax
import numpy as np
import pytest

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.errors import CompilerError
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.runtime.xla_options import Option, XlaOptions
from spmd_lm.step.program import Program
from tests.helpers import device_batch, make_config

SCATTER = re.compile(r"^.* = f32\[\S* scatter\(.*$", re.MULTILINE)
GPU = {
    "parallel": {"data": 1},
    "model": {"layers": 1, "width": 64, "heads": 4, "attention_dropout": 0.0},
    "precision": {"params": "float32", "compute": "bfloat16", "reduce": "float32"},
}


def gpu_program(**run) -> Program:
    return Program(make_config(run=run, **GPU), parse_topology("h200:1x1").devices())


@pytest.mark.slow
@pytest.mark.parametrize("options", ["auto", "none"])
def test_no_two_gradients_are_added_to_one_row_at_once(options):
    """The embeddings of tokens and positions otherwise get theirs by atomics on a GPU."""
    plain, deterministic = (
        SCATTER.findall(gpu_program(compiler_options=options, deterministic=each).compiled.as_text())
        for each in (False, True)
    )
    assert len(plain) == len(deterministic) == 2
    assert all("unique_indices=true" not in scatter for scatter in plain)
    assert all("unique_indices=true" in scatter for scatter in deterministic)


def test_deterministic_programs_take_the_chunked_kernel_and_the_option_whatever_else_is_set():
    p, plain = gpu_program(compiler_options="none", deterministic=True), gpu_program()
    assert p.xla_options.deterministic == {"xla_gpu_deterministic_ops": True} and not plain.xla_options.deterministic
    assert p.xla_options.deterministic.items() <= p.xla_options.values.items()
    assert p.model.kernels == ("chunked",) and plain.model.kernels == ("cudnn",)


@pytest.fixture
def unknown_option():
    """A CPU's compiler does not know what determinism asks for, and says so."""
    p = Program(make_config(run={"deterministic": True}), jax.devices()[:1])
    p.xla_options = XlaOptions([Option("xla_gpu_gone", True, "run.deterministic")], [], {"xla_gpu_gone": True})
    return p


def test_a_compiler_without_the_option_is_told_with_the_key_that_asks_for_it(unknown_option):
    with pytest.raises(CompilerError, match=r"No such compile option: .*Use run.deterministic=false\."):
        unknown_option.compile()


@pytest.mark.parametrize("name", ["evaluate", "score", "generate"])
def test_the_run_s_other_programs_are_compiled_with_the_option_too(unknown_option, name):
    p = unknown_option
    params = p.init().params
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_gpu_gone'"):
        if name == "generate":
            Generator(p, 1, Sampling(tokens=1)).generate(params, [np.array([1])])
        else:
            getattr(p, name)(params, device_batch(p, 0))
