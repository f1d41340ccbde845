"""A step that does not end is reported with all stacks, and ends the process with 7."""

import sys
import textwrap
import threading

import pytest

from spmd_lm.config.schema import Watchdog
from spmd_lm.errors import Exit
from spmd_lm.runtime import watchdog
from tests import processes

PROGRAM = """
    import sys
    import time
    from spmd_lm.config.schema import Watchdog
    from spmd_lm.runtime import watchdog

    class Clock:  # it shows what this program wants it to, whatever else the machine does
        now = looks = 0

        def monotonic(self):
            self.looks += 1
            return self.now

    def spend(seconds):
        for _ in range(round(seconds / watchdog.TICK_SECONDS)):
            clock.now += watchdog.TICK_SECONDS
            looks = clock.looks
            while clock.looks == looks:
                time.sleep(0.001)

    clock = watchdog.time = Clock()
    watchdog.TICK_SECONDS = 0.01
    watchdog.PATIENCE["checkpoint"] = 3
    activity = "step"
    def say(what):
        print(what, flush=True)
    with watchdog.StepWatch(Watchdog(factor=10, minimum=0.3), lambda: activity, say) as watch:
        for step in range(1, 4):
            spend(0.05)
            watch.beat(step)
        for activity in ("compile", "checkpoint"):
            spend(0.7)  # these may take longer
        activity = sys.argv[1]
        watch.beat(4)
        print("hanging", flush=True)
        spend(60)
"""


@pytest.mark.parametrize(
    "activity, what",
    [("step", "step 5"), pytest.param("checkpoint", "the checkpoint of step 5", marks=pytest.mark.slow)],
)
def test_a_step_or_a_save_that_hangs_ends_the_process(activity, what):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), activity]
    ended = processes.finish(command, cwd=processes.ROOT)
    assert ended.returncode == Exit.HANG
    hanging, said = ended.stdout.splitlines()
    assert hanging == "hanging" and said.startswith(f"{what} has not ended in ")
    assert 'File "<string>", line 36 in <module>' in ended.stderr  # the last line


@pytest.mark.parametrize("is_aborted, said", [(False, ""), (True, ", or jax has lost another: see what stands above")])
def test_the_first_process_is_not_blamed_where_jax_has_aborted_the_one_that_asks(monkeypatch, is_aborted, said):
    """The thread that takes answers is in the handler of SIGABRT then, and process 0 may be the one that asks."""
    aborted = threading.Event()
    monkeypatch.setattr(watchdog, "published", lambda name: threading.Event().wait())  # it never answers
    monkeypatch.setattr(watchdog, "aborted", aborted)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 60.0 if is_aborted else 0.2)  # it is not waited for
    if is_aborted:
        aborted.set()
    assert watchdog.StepWatch(Watchdog(), lambda: "step", print)._lagging() == f"process 0 does not answer{said}"
