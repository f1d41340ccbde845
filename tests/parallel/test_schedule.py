"""Schedules against what their papers say of them, and against the order in which work can be done at all."""

import itertools
import math

import jax
import numpy as np
import pytest

from spmd_lm.parallel.pipeline.schedule import IDLE, PipelineTask, Schedule, make_schedule, render, schedule_table
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts

ONE_CHUNK = [(kind, p, m, 1) for kind in ("gpipe", "1f1b") for p in (1, 2, 3, 4, 8, 16) for m in range(1, 34)]
CHUNKS = [
    (kind, p, m, v)
    for kind, p, v, m in itertools.product(
        ("interleaved", "breadth_first"), (1, 2, 3, 4, 8), (1, 2, 3, 4, 7), range(1, 33)
    )
    if v == 1 or (m % p == 0 if kind == "interleaved" else m >= p)
]
ALL = [make_schedule(*case) for case in ONE_CHUNK + CHUNKS]


def ticks_of(s: Schedule) -> tuple[dict, dict]:
    """(stage, task) -> the tick of its forward, and of its backward."""
    ticks = []
    for table, order in ((s.forward, s.forward_order), (s.backward, s.backward_order)):
        at = {(stage, order[i]): tick for tick, row in enumerate(table) for stage, i in enumerate(row) if i != IDLE}
        assert len(at) == (table != IDLE).sum()  # nothing twice
        ticks.append(at)
    return tuple(ticks)


def before(stage: int, task: PipelineTask, s: Schedule) -> tuple[int, PipelineTask] | None:
    """The stage and task whose output is the input of `task` on `stage`."""
    if stage:
        return stage - 1, task
    return (s.stages - 1, PipelineTask(task.chunk - 1, task.microbatch)) if task.chunk else None


def test_hundreds_of_schedules_are_checked():
    assert len(ALL) > 800


def test_every_stage_runs_every_task_once_each_way_and_never_before_its_input_is_there():
    for s in ALL:
        everything = {
            (stage, PipelineTask(v, i))
            for stage in range(s.stages)
            for v in range(s.chunks)
            for i in range(s.microbatches)
        }
        forward, backward = ticks_of(s)
        assert forward.keys() == backward.keys() == everything
        for (stage, task), tick in forward.items():
            assert tick <= backward[stage, task]
            if sender := before(stage, task, s):
                assert forward[sender] < tick
                assert backward[stage, task] < backward[sender]


def test_the_bubble_is_ideal():
    for s in ALL:
        assert s.bubble == pytest.approx((s.stages - 1) / (s.chunks * s.microbatches), rel=1e-12), s.kind
        assert s.time(1, 1) == pytest.approx(2 * (s.microbatches + (s.stages - 1) / s.chunks))


def test_ticks_are_paired():
    for s in ALL:
        work, ramp = s.chunks * s.microbatches, s.stages - 1
        if s.kind in ("gpipe", "breadth_first"):
            assert s.ticks == 2 * (work + ramp)
        else:
            assert s.ticks == work + 2 * ramp + (s.chunks - 1) * s.stages


def test_live_inputs():
    """1F1B holds 2p - 1 at most, whatever m; what goes forward first as a whole holds all of it."""
    for s in ALL:
        forward, backward = ticks_of(s)
        for stage in range(s.stages):
            spans = [(forward[key], backward[key]) for key in forward if key[0] == stage]
            counted = max(sum(a <= t <= b for a, b in spans) for t in range(s.ticks)) if s.ticks < 60 else None
            assert counted in (None, s.live_inputs[stage])
        if s.kind == "1f1b":
            assert s.live_inputs == [min(s.microbatches, 2 * (s.stages - 1 - stage) + 1) for stage in range(s.stages)]
            assert max(s.live_inputs) <= 2 * s.stages - 1
        if s.kind in ("gpipe", "breadth_first"):
            assert s.live_inputs == [s.chunks * s.microbatches] * s.stages
        if s.kind == "interleaved":
            assert max(s.live_inputs) == min(s.chunks * s.microbatches, (s.chunks + 1) * s.stages - 1)


def test_one_chunk_is_the_plain_schedule():
    for p, m in itertools.product((1, 2, 4), (4, 8)):
        for plain, chunked in (("gpipe", "breadth_first"), ("1f1b", "interleaved")):
            a, b = make_schedule(plain, p, m), make_schedule(chunked, p, m, 1)
            assert np.array_equal(a.forward, b.forward) and np.array_equal(a.backward, b.backward)


def test_breadth_first_takes_each_chunk_once():
    """Weights are gathered once in each direction."""
    for s in ALL:
        if s.kind == "breadth_first":
            chunks = [task.chunk for task in s.forward_order]
            assert chunks == sorted(chunks)


def test_messages():
    for s in ALL:
        forward, _ = ticks_of(s)
        assert s.stage_sends == sum(before(stage, task, s) is not None for stage, task in forward)


def test_drawn():
    assert render(make_schedule("1f1b", 2, 3)).splitlines() == [
        "tick      0    1    2    3    4",
        "stage 0  0|.  1|.  2|0  .|1  .|2",
        "stage 1  .|.  0|0  1|1  2|2  .|.",
    ]
    drawn = render(make_schedule("interleaved", 2, 2, 2))
    assert "0a|." in drawn and "0b|0b" in drawn
    long = render(make_schedule("1f1b", 64, 512), width=100).splitlines()
    assert len(long) == 65 and max(map(len, long)) <= 100 and all("..." in line for line in long)
    assert math.isclose(make_schedule("1f1b", 64, 512).bubble, 63 / 512)


# --- as a program reads it --------------------------------------------------------------------------------------------

