"""A run resumes under any other layout, on fewer or more devices: from the same bits, to the same losses."""

import itertools
import json
from pathlib import Path

import jax
import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.step.state import TrainState
from tests.helpers import assert_equal, device_batch, make_config, program
from tests.reliability.jobs import Job, losses

LAYOUTS = {
    "1 device": {"data": 1},
    "2 devices": {"data": 2, "zero": 1},
    "4 devices": {"data": 2, "model": 2, "sequence": True},
    "data 8": {"data": 8, "zero": 3},
    "model 8": {"data": 1, "model": 8},
    "replica 2": {"replica": 2, "data": 2, "model": 2, "zero": 2},
    "1f1b": {"pipe": 2, "data": 2, "model": 2, "microbatches": 4, "schedule": "1f1b"},
    "interleaved": {"pipe": 2, "data": 4, "microbatches": 2, "schedule": "interleaved", "chunks": 2, "zero": 1},
    "heads": {"data": 2, "context": 2, "context_attention": "heads", "model": 2, "zero": 1},
    "ring": {"data": 2, "context": 4, "context_attention": "ring", "zero": 3},
}
STEPS = 2  # before the change, and after it


def run(name: str, state: TrainState, first: int) -> tuple[TrainState, list[float]]:
    p, metrics = make_program(name), []
    for step in range(first, first + STEPS):
        state, values = p.step(state, device_batch(p, step))
        metrics += [values["loss"].item(), values["grad_norm"].item()]
    return state, metrics


def make_program(name: str):
    return program(make_config(parallel=LAYOUTS[name], model={"layers": 4}))


@pytest.mark.slow
def test_every_change_of_layout(tmp_path, x64):
    """90 ordered pairs of 10 layouts; dropout and clipping are on."""
    saved, later = {}, {}
    for name in LAYOUTS:
        p = make_program(name)
        state, _ = run(name, p.init(), first=0)
        checkpoints = Checkpointer(tmp_path / name)
        saved[name] = p.canonical(state)
        checkpoints.save(STEPS, saved[name], make_meta({}, 0, ""))
        checkpoints.close()
        saved[name] = jax.device_get(saved[name])
        _, later[name] = run(name, state, first=STEPS)
    for before, after in itertools.permutations(LAYOUTS, 2):
        p = make_program(after)
        restored = Checkpointer(tmp_path / before).restore(STEPS, p.abstract_canonical())
        assert_equal(jax.device_get(restored), saved[before])
        placed = p.from_canonical(restored)
        assert_equal(jax.device_get(p.canonical(placed)), saved[before])
        _, values = run(after, placed, first=STEPS)
        assert values == pytest.approx(later[before], rel=1e-12), (before, after)


CYCLE = [
    ["parallel.data=4"],
    ["parallel.data=2", "parallel.model=2"],
    ["parallel.data=1", "parallel.model=4", "parallel.sequence=true"],
    ["parallel.data=4", "parallel.zero=3"],
    ["parallel.pipe=2", "parallel.data=2", "parallel.microbatches=2"],
    ["parallel.replica=2", "parallel.data=2", "parallel.zero=2"],
    ["parallel.data=4", "parallel.zero=1", "parallel.microbatches=2"],
    ["parallel.data=1", "parallel.context=4", "parallel.context_attention=ring", "parallel.zero=1"],
    ["parallel.pipe=2", "parallel.data=1", "parallel.model=2", "parallel.microbatches=4", "parallel.zero=1"],
]


@pytest.mark.slow
def test_a_cycle_of_layouts_over_two_processes(tmp_path):
    """Two processes start repeatedly, each time under the next of 9 layouts, in float64."""
    run = [*(f"precision.{key}=float64" for key in ("params", "compute", "reduce")), "model.layers=2", "train.batch=8"]
    run += ["optim.decay=constant", "checkpoint.every=0"]
    for number, layout in enumerate(CYCLE, 1):
        with Job(tmp_path / "cycle", *run, *layout, f"train.steps={2 * number}", "checkpoint.every=2") as job:
            assert job.exit_codes() == [0, 0], job.outputs[0].read_text()
    with Job(tmp_path / "one", *run, *CYCLE[0], f"train.steps={2 * len(CYCLE)}") as job:
        assert job.exit_codes() == [0, 0]
    for (step, loss, norm), expected in zip(losses(tmp_path / "cycle"), losses(tmp_path / "one"), strict=True):
        assert (step, loss, norm) == pytest.approx(expected, rel=1e-12)
    assert json.loads(Path(tmp_path / "cycle" / "status.json").read_text())["restarts"] == len(CYCLE) - 1
