"""`spmd-lm audit`: what the compiled step sends beside what theory asks for, on hardware that need not be there.

On `cpu:N` the compiler sends bfloat16, though not float16, as float32: listed as such, and no excess."""

import dataclasses
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd_lm.analysis import hlo, memory
from spmd_lm.analysis.expected_collectives import AR, RS, ExpectedCollective, expected_collectives
from spmd_lm.analysis.topology import Topology, installed
from spmd_lm.axes import PIPE
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.pipeline.schedule_table import schedule_table
from spmd_lm.runtime.formatting import format_bytes, format_table
from spmd_lm.step.program import Program, choose_kernel

TOLERANCE = 0.01
"""Of the bytes that theory asks for, missing and in excess together."""
SLACK = 4096
"""Bytes that are always forgiven: what a compiler adds in scalars."""

PARTS = ("embedding", "blocks", "head", "messages", "weights", "gradients", "scalars")
"""Scopes of the step, as they reach the names of the compiled operations."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Collectives of one kind, axes, part and dtype, over one step of one device; the mean over the stages of a
    pipeline.  stages: bytes of each.  See ExpectedCollective."""

    kind: str
    axes: tuple[str, ...]
    part: str
    dtype: str
    lowered_as: str | None
    count: float = 0
    bytes: float = 0
    result_bytes: float = 0
    stages: tuple[float, ...] = ()


def audit(config: RunConfig, topology: Topology | None = None) -> dict[str, Any]:
    """The step of `config`, compiled for `topology`, or for the devices that are here, and compared with theory.

    ConfigError, or LayoutError, if it cannot be compiled."""
    devices = topology.devices() if topology else jax.devices()
    platform, notice = devices[0].platform, None
    if topology and topology.slices > 1:
        notice = (
            "Between slices a TPU sends through its hosts. Those bytes are not read back yet, and count as missing."
        )
    if topology and platform == "gpu":
        config, notice = with_kernels_that_compile(config)
    program = Program(config, devices)
    start = time.perf_counter()
    lowered = program.train_step.lower(program.abstract_state(), program.abstract_batch())
    try:
        compiled = lowered.compile(compiler_options=topology.compiler_options if topology else None)
    except jax.errors.JaxRuntimeError as e:
        why = str(e).splitlines()[0]
        where = f"--topology {topology}" if topology else f"these {len(devices)} devices ({platform})"
        raise ConfigError(f"{where}: its compiler cannot compile this step: {why}") from e
    seconds = time.perf_counter() - start
    shares = schedule_table(program.schedule).shares() if program.schedule.stages > 1 else None
    read_back = list(hlo.Program(compiled.as_text()).collectives(len(devices), shares))
    found, asked = summed(read(read_back, program.plan.sizes)), expected_collectives(config, program.plan)
    stuck = [each for each in read_back if each.conditional and PIPE in spanned(each, program.plan.sizes)]
    compared = found, asked
    if platform == "cpu":
        found, _ = compared = as_simulated(found, asked)
    differences = compare(*compared, merged=platform == "cpu" and not config.scan_layers)
    missing, excess = (sum(d[key] for d in differences) for key in ("missing_bytes", "excess_bytes"))
    most = TOLERANCE * sum(row.bytes for row in asked) + SLACK
    return {
        "config": config.run.name,
        "topology": str(topology or f"{platform}:{len(devices)}"),
        "notice": notice,
        "mesh": program.plan.sizes,
        "ok": missing + excess <= most and not stuck,
        "stages_that_may_wait": [f"{each.kind} in {each.scope}" for each in stuck],
        "tolerance_bytes": most,
        "collectives": [as_dict(each) for each in found],
        "theory": [as_dict(row) for row in asked],
        "differences": [d for d in differences if d["missing_bytes"] or d["excess_bytes"]],
        "missing_bytes": missing,
        "excess_bytes": excess,
        "bytes_by_stage": by_stage(found),
        "bubble": program.schedule.bubble,
        "memory": memory_of(config, program, compiled),
        "compile_seconds": seconds,
    }


