"""A step that does not end is reported with all stacks, and ends the process with 7."""

import subprocess
import sys
import textwrap

from spmd_lm.errors import Exit
from tests import processes

PROGRAM = """
    import time
    from spmd_lm.config.schema import Watchdog
    from spmd_lm.runtime import watchdog

    watchdog.TICK_SECONDS = 0.05
    at_a_step = True
    def say(what):
        print(what, flush=True)
    with watchdog.StepWatch(Watchdog(factor=10, minimum=0.3), lambda: at_a_step, say) as watch:
        for step in range(1, 4):
            time.sleep(0.05)
            watch.beat(step)
        at_a_step = False
        time.sleep(1)  # an evaluation may take longer
        at_a_step = True
        watch.beat(4)
        print("hanging", flush=True)
        time.sleep(60)
"""


def test_a_step_that_hangs_ends_the_process():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, timeout=30)
    assert ended.returncode == Exit.HANG
    hanging, what = ended.stdout.splitlines()
    assert hanging == "hanging" and what.startswith("step 5 has not ended in ")
    assert 'File "<string>", line 19 in <module>' in ended.stderr  # the last sleep
