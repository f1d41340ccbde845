"""Time of a step under each schedule of a pipeline, on simulated devices, with the same remat.

    python benchmarks/schedules.py [--stages 4] [--microbatches 16] [--chunks 2] [--rounds 9] [--remat full]

One process holds all of them; they take turns, one step at a time, and each round compares them anew.  Told are the
median over the rounds of a step's time and of its ratio to gpipe's.  Stages share the machine's cores, so that a bubble
costs nothing and what is timed is the work: a tick whose half is idle must do none.  Exits 1 if 1f1b takes longer than
gpipe."""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spmd_lm.runtime.devices import quiet, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("stages", 4), ("microbatches", 16), ("chunks", 2), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--remat", default="full")
    a = parser.parse_args()
    quiet()
    simulate(a.stages)
    import jax

    from spmd_lm.config.schema import RunConfig
    from spmd_lm.data.corpus import load_data
    from spmd_lm.data.loader import CausalLMTrainLoader
    from spmd_lm.step.program import Program

    def config(schedule: str, chunks: int) -> RunConfig:
        parallel = {"pipe": a.stages, "data": 1, "microbatches": a.microbatches, "schedule": schedule, "chunks": chunks}
        layers = 2 * a.stages * a.chunks
        sizes = {"layers": layers, "width": 256, "heads": 8, "context": 128, "vocab": 512}
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

    chunks = {"gpipe": 1, "1f1b": 1, "interleaved": a.chunks, "breadth_first": a.chunks}
    programs = {name: Program(config(name, n)) for name, n in chunks.items()}
    states = {name: program.init() for name, program in programs.items()}
    batches = {}
    for name, program in programs.items():
        c = program.config
        corpus = load_data(c.data, c.train.seed, c.model.vocab)
        batches[name] = CausalLMTrainLoader(corpus.train, c).batch(0, program.batch_shardings)
        states[name], _ = program.step(states[name], batches[name])  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(a.rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            states[name], figures = program.step(states[name], batches[name])
            jax.block_until_ready((states[name], figures))
            seconds[name].append(time.perf_counter() - start)
    print(f"{a.stages} stages, {a.microbatches} microbatches, remat {a.remat}, {a.rounds} rounds, {jax.__version__=}")
    ratios = {}
    for name, times in seconds.items():
        each = [t / base for t, base in zip(times, seconds["gpipe"], strict=True)]
        ratios[name] = statistics.median(each)
        temporaries = programs[name].compiled.memory_analysis().temp_size_in_bytes
        print(
            f"{name:<14} chunks {chunks[name]}  {statistics.median(times):6.3f} s   {ratios[name]:.3f} of gpipe's   "
            f"{temporaries / 2**20:7.1f} MiB of temporaries, all stages"
        )
    return int(ratios["1f1b"] > 1)


if __name__ == "__main__":
    sys.exit(main())
