"""The pipeline's part of `spmd-lm plan`: the schedule, drawn, what each stage holds, and the options for ZeRO-3."""

from typing import Any

from spmd_lm.analysis import memory
from spmd_lm.analysis.expected_collectives import expected_collectives
from spmd_lm.axes import DATA, PIPE
from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.pipeline import schedule as schedules
from spmd_lm.parallel.plan import Plan
from spmd_lm.runtime.formatting import format_bytes, format_table, pluralize
from spmd_lm.step.program import abstract_plan


def describe(config: RunConfig, plan: Plan, kernel: str, parameters: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The pipeline as plain data; None for a single stage.  parameters: as plan_report describes them."""
    if plan.layout.pipe == 1:
        return None
    p = config.parallel
    schedule = schedules.make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
    stream = memory.activation_bytes(config, plan) // (plan.layout.model if plan.sequence else 1)
    replicated = [parameter for parameter in parameters if [PIPE] not in parameter["spec"]]
    return {
        "schedule": schedule.kind,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "layers_per_chunk": config.layers_per_chunk,
        "microbatches": schedule.microbatches,
        "ticks": schedule.ticks,
        "bubble": schedule.bubble,
        "messages": schedule.messages,
        "inputs_held": schedule.live_inputs,
        "activation_bytes": [inputs * stream for inputs in schedule.live_inputs],
        "on_every_stage": {parameter["name"]: parameter["bytes_per_device"] for parameter in replicated},
        "drawing": schedules.render(schedule),
        "choices": _zero3_options(config, plan, kernel),
    }


def _zero3_options(config: RunConfig, plan: Plan, kernel: str) -> list[dict[str, Any]]:
    """How often ZeRO-3 may gather weights, with the memory and traffic of each.

    Recommended is the least product of memory and traffic; the bubble has no weight in it."""
    if plan.zero.stage != 3 or not plan.nontrivial_axes(DATA):
        return []
    p, stages = config.parallel, plan.layout.pipe
    is_depth_first = p.schedule != "breadth_first"
    depth_first = {"schedule": p.schedule, "chunks": p.chunks} if is_depth_first else {"schedule": "1f1b", "chunks": 1}
    alternatives: dict[str, dict[str, Any]] = {
        "for each microbatch": depth_first | {"reduce_once": False},
        "once a step": depth_first | {"reduce_once": True},
    }
    if p.microbatches >= stages:
        breadth_first = {"schedule": "breadth_first", "chunks": config.model.layers // stages}
        alternatives["for each layer and direction"] = breadth_first | {"reduce_once": False}
    options = []
    for gathers, keys in alternatives.items():
        other = config.model_copy(update={"parallel": p.model_copy(update=keys)})
        other_plan = abstract_plan(other, plan.layout.devices, plan.platform)
        total = sum(memory.table(other, other_plan, kernel).values())
        wire = sum(row.bytes for row in expected_collectives(other, other_plan))
        bubble = schedules.make_schedule(keys["schedule"], stages, p.microbatches, keys["chunks"]).bubble
        options.append({"gathers": gathers} | keys | {"memory": total, "wire": wire, "bubble": bubble})
    best = min(options, key=lambda option: option["memory"] * option["wire"])
    return [option | {"recommended": option is best} for option in options]


def summary(d: dict[str, Any]) -> str:
    """The pipeline in one line."""
    chunks = f"{pluralize(d['chunks'], 'chunk')} of {pluralize(d['layers_per_chunk'], 'layer')}"
    return f"{d['schedule']}, {d['stages']} stages x {chunks}; {d['ticks']} ticks, bubble {d['bubble']:.1%} of the work"


def render(d: dict[str, Any]) -> list[str]:
    """Lines of text: the schedule, what each stage holds, and the options for ZeRO-3."""
    stages = [("stage", "inputs held", "activations")]
    for stage, (inputs, size) in enumerate(zip(d["inputs_held"], d["activation_bytes"], strict=True)):
        stages.append((str(stage), str(inputs), format_bytes(size)))
    if len(stages) > 9:
        stages = [*stages[:5], ("...", "", ""), *stages[-3:]]
    replicated = sum(d["on_every_stage"].values())
    lines = [
        f"schedule: forward|backward{', each a microbatch and the letter of its chunk' if d['chunks'] > 1 else ''}",
        d["drawing"],
        "",
        *format_table(stages),
        "",
        f"on every stage: {', '.join(d['on_every_stage'])}; {format_bytes(replicated)} of parameters per device",
    ]
    if d["choices"]:
        table = [("weights gathered", "parallel.", "memory", "wire", "bubble", "")]
        for o in d["choices"]:
            keys = f"schedule={o['schedule']} chunks={o['chunks']} reduce_once={str(o['reduce_once']).lower()}"
            note = "recommended: least memory x wire" if o["recommended"] else ""
            table.append(
                (o["gathers"], keys, format_bytes(o["memory"]), format_bytes(o["wire"]), f"{o['bubble']:.1%}", note)
            )
        lines += ["", *format_table(table)]
    return lines
