"""What `spmd-lm plan` says of a pipeline: its schedule, drawn, what each stage holds, and what ZeRO-3 may choose."""

from typing import Any

from spmd_lm.analysis import memory
from spmd_lm.analysis.expected_collectives import activation_bytes, expected_collectives
from spmd_lm.axes import DATA, PIPE
from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.pipeline.schedule import make_schedule, render
from spmd_lm.parallel.plan import Plan
from spmd_lm.runtime.formatting import format_bytes, format_table, pluralize
from spmd_lm.step.program import abstract_plan


def describe(config: RunConfig, plan: Plan, kernel: str, parameters: list[dict]) -> dict[str, Any] | None:
    """As plain data; None where there is one stage.  parameters: as the plan describes them."""
    if plan.layout.pipe == 1:
        return None
    p = config.parallel
    s = make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
    stream = activation_bytes(config, plan) // (plan.layout.model if plan.sequence else 1)
    everywhere = [each for each in parameters if [PIPE] not in each["spec"]]
    return {
        "schedule": s.kind,
        "stages": s.stages,
        "chunks": s.chunks,
        "layers_per_chunk": config.layers_per_chunk,
        "microbatches": s.microbatches,
        "ticks": s.ticks,
        "bubble": s.bubble,
        "messages": s.messages,
        "inputs_held": s.live_inputs,
        "activation_bytes": [inputs * stream for inputs in s.live_inputs],
        "on_every_stage": {each["name"]: each["bytes_per_device"] for each in everywhere},
        "drawing": render(s),
        "choices": _choices(config, plan, kernel) if plan.zero.stage == 3 and plan.nontrivial_axes(DATA) else [],
    }


def _choices(config: RunConfig, plan: Plan, kernel: str) -> list[dict[str, Any]]:
    """What fully sharded weights cost: gathered for each microbatch, once a step, or once for each chunk and
    direction.  Recommended is the least product of memory and traffic; the bubble is not weighed."""
    p, stages = config.parallel, plan.layout.pipe
    own = p.schedule != "breadth_first"
    same: dict[str, Any] = {"schedule": p.schedule if own else "1f1b", "chunks": p.chunks if own else 1}
    ways = {"for each microbatch": same | {"reduce_once": False}, "once a step": same | {"reduce_once": True}}
    if p.microbatches >= stages:
        chunks = config.model.layers // stages
        ways["for each layer and direction"] = {"schedule": "breadth_first", "chunks": chunks, "reduce_once": False}
    choices = []
    for gathers, keys in ways.items():
        other = config.model_copy(update={"parallel": p.model_copy(update=keys)})
        laid_out = abstract_plan(other, plan.layout.devices, plan.platform)
        held = sum(memory.table(other, laid_out, kernel).values())
        sent = sum(row.bytes for row in expected_collectives(other, laid_out))
        bubble = make_schedule(keys["schedule"], stages, p.microbatches, keys["chunks"]).bubble
        choices.append({"gathers": gathers} | keys | {"memory": held, "wire": sent, "bubble": bubble})
    best = min(choices, key=lambda each: each["memory"] * each["wire"])
    return [each | {"recommended": each is best} for each in choices]


def line(d: dict[str, Any]) -> str:
    """A pipeline in one line."""
    chunks = f"{pluralize(d['chunks'], 'chunk')} of {pluralize(d['layers_per_chunk'], 'layer')}"
    return f"{d['schedule']}, {d['stages']} stages x {chunks}; {d['ticks']} ticks, bubble {d['bubble']:.1%} of the work"


def text(d: dict[str, Any]) -> list[str]:
    """The rest of it for a person: the schedule, and what each stage holds."""
    stages = [("stage", "inputs held", "activations")]
    stages += [
        (str(stage), str(inputs), format_bytes(size))
        for stage, (inputs, size) in enumerate(zip(d["inputs_held"], d["activation_bytes"], strict=True))
    ]
    if len(stages) > 9:
        stages = [*stages[:5], ("...", "", ""), *stages[-3:]]
    copies = sum(d["on_every_stage"].values())
    lines = [
        f"schedule: forward|backward{', a microbatch and the letter of its chunk' if d['chunks'] > 1 else ''}",
        d["drawing"],
        "",
        *format_table(stages),
        "",
        f"on every stage: {', '.join(d['on_every_stage'])}; {format_bytes(copies)} of parameters per device",
    ]
    if d["choices"]:
        table = [("weights gathered", "parallel.", "memory", "wire", "bubble", "")]
        for each in d["choices"]:
            keys = f"schedule={each['schedule']} chunks={each['chunks']} reduce_once={str(each['reduce_once']).lower()}"
            told = "recommended: the least product of both" if each["recommended"] else ""
            table.append(
                (
                    each["gathers"],
                    keys,
                    format_bytes(each["memory"]),
                    format_bytes(each["wire"]),
                    f"{each['bubble']:.1%}",
                    told,
                )
            )
        lines += ["", *format_table(table)]
    return lines
