"""`spmd-lm plan`: mesh, parameters, memory and batch of a run, before it runs and without its devices."""

import functools
import math
from typing import Any

import jax

from spmd_lm.analysis import flops, memory
from spmd_lm.axes import DimNames, is_dim_names
from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.plan import Plan, padded_vocab
from spmd_lm.parallel.rules import PARAMETERS
from spmd_lm.planning import pipeline_report
from spmd_lm.runtime.formatting import format_bytes, format_table, pluralize
from spmd_lm.step.optimizer import frozen_mask, trained_count
from spmd_lm.step.program import abstract_plan


def describe(config: RunConfig, plan: Plan | None = None) -> dict[str, Any]:
    """The plan as plain data.  Without one, it is made for the devices that the run simulates, which starts none of
    them, or else for those of this machine."""
    if plan is None:
        simulated = config.run.simulate_devices
        devices, platform = (simulated, "cpu") if simulated else (jax.device_count(), jax.default_backend())
        plan = abstract_plan(config, devices, platform)
    m, layout = config.model, plan.layout
    kernel, reason = choose_kernel(config, plan.platform)
    sequences = config.train.batch // config.parallel.microbatches
    leaves = jax.tree_util.tree_leaves_with_path(plan.sharded_names, is_leaf=is_dim_names)
    parameters = [_describe_parameter(config, plan, path, names) for path, names in leaves]
    return {
        "run": config.run.name,
        "mesh": layout.sizes,
        "zero": plan.zero.stage,
        "sequence": plan.sequence,
        "reduce_once": config.parallel.reduce_once,
        "devices": layout.devices,
        "platform": plan.platform,
        "parameters": parameters,
        "parameter_count": parameter_count(plan),
        "trained_count": _trained_count(config, plan),
        "vocab": {"model": m.vocab, "padded": padded_vocab(m.vocab, layout.model)},
        "state_bytes": sum(memory.state(config, plan).values()),
        "memory": memory.table(config, plan, kernel),
        "fullest_in": memory.fullest_phase(config, plan, kernel).name,
        "batch": {
            "sequences": config.train.batch,
            "microbatches": config.parallel.microbatches,
            "sequences_per_device_and_microbatch": sequences // layout.batch_shards,
            "tokens": config.train.batch * m.context,
            "steps": config.train.steps,
        },
        "model_flops_per_step": flops.train_step(config),
        "attention": {"kernel": kernel, "why": reason},
        "pipeline": pipeline_report.describe(config, plan, kernel, parameters),
        "remat": config.remat_policy.policy,
        "precision": config.precision.model_dump(),
    }


def parameter_count(plan: Plan) -> int:
    """Number of parameters, without padding."""
    return sum(leaf.size for leaf in jax.tree.leaves(plan.shapes))


def _trained_count(config: RunConfig, plan: Plan) -> int:
    """Parameters that optim.freeze leaves to train; ConfigError for a pattern that matches none."""
    patterns = config.optim.freeze.split()
    if not patterns:
        return parameter_count(plan)
    return trained_count(frozen_mask(patterns, plan.names, plan.shapes), plan.shapes)


def _describe_parameter(config: RunConfig, plan: Plan, path: tuple[Any, ...], names: DimNames) -> dict[str, Any]:
    leaf = functools.reduce(lambda tree, key: tree[key.key], path, plan.placed_shapes)
    logical_spec = PARAMETERS.spec(names)
    mesh_spec = plan.param_rules.spec(names)  # where `data` may be several axes
    return {
        "name": ".".join(key.key for key in path),
        "shape": list(leaf.shape),
        "names": list(names),
        "spec": [[entry] if isinstance(entry, str) else list(entry or ()) for entry in logical_spec],
        "bytes_per_device": memory.bytes_per_device(plan, leaf, mesh_spec, config.precision.params),
    }


def summary(description: dict[str, Any]) -> str:
    """The plan in a few lines, as a run prints it at its start."""
    d, batch, vocab, attention = description, *(description[key] for key in ("batch", "vocab", "attention"))
    mesh = " x ".join(f"{axis} {size}" for axis, size in d["mesh"].items())
    options = [f"ZeRO-{d['zero']}"]
    options += ["sequence parallelism"] if d["sequence"] else []
    options += ["gradients reduced once"] if d["reduce_once"] else []
    parameters = f"{d['parameter_count']:,} parameters"
    if d["trained_count"] != d["parameter_count"]:
        parameters += f", {d['trained_count']:,} of them trained"
    if vocab["padded"] != vocab["model"]:
        parameters += f", vocabulary {vocab['model']} padded to {vocab['padded']}"
    shards = pluralize(d["mesh"]["replica"] * d["mesh"]["data"], "shard")
    microbatches = pluralize(batch["microbatches"], "microbatch")
    state, total = d["state_bytes"], sum(d["memory"].values())
    lines = [
        f"mesh    {mesh} = {pluralize(d['devices'], 'device')} ({d['platform']}), {', '.join(options)}",
        f"model   {parameters}, remat {d['remat']}",
        f"kernel  attention {attention['kernel']} ({attention['why']}), compute {_compute(d['precision'])}",
        f"batch   {batch['sequences']} sequences = {microbatches} x {shards} x "
        f"{batch['sequences_per_device_and_microbatch']}",
        f"step    {batch['tokens']:,} tokens, {d['model_flops_per_step']:.3g} model FLOPs; {batch['steps']:,} steps",
        f"memory  {format_bytes(state)} of state per device, about {format_bytes(total)} in total",
    ]
    if d["pipeline"]:
        lines.insert(4, f"pipe    {pipeline_report.summary(d['pipeline'])}")
    return "\n".join(lines)


def _compute(precision: dict[str, Any]) -> str:
    """The compute dtype, and the loss scale if there is one: `float16, initial loss scale 2^32`."""
    if precision["loss_scale"] != "dynamic":
        return precision["compute"]
    return f"{precision['compute']}, initial loss scale 2^{math.log2(precision['initial_scale']):.4g}"


def render(description: dict[str, Any]) -> str:
    """The whole plan as text: the summary, then tables of parameters and memory, and the pipeline."""
    d = description
    parameters = [("parameter", "shape", "dimensions", "sharded over", "per device")]
    for p in d["parameters"]:
        shape, names = (str(tuple(p[key])).replace("'", "") for key in ("shape", "names"))
        shardings = []
        for name, axes in zip(p["names"], p["spec"], strict=True):
            nontrivial = [axis for axis in axes if d["mesh"][axis] > 1]
            if nontrivial:
                shardings.append(f"{name}: {' x '.join(nontrivial)}")
        sharded_over = ", ".join(shardings) or "none, replicated"
        parameters.append((p["name"], shape, names, sharded_over, format_bytes(p["bytes_per_device"])))
    table = [("memory per device", "")]
    table += [(row, format_bytes(size)) for row, size in d["memory"].items()]
    table.append(("total, about", f"{format_bytes(sum(d['memory'].values()))} in {d['fullest_in']}"))
    pipeline = ["", *pipeline_report.render(d["pipeline"])] if d["pipeline"] else []
    return "\n".join([summary(d), "", *format_table(parameters), "", *format_table(table), *pipeline])
