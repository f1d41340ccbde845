"""Time of a step under each schedule of a pipeline, on simulated devices, with the same remat.

    python benchmarks/schedules.py [--stages 4] [--microbatches 16] [--chunks 2] [--rounds 9] [--remat full]

One process holds all programs; they take turns, one step at a time, and each round compares them anew.  Printed are
medians over the rounds: of a step's time, and of its ratio to gpipe's.  Stages share the machine's cores, so a bubble
costs nothing and only work is timed: an idle half tick must do none.  Exits 1 if 1f1b takes longer than gpipe."""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spmd_lm.runtime.devices import hide_xla_warnings, simulate_devices


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("stages", 4), ("microbatches", 16), ("chunks", 2), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--remat", default="full")
    return parser.parse_args()


def config(a: argparse.Namespace, schedule: str, chunks: int):
    from spmd_lm.config.schema import RunConfig

    sizes = {"layers": 2 * a.stages * a.chunks, "width": 256, "heads": 8, "context": 128, "vocab": 512}
    parallel = {"pipe": a.stages, "data": 1, "microbatches": a.microbatches, "schedule": schedule, "chunks": chunks}
    return RunConfig.model_validate(
        {
            "model": sizes | {"dropout": 0.0, "attention_dropout": 0.0},
            "data": {"source": "synthetic"},
            "parallel": parallel,
            "precision": {"compute": "float32"},
            "optim": {"lr": 1e-3},
            "remat": {"policy": a.remat},
            "train": {"steps": 1000, "batch": 4 * a.microbatches},
        }
    )


def step_seconds(programs: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each program's steps; the programs take turns."""
    import jax

    from spmd_lm.data.corpus import load_data, make_loader

    states, batches = {}, {}
    for name, program in programs.items():
        c = program.config
        corpus = load_data(c.data, c.train.seed, c.model.vocab)
        batches[name] = make_loader(c, corpus, "training").batch(0, program.batch_shardings)
        states[name], _ = program.step(program.init(), batches[name])  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            states[name], metrics = program.step(states[name], batches[name])
            jax.block_until_ready((states[name], metrics))
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> int:
    a = parse_arguments()
    hide_xla_warnings()
    simulate_devices(a.stages)
    import jax

    from spmd_lm.step.program import Program

    chunks = {"gpipe": 1, "1f1b": 1, "interleaved": a.chunks, "breadth_first": a.chunks}
    programs = {name: Program(config(a, name, n)) for name, n in chunks.items()}
    seconds = step_seconds(programs, a.rounds)
    print(f"{a.stages} stages, {a.microbatches} microbatches, remat {a.remat}, {a.rounds} rounds, {jax.__version__=}")
    ratios = {}
    for name, times in seconds.items():
        ratios[name] = statistics.median(t / base for t, base in zip(times, seconds["gpipe"], strict=True))
        memory = programs[name].compiled.memory_analysis()
        assert memory is not None
        print(
            f"{name:<14} chunks {chunks[name]}  {statistics.median(times):6.3f} s   {ratios[name]:.3f} of gpipe's   "
            f"{memory.temp_size_in_bytes / 2**20:7.1f} MiB of temporaries, all stages"
        )
    return int(ratios["1f1b"] > 1)


if __name__ == "__main__":
    sys.exit(main())
