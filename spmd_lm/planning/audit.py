"""`spmd-lm audit`: compiles the train step, for hardware that may be absent, and compares its collectives, and matmuls
in eight bits, with the expected ones.

On `cpu:N` the compiler sends bfloat16, though not float16, as float32, and a TPU's gathers float32 as bfloat16 where
its matrix unit reads that: both are reported, but not as differences."""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spmd_lm.analysis.compiled_collectives import (
    CollectiveInstruction,
    CompiledCollective,
    collective_instructions,
    compiled_collectives,
)
from spmd_lm.analysis.control_flow import Shares
from spmd_lm.analysis.cross_slice import read_collectives_across_slices
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.topology import Topology, is_installed
from spmd_lm.axes import PIPE
from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.context_parallel import ring_chunks
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.counted_step import ExpectedCollective
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.hardware import Hardware
from spmd_lm.cost_model.layer_trace import has_own_block, trace_layers
from spmd_lm.cost_model.sizes import dtype_bytes, rows_per_device, tokens_per_device
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER
from spmd_lm.models.modules import modules_of_model
from spmd_lm.models.transformer import Embedding
from spmd_lm.parallel.mesh import peers_across_slices
from spmd_lm.parallel.pipeline.schedule import schedule_table
from spmd_lm.parallel.plan import Plan
from spmd_lm.planning.device_memory import device_traffic, render_traffic
from spmd_lm.planning.eight_bits import eight_bits, render_eight_bits
from spmd_lm.planning.exposed_communication import exposed_communication, render_exposed, write_hlo
from spmd_lm.runtime.formatting import format_bytes, format_table
from spmd_lm.step.own_check import check_own_modules
from spmd_lm.step.program import Program

TOLERANCE = 0.01  # share of the expected bytes that may be missing or in excess
HOST_TOLERANCE = 0.05  # share of what should rest in a host's memory that may be missing or in excess
SLACK = 4096  # bytes that always may: scalars that compilers add
MODEL_PARTS = ("embedding", "blocks", "head")
"""Scopes of a step that a model's modules compute."""
UPCAST, ROUNDED = "float32", "bfloat16"  # the dtype into which a compiler turned the other


class AuditedStep(NamedTuple):
    """A compiled step, and the result of `audit`."""

    program: Program
    module: HloModule
    shares: Shares | None
    report: dict[str, Any]


def audit(config: RunConfig, topology: Topology | None = None, hlo: Path | None = None) -> dict[str, Any]:
    """Collectives and memory of the step of `config`, compiled for `topology` or this machine's devices, beside the
    expected ones; its exposed communication, and on a GPU its memory traffic, None where speeds are unknown.

    hlo: a file for the program's text.  Raises ConfigError or LayoutError if the step cannot be compiled, OutputError
    if the file cannot be written."""
    return audit_step(config, topology, hlo).report


def audit_step(
    config: RunConfig, topology: Topology | None = None, hlo: Path | None = None, hardware: Hardware | None = None
) -> AuditedStep:
    """`audit`, with the program.  hardware: its speeds, default the published ones."""
    devices = topology.devices() if topology else jax.devices()
    platform, notices = devices[0].platform, []
    if topology and platform == "gpu":
        config, notice = _with_available_kernel(config, devices[0].device_kind)
        notices.append(notice)
    program = Program(config, devices)
    notices.append(check_own_modules(config, program.model.modules, program.plan))
    start = time.perf_counter()
    compiled = program.compiled
    compile_seconds = time.perf_counter() - start
    text = compiled.as_text() or ""
    if hlo:
        write_hlo(hlo, text)
    mesh, module = program.plan.mesh, HloModule(text)
    assert isinstance(mesh, jax.sharding.Mesh)
    if platform == "tpu":
        peers = peers_across_slices(mesh)
        unread = read_collectives_across_slices(module, peers)
        notices.append(_notice_of_slices(len(peers[0]), program.plan.layout.replica, unread))
    shares = schedule_table(program.schedule).execution_fractions() if program.schedule.stages > 1 else None
    report = {
        "config": config.run.name,
        "topology": str(topology or f"{platform}:{len(devices)}"),
        "notice": "; ".join(filter(None, notices)) or None,
        "mesh": program.plan.sizes,
        **_collectives(config, program, collective_instructions(module, len(devices), shares)),
        "exposed": exposed_communication(module, mesh, shares, hardware),
        "memory_traffic": device_traffic(program.config, program.plan, module, shares, hardware),
        "eight_bits": eight_bits(program.config, program.plan, module, shares),
        "bubble": program.schedule.bubble,
        "memory": _memory(config, program, compiled),
        "updates": _updates(config, program),
        "compile_seconds": compile_seconds,
        "compiler_options": program.xla_options.values,
        "compiler_advice": program.xla_options.advice,
    }
    report["ok"] &= _offloads_what_is_planned(report["memory"]) and _updates_as_planned(report["updates"])
    report["ok"] &= report["eight_bits"] is None or report["eight_bits"]["ok"]
    return AuditedStep(program, module, shares, report)


