"""`spmd-lm bench`: how fast the train step is, on tokens that cost nothing to make."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.step.program import Program


def random_batch(program: Program, seed: int = 0) -> Batch:
    """Uniform random tokens in full rows, everything that an objective asks of weight one, laid out for the step."""
    wanted, vocab = program.abstract_batch(), program.config.model.vocab
    rng, (*rows, time) = np.random.default_rng(seed), wanted.tokens.shape
    text = rng.integers(0, vocab, (*rows, time + 1), np.int32)
    made = {
        "tokens": text[..., :-1],
        "targets": text[..., 1:],
        "positions": np.broadcast_to(np.arange(time, dtype=np.int32), (*rows, time)),
        "samples": np.arange(program.config.train.batch, dtype=np.int32).reshape(rows),
        "types": np.zeros((*rows, time), np.int32),
        "labels": np.zeros(rows, np.int32),
        "ends": np.zeros(rows, np.int32),
    }
    asked = {name: leaf for name, leaf in vars(wanted).items() if leaf is not None}
    host = Batch(
        **dict.fromkeys(vars(wanted))
        | {name: made.get(name, np.ones(leaf.shape, leaf.dtype)) for name, leaf in asked.items()}
    )
    put = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])  # noqa: E731
    return jax.tree.map(put, host, program.batch_shardings)


def peak_memory(program: Program) -> tuple[int, str]:
    """Bytes at the fullest moment of one device, and who says so."""
    stats = program.device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "allocator"
    analysis = program.compiled.memory_analysis()
    assert analysis is not None
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes, "compiler: arguments and temporaries"


def bench(config: RunConfig, steps: int = 10, warmup: int = 2) -> dict[str, Any]:
    """Time `steps` steps, each on its own, after `warmup` more.  Seconds are of the wall."""
    program = Program(config)
    compile_seconds = program.compile()
    state, batch = program.init(), random_batch(program)
    seconds = []
    for step in range(warmup + steps):
        start = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        if step >= warmup:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    peak_bytes, source = peak_memory(program)
    return {
        "config": config.run.name,
        "devices": program.plan.layout.devices,
        "device_kind": program.device.device_kind,
        "mesh": program.plan.layout.sizes,
        "attention": program.model.kernel,
        "steps": steps,
        "step_seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "tokens_per_second": program.tokens_per_step / median,
        "model_flops_per_second": program.flops_per_step / median,
        "mfu": program.flops_per_step / median / peak_flops if (peak_flops := program.peak_flops) else None,
        "mfu_basis": program.peak.source if program.peak else "a peak that nobody publishes",
        "compile_seconds": compile_seconds,
        "peak_memory_bytes": peak_bytes,
        "peak_memory_source": source,
        "loss": float(metrics["loss"]),
    }


def render(result: dict[str, Any]) -> str:
    r, seconds = result, result["step_seconds"]
    low, median, high = (f"{seconds[key] * 1e3:.1f}" for key in ("min", "median", "max"))
    mfu = "unknown" if r["mfu"] is None else f"{r['mfu']:.1%}"
    tera, peak = r["model_flops_per_second"] / 1e12, r["peak_memory_bytes"] / 2**30
    return "\n".join(
        (
            f"step     {median} ms, median of {r['steps']} ({low} to {high})",
            f"speed    {r['tokens_per_second']:,.0f} tokens/s, {tera:.3g} model TFLOP/s",
            f"MFU      {mfu} of {r['devices']} x {r['mfu_basis']}",
            f"compile  {r['compile_seconds']:.1f} s",
            f"memory   {peak:.2f} GiB at the peak of one device ({r['peak_memory_source']})",
        )
    )
