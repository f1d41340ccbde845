"""A schedule as a program reads it: arrays of what each stage does in each tick, where it lies, and how often."""

import dataclasses

import numpy as np

from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule, Unit

Rows = dict[str, np.ndarray]
"""Arrays [ticks, stages]."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """forward, backward: of each tick and stage

        on              whether there is a unit of work
        microbatch, chunk
        enters          its input comes from the embedding
        leaves          its result goes to the head
        slot            where its input is kept
        gradient_slot   where the gradient of its result is kept
        arrives         the slot in which to put what has just come from a neighbour, IDLE for none
        fetches         its chunk is another than the one before it
        begins          it is the chunk's first
        completes       it is the chunk's last

    inputs, cotangents: slots of each kind."""

    forward: Rows
    backward: Rows
    inputs: int
    cotangents: int

    @property
    def phases(self) -> list[tuple[Rows | None, Rows | None]]:
        """Ticks in runs that one loop can do, as (forward, backward), None for a half in which all stages are idle.

        Where no tick has both, each half has a loop of its own, and sends in one direction alone."""
        ahead, back = (np.any(rows["on"], axis=1) for rows in (self.forward, self.backward))
        if (ahead & back).any():
            return [(self.forward, self.backward)]
        return [(_of(self.forward, ahead), None), (None, _of(self.backward, back))]

    def runs(self, run_idle_stages: bool = False) -> dict[str, np.ndarray]:
        """float [stages]: how often each of the executor's conditions is true in a step, on each stage.

        run_idle_stages: where idle halves run all the same, each is as if it were always true."""
        found: dict[str, np.ndarray] = {}
        for half, rows in zip(("forward", "backward"), (self.forward, self.backward), strict=True):
            on, ticks = rows["on"], self.ticks[half]
            true = {name: (rows[name] & on).sum(0) for name in CONDITIONS} | {
                "arrives": (rows["arrives"] != IDLE).sum(0)
            }
            found |= {
                f"{half}_{name}": np.full(on.shape[1], ticks) if run_idle_stages else n for name, n in true.items()
            }
        first = np.arange(self.forward["on"].shape[1]) == 0
        return found | {"after_enters": first | run_idle_stages, "between_leaves": first[::-1] | run_idle_stages}

    @property
    def ticks(self) -> dict[str, int]:
        """Ticks of the phases that have each half."""
        ahead, back = zip(*self.phases, strict=True)
        longest = lambda phases: max(len(rows["on"]) for rows in phases if rows is not None)  # noqa: E731
        return {"forward": longest(ahead), "backward": longest(back)}

    def shares(self) -> dict[str, np.ndarray]:
        """float [stages]: the same of the times that each is asked, in every tick or where its half is on."""
        runs, at_top = self.runs(), ("on", "arrives", "fetches", "completes")
        asked = lambda half, name: self.ticks[half] if name in at_top else np.maximum(runs[f"{half}_on"], 1)  # noqa: E731
        once = {name: runs[name] for name in ("after_enters", "between_leaves")}
        return once | {name: times / asked(*name.split("_")) for name, times in runs.items() if name not in once}


def _of(rows: Rows, ticks: np.ndarray) -> Rows:
    return {name: column[ticks] for name, column in rows.items()}


def _slots(spans: list[tuple[int, int, Unit]]) -> dict[Unit, int]:
    """A slot for each unit, so that none holds two in one tick.  spans: first and last tick in which each is held."""
    free_from: list[int] = []
    slots = {}
    for first, last, unit in sorted(spans, key=lambda span: span[:2]):
        slot = next((i for i, tick in enumerate(free_from) if tick <= first), len(free_from))
        free_from[slot : slot + 1] = [last + 1]
        slots[unit] = slot
    return slots


NAMES = (
    *("on", "microbatch", "chunk", "enters", "leaves"),
    *("slot", "gradient_slot", "arrives", "fetches", "begins", "completes"),
)
FLAGS = ("on", "enters", "leaves", "fetches", "begins", "completes")
CONDITIONS = ("on", "enters", "leaves", "fetches", "completes")


def steps(s: Schedule) -> Steps:
    blank = lambda: {name: np.full((s.ticks, s.stages), IDLE if name == "arrives" else 0, np.int32) for name in NAMES}  # noqa: E731
    forward, backward = blank(), blank()
    slots = [_fill(s, stage, forward, backward) for stage in range(s.stages)]
    for rows in (forward, backward):
        rows |= {name: rows[name].astype(bool) for name in FLAGS}
    inputs, cotangents = (max(numbers) for numbers in zip(*slots, strict=True))
    return Steps(forward, backward, inputs, cotangents)


def _fill(s: Schedule, stage: int, forward: Rows, backward: Rows) -> tuple[int, int]:
    """One stage's column of both tables; how many slots it needs of each kind."""
    p, v = s.stages, s.chunks
    ahead = {unit: i for i, unit in enumerate(s.order)}
    back = {unit: i + s.delay + p - 1 for i, unit in enumerate(s.order_back)}
    ahead_at = lambda stage, unit: ahead[unit] + stage  # noqa: E731
    back_at = lambda stage, unit: back[unit] - stage  # noqa: E731
    arrivals, returns, held, waiting = {}, {}, [], []
    for unit in s.order:
        if (stage, unit.chunk) != (0, 0):
            giver = (stage - 1, unit) if stage else (p - 1, Unit(unit.chunk - 1, unit.microbatch))
            arrivals[unit] = ahead_at(*giver) + 1
        if (stage, unit.chunk) != (p - 1, v - 1):
            giver = (stage + 1, unit) if stage < p - 1 else (0, Unit(unit.chunk + 1, unit.microbatch))
            returns[unit] = back_at(*giver) + 1
            waiting.append((returns[unit], back_at(stage, unit), unit))
        held.append((arrivals.get(unit, ahead_at(stage, unit)), back_at(stage, unit), unit))
    slot, gradient_slot = _slots(held), _slots(waiting)
    for unit in s.order:
        for rows, tick in ((forward, ahead_at(stage, unit)), (backward, back_at(stage, unit))):
            what = (True, unit.microbatch, unit.chunk, unit not in arrivals, unit not in returns)
            for name, value in zip(NAMES, (*what, slot[unit], gradient_slot.get(unit, 0)), strict=False):
                rows[name][tick, stage] = value
        if unit in arrivals:
            forward["arrives"][arrivals[unit], stage] = slot[unit]
        if unit in returns:
            backward["arrives"][returns[unit], stage] = gradient_slot[unit]
    at_hand = None
    uses = [(ahead_at(stage, unit), forward, unit) for unit in s.order]
    uses += [(back_at(stage, unit), backward, unit) for unit in s.order_back]
    for tick, rows, unit in sorted(uses, key=lambda use: (use[0], use[1] is backward)):
        rows["fetches"][tick, stage] = unit.chunk != at_hand
        at_hand = unit.chunk
    for chunk in range(v):
        ticks = [back_at(stage, unit) for unit in s.order if unit.chunk == chunk]
        backward["begins"][min(ticks), stage] = backward["completes"][max(ticks), stage] = True
    return 1 + max(slot.values()), 1 + max(gradient_slot.values(), default=0)
