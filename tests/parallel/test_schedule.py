"""Schedules against what their papers say of them, and against the order in which work can be done at all."""

import itertools
import math

import numpy as np
import pytest

from spmd_lm.errors import LayoutError
from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule, Unit, render, schedule

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
            assert max(s.live) <= 2 * s.stages * s.chunks - 1


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


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (("1f1b", 4, 8, 2), "has one chunk, not 2. Use parallel.schedule=interleaved"),
        (("gpipe", 4, 8, 2), "Use parallel.schedule=breadth_first"),
        (("interleaved", 4, 10, 2), "Use parallel.microbatches=8 or 12"),
        (("interleaved", 4, 3, 2), "Use parallel.microbatches=4.$"),
        (("breadth_first", 4, 3, 2), "Use parallel.microbatches=4 or more"),
    ],
)
def test_what_makes_no_schedule_is_refused(case, said):
    with pytest.raises(LayoutError, match=said):
        schedule(*case)


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