def with_kernels_that_compile(config: RunConfig) -> tuple[RunConfig, str | None]:
    """For a GPU that is not there: `config`, and a notice if its attention kernel cannot be compiled without one.

    What the step sends is the same."""
    kernel, _ = choose_kernel(config, "gpu")
    if kernel != "cudnn" or installed("nvidia.cudnn"):
        return config, None
    model = config.model.model_copy(update={"attention": "xla"})
    told = "cuDNN is not installed here: compiled with XLA's attention, whose temporaries are larger. "
    return config.model_copy(update={"model": model}), told + "pip install nvidia-cudnn-cu13 for the kernel itself."


def as_dict(row: Any) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"axes": list(row.axes)}


# --- reading ----------------------------------------------------------------------------------------------------------


def read(collectives: Iterable[hlo.Collective], sizes: Mapping[str, int]) -> Iterable[Found]:
    """What a compiled step sends; axes and parts by name."""
    for each in collectives:
        if each.wire and each.count:
            axes, part = axes_of(each, sizes), part_of(each.scope)
            count, bytes_, result = (n * each.count for n in (each.arrays, each.wire, each.result))
            stages = tuple(each.wire * count for count in each.counts)
            yield Found(each.kind, axes, part, each.dtype, each.lowered_as, count, bytes_, result, stages)