def _notice_of_slices(slices: int, replicas: int, unread: list[str]) -> str | None:
    """Limits of an audit of several TPU slices.  unread: names of transfers between slices that are not read."""
    if unread:
        return f"TPU slices send each other {' and '.join(unread)}, which is not read, and counts as missing."
    if slices > 1 and replicas != slices:
        return (
            f"XLA adds up the {replicas} replicas within {slices} slices first, and then between these; theory counts "
            "both as one."
        )
    return None


def _collectives(config: RunConfig, program: Program, instructions: list[CollectiveInstruction]) -> dict[str, Any]:
    """Compiled and expected collectives, compared."""
    sizes, platform = program.plan.sizes, program.plan.platform
    found, expected = compiled_collectives(instructions, sizes), expected_collectives(config, program.plan)
    # Stages in different branches would wait for each other for ever; so would a permute, whatever it spans.
    in_branches = [i for i in instructions if i.conditional and i.groups]
    deadlocks = [i for i in in_branches if i.kind == COLLECTIVE_PERMUTE or PIPE in i.spanned_axes(sizes)]
    zeros = [i for i in instructions if i.yields_zeros]
    simulated = platform == "cpu"
    if simulated and program.plan.partitioner == "types":
        found = _mark_unscattered(found, expected)
    found = _mark_upcast(found, expected) if simulated else found
    found = _mark_rounded(found, expected) if platform == "tpu" else found
    own_block, not_judged = has_own_block(config), _own_scopes(config)
    judged = [row for row in found if row.part not in not_judged]
    judged_expected = [row for row in expected if row.part not in not_judged]
    differences = _compare(judged, judged_expected, simulated=simulated, optional=MODEL_PARTS if own_block else ())
    missing, excess = (sum(d[key] for d in differences) for key in ("missing_bytes", "excess_bytes"))
    tolerance = TOLERANCE * sum(row.bytes for row in judged_expected) + SLACK
    return {
        "ok": missing + excess <= tolerance and not deadlocks and not zeros,
        "stages_that_may_wait": [f"{i.kind} in {i.scope}" for i in deadlocks],
        "compiled_to_zeros": [f"{i.kind} in {i.scope}" for i in zeros],
        "tolerance_bytes": tolerance,
        "not_judged": [*not_judged],
        "per_layer": _per_layer(config, program.plan, found, expected) if own_block else [],
        "collectives": [asdict(row) | {"axes": list(row.axes)} for row in found],
        "theory": [asdict(row) | {"axes": list(row.axes)} for row in expected],
        "differences": [d for d in differences if d["missing_bytes"] or d["excess_bytes"]],
        "missing_bytes": missing,
        "excess_bytes": excess,
        "bytes_by_stage": tuple(map(sum, zip(*(row.stages for row in found), strict=True))),
    }


def _own_scopes(config: RunConfig) -> tuple[str, ...]:
    """Scopes of the step that the user's modules compute, whose collectives are not predicted."""
    modules = modules_of_model(config.model, config.objective)
    own = modules.embedding is not Embedding, modules.own_block, modules.head is not None
    return tuple(itertools.compress(MODEL_PARTS, own))


