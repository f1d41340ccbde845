"""Schedules against what their papers say of them, and against the order in which work can be done at all."""

import itertools
import math

import numpy as np
import pytest

from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule, Unit, render, schedule
from spmd_lm.parallel.pipeline.schedule_table import steps

ONE_CHUNK = [(kind, p, m, 1) for kind in ("gpipe", "1f1b") for p in (1, 2, 3, 4, 8, 16) for m in range(1, 34)]
CHUNKS = [
    (kind, p, m, v)
    for kind, p, v, m in itertools.product(
        ("interleaved", "breadth_first"), (1, 2, 3, 4, 8), (1, 2, 3, 4, 7), range(1, 33)
    )
    if v == 1 or (m % p == 0 if kind == "interleaved" else m >= p)
]
ALL = [schedule(*case) for case in ONE_CHUNK + CHUNKS]


def done(s: Schedule) -> tuple[dict, dict]:
    """(stage, unit) -> the tick of its forward, and of its backward."""
    ticks = []
    for table, order in ((s.forward, s.order), (s.backward, s.order_back)):
        at = {(stage, order[i]): tick for tick, row in enumerate(table) for stage, i in enumerate(row) if i != IDLE}
        assert len(at) == (table != IDLE).sum()  # nothing twice
        ticks.append(at)
    return tuple(ticks)


def before(stage: int, unit: Unit, s: Schedule) -> tuple[int, Unit] | None:
    """Who hands `unit` to `stage`."""
    if stage:
        return stage - 1, unit
    return (s.stages - 1, Unit(unit.chunk - 1, unit.microbatch)) if unit.chunk else None


def test_there_are_hundreds():
    assert len(ALL) > 800


def test_every_stage_does_every_unit_once_each_way_and_never_before_it_can():
    for s in ALL:
        everything = {
            (stage, Unit(v, i)) for stage in range(s.stages) for v in range(s.chunks) for i in range(s.microbatches)
        }
        forward, backward = done(s)
        assert forward.keys() == backward.keys() == everything
        for (stage, unit), tick in forward.items():
            assert tick <= backward[stage, unit]
            if giver := before(stage, unit, s):
                assert forward[giver] < tick
                assert backward[stage, unit] < backward[giver]


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
        forward, backward = done(s)
        for stage in range(s.stages):
            spans = [(forward[key], backward[key]) for key in forward if key[0] == stage]
            counted = max(sum(a <= t <= b for a, b in spans) for t in range(s.ticks)) if s.ticks < 60 else None
            assert counted in (None, s.live[stage])
        if s.kind == "1f1b":
            assert s.live == [min(s.microbatches, 2 * (s.stages - 1 - stage) + 1) for stage in range(s.stages)]
            assert max(s.live) <= 2 * s.stages - 1
        if s.kind in ("gpipe", "breadth_first"):
            assert s.live == [s.chunks * s.microbatches] * s.stages
        if s.kind == "interleaved":
            assert max(s.live) == min(s.chunks * s.microbatches, (s.chunks + 1) * s.stages - 1)


def test_one_chunk_is_the_plain_schedule():
    for p, m in itertools.product((1, 2, 4), (4, 8)):
        for plain, chunked in (("gpipe", "breadth_first"), ("1f1b", "interleaved")):
            a, b = schedule(plain, p, m), schedule(chunked, p, m, 1)
            assert np.array_equal(a.forward, b.forward) and np.array_equal(a.backward, b.backward)


def test_breadth_first_takes_each_chunk_once():
    """So that its weights are gathered once in each direction."""
    for s in ALL:
        if s.kind == "breadth_first":
            chunks = [unit.chunk for unit in s.order]
            assert chunks == sorted(chunks)


def test_messages():
    for s in ALL:
        forward, _ = done(s)
        assert s.messages == sum(before(stage, unit, s) is not None for stage, unit in forward)


def test_drawn():
    assert render(schedule("1f1b", 2, 3)).splitlines() == [
        "tick      0    1    2    3    4",
        "stage 0  0|.  1|.  2|0  .|1  .|2",
        "stage 1  .|.  0|0  1|1  2|2  .|.",
    ]
    drawn = render(schedule("interleaved", 2, 2, 2))
    assert "0a|." in drawn and "0b|0b" in drawn
    long = render(schedule("1f1b", 64, 512), width=100).splitlines()
    assert len(long) == 65 and max(map(len, long)) <= 100 and all("..." in line for line in long)
    assert math.isclose(schedule("1f1b", 64, 512).bubble, 63 / 512)


# --- as a program reads it --------------------------------------------------------------------------------------------

SOME = [s for s in ALL if s.stages > 1 and s.microbatches < 14][::3]


def test_slots_are_never_shared():
    """What lies in a slot stays there from its arrival to its use."""
    for s in SOME:
        table = steps(s)
        for stage in range(s.stages):
            lies: dict[int, tuple[int, int]] = {}
            ahead = {name: column[:, stage] for name, column in table.forward.items()}
            back = {name: column[:, stage] for name, column in table.backward.items()}
            for tick in range(s.ticks):
                if ahead["arrives"][tick] != IDLE:
                    assert ahead["arrives"][tick] not in lies
                    lies[ahead["arrives"][tick]] = (-1, -1)  # from elsewhere; which, its forward says
                if ahead["on"][tick]:
                    unit, slot = (ahead["chunk"][tick], ahead["microbatch"][tick]), ahead["slot"][tick]
                    assert (slot in lies) != bool(ahead["enters"][tick])
                    lies[slot] = unit
                if back["on"][tick]:
                    assert lies.pop(back["slot"][tick]) == (back["chunk"][tick], back["microbatch"][tick])
            assert not lies
        assert table.inputs >= max(s.live)


def test_a_chunk_s_weights_are_fetched_twice_less_where_the_directions_meet():
    for s in SOME:
        if s.kind == "breadth_first":
            runs = steps(s).runs()
            assert (runs["forward_fetches"] + runs["backward_fetches"] == 2 * s.chunks - 1).all()
            assert (runs["backward_completes"] == s.chunks).all()


def test_how_often_each_condition_is_true():
    for s in SOME:
        table, work = steps(s), s.chunks * s.microbatches
        runs, shares = table.runs(), table.shares()
        assert (runs["forward_on"] == work).all() and (runs["backward_on"] == work).all()
        assert runs["forward_enters"].tolist() == [s.microbatches] + [0] * (s.stages - 1)
        assert runs["backward_leaves"].tolist() == [0] * (s.stages - 1) + [s.microbatches]
        assert runs["forward_arrives"].sum() == runs["backward_arrives"].sum() == s.messages
        assert all(share.min() >= 0 and share.max() <= 1 for share in shares.values())
        phases = {
            half: len(rows["on"])
            for phase in table.phases
            for half, rows in zip(("f", "b"), phase, strict=True)
            if rows
        }
        assert (shares["forward_on"] * phases["f"]).round(9).tolist() == runs["forward_on"].tolist()
        assert len(table.phases) == (2 if s.kind in ("gpipe", "breadth_first") and s.microbatches > 0 else 1)


def test_masked_stages_work_in_every_tick():
    table = steps(schedule("1f1b", 4, 8))
    assert {
        int(n) for name, times in table.runs(run_idle_stages=True).items() for n in times if "_leaves" not in name[:8]
    } == {
        1,
        14,
    }
