"""The same step as a run of spmd-lm makes it, through its one path for every layout: Program, Plan, TrainState.

Only what is drawn at random is replaced in the first state, by the workload's own weights."""

import argparse
import dataclasses

import jax
import workload
from workload import SIZES, Sizes

from spmd_lm.config.schema import AdamW, Model, Precision, RunConfig, Synthetic, Train
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.bench import random_batch


def config(s: Sizes, scan: bool) -> RunConfig:
    sizes = {"layers": s.layers, "width": s.width, "heads": s.heads, "context": s.context, "vocab": s.vocab}
    adam = {"lr": workload.LR, "b1": workload.B1, "b2": workload.B2, "eps": workload.EPS}
    return RunConfig(
        model=Model(**sizes, scan=scan, dropout=0.0, attention_dropout=0.0, activation="gelu"),
        data=Synthetic(source="synthetic"),
        precision=Precision(compute="float32"),
        optim=AdamW(**adam, weight_decay=workload.WEIGHT_DECAY, decay="constant", clip=0.0),
        train=Train(steps=1_000_000, batch=s.batch),
    )


def first_state(program: Program, s: Sizes) -> TrainState:
    state, drawn = program.init(), workload.matrices(s)
    turned = {name: drawn[name].swapaxes(1, 2) for name in ("out", "down")}  # stored [width, other]
    replace = lambda path, old: {**drawn, **turned}.get(path[-1].key, old)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(replace, program.canonical(state).params)
    return dataclasses.replace(state, params=jax.device_put(program.plan.place(params), program.state_shardings.params))


def main(name: str, scan: bool) -> None:
    s = SIZES[name]
    program = Program(config(s, scan), jax.devices()[:1])
    program.compile()
    batch, where = random_batch(program), program.batch_shardings
    inputs, targets = (x[None] for x in workload.tokens(s))
    batch = dataclasses.replace(
        batch, tokens=jax.device_put(inputs, where.tokens), targets=jax.device_put(targets, where.targets)
    )
    state = [first_state(program, s)]

    def step() -> float:
        state[0], metrics = jax.block_until_ready(program.step(state[0], batch))
        return float(metrics["loss"])

    workload.serve(step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", choices=SIZES)
    parser.add_argument("--scan", action="store_true", help="scan over layers, as a config does by default")
    args = parser.parse_args()
    main(args.sizes, args.scan)