def _per_layer(
    config: RunConfig, plan: Plan, found: list[CompiledCollective], expected: list[ExpectedCollective]
) -> list[dict[str, Any]]:
    """Collectives of the user's block in one layer, forward and backward: in its code, and compiled; in units of a
    microbatch's whole residual stream."""
    rows = rows_per_device(config, plan.layout)
    stream = tokens_per_device(config, plan.layout) * config.model.width * dtype_bytes(config.precision.compute)
    code, sent, predicted = (defaultdict[tuple[str, tuple[str, ...]], float](float) for _ in range(3))
    for _, share, traced in trace_layers(config, plan, kernel="xla"):
        for each, count in (traced.forward.sent + traced.backward.sent).items():
            streams = rows * each.elements * dtype_bytes(each.dtype) / stream
            code[each.kind, each.axes] += share * count * streams
    for total, collectives in ((sent, found), (predicted, expected)):
        for row in collectives:
            upcast = 2 if UPCAST in (getattr(row, "lowered_as", None) or "") else 1  # on a CPU
            total[row.kind, row.axes] += row.bytes / upcast * (row.part == "blocks")
    return [
        {"kind": kind, "axes": list(axes), "code": count, "compiled": count * sent[kind, axes] / predicted[kind, axes]}
        for (kind, axes), count in sorted(code.items())
        if predicted[kind, axes]  # with frozen layers nothing runs backward
    ]


def _with_available_kernel(config: RunConfig, device_kind: str) -> tuple[RunConfig, str | None]:
    """`config` with an attention kernel that compiles here for an absent GPU, and a notice if it is another one; the
    step's collectives are the same."""
    kernels = {choose_kernel(of_kind, "gpu", device_kind).kernel for of_kind in config.of_each_kind}
    if "cudnn" not in kernels or is_installed("nvidia.cudnn"):
        return config, None
    instead = "chunked" if ring_chunks(config.model, config.parallel) > 1 else "xla"
    model = config.model.model_copy(update={"attention": instead})
    return config.model_copy(update={"model": model}), (
        "cuDNN is not installed here: compiled with XLA's attention, whose temporaries are larger. pip install "
        "nvidia-cudnn-cu13 for the kernel itself."
    )


def _mark_upcast(found: list[CompiledCollective], expected: list[ExpectedCollective]) -> list[CompiledCollective]:
    """Marks float32 collectives that a CPU sends for bfloat16 ones."""
    bfloat16 = {(e.kind, e.axes, "f32") for e in expected if e.dtype == "bfloat16"}
    return [
        replace(c, lowered_as=", ".join(filter(None, (c.lowered_as, UPCAST))))
        if (c.kind, c.axes, c.dtype) in bfloat16
        else c
        for c in found
    ]


def _mark_rounded(found: list[CompiledCollective], expected: list[ExpectedCollective]) -> list[CompiledCollective]:
    """Marks gathers of float32 that a TPU, whose matmuls read bfloat16 by default, rounds before it sends them."""
    dtypes = defaultdict[tuple[str, tuple[str, ...], str], set[str]](set)
    for e in expected:
        dtypes[e.kind, e.axes, e.part].add(e.dtype)

    def is_rounded(c: CompiledCollective) -> bool:
        return (c.kind, c.dtype) == (ALL_GATHER, "bf16") and dtypes[c.kind, c.axes, c.part] == {"float32"}

    return [replace(c, lowered_as=ROUNDED) if is_rounded(c) else c for c in found]


def _mark_unscattered(found: list[CompiledCollective], expected: list[ExpectedCollective]) -> list[CompiledCollective]:
    """Counts all-reduces as reduce-scatters in scopes that expect these and no all-reduce: on a CPU a reduce-scatter
    that XLA inserts is an all-reduce and a slice."""
    reduced = {(e.axes, e.part) for e in expected if e.kind == ALL_REDUCE}
    scattered = {(e.axes, e.part) for e in expected if e.kind == REDUCE_SCATTER} - reduced

    def scatter(c: CompiledCollective) -> CompiledCollective:
        if c.kind != ALL_REDUCE or (c.axes, c.part) not in scattered:
            return c
        stages = tuple(sent / 2 for sent in c.stages)
        return replace(c, kind=REDUCE_SCATTER, bytes=c.bytes / 2, stages=stages, lowered_as="all-reduce")

    return [scatter(c) for c in found]


