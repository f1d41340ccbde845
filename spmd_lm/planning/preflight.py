"""`spmd-lm preflight`: memory, step time and cost of a run on some hardware.

The step is compiled: memory, collectives and FLOPs are the program's.  Seconds are modelled: compute, bubble and
optimizer by cost_model/step_time.py, compute on a GPU by analysis/memory_traffic.py, and exposed communication by
analysis/exposed.py, as in audit."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.config.load import dump
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import flops, memory
from spmd_lm.cost_model.counted_step import layer_passes
from spmd_lm.cost_model.layer_trace import trace_layers
from spmd_lm.cost_model.sizes import rows_per_device
from spmd_lm.cost_model.step_time import predict_step, step_range
from spmd_lm.errors import CompilerError, ConfigError
from spmd_lm.parallel.mesh import domains_along
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.parallel.plan import Plan
from spmd_lm.planning.audit import AuditedStep, audit_step
from spmd_lm.planning.capacity import describe_capacity
from spmd_lm.planning.plan_report import active_count, parameter_count
from spmd_lm.planning.search import Target, make_plan, require_speed
from spmd_lm.runtime.compilation_cache import VerifiedCache
from spmd_lm.runtime.formatting import format_bytes, format_range, format_table

HOUR, DAY = 3600, 86_400
PICTURES = (".png", ".svg")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "spmd-lm")


def preflight(config: RunConfig, target: Target) -> dict[str, Any]:
    """Results that need no price.  Raises ConfigError or LayoutError if the step cannot be compiled; one that the
    compiler refuses for lack of memory does not fit."""
    require_speed(config, target)
    try:
        step = audit_step(config, target.topology, hardware=target.hardware)
    except CompilerError as error:
        if not error.out_of_memory:
            raise
        return _refused(config, target, error.reason)
    return _compiled(config, target, step)


def _compiled(config: RunConfig, target: Target, step: AuditedStep) -> dict[str, Any]:
    program, module, shares, audited = step
    config = program.config  # its attention kernel is one that could be compiled
    plan, hardware, exposed = program.plan, target.hardware, audited["exposed"]
    assert exposed
    published = flops.peak(program.device, config.precision.compute)
    predicted = predict_step(config, plan, hardware, target.software)
    parts = predicted.parts | {"exposed": exposed["exposed_seconds"]}
    spans = step_range(parts, target.software)
    if traffic := audited["memory_traffic"]:
        counted = max(0.0, traffic["seconds"] - predicted.optimizer)
        parts |= {"compute": counted, "bubble": predicted.bubble * counted / predicted.compute}
    step_seconds = sum(parts.values())
    best, worst = spans["step_seconds"]
    spans["step_seconds"] = [min(best, step_seconds), max(worst, step_seconds)]
    in_kernels = fused_attention_flops(config, plan)
    model_flops, devices = flops.train_step(config, plan), plan.layout.devices
    tokens = program.tokens_per_step / step_seconds
    found = _memory(config, plan, target, audited["memory"])
    return {
        "config": config.run.name,
        "topology": str(target.topology),
        "devices": devices,
        "mesh": plan.sizes,
        "matches_theory": audited["ok"],
        "fits": found["peak"] <= found["capacity"],
        "memory": found,
        "collectives": [_collective(row, plan, target) for row in exposed["rows"]],
        "flops": {
            "model": model_flops,
            "hardware": devices * (compiled_flops(module, shares) + in_kernels),
        },
        "step_seconds": step_seconds,
        "range": spans,
        "parts": parts,
        "counted": traffic is not None,
        "analytic": {"step_seconds": predicted.seconds, "parts": predicted.parts},
        "tokens_per_second": tokens,
        "mfu": model_flops / step_seconds / devices / published.flops if published else None,
        "parameters": describe_parameters(config, plan),
        "tokens_per_step": program.tokens_per_step,
        "steps": config.train.steps,
        "bubble": audited["bubble"],
        "compile_seconds": audited["compile_seconds"],
        "refused": None,
        "notice": audited["notice"],
    }


def _refused(config: RunConfig, target: Target, reason: str) -> dict[str, Any]:
    """Results for a step that the compiler refuses for lack of memory: the plan's, and None for a program's."""
    plan, hardware = make_plan(config, target), target.hardware
    predicted, p = predict_step(config, plan, hardware, target.software), config.parallel
    planned = sum(memory.table(config, plan).values())
    unknown = "counted", "matches_theory", "step_seconds", "range", "parts", "tokens_per_second", "mfu"
    return dict.fromkeys((*unknown, "compile_seconds")) | {
        "config": config.run.name,
        "topology": str(target.topology),
        "devices": plan.layout.devices,
        "mesh": plan.sizes,
        "fits": False,
        "memory": _memory(config, plan, target, {"temporaries": None, "peak": planned, "arguments": 0}),
        "collectives": [],
        "flops": {"model": flops.train_step(config, plan), "hardware": None},
        "analytic": {"step_seconds": predicted.seconds, "parts": predicted.parts},
        "parameters": describe_parameters(config, plan),
        "tokens_per_step": config.train.batch * config.model.context,
        "steps": config.train.steps,
        "bubble": make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks).bubble,
        "refused": reason,
        "notice": None,
    }


def describe_parameters(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Numbers of the model's parameters, and of those that a token uses."""
    return {"all": parameter_count(plan), "active": active_count(config, plan)}