SOME = [s for s in ALL if s.stages > 1 and s.microbatches < 14][::3]


def test_slots_are_never_shared():
    """A slot holds what arrived until it is used."""
    for s in SOME:
        table = schedule_table(s)
        for stage in range(s.stages):
            held: dict[int, tuple[int, int]] = {}
            forward, backward = (jax.tree.map(lambda column: column[:, stage], half) for half in halves(table))  # noqa: B023
            for tick in range(s.ticks):
                if forward.active[tick]:
                    task, slot = (forward.chunk[tick], forward.microbatch[tick]), forward.input_slot[tick]
                    assert (slot in held) != bool(forward.from_embedding[tick])
                    held[slot] = task
                if backward.active[tick]:
                    assert held.pop(backward.input_slot[tick]) == (backward.chunk[tick], backward.microbatch[tick])
                if forward.receive_slot[tick] != IDLE:
                    assert forward.receive_slot[tick] not in held
                    held[forward.receive_slot[tick]] = (-1, -1)  # of a task that its forward names
            assert not held
        assert table.input_slots >= max(s.live_inputs)


def halves(table):
    return table.forward, table.backward


def test_a_chunk_s_weights_are_loaded_twice_less_where_the_directions_meet():
    for s in SOME:
        if s.kind == "breadth_first":
            runs = schedule_table(s).execution_counts()
            assert (runs["forward_new_chunk"] + runs["backward_new_chunk"] == 2 * s.chunks - 1).all()
            assert (runs["backward_last_of_chunk"] == s.chunks).all()


def test_a_chunk_is_left_where_the_next_task_is_of_another_one():
    """Prefetch gathers the next chunk there; in all other tasks a stage stays in its chunk."""
    for s in SOME:
        table = schedule_table(s)
        for stage in range(s.stages):
            in_time = [
                (half.chunk[tick, stage], half.same_chunk_next[tick, stage], half.new_chunk_next[tick, stage])
                for tick in range(s.ticks)
                for half in halves(table)
                if half.active[tick, stage]
            ]
            chunks = [chunk for chunk, *_ in in_time]
            leaves = [chunk != after for chunk, after in zip(chunks, [*chunks[1:], chunks[-1]], strict=True)]
            assert [leaving for *_, leaving in in_time] == leaves == [not staying for _, staying, _ in in_time]


def test_what_a_stage_receives_its_neighbour_sends():
    """Forward is sent in the same tick, backward in the one before."""
    for s in SOME:
        table = schedule_table(s)
        for half, way, ahead in ((table.forward, 1, 0), (table.backward, -1, 1)):
            for tick, stage in np.argwhere(half.receive_slot != IDLE):
                assert half.active[tick - ahead, (stage - way) % s.stages]


def test_how_often_each_condition_is_true():
    for s in SOME:
        table, work = schedule_table(s), s.chunks * s.microbatches
        runs, shares = table.execution_counts(), table.execution_fractions()
        assert (runs["forward_active"] == work).all() and (runs["backward_active"] == work).all()
        assert runs["forward_from_embedding"].tolist() == [s.microbatches] + [0] * (s.stages - 1)
        assert runs["backward_to_head"].tolist() == [0] * (s.stages - 1) + [s.microbatches]
        assert runs["forward_receives"].sum() == runs["backward_receives"].sum() == s.stage_sends
        assert runs.keys() == shares.keys()
        assert all(share.min() >= 0 and share.max() <= 1 for share in shares.values())
        loop_ticks = {
            name: len(half.active)
            for phase in table.phases
            for name, half in zip(("forward", "backward"), phase, strict=True)
            if half
        }
        assert loop_ticks == table.ticks
        assert (shares["forward_active"] * loop_ticks["forward"]).round(9).tolist() == runs["forward_active"].tolist()
        assert len(table.phases) == (2 if s.kind in ("gpipe", "breadth_first") and s.microbatches > 0 else 1)


def test_idle_stages_that_run_work_in_every_tick():
    runs = schedule_table(make_schedule("1f1b", 4, 8)).execution_counts(run_idle_stages=True)
    assert {int(n) for times in runs.values() for n in times} == {1, 14}


PER_HALF = ("active", "from_embedding", "to_head")


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "breadth_first"])
def test_closed_forms_count_what_the_table_has(kind):
    chunks = (1,) if kind in ("gpipe", "1f1b") else (1, 2, 3)
    for p, v, m in itertools.product(range(2, 6), chunks, range(1, 13)):
        if v > 1 and (m % p if kind == "interleaved" else m < p):
            continue
        table, counts = schedule_table(schedule := make_schedule(kind, p, m, v)), schedule_counts(kind, p, m, v)
        assert set(table.ticks.values()) == {counts.ticks} and counts.bubble == pytest.approx(schedule.bubble)
        assert (table.input_slots, table.output_grad_slots) == (counts.input_slots, counts.output_grad_slots)
        for idle, expected in ((False, counts), (True, counts.with_idle_stages())):
            mean = {name: float(times.mean()) for name, times in table.execution_counts(idle).items()}
            both = [(mean[f"forward_{name}"], mean[f"backward_{name}"]) for name in PER_HALF]
            fields = (expected.active, expected.first, expected.last)
            assert both == [pytest.approx((each, each)) for each in fields]
            assert mean["forward_receives"] + mean["backward_receives"] == pytest.approx(expected.received)
            for name in ("embedding_of_all_microbatches", "head_of_all_microbatches"):
                assert mean[name] == pytest.approx(expected.per_step)
            if kind == "breadth_first":
                assert mean["forward_new_chunk"] + mean["backward_new_chunk"] == expected.new_chunks
                assert mean["backward_last_of_chunk"] == expected.chunk_ends