def spanned(collective: hlo.Collective, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which the devices of a group, or of a pair, differ."""
    places = np.array(np.unravel_index(np.array(collective.groups), tuple(sizes.values())))  # [axis, group, member]
    differ = (places != places[:, :, :1]).any(axis=(1, 2))
    return tuple(axis for axis, differs in zip(sizes, differ, strict=True) if differs)


def axes_of(collective: hlo.Collective, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The same; ('?',) for groups of no axes."""
    axes = spanned(collective, sizes)
    whole = np.prod([sizes[axis] for axis in axes]) == len(collective.groups[0])
    return axes if whole or collective.kind == "collective-permute" else ("?",)


def part_of(scope: str) -> str:
    named = re.findall(rf"\b({'|'.join(PARTS)})\b", scope)
    return named[-1] if named else "other"


def summed(found: Iterable[Found]) -> list[Found]:
    """One of each kind, axes, part, dtype and lowering; the largest first."""
    totals: dict[tuple, list[Found]] = defaultdict(list)
    for f in found:
        totals[f.kind, f.axes, f.part, f.dtype, f.lowered_as].append(f)
    add = lambda same, name: sum(getattr(f, name) for f in same)  # noqa: E731
    sums = [
        dataclasses.replace(same[0], stages=by_stage(same), **{name: add(same, name) for name in ADDED})
        for same in totals.values()
    ]
    return sorted(sums, key=lambda f: -f.bytes)


ADDED = ("count", "bytes", "result_bytes")


def by_stage(found: Iterable[Found]) -> tuple[float, ...]:
    """Bytes that each stage sends."""
    return tuple(map(sum, zip(*(f.stages for f in found), strict=True)))


# --- comparing --------------------------------------------------------------------------------------------------------


def as_simulated(found: list[Found], asked: list[ExpectedCollective]) -> tuple[list[Found], list[ExpectedCollective]]:
    """Both as a CPU's compiler writes them: what is bfloat16 in theory is sent as float32."""
    narrow = {(row.kind, row.axes) for row in asked if row.dtype == "bfloat16"}

    def widen(row: ExpectedCollective) -> ExpectedCollective:
        times = 2 if row.dtype == "bfloat16" else 1
        return dataclasses.replace(row, bytes=row.bytes * times, repeated=row.repeated * times)

    lowered = lambda f: f.dtype == "f32" and (f.kind, f.axes) in narrow  # noqa: E731
    told = [dataclasses.replace(f, lowered_as="float32") if lowered(f) else f for f in found]
    return told, [widen(row) for row in asked]


def compare(found: list[Found], asked: list[ExpectedCollective], *, merged: bool = False) -> list[dict[str, Any]]:
    """Bytes of each kind over each set of axes, beside theory's.  merged: what is sent again may be missing."""
    sent: dict[tuple, float] = defaultdict(float)
    wanted: dict[tuple, float] = defaultdict(float)
    needed: dict[tuple, float] = defaultdict(float)
    for f in found:
        sent[f.kind, f.axes] += f.bytes
    for row in asked:
        wanted[row.kind, row.axes] += row.bytes
        needed[row.kind, row.axes] += row.bytes - (row.repeated if merged else 0)
    return [
        {
            "kind": kind,
            "axes": list(axes),
            "bytes": sent[kind, axes],
            "theory": wanted[kind, axes],
            "missing_bytes": max(0.0, needed[kind, axes] - sent[kind, axes]),
            "excess_bytes": max(0.0, sent[kind, axes] - wanted[kind, axes]),
        }
        for kind, axes in sorted(sent.keys() | wanted.keys())
    ]


def memory_of(config: RunConfig, program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes per device: what the compiler says, and what the plan said before."""
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


# --- telling ----------------------------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """For a person: theory, what was found, and what differs."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    on = lambda row: " x ".join(row["axes"])  # noqa: E731
    asked = [("theory", "over", "part", "dtype", "count", "wire", "formula")]
    asked += [
        (t["kind"], on(t), t["part"], t["dtype"], f"{t['count']:,.6g}", format_bytes(t["bytes"]), t["formula"])
        for t in result["theory"]
    ]
    found = [("compiled", "over", "part", "dtype", "count", "wire", "lowered as")]
    found += [
        (c["kind"], on(c), c["part"], c["dtype"], f"{c['count']:,.6g}", format_bytes(c["bytes"]), c["lowered_as"] or "")
        for c in result["collectives"]
    ]
    m = result["memory"]
    lines = [
        *([result["notice"]] if result["notice"] else []),
        f"step of {result['config']} on {result['topology']}: {mesh}, compiled in {result['compile_seconds']:.1f} s",
        "",
        *format_table(asked),
        "",
        *format_table(found),
        "",
        *(difference(d) for d in result["differences"] if d["missing_bytes"] + d["excess_bytes"] > SLACK),
        *traded(result["differences"]),
        f"wire    {format_bytes(sum(c['bytes'] for c in result['collectives']))} per device and step; theory "
        f"{format_bytes(sum(t['bytes'] for t in result['theory']))}; missing {format_bytes(result['missing_bytes'])}, "
        f"in excess {format_bytes(result['excess_bytes'])} (tolerance {format_bytes(result['tolerance_bytes'])})",
        *told_by_stage(result["bytes_by_stage"]),
        *(f"waits   {what}: stages that part ways meet in it" for what in result["stages_that_may_wait"]),
        f"memory  {held(m)} per device",
        "as theory asks" if result["ok"] else "NOT as theory asks",
    ]
    return "\n".join(lines)


def told_by_stage(sent: Sequence[float]) -> list[str]:
    if len(sent) < 2:
        return []
    most = max(range(len(sent)), key=lambda stage: sent[stage])
    return [f"stages  {format_bytes(min(sent))} to {format_bytes(sent[most])}, which stage {most} sends"]


def held(m: dict[str, Any]) -> str:
    """What the compiler says of memory: of some chips the peak alone; and a CPU's peak leaves temporaries out."""
    if not m["temporaries"]:
        return f"{format_bytes(m['arguments'])} arguments; peak {format_bytes(m['peak'])}"
    parts = (
        f"{format_bytes(m['arguments'])} arguments + {format_bytes(m['temporaries'])} temporaries = "
        f"{format_bytes(m['total'])}"
    )
    return parts if m["peak"] < m["temporaries"] else f"{parts}; peak {format_bytes(m['peak'])}"


def difference(d: dict[str, Any]) -> str:
    what = (
        f"{format_bytes(d['missing_bytes'])} missing"
        if d["missing_bytes"]
        else f"{format_bytes(d['excess_bytes'])} in excess"
    )
    return f"differs {d['kind']} over {' x '.join(d['axes'])}: {what}"


def traded(differences: list[dict[str, Any]]) -> list[str]:
    """Plain all-reduces where reduce-scatters were asked for, and what they cost."""
    missing = {tuple(d["axes"]): d["missing_bytes"] for d in differences if d["kind"] == RS and d["missing_bytes"]}
    excess = {tuple(d["axes"]): d["excess_bytes"] for d in differences if d["kind"] == AR and d["excess_bytes"]}
    return [
        f"cost    over {' x '.join(axes)} an all-reduce stands where a reduce-scatter was asked for: "
        f"{format_bytes(excess[axes])} for {format_bytes(missing[axes])}"
        for axes in missing.keys() & excess.keys()
        if min(missing[axes], excess[axes]) > SLACK
    ]