def _memory(config: RunConfig, plan: Plan, target: Target, found: dict[str, Any]) -> dict[str, Any]:
    """Bytes per device: state is exact; peak and temporaries are the compiler's; gradients and activations are the
    plan's at its peak.  remedy: the setting of jax's allocator that the step needs to fit."""
    state, fullest = memory.state(config, plan), memory.fullest_point(config, plan)
    peak, capacity = max(found["peak"], found["arguments"]), target.capacity
    return {
        "parameters": state["parameters"],
        "gradients": fullest.gradients,
        "optimizer": state[config.optim.moments],
        "activations": fullest.activations,
        "temporaries": found["temporaries"],
        "host": memory.on_host(config, plan),
        "disk": memory.state_on_disk(config, plan),
        "peak": peak,
        "planned": sum(memory.table(config, plan).values()),
        "capacity": int(capacity.usable),
        "device": int(capacity.device),
        "remedy": capacity.remedy(peak),
    }


def _collective(row: dict[str, Any], plan: Plan, target: Target) -> dict[str, Any]:
    assert isinstance(plan.mesh, Mesh)
    domains = domains_along(plan.mesh, row["axes"])
    fast = "ICI" if target.topology.platform == "tpu" else "NVLink"
    shared = {key: row[key] for key in ("kind", "axes", "bytes", "exposed_seconds")}
    return shared | {"link": "network" if domains > 1 else fast, "seconds": row["wire_seconds"]}


def fused_attention_flops(config: RunConfig, plan: Plan) -> float:
    """FLOPs of fused attention on a device in a step, which the program's text does not show: forward, backward and
    recomputed, over unmasked scores."""
    total, (ahead, passes) = 0.0, layer_passes(config, plan)
    rows = rows_per_device(config, plan.layout)
    for _, share, traced in trace_layers(config, plan):
        forward, backward = traced.forward.attention_flops, traced.backward.attention_flops
        again = forward if config.remat_policy.layers_per_remat_block > 1 else 0.0
        flops = ahead * forward + passes * (forward + again + backward)
        total += share * rows * flops
    return total


def with_costs(found: dict[str, Any], price: float | None, tokens: float | None) -> dict[str, Any]:
    """`found`, with days and cost of the run, None if refused, and ranges of all that depends on a step's seconds.

    price: cost of a device for an hour.
    tokens: training tokens; default those of train.steps."""
    tokens = tokens or found["steps"] * found["tokens_per_step"]
    if found["refused"]:
        return found | {"tokens": tokens, "days": None, "price": price, "cost": None}

    def at(slower: float) -> dict[str, float | None]:
        rate, mfu, seconds = found["tokens_per_second"], found["mfu"], slower * tokens / found["tokens_per_second"]
        cost = None if price is None else price * found["devices"] * seconds / HOUR
        return {"tokens_per_second": rate / slower, "mfu": mfu and mfu / slower, "days": seconds / DAY, "cost": cost}

    best, worst = (at(seconds / found["step_seconds"]) for seconds in found["range"]["step_seconds"])
    ranges = found["range"] | {key: [best[key], worst[key]] for key in best}
    return found | at(1.0) | {"tokens": tokens, "price": price, "range": ranges}


def cached(directory: Path | None, config: RunConfig, target: Target, make: Callable[[], dict[str, Any]]) -> dict:
    """The stored preflight of this configuration, target and compilers' versions; or a new one, which is stored."""
    if directory is None:
        return make()
    cache, key = VerifiedCache(directory), _digest(config, target)
    if stored := cache.get(key):
        return json.loads(stored) | {"cached": True}
    found = make()
    with suppress(OSError):  # not stored: computed again next time
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache.put(key, json.dumps(found).encode())
    return found


