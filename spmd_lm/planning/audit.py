"""`spmd-lm audit`: compiles the train step, for hardware that may be absent, and compares its collectives with theory.

On `cpu:N` the compiler sends bfloat16, though not float16, as float32: this is reported, and is not an excess."""

import dataclasses
import time
from collections import defaultdict
from typing import Any

import jax

from spmd_lm.analysis import memory
from spmd_lm.analysis.compiled_collectives import (
    CompiledCollective,
    bytes_by_stage,
    compiled_collectives,
    spanned_axes,
)
from spmd_lm.analysis.expected_collectives import ExpectedCollective, expected_collectives
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.topology import Topology, is_installed
from spmd_lm.axes import PIPE
from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.pipeline.schedule import schedule_table
from spmd_lm.step.program import Program

TOLERANCE = 0.01
"""Missing and excess bytes together, as a fraction of the expected bytes, that an audit accepts."""
SLACK = 4096
"""Bytes that it always accepts: scalars that compilers add."""


def audit(config: RunConfig, topology: Topology | None = None) -> dict[str, Any]:
    """The collectives and memory of the step of `config`, compiled for `topology` or for the devices of this machine,
    compared with what is expected.

    Raises ConfigError or LayoutError if it cannot be compiled."""
    devices = topology.devices() if topology else jax.devices()
    platform, notice = devices[0].platform, None
    if topology and topology.slices > 1:
        notice = (
            "Between slices a TPU sends through its hosts. Those bytes are not read back yet, and count as missing."
        )
    if topology and platform == "gpu":
        config, notice = with_available_kernel(config)
    program = Program(config, devices)
    name = str(topology or f"{platform}:{len(devices)}")
    start = time.perf_counter()
    compiled = _compile(program, topology, f"--topology {topology}" if topology else f"these devices ({name})")
    compile_seconds = time.perf_counter() - start
    sizes = program.plan.sizes
    shares = schedule_table(program.schedule).shares() if program.schedule.stages > 1 else None
    instructions = HloModule(compiled.as_text() or "").collectives(len(devices), shares)
    found, expected = compiled_collectives(instructions, sizes), expected_collectives(config, program.plan)
    # Stages that take different branches would wait for each other for ever.
    deadlocks = [i for i in instructions if i.conditional and PIPE in spanned_axes(i, sizes)]
    lowered = expected
    if platform == "cpu":
        found, lowered = as_simulated(found, expected)
    differences = compare(found, lowered, may_merge=platform == "cpu" and not config.scan_layers)
    missing, excess = (sum(d[key] for d in differences) for key in ("missing_bytes", "excess_bytes"))
    tolerance = TOLERANCE * sum(row.bytes for row in expected) + SLACK
    return {
        "config": config.run.name,
        "topology": name,
        "notice": notice,
        "mesh": sizes,
        "ok": missing + excess <= tolerance and not deadlocks,
        "stages_that_may_wait": [f"{i.kind} in {i.scope}" for i in deadlocks],
        "tolerance_bytes": tolerance,
        "collectives": [as_dict(row) for row in found],
        "theory": [as_dict(row) for row in expected],
        "differences": [d for d in differences if d["missing_bytes"] or d["excess_bytes"]],
        "missing_bytes": missing,
        "excess_bytes": excess,
        "bytes_by_stage": bytes_by_stage(found),
        "bubble": program.schedule.bubble,
        "memory": memory_of(config, program, compiled),
        "compile_seconds": compile_seconds,
    }


def _compile(program: Program, topology: Topology | None, where: str) -> jax.stages.Compiled:
    lowered = program.train_step.lower(program.abstract_state(), program.abstract_batch())
    try:
        return lowered.compile(compiler_options=topology.compiler_options if topology else None)
    except jax.errors.JaxRuntimeError as e:
        raise ConfigError(f"{where}: its compiler cannot compile this step: {str(e).splitlines()[0]}") from e


def with_available_kernel(config: RunConfig) -> tuple[RunConfig, str | None]:
    """For an absent GPU: `config` with an attention kernel that compiles here, and a notice if that is another one.

    The kernel does not change what the step sends."""
    kernel, _ = choose_kernel(config, "gpu")
    if kernel != "cudnn" or is_installed("nvidia.cudnn"):
        return config, None
    model = config.model.model_copy(update={"attention": "xla"})
    return config.model_copy(update={"model": model}), (
        "cuDNN is not installed here: compiled with XLA's attention, whose temporaries are larger. pip install "
        "nvidia-cudnn-cu13 for the kernel itself."
    )


def as_dict(row: CompiledCollective | ExpectedCollective) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"axes": list(row.axes)}


def as_simulated(
    found: list[CompiledCollective], expected: list[ExpectedCollective]
) -> tuple[list[CompiledCollective], list[ExpectedCollective]]:
    """Both as on a CPU, whose compiler sends bfloat16 as float32: with what it lowered marked, and with the bytes of
    bfloat16 doubled."""
    bfloat16 = {(row.kind, row.axes) for row in expected if row.dtype == "bfloat16"}
    marked = [
        dataclasses.replace(row, lowered_as="float32")
        if row.dtype == "f32" and (row.kind, row.axes) in bfloat16
        else row
        for row in found
    ]
    widened = [
        dataclasses.replace(row, bytes=row.bytes * 2, repeated=row.repeated * 2) if row.dtype == "bfloat16" else row
        for row in expected
    ]
    return marked, widened


def compare(
    found: list[CompiledCollective], expected: list[ExpectedCollective], *, may_merge: bool = False
) -> list[dict[str, Any]]:
    """Compiled and expected bytes for each kind and set of axes.  may_merge: repeated collectives may be missing."""
    sent: dict[tuple, float] = defaultdict(float)
    most: dict[tuple, float] = defaultdict(float)
    least: dict[tuple, float] = defaultdict(float)
    for c in found:
        sent[c.kind, c.axes] += c.bytes
    for e in expected:
        most[e.kind, e.axes] += e.bytes
        least[e.kind, e.axes] += e.bytes - (e.repeated if may_merge else 0)
    return [
        {
            "kind": kind,
            "axes": list(axes),
            "bytes": sent[kind, axes],
            "theory": most[kind, axes],
            "missing_bytes": max(0.0, least[kind, axes] - sent[kind, axes]),
            "excess_bytes": max(0.0, sent[kind, axes] - most[kind, axes]),
        }
        for kind, axes in sorted(sent.keys() | most.keys())
    ]


def memory_of(config: RunConfig, program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes per device, by the compiler and by the plan."""
    m = compiled.memory_analysis()
    assert m is not None
    kernel, _ = choose_kernel(config, program.plan.platform)
    return {
        "arguments": m.argument_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "total": m.argument_size_in_bytes + m.temp_size_in_bytes,
        "peak": m.peak_memory_in_bytes,
        "planned": memory.table(config, program.plan, kernel),
    }
