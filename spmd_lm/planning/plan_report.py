"""`spmd-lm plan`: mesh, parameters, memory, batch and pipeline of a run, before it runs and without its devices."""

import itertools
import math
from typing import Any

from spmd_lm.analysis.topology import Topology
from spmd_lm.axes import BATCH_AXES, CONTEXT, EXPERTS, MODEL, PIPE, devices_along
from spmd_lm.config import checks
from spmd_lm.config.adapters import numbers_per_element
from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.context_parallel import choose_context_attention
from spmd_lm.config.expert_products import BUFFERS, choose_product
from spmd_lm.config.layer_loop import choose_loop
from spmd_lm.config.layers import layer_path
from spmd_lm.config.own_modules import modules_of
from spmd_lm.config.partitioner import choose_partitioner
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import flops, memory
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.least_traffic import saved_traffic
from spmd_lm.cost_model.sizes import dtype_bytes, rows_per_device, stream_bytes, tokens_per_device
from spmd_lm.own_optimizer import bytes_of_moments
from spmd_lm.parallel.freeze import trained_count
from spmd_lm.parallel.mesh import devices_within_domain, require_replicas_between
from spmd_lm.parallel.padding import padded_vocab
from spmd_lm.parallel.pipeline import schedule as schedules
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.rules import PARAMETERS
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.planning.capacity import capacity_of, describe_capacity
from spmd_lm.resolve import abstract_plan, require_model_within_domain
from spmd_lm.runtime.devices import devices_present
from spmd_lm.runtime.formatting import format_bytes, format_table, pluralize