def _digest(config: RunConfig, target: Target) -> str:
    versions = []
    for name in COMPILERS:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    what = [dump(config), str(target), str(target.software), *versions]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def draw(config: RunConfig, found: dict[str, Any], path: Path) -> None:
    """Draws one step by stage.  Raises ConfigError for a file that cannot be written."""
    from spmd_lm.plots.timeline import timeline

    p = config.parallel
    figure = timeline(
        make_schedule(p.schedule, p.pipe, p.microbatches, config.chunks), found["parts"] or found["analytic"]["parts"]
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--picture {path}: cannot be written: {error.strerror}. Choose another file.") from error


def _paid(found: dict[str, Any]) -> str:
    if found["cost"] is None:
        return ""
    amount = format_range(found["range"]["cost"], lambda cost: f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}")
    return f", {amount} at {found['price']:g} for a device and hour"


def render(found: dict[str, Any]) -> str:
    f, m, work = found, found["memory"], found["flops"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in f["mesh"].items())
    room = m["capacity"] - m["peak"]
    kinds = [f"{format_bytes(m[kind])} {kind}" for kind in ("parameters", "optimizer", "gradients", "activations")]
    peak, planned = format_bytes(m["peak"]), format_bytes(m["planned"])
    capacity = f"{format_bytes(m['capacity'])} per device"
    if m["capacity"] < m["device"]:
        capacity = f"the {describe_capacity(m['capacity'], m['device'])}"
    planned += f", {format_bytes(m['host'])} on its host" * bool(m["host"])
    planned += f", {format_bytes(m['disk'])} on disk" * bool(m["disk"])
    all_, active = (f["parameters"][key] for key in ("all", "active"))
    model = [f"model   {all_:,} parameters, {active:,} of them active per token"] if active != all_ else []
    remedy = [f"remedy  {m['remedy']}, with which it fits"] if m["remedy"] else []
    if f["refused"]:
        return (
            f"{f['config']} on {f['topology']}: {mesh}\n"
            f"memory  does NOT fit: planned {planned} of {capacity} ({', '.join(kinds)})\n"
            f"refused by the compiler: {f['refused']}\n"
            f"remedy  a layout that spmd-lm plan CONFIG --search --topology {f['topology']} finds, or more devices"
        )
    verdict = f"fits, with {format_bytes(room)} to spare" if f["fits"] else f"does NOT fit, by {format_bytes(-room)}"
    rows: list[tuple[str, ...]] = [("collective", "over", "link", "sent", "seconds", "exposed")]
    for row in f["collectives"]:
        seconds = (f"{row[key]:.4g}" for key in ("seconds", "exposed_seconds"))
        rows.append((row["kind"], " x ".join(row["axes"]), row["link"], format_bytes(row["bytes"]), *seconds))
    parts = ", ".join(f"{name} {seconds:.4g}" for name, seconds in f["parts"].items())
    times, spans = work["hardware"] / work["model"], f["range"]
    mfu = "unknown" if f["mfu"] is None else format_range(spans["mfu"], "{:.0%}".format)
    compute = f"the parts of a step are at {f['software']:.0%}"
    if f.get("counted"):
        compute = "compute in the parts of a step is its kernels', counted as audit does"
    days, (most, least) = format_range(spans["days"], "{:.3g}".format), spans["software"]
    return "\n".join(
        (
            f"{f['config']} on {f['topology']}: {mesh}",
            f"memory  {verdict}: peak {peak} of {capacity} ({', '.join(kinds)}; planned {planned})",
            *model,
            *remedy,
            "",
            *format_table(rows),
            "",
            f"step    {format_range(spans['step_seconds'], '{:.3g}'.format)} s; {f['step_seconds']:.4g} s of {parts}",
            f"flops   {work['model']:.4g} of the model, {work['hardware']:.4g} of the program ({times:.2f} times)",
            f"speed   {format_range(spans['tokens_per_second'], '{:,.0f}'.format)} tokens/s, MFU {mfu}",
            f"run     {f['tokens']:.4g} tokens in {days} days of {f['devices']} devices{_paid(f)}",
            f"if products reach {most:.0%} to {least:.0%} of the hardware's rate, as published runs of other programs "
            f"did; {compute}",
            *filter(None, [f.get("notice")]),
            "matches theory" if f["matches_theory"] else "does NOT match theory: see spmd-lm audit",
        )
    )
