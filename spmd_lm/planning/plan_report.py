"""`spmd-lm plan`: what a run will be, before it runs and without its devices."""

import functools
import math

import jax

from spmd_lm.analysis import flops, memory
from spmd_lm.axes import is_dim_names
from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.plan import Plan, padded_vocab
from spmd_lm.parallel.rules import PARAMETERS
from spmd_lm.planning import pipeline_report
from spmd_lm.runtime.formatting import columns, count, human
from spmd_lm.step.freeze import frozen, trained
from spmd_lm.step.program import abstract_plan


def describe(config: RunConfig, plan: Plan | None = None) -> dict:
    """The plan as plain data.  With no plan given: on as many devices as are simulated, which starts none of them, or
    else as are there."""
    if plan is None:
        simulated = config.run.simulate_devices
        devices, platform = (simulated, "cpu") if simulated else (jax.device_count(), jax.default_backend())
        plan = abstract_plan(config, devices, platform)
    m, layout = config.model, plan.layout
    kernel, why = choose_kernel(config, plan.platform)
    rows = config.train.batch // config.parallel.microbatches
    leaves = jax.tree_util.tree_leaves_with_path(plan.sharded_names, is_leaf=is_dim_names)
    parameters = [_parameter(plan, config, path, names) for path, names in leaves]
    return {
        "run": config.run.name,
        "mesh": layout.sizes,
        "zero": plan.zero.stage,
        "sequence": plan.sequence,
        "reduce_once": config.parallel.reduce_once,
        "devices": layout.devices,
        "platform": plan.platform,
        "parameters": parameters,
        "parameter_count": flops.parameters(config),
        "trained_count": _trained(plan, config),
        "vocab": {"model": m.vocab, "padded": padded_vocab(m.vocab, layout.model)},
        "memory": memory.table(config, plan, kernel),
        "fullest_in": memory.fullest(config, plan, kernel),
        "batch": {
            "sequences": config.train.batch,
            "microbatches": config.parallel.microbatches,
            "sequences_per_device_and_microbatch": rows // layout.batch_shards,
            "tokens": config.train.batch * m.context,
            "steps": config.train.steps,
        },
        "model_flops_per_step": flops.train_step(config),
        "attention": {"kernel": kernel, "why": why},
        "pipeline": pipeline_report.describe(config, plan, kernel, parameters),
        "remat": config.remat_policy.policy,
        "precision": config.precision.model_dump(),
    }


def _trained(plan: Plan, config: RunConfig) -> int:
    """Parameters that optim.freeze leaves to train; ConfigError for a pattern that names none."""
    patterns = config.optim.freeze.split()
    return trained(frozen(patterns, plan.names, plan.shapes), plan.shapes) if patterns else flops.parameters(config)


def _parameter(plan: Plan, config: RunConfig, path, names) -> dict:
    leaf = functools.reduce(lambda tree, key: tree[key.key], path, plan.placed_shapes)
    lies = PARAMETERS.spec(names)
    spec = plan.param_rules.spec(names)  # `data` may be several axes of the mesh
    return {
        "name": ".".join(key.key for key in path),
        "shape": list(leaf.shape),
        "names": list(names),
        "spec": [list((e,) if isinstance(e, str) else e or ()) for e in lies],
        "bytes_per_device": memory.per_device(plan, leaf, spec, config.precision.params),
    }


def summary(description: dict) -> str:
    """The plan in a few lines, as a run prints it at its start."""
    d, batch, vocab, attention = description, *(description[key] for key in ("batch", "vocab", "attention"))
    mesh = " x ".join(f"{axis} {size}" for axis, size in d["mesh"].items())
    switched = ("sequence split", d["sequence"]), ("gradients reduced once", d["reduce_once"])
    extras = ", ".join([f"ZeRO-{d['zero']}", *(what for what, on in switched if on)])
    padding = "" if vocab["padded"] == vocab["model"] else f", vocabulary {vocab['model']} padded to {vocab['padded']}"
    shards = d["mesh"]["replica"] * d["mesh"]["data"]
    parts = f"{count(batch['microbatches'], 'microbatch')} x {count(shards, 'shard')}"
    rows = f"{parts} x {batch['sequences_per_device_and_microbatch']}"
    state, whole = sum(d["memory"][row] for row in memory.STATE), sum(d["memory"].values())
    flop, parameters, moving = d["model_flops_per_step"], d["parameter_count"], d["trained_count"]
    still = "" if moving == parameters else f", {moving:,} of them trained"
    return "\n".join(
        (
            f"mesh    {mesh} = {count(d['devices'], 'device')} ({d['platform']}), {extras}",
            f"model   {parameters:,} parameters{still}{padding}, remat {d['remat']}",
            f"kernel  attention {attention['kernel']} ({attention['why']}), compute {_arithmetic(d['precision'])}",
            f"batch   {batch['sequences']} sequences = {rows}",
            *([f"pipe    {pipeline_report.line(d['pipeline'])}"] if d["pipeline"] else []),
            f"step    {batch['tokens']:,} tokens, {flop:.3g} model FLOPs; {batch['steps']:,} steps",
            f"memory  {human(state)} of state per device, about {human(whole)} in all",
        )
    )


def _arithmetic(precision: dict) -> str:
    """`float16, the loss scaled by 2^32 at first`, or the dtype alone."""
    dtype = precision["compute"]
    scaled = precision["loss_scale"] == "dynamic"
    return dtype + (f", the loss scaled by 2^{math.log2(precision['initial_scale']):.4g} at first" if scaled else "")


def render(description: dict) -> str:
    """The plan for a person: mesh, parameters, memory, batch."""
    parameters = [("parameter", "shape", "dimensions", "lies on", "per device")]
    for p in description["parameters"]:
        shape, names = (str(tuple(p[key])).replace("'", "") for key in ("shape", "names"))
        placed = zip(p["names"], p["spec"], strict=True)
        live = ((name, [axis for axis in on if description["mesh"][axis] > 1]) for name, on in placed)
        lies = ", ".join(f"{name}: {' x '.join(on)}" for name, on in live if on) or "whole everywhere"
        parameters.append((p["name"], shape, names, lies, human(p["bytes_per_device"])))
    table = [("memory per device", "")]
    table += [(row, human(size)) for row, size in description["memory"].items()]
    table.append(("in all, about", f"{human(sum(description['memory'].values()))} in {description['fullest_in']}"))
    drawn = ["", *pipeline_report.text(description["pipeline"])] if description["pipeline"] else []
    return "\n".join([summary(description), "", *columns(parameters), "", *columns(table), *drawn])
