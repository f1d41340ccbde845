"""Ways to end a process, and to leave a function, for the children of tests, each of which imports this anew."""

import ctypes
import os
import signal
import time
from pathlib import Path


def end_with(said: str, number: int, *_: object) -> None:
    os.write(2, said.encode())
    signal.raise_signal(number)


def exit_with(said: str, code: int, *_: object) -> None:
    os.write(2, said.encode())
    os._exit(code)


def read_nowhere(*_: object) -> None:
    ctypes.string_at(0)


def say_and_sleep(pid: Path) -> None:
    """Sleeps for a minute, after which a test that waits for a lost signal fails."""
    (new := pid.with_suffix(".new")).write_text(str(os.getpid()))
    new.rename(pid)
    time.sleep(60)


def fail(error: Exception, *_: object) -> None:
    raise error


class NoPickle(Exception):
    """An exception that pickle cannot restore."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} {reason}")


def fail_without_pickle() -> None:
    raise NoPickle("a", "b")


def print_and_return(result: object) -> object:
    print("a line of Python")
    os.write(1, b"a line of C++\n")
    return result