def plan_on(config: RunConfig, topology: Topology) -> Plan:
    """The plan of a run on hardware that may be absent.  Raises LayoutError if there is none."""
    plan = abstract_plan(config, topology.size, topology.platform, topology.device_kind, host=topology.host)
    within = devices_within_domain(plan.mesh, plan.active_axes(MODEL), topology.domain)
    require_model_within_domain(config, plan, plan.layout.model // within)
    if not config.parallel.model_across_hosts:
        require_replicas_between(topology.slices, plan.layout)
    return plan


def describe(config: RunConfig, plan: Plan | None = None, topology: Topology | None = None) -> dict[str, Any]:
    """The plan of `topology`, else `plan`, else that of the run's devices, as plain data.  Raises LayoutError if none
    is possible, ConfigError for an optim.freeze that matches no parameter."""
    plan = plan_on(config, topology) if topology else plan or _plan_of_run(config)
    m, layout, table = config.model, plan.layout, memory.table(config, plan)
    parameters, own = _describe_parameters(config, plan), bool(m.module or config.objective.module)
    return {
        "run": config.run.name,
        "mesh": layout.sizes,
        "zero": plan.zero.stage,
        "sequence": plan.sequence,
        "reduce_once": config.parallel.reduce_once,
        "secondary": plan.secondary,
        "quantize_gather": config.parallel.quantize_gather if plan.gather_codec else "none",
        "quantize_scatter": config.parallel.quantize_scatter if plan.scatter_codec else "none",
        "prefetch": list(plan.prefetch),
        "prefetch_chunks": plan.prefetch_chunks,
        "collective_matmul": list(plan.collective_matmul),
        "devices": layout.devices,
        "platform": plan.platform,
        "topology": str(topology) if topology else None,
        "parameters": parameters,
        "parameter_count": parameter_count(plan),  # without padding
        "active_count": active_count(config, plan),
        "experts": _describe_experts(config, plan),
        "trained_count": trained_count(plan.frozen, plan.shapes),
        "saved_by_freezing": _describe_freezing(config, plan) if plan.freeze or plan.trainable else None,
        "vocab": {"model": m.vocab, "padded": padded_vocab(m.vocab, layout.model)},
        "state_bytes": sum(memory.state(config, plan).values()),
        "memory": table,
        "host_memory": {
            "activations": memory.activations_on_host(config, plan),
            "masters and moments": memory.state_on_host(config, plan),
        },
        "disk": memory.state_on_disk(config, plan),
        "fullest_in": memory.fullest_point(config, plan).name,
        "batch": {
            "sequences": config.train.batch,
            "microbatches": config.parallel.microbatches,
            "sequences_per_device_and_microbatch": rows_per_device(config, plan.layout),
            "tokens": config.train.batch * m.context,
            "steps": config.train.steps,
        },
        "model_flops_per_step": flops.train_step(config, plan),
        "partitioner": choose_partitioner(config, plan.platform, bool(plan.collective_matmul), own)._asdict(),
        "attention": _describe_attention(config, plan),
        "context": _describe_context(config, plan) if layout.context > 1 else None,
        "layers": _describe_layers(config, plan),
        "deterministic": config.run.deterministic,
        "pipeline": _describe_pipeline(config, plan, parameters) if layout.pipe > 1 else None,
        "remat": config.remat_policy.policy,
        "precision": config.precision.model_dump(),
        "own_modules": [f"{name}.module={ref.path}:{ref.name}" for name, ref in modules_of(config).items()],
    } | _describe_capacity(plan, topology, sum(table.values()))


def parameter_count(plan: Plan) -> int:
    """Number of the model's parameters, without padding; quantized matrices count by their entries."""
    leaves = leaves_by_path(plan.shapes).items()
    return sum(leaf.size * numbers_per_element(path.rpartition(".")[2], str(leaf.dtype)) for path, leaf in leaves)


def active_count(config: RunConfig, plan: Plan) -> int:
    """Number of the parameters that a token uses: of experts, those of the ones that it chooses."""
    leaves, idle = leaves_by_path(plan.shapes), 0
    for each in plan.parameters:
        place, _ = layer_path(each.path)
        if EXPERTS in each.names and (moe := config.model.of_each_kind[place].moe):
            idle += leaves[".".join(each.path)].size * (moe.experts - moe.per_token) // moe.experts
    return parameter_count(plan) - idle


def _describe_experts(config: RunConfig, plan: Plan) -> list[dict[str, Any]]:
    """Each kind of layer with experts: the formulation of its products, and why; tokens of a group, slots that an
    expert has for them, slots for each that is used if all are, and bytes of a layer's slots on a device."""
    described, choices = [], {each.model: choose_product(each, plan.platform) for each in config.of_each_kind}
    for model, choice in choices.items():
        if moe := model.moe:
            group = moe.group or model.context // plan.layout.context
            slots = moe.slots(group)
            used = moe.experts * slots / (moe.per_token * group) if choice.product == BUFFERS else 1.0
            size = used * tokens_per_device(config, plan.layout) * moe.per_token * model.width
            keys = {key: getattr(moe, key) for key in ("experts", "per_token", "capacity")} | choice._asdict()
            keys |= {"group": group, "slots": slots, "slots_per_choice": used}
            described.append(keys | {"buffer_bytes": int(size * dtype_bytes(config.precision.compute))})
    return described


def _text_of_experts(experts: dict[str, Any]) -> str:
    e = experts
    capacity = "no capacity" if e["capacity"] == "none" else f"capacity {e['capacity']:g}"
    text, size = f"{e['experts']}, {e['per_token']} of each token; {capacity}", format_bytes(e["buffer_bytes"])
    if e["product"] != BUFFERS:
        return f"{text}: {e['product']}'s products of sorted tokens, {size} a layer ({e['why']})"
    slots = f"{e['slots']} slots for {e['group']} tokens, {e['slots_per_choice']:.3g} for each choice"
    return f"{text}: {slots}, in buffers of {size} a layer ({e['why']})"


def _describe_capacity(plan: Plan, topology: Topology | None, needed: float) -> dict[str, Any]:
    """Usable and total bytes of a topology's device or a GPU, its share of its host's memory, the setting with which
    `needed` bytes fit; or None."""
    known = find_hardware(plan.device_kind) if topology or plan.platform == "gpu" else None
    capacity = capacity_of(known, plan.platform)
    return {
        "capacity": capacity and capacity.usable,
        "device_memory": capacity and capacity.device,
        "host_capacity": known and known.host_memory,
        "remedy": capacity and capacity.remedy(needed),
    }


def _plan_of_run(config: RunConfig) -> Plan:
    """The plan of a run on the devices that it simulates, without starting them, or on those of this machine."""
    if simulated := config.run.simulate_devices:
        return abstract_plan(config, simulated, "cpu", "cpu")
    devices = devices_present()
    return abstract_plan(config, len(devices), devices[0].platform, devices[0].device_kind)


def _describe_parameters(config: RunConfig, plan: Plan) -> list[dict[str, Any]]:
    # `data` is one axis here, in the mesh perhaps several
    parameters, rules = [], PARAMETERS.with_own(plan.own_rules).on_mesh(tuple(plan.layout.sizes))
    for each in plan.parameters:
        size = each.elements * dtype_bytes(memory.stored_dtype(config, each))
        spec = [list(rules.axes(name)) for name in each.sharded_names]
        parameter = {"name": ".".join(each.path), "shape": list(each.shape), "names": list(each.sharded_names)}
        parameters.append(parameter | {"spec": spec, "bytes_per_device": size})
    return parameters


def _describe_freezing(config: RunConfig, plan: Plan) -> dict[str, float]:
    """Savings by frozen parameters: bytes of moments on a device, and the share of the model FLOPs of training all."""
    everything = 3 * config.train.batch * flops.forward_per_sequence(config)
    frozen = sum(
        each.elements * numbers_per_element(each.path[-1], each.dtype) for each in plan.parameters if not each.trained
    )
    moments = bytes_of_moments(config.optim, config.precision.params) * frozen
    return {"moment_bytes": moments, "flops": 1 - flops.train_step(config, plan) / everything}


def _describe_attention(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Attention kernels of all kinds of layers, and reasons, each once."""
    choices = dict.fromkeys(choose_kernel(of_kind, plan.platform, plan.device_kind) for of_kind in config.of_each_kind)
    return {
        "kernel": ", ".join(dict.fromkeys(each.kernel for each in choices)),
        "why": "; ".join(each.why for each in choices),
    }


def _describe_context(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """How attention reaches over `context`, why, and sizes of its mesh axes: on a torus there may be two."""
    form, why = choose_context_attention(config.model, config.parallel)
    axes = {axis: plan.mesh.shape[axis] for axis in plan.active_axes(CONTEXT)}
    return {"form": form, "why": why, "zigzag": plan.zigzag, "axes": axes}


def _text_of_context(context: dict[str, Any]) -> str:
    text = f"attention by {context['form']} ({context['why']})"
    if len(context["axes"]) == 1:
        return text
    axes = " x ".join(f"{axis} {size}" for axis, size in context["axes"].items())
    if context["form"] == "heads":
        return f"{text}; {axes} on the torus: its exchange crosses both"
    return f"{text}; {axes} on the torus, no single ring: every hop waits for keys that cross two links or more"


def _describe_layers(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Loop or unrolled layers, why, and the bytes that a loop copies on a GPU in a step."""
    scatters = plan.zero.scatters_in_backward
    choice = choose_loop(config, plan.platform, prefetch=bool(plan.prefetch), scatters=scatters)
    copies = saved_traffic(config, plan) if plan.platform == "gpu" else None
    kinds = config.model.kinds
    period = [kind.as_written for kind in kinds] if config.model.period else None
    return {"count": config.model.layers, "period": period} | choice._asdict() | {"loop_copies": copies}


def _describe_period(layers: dict[str, Any]) -> str:
    if not layers["period"]:
        return ""
    kinds = (each if isinstance(each, str) else each["kind"] for each in layers["period"])
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(kinds)]
    last = layers["count"] % len(layers["period"])
    cut_short = f", the last one of {pluralize(last, 'layer')}" if last else ""
    return f" in periods of {' and '.join(f'{n} {kind}' for kind, n in runs)}{cut_short},"


def _describe_pipeline(config: RunConfig, plan: Plan, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """The schedule, drawn, the activations of each stage, and the options for ZeRO-3."""
    p = config.parallel
    schedule = schedules.make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
    stream = stream_bytes(config, plan)
    return {
        "schedule": schedule.kind,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "layers_per_chunk": config.layers_per_chunk,
        "microbatches": schedule.microbatches,
        "ticks": schedule.ticks,
        "bubble": schedule.bubble,
        "messages": schedule.stage_sends,
        "inputs_held": schedule.live_inputs,
        "activation_bytes": [inputs * stream for inputs in schedule.live_inputs],
        "on_every_stage": {each["name"]: each["bytes_per_device"] for each in parameters if [PIPE] not in each["spec"]},
        "drawing": schedules.render(schedule),
        "choices": _zero3_options(config, plan),
    }


def _zero3_options(config: RunConfig, plan: Plan) -> list[dict[str, Any]]:
    """Options for how often ZeRO-3 gathers weights, with memory and traffic; recommended is the least product of both,
    whatever the bubble."""
    if plan.zero.stage != 3:
        return []
    p, stages = config.parallel, plan.layout.pipe
    depth_first: tuple[schedules.Kind, int] = (p.schedule, p.chunks) if p.schedule != "breadth_first" else ("1f1b", 1)
    alternatives = [("for each microbatch", *depth_first, False), ("once a step", *depth_first, True)]
    if p.microbatches >= stages:
        alternatives.append(("for each layer and direction", "breadth_first", config.model.layers // stages, False))
    options: list[dict[str, Any]] = []
    for gathers, kind, chunks, reduce_once in alternatives:
        keys = {"schedule": kind, "chunks": chunks, "reduce_once": reduce_once}
        other = config.model_copy(update={"parallel": p.model_copy(update=keys)})
        if checks.problems(dict(other)):
            continue
        host = plan.rings.within * stages * plan.layout.model if plan.rings else None
        other_plan = abstract_plan(other, plan.layout.devices, plan.platform, plan.device_kind, host=host)
        total = sum(memory.table(other, other_plan).values())
        wire = sum(row.bytes for row in expected_collectives(other, other_plan))
        bubble = schedules.make_schedule(kind, stages, p.microbatches, chunks).bubble
        options.append({"gathers": gathers} | keys | {"memory": total, "wire": wire, "bubble": bubble})
    if not options:
        return []
    best = min(options, key=lambda option: option["memory"] * option["wire"])
    return [option | {"recommended": option is best} for option in options]


def _saved_by_freezing(saved: dict[str, float]) -> str:
    flops = f"{abs(saved['flops']):.0%}"
    share = f"{flops} of the FLOPs" if saved["flops"] >= 0 else f"adds {flops} to the FLOPs"
    return f"saves {format_bytes(saved['moment_bytes'])} of moments per device and {share}"


def summary(description: dict[str, Any]) -> str:
    """The plan in a few lines, which a run prints at its start."""
    d, batch, vocab, attention = description, *(description[key] for key in ("batch", "vocab", "attention"))
    mesh = " x ".join(f"{axis} {size}" for axis, size in d["mesh"].items())
    options = [f"ZeRO-{d['zero']}"]
    options += ["sequence parallelism"] if d["sequence"] else []
    options += ["gradients reduced once"] if d["reduce_once"] else []
    options += ["layers gathered across hosts once"] if d["secondary"] else []
    options += [f"weights gathered in {d['quantize_gather']}"] if d["quantize_gather"] != "none" else []
    options += [f"gradients scattered in {d['quantize_scatter']}"] if d["quantize_scatter"] != "none" else []
    options += [f"{' and '.join(d['prefetch'])} gathered a layer ahead"] if d["prefetch"] else []
    options += ["chunks gathered ahead"] if d["prefetch_chunks"] else []
    options += [f"products of {' and '.join(d['collective_matmul'])} in parts"] if d["collective_matmul"] else []
    parameters = f"{d['parameter_count']:,} parameters"
    if d["active_count"] != d["parameter_count"]:
        parameters += f", {d['active_count']:,} of them active per token"
    if d["trained_count"] != d["parameter_count"]:
        parameters += f", {d['trained_count']:,} of them trained, which {_saved_by_freezing(d['saved_by_freezing'])}"
    if vocab["padded"] != vocab["model"]:
        parameters += f", vocabulary {vocab['model']} padded to {vocab['padded']}"
    compute = d["precision"]["compute"]
    if d["precision"]["fake_quant"] != "none":
        compute += f", matrices rounded to {d['precision']['fake_quant']}"
    if d["precision"]["quantized"] != "none":
        compute += f", matrices in {d['precision']['quantized']}"
    if d["precision"]["matmul"] != "none":
        emulated = ", or emulated" if d["precision"]["emulate"] else ""
        compute += f", matrices multiplied in {d['precision']['matmul']}{emulated}"
    if d["precision"]["loss_scale"] == "dynamic":
        compute += f", initial loss scale 2^{math.log2(d['precision']['initial_scale']):.4g}"
    compute += ", deterministic" if d["deterministic"] else ""
    shards = pluralize(devices_along(BATCH_AXES, d["mesh"]), "shard")
    microbatches = pluralize(batch["microbatches"], "microbatch")
    state, total = d["state_bytes"], sum(d["memory"].values())
    devices = f"{pluralize(d['devices'], 'device')} ({d['topology'] or d['platform']})"
    capacity = f" of the {describe_capacity(d['capacity'], d['device_memory'])}" if d["capacity"] else ""
    capacity += f"; to fit it needs {d['remedy']}" if d["remedy"] else ""
    loop = d["layers"]
    how = f"{loop['count']}{_describe_period(loop)} {'in a loop' if loop['scan'] else 'unrolled'} ({loop['why']})"
    if loop["loop_copies"]:
        how += f"; a loop copies at least {loop['loop_copies'] / 1e9:,.3g} GB a step"
    on_host = sum(d["host_memory"].values())
    host = f", and {format_bytes(on_host)} on its host" if on_host else ""
    if on_host and (room := d["host_capacity"]):
        host += f", {'of' if on_host <= room else 'more than'} its share of {format_bytes(room)}"
    host += f", {format_bytes(d['disk'])} on disk" if d["disk"] else ""
    lines = [
        f"mesh    {mesh} = {devices}, {', '.join(options)}",
        f"model   {parameters}, remat {d['remat']}",
        *(f"experts {_text_of_experts(each)}" for each in d["experts"]),
        *([f"own     {', '.join(d['own_modules'])}"] if d["own_modules"] else []),
        f"layers  {how}",
        *([f"sends   {d['partitioner']['partitioner']} ({d['partitioner']['why']})"] if d["devices"] > 1 else []),
        f"kernel  attention {attention['kernel']} ({attention['why']}), compute {compute}",
        *([f"context {_text_of_context(d['context'])}"] if d["context"] else []),
        f"batch   {batch['sequences']} sequences = {microbatches} x {shards} x "
        f"{batch['sequences_per_device_and_microbatch']}",
        f"step    {batch['tokens']:,} tokens, {d['model_flops_per_step']:.3g} model FLOPs; {batch['steps']:,} steps",
        f"memory  {format_bytes(state)} of state per device, about {format_bytes(total)} in total{capacity}{host}",
    ]
    if p := d["pipeline"]:
        stages = f"{p['stages']} stages x {pluralize(p['chunks'], 'chunk')} of"
        work = f"{p['ticks']} ticks, bubble {p['bubble']:.1%} of the work"
        lines.insert(-2, f"pipe    {p['schedule']}, {stages} {pluralize(p['layers_per_chunk'], 'layer')}; {work}")
    return "\n".join(lines)


def render(description: dict[str, Any]) -> str:
    """The whole plan as text: the summary, then tables of parameters and memory, and the pipeline."""
    d = description
    parameters = [("parameter", "shape", "dimensions", "sharded over", "per device")]
    for p in d["parameters"]:
        shape, names = (str(tuple(p[key])).replace("'", "") for key in ("shape", "names"))
        axes = [" x ".join(axis for axis in on if d["mesh"][axis] > 1) for on in p["spec"]]
        shardings = [f"{name}: {over}" for name, over in zip(p["names"], axes, strict=True) if over]
        sharded_over = ", ".join(shardings) or "none, replicated"
        parameters.append((p["name"], shape, names, sharded_over, format_bytes(p["bytes_per_device"])))
    rows = [(row, format_bytes(size)) for row, size in d["memory"].items()]
    total = f"{format_bytes(sum(d['memory'].values()))} in {d['fullest_in']}"
    table = [("memory per device", ""), *rows, ("total, about", total)]
    table += [(f"{name} on the host", format_bytes(size)) for name, size in d["host_memory"].items() if size]
    table += [("masters and moments on disk", format_bytes(d["disk"]))] * bool(d["disk"])
    pipeline = ["", *_render_pipeline(d["pipeline"])] if d["pipeline"] else []
    return "\n".join([summary(d), "", *format_table(parameters), "", *format_table(table), *pipeline])


def _render_pipeline(d: dict[str, Any]) -> list[str]:
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
            size, wire, bubble = format_bytes(o["memory"]), format_bytes(o["wire"]), f"{o['bubble']:.1%}"
            note = "recommended: least memory x wire" if o["recommended"] else ""
            table.append((o["gathers"], keys, size, wire, bubble, note))
        lines += ["", *format_table(table)]
    return lines
