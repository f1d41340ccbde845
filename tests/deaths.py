"""Ways to end a process, and to leave a function, for the children of tests, each of which imports this anew."""

import ctypes
import os
import signal


def end_with(said: str, number: int, *_: object) -> None:
    os.write(2, said.encode())
    signal.raise_signal(number)


def exit_with(said: str, code: int, *_: object) -> None:
    os.write(2, said.encode())
    os._exit(code)


def read_nowhere(*_: object) -> None:
    ctypes.string_at(0)


def fail(error: Exception, *_: object) -> None:
    raise error


class NoPickle(Exception):
    """That pickle cannot make again."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} {reason}")


def fail_without_pickle() -> None:
    raise NoPickle("a", "b")


def print_and_return(result: object) -> object:
    print("a line of Python")
    os.write(1, b"a line of C++\n")
    return result
