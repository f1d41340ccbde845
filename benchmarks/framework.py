"""The benchmark's step by spmd-lm, through the code path of every layout: Program, Plan, TrainState.

The workload's weights replace the random ones of its first state."""

import argparse
import dataclasses

import jax
import workload
from workload import SIZES, Sizes

from spmd_lm.config.data_sections import Synthetic
from spmd_lm.config.schema import AdamW, Model, Precision, RunConfig, Train
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.bench import random_batch


def config(s: Sizes, scan: bool) -> RunConfig:
    return RunConfig(
        model=Model(
            layers=s.layers,
            width=s.width,
            heads=s.heads,
            context=s.context,
            vocab=s.vocab,
            scan=scan,
            dropout=0.0,
            attention_dropout=0.0,
            activation="gelu",
        ),
        data=Synthetic(source="synthetic"),
        precision=Precision(compute="float32"),
        optim=AdamW(
            lr=workload.LR,
            b1=workload.B1,
            b2=workload.B2,
            eps=workload.EPS,
            weight_decay=workload.WEIGHT_DECAY,
            decay="constant",
            clip=0.0,
        ),
        train=Train(steps=1_000_000, batch=s.batch),
    )


def first_state(program: Program, s: Sizes) -> TrainState:
    state, weights = program.init(), workload.matrices(s)
    weights |= {name: weights[name].swapaxes(1, 2) for name in ("out", "down")}  # stored [layers, width, other]

    def workload_weights(path, initial):
        return weights.get(path[-1].key, initial)

    params = jax.tree_util.tree_map_with_path(workload_weights, program.canonical(state).params)
    return dataclasses.replace(
        state, params=jax.device_put(program.plan.from_canonical(params), program.state_shardings.params)
    )


def main(name: str, scan: bool) -> None:
    s = SIZES[name]
    program = Program(config(s, scan), jax.devices()[:1])
    program.compile()
    batch, shardings = random_batch(program), program.batch_shardings
    inputs, targets = (x[None] for x in workload.tokens(s))
    batch = dataclasses.replace(
        batch, tokens=jax.device_put(inputs, shardings.tokens), targets=jax.device_put(targets, shardings.targets)
    )
    state = [first_state(program, s)]

    def step() -> float:
        state[0], metrics = jax.block_until_ready(program.step(state[0], batch))
        return float(metrics["loss"])

    workload.serve(step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", choices=SIZES)
    parser.add_argument("--scan", action="store_true", help="scan over layers, the default of a configuration")
    args = parser.parse_args()
    main(args.sizes, args.scan)
