"""Worker processes for a stage's tasks: results come in the order of the tasks.

They are spawned, because this process has threads, which must not be forked, and do not import jax.  They end with this
process, even if it is killed (on Linux)."""

import collections
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from spmd_lm.errors import UserError
from spmd_lm.runtime.processes import PARENT, end_with_parent
from spmd_lm.runtime.signals import not_ignored

Input = TypeVar("Input")
Output = TypeVar("Output")


class Workers:
    """`count` processes; for a count of 1, only this one."""

    def __init__(self, count: int):
        self.count = count
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self.count > 1:
            sys.warnoptions.append("ignore:resource_tracker")  # from the process that cleans up if this one is killed
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.count, context, set_up_worker, (os.getpid(),))
        return self

    def __exit__(self, *error: Any) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Input], Output], tasks: Iterable[Input]) -> Iterator[Output]:
        """Yields results in the order of the tasks, with at most `count` + 2 tasks in memory."""
        if self.pool is None:
            yield from map(function, tasks)
            return
        waiting: collections.deque[Future[Output]] = collections.deque()
        rest = iter(tasks)
        try:
            for task in itertools.islice(rest, self.count + 1):
                waiting.append(self._submit(function, task))
            while waiting:
                result = waiting.popleft().result()
                for task in itertools.islice(rest, 1):
                    waiting.append(self._submit(function, task))
                yield result
        except BrokenProcessPool:
            advice = "Use fewer workers, and start again: what is finished is not done again"
            raise UserError(f"a worker process was killed, perhaps because memory was short. {advice}.") from None

    def _submit(self, function: Callable[[Input], Output], task: Input) -> Future[Output]:
        """Submits with SIGINT blocked, which a new process inherits until `set_up_worker`."""
        assert self.pool
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self.pool.submit(function, task)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def set_up_worker(parent: int) -> None:
    for number in not_ignored(signal.SIGINT):  # nohup and `&` ignore it for all processes
        signal.signal(number, signal.SIG_DFL)  # Ctrl-C ends it without a word
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would take the other workers' cores
    os.environ[PARENT] = str(parent)
    try:
        end_with_parent()
    except SystemExit:  # the pool would log it
        os._exit(128 + signal.SIGTERM)
