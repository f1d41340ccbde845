"""`spmd-lm bench`: the speed of the train step on random tokens."""

import statistics
import time
from contextlib import closing
from typing import Any

import jax
import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.flops import Utilization
from spmd_lm.step.program import Program


def random_batch(program: Program) -> Batch:
    """Uniform random tokens in full rows, with all weights 1, sharded for the step."""
    abstract, rng = program.abstract_batch(), np.random.default_rng(0)
    *rows, context = abstract.tokens.shape
    text = rng.integers(0, program.config.model.vocab, (*rows, context + 1), np.int32)
    values = {
        "tokens": text[..., :-1],
        "targets": text[..., 1:],
        "positions": np.arange(context),
        "sample_ids": np.arange(program.config.train.batch).reshape(rows),
        **dict.fromkeys(("token_type_ids", "labels", "end_positions"), 0),
    }

    def place(path: tuple[jax.tree_util.GetAttrKey], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        x = np.broadcast_to(np.asarray(values.get(path[0].name, 1), leaf.dtype), leaf.shape)
        return jax.make_array_from_callback(x.shape, leaf.sharding, lambda index: x[index])

    return jax.tree_util.tree_map_with_path(place, abstract)


def peak_memory(program: Program) -> tuple[int, str]:
    """Peak bytes in use on one device of this process, and the source of that number."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "allocator"
    analysis = program.compiled.memory_analysis()
    assert analysis is not None
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes, "compiler: arguments and temporaries"


def bench(config: RunConfig, steps: int = 10, warmup: int = 2) -> dict[str, Any]:
    """Times `steps` steps, each on its own, after `warmup` untimed ones.  Seconds are wall-clock."""
    with closing(Program(config)) as program:
        return _bench(program, steps, warmup)


def _bench(program: Program, steps: int, warmup: int) -> dict[str, Any]:
    config, compile_seconds = program.config, program.compile()
    state, batch = program.init(), random_batch(program)
    seconds = []
    for step in range(warmup + steps):
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        if step >= warmup:
            seconds.append(time.perf_counter() - start)
    median, utilization = statistics.median(seconds), Utilization.of(config, program.plan, program.device)
    peak_bytes, source = peak_memory(program)
    return {
        "config": config.run.name,
        "devices": program.plan.layout.devices,
        "device_kind": program.device.device_kind,
        "mesh": program.plan.layout.sizes,
        "attention": ", ".join(dict.fromkeys(program.model.kernels)),
        "steps": steps,
        "step_seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "tokens_per_second": program.tokens_per_step / median,
        "model_flops_per_second": utilization.model_flops / median,
        "mfu": utilization.mfu(median),
        "mfu_basis": utilization.peak.source if utilization.peak else "a device without a published peak",
        "compile_seconds": compile_seconds,
        "compiler_options": program.xla_options.values,
        "compiler_advice": program.xla_options.advice,
        "peak_memory_bytes": peak_bytes,
        "peak_memory_source": source,
        "loss": float(metrics["loss"]),
    }


def render(r: dict[str, Any]) -> str:
    low, median, high = (f"{r['step_seconds'][key] * 1e3:.1f}" for key in ("min", "median", "max"))
    mfu = "unknown" if r["mfu"] is None else f"{r['mfu']:.1%}"
    tera, peak = r["model_flops_per_second"] / 1e12, r["peak_memory_bytes"] / 2**30
    lines = [
        f"step     {median} ms, median of {r['steps']} ({low} to {high})",
        f"speed    {r['tokens_per_second']:,.0f} tokens/s, {tera:.3g} model TFLOP/s",
        f"MFU      {mfu} of {r['devices']} x {r['mfu_basis']}",
        f"compile  {r['compile_seconds']:.1f} s",
        f"memory   {peak:.2f} GiB at the peak of one device ({r['peak_memory_source']})",
        *(f"xla      {name}={value}" for name, value in r["compiler_options"].items()),
        *r["compiler_advice"],
    ]
    return "\n".join(lines)