def _compare(
    found: list[CompiledCollective],
    expected: list[ExpectedCollective],
    *,
    simulated: bool,
    optional: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Compiled and expected bytes for each kind and set of axes; rounded ones count twice.

    simulated: whether expected bfloat16 counts twice, and repeated collectives may be missing.
    optional: scopes whose collectives may be missing, merged with those of the user's modules."""
    sent, most, least = (defaultdict[tuple[str, tuple[str, ...]], float](float) for _ in range(3))
    for c in found:
        sent[c.kind, c.axes] += c.bytes * (2 if c.lowered_as == ROUNDED else 1)
    for e in expected:
        times = 2 if simulated and e.dtype == "bfloat16" else 1
        most[e.kind, e.axes] += times * e.bytes
        least[e.kind, e.axes] += times * (e.bytes - simulated * e.repeated) * (e.part not in optional)
    differences = []
    for kind, axes in sorted(sent.keys() | most.keys()):
        found_bytes, allowed = sent[kind, axes], most[kind, axes]
        missing, excess = max(0.0, least[kind, axes] - found_bytes), max(0.0, found_bytes - allowed)
        difference = {"kind": kind, "axes": list(axes), "bytes": found_bytes, "theory": allowed}
        differences.append(difference | {"missing_bytes": missing, "excess_bytes": excess})
    return differences


def _memory(config: RunConfig, program: Program, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes per device: compiled and planned."""
    m = compiled.memory_analysis()
    assert m is not None
    return {
        "arguments": m.argument_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "total": m.argument_size_in_bytes + m.temp_size_in_bytes,
        "peak": m.peak_memory_in_bytes,
        "planned": memory.table(config, program.plan),
        "host": m.host_argument_size_in_bytes + m.host_temp_size_in_bytes,
        "planned_host": memory.activations_on_host(config, program.plan),
    }


def _updates(config: RunConfig, program: Program) -> dict[str, Any] | None:
    """Bytes per device of the updates of offloaded state; None if nothing is offloaded.
    copied, planned: to and from the host in a step, by name: the program's, and the cost model's.
    held: what an update on the devices holds, of the one that comes closest to `two_groups`.
    two_groups: the most that it may hold: its arguments, and as much again as they donate."""
    if program.offload is None:
        return None
    held, two_groups = 0, 1
    for lowered in program.lowered_updates().values():
        m = lowered.compile().memory_analysis()
        assert m is not None
        allowed = m.argument_size_in_bytes + m.alias_size_in_bytes
        if m.peak_memory_in_bytes / allowed > held / two_groups:
            held, two_groups = m.peak_memory_in_bytes, allowed
    copied, planned = program.copied_by_updates(), memory.copied_by_updates(config, program.plan)
    return {"copied": copied, "planned": planned, "held": held, "two_groups": two_groups}


def _updates_as_planned(updates: dict[str, Any] | None) -> bool:
    return not updates or (updates["copied"] == updates["planned"] and updates["held"] <= updates["two_groups"])


def _offloads_what_is_planned(m: dict[str, Any]) -> bool:
    return abs(m["host"] - m["planned_host"]) <= HOST_TOLERANCE * m["planned_host"]


def render(result: dict[str, Any]) -> str:
    """The result of `audit` as text: expected and compiled collectives, and their differences."""
    r, mesh = result, " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    sent, expected = (sum(row["bytes"] for row in r[key]) for key in ("collectives", "theory"))
    lines = [r["notice"]] if r["notice"] else []
    lines += [
        f"step of {r['config']} on {r['topology']}: {mesh}, compiled in {r['compile_seconds']:.1f} s",
        "",
        *_table("theory", r["theory"], "formula"),
        "",
        *_table("compiled", r["collectives"], "lowered_as"),
        "",
        *_render_per_layer(r["per_layer"]),
        *_render_differences(r["differences"]),
        f"wire    {format_bytes(sent)} per device and step; theory {format_bytes(expected)}; "
        f"missing {format_bytes(r['missing_bytes'])}, excess {format_bytes(r['excess_bytes'])} "
        f"(tolerance {format_bytes(r['tolerance_bytes'])})",
    ]
    if len(stages := r["bytes_by_stage"]) > 1:
        least, most = format_bytes(min(stages)), format_bytes(max(stages))
        lines.append(f"stages  {least} to {most}, the most on stage {stages.index(max(stages))}")
    lines += [f"zeros   {each}: the compiler lost what it sends" for each in r["compiled_to_zeros"]]
    lines += [f"waits   {each}: stages in different branches would wait here" for each in r["stages_that_may_wait"]]
    lines += render_exposed(r["exposed"]) if r["exposed"] else []
    lines += render_traffic(r["memory_traffic"]) if r["memory_traffic"] else []
    lines += render_eight_bits(r["eight_bits"]) if r["eight_bits"] else []
    lines.append(f"memory  {_render_memory(r['memory'])} per device")
    lines += _render_updates(r["updates"]) if r["updates"] else []
    lines += [f"xla     {name}={value}" for name, value in r["compiler_options"].items()]
    lines += r["compiler_advice"]
    apart_from = ", apart from your modules, which it does not judge" if r["not_judged"] else ""
    if not _offloads_what_is_planned(r["memory"]):
        host, wanted = (format_bytes(r["memory"][key]) for key in ("host", "planned_host"))
        lines.append(f"host    the compiler puts {host} into its host's memory, where {wanted} should rest")
    lines.append(("matches theory" if r["ok"] else "does NOT match theory") + apart_from)
    return "\n".join(lines)


def _render_updates(updates: dict[str, Any]) -> Iterator[str]:
    copied, planned = (
        ", ".join(f"{format_bytes(size)} of {name}" for name, size in updates[key].items())
        for key in ("copied", "planned")
    )
    yield f"copies  {copied}"
    if updates["copied"] != updates["planned"]:
        yield f"        where {planned} are planned"
    if updates["held"]:
        held, allowed = (format_bytes(updates[key]) for key in ("held", "two_groups"))
        yield f"updates hold {held}; two groups are {allowed}"


def _table(title: str, rows: list[dict[str, Any]], last: str) -> list[str]:
    cells = [(title, "over", "part", "dtype", "count", "wire", last.replace("_", " "))]
    for row in rows:
        axes, count, wire = " x ".join(row["axes"]), f"{row['count']:,.6g}", format_bytes(row["bytes"])
        cells.append((row["kind"], axes, row["part"], row["dtype"], count, wire, row[last] or ""))
    return format_table(cells)


def _render_per_layer(rows: list[dict[str, Any]]) -> list[str]:
    """A table of the collectives of the user's block."""
    if not rows:
        return []
    cells = [("a layer of your block", "over", "in its code", "compiled")]
    for row in rows:
        cells.append((row["kind"], " x ".join(row["axes"]), f"{row['code']:.3g}", f"{row['compiled']:.3g}"))
    unit = "        in residual streams of a microbatch, forward and backward; not judged"
    return [*format_table(cells), unit, ""]


def _render_differences(differences: list[dict[str, Any]]) -> Iterator[str]:
    """Differences in bytes, and the cost of plain all-reduces in place of reduce-scatters."""
    excess_of = {tuple(d["axes"]): d["excess_bytes"] for d in differences if d["kind"] == ALL_REDUCE}
    costs = []
    for d in differences:
        axes, missing, excess = " x ".join(d["axes"]), format_bytes(d["missing_bytes"]), format_bytes(d["excess_bytes"])
        if d["missing_bytes"] + d["excess_bytes"] > SLACK:
            amount = f"{missing} missing" if d["missing_bytes"] else f"{excess} in excess"
            yield f"differs {d['kind']} over {axes}: {amount}"
        replacing = excess_of.get(tuple(d["axes"]), 0)
        if d["kind"] == REDUCE_SCATTER and min(d["missing_bytes"], replacing) > SLACK:
            cost = f"{format_bytes(replacing)} for {missing}"
            costs.append(f"cost    over {axes} an all-reduce replaces a reduce-scatter: {cost}")
    yield from costs


def _render_memory(m: dict[str, Any]) -> str:
    """The compiler's figures.  Some compilers give no temporaries; a CPU's peak excludes them, and is not shown."""
    arguments, temporaries, total, peak = (
        format_bytes(m[key]) for key in ("arguments", "temporaries", "total", "peak")
    )
    if not m["temporaries"]:
        return f"{arguments} arguments; peak {peak}"
    text = f"{arguments} arguments + {temporaries} temporaries = {total}"
    text += f"; peak {peak}" if m["peak"] >= m["temporaries"] else ""
    return f"{text}; {format_bytes(m['host'])} on its host" if m["host"] else text
