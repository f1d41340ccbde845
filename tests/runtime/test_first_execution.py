"""The first execution of a program begins when nothing else uses its devices, and ends before anything else does."""

import pytest

from spmd_lm.runtime.compiler_workarounds import exclusive_first_call


class Array:
    """An array that its device computes until somebody waits."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def block_until_ready(self):
        self.events.append(f"{self.name} is ready")
        return self


def test_a_first_execution_waits_for_what_it_reads_and_for_what_it_makes():
    events = []
    state, batch, result = (Array(name, events) for name in ("state", "batch", "result"))

    def step(state, batch):
        events.append("step")
        return {"loss": result}

    program = exclusive_first_call(step)
    assert program({"weights": state}, batch) == {"loss": result}
    assert events == ["state is ready", "batch is ready", "step", "result is ready"]
    assert program(state, batch) == {"loss": result}
    assert events[4:] == ["step"]  # from then on the host runs ahead


def test_an_execution_that_fails_was_none():
    events, fails = [], [True, False]

    def step(state):
        if fails.pop(0):
            raise RuntimeError("out of memory")
        return state

    program = exclusive_first_call(step)
    with pytest.raises(RuntimeError, match="out of memory"):
        program(1)
    program(Array("state", events))
    assert events == ["state is ready"] * 2
