"""Runs functions in a child process, whose death is a one-line error here.

A compiler may end its process: it overflows a stack, fails a check, or takes too much memory.  The child is a new
process, which copies neither threads nor devices of this one, and ends when this one does, even if killed (on Linux).

Calls and outcomes are pickled: they pass over private pipes between this process and its child, never through a file or
a network."""

import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from spmd_lm.errors import CompilerError, UserError
from spmd_lm.runtime.outputs import flush_streams, unfailing
from spmd_lm.runtime.processes import PARENT, end_with_parent
from spmd_lm.runtime.signals import name_of_signal, not_ignored

Returned = TypeVar("Returned")

LAST_WORDS = re.compile(r"^(?:F\d{4} .*?\] |ERROR: )(.*)$", re.MULTILINE)
"""A compiler's last message on standard error before it ends its process: a failed check, a refused flag."""


def run_in_child(target: str, function: Callable[..., Returned], *arguments: Any) -> Returned:
    """function(*arguments), in a process of its own, whose exceptions are raised here and whose standard error appears
    here when it ends.  All must be picklable.  Raises CompilerError if the process dies.
    target: what it compiles for, such as v5p:4x4x4."""
    environment = os.environ | {PARENT: str(os.getpid()), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-P", "-m", __name__]
    ended = subprocess.run(command, input=pickle.dumps((function, arguments)), capture_output=True, env=environment)
    said = ended.stderr.decode(errors="replace")
    try:
        result, error = pickle.loads(ended.stdout)
    except (EOFError, pickle.UnpicklingError):  # it died before writing the outcome, its last act
        raise _death(target, ended.returncode, said) from None
    unfailing(sys.stderr).write(said)
    if error is not None:
        raise error
    return result


def _death(target: str, code: int, said: str) -> CompilerError:
    """The error for a dead child, with advice.  A note holds its full standard error."""
    ending = f"killed by {name_of_signal(-code)}" if code < 0 else f"exit code {code}, without a result"
    reason, advice = f"the process that compiles was {ending}", "Start again."
    if code == -signal.SIGKILL:
        reason += ", as the system does where memory is short"
        advice = "Compile on a machine with more memory, one step at a time, or fewer layers."
    elif code not in (-signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT):
        words = LAST_WORDS.findall(said) or said.splitlines()[-1:] * (code >= 0)
        reason = f"its compiler ended the process ({ending}{f': {words[0]:.300}' if words else ''})"
        advice = (
            "That is a fault of the compiler, which a step that differs a little may not meet: try another "
            "remat.policy, other sizes of the model, or another version of the compiler."
        )
    error = CompilerError(f"--topology {target}: {reason}. {advice}", reason, out_of_memory=False)
    if said:
        error.add_note(said)
    return error


def main() -> NoReturn:
    """The child: reads a call from standard input, and writes its outcome to standard output."""
    for number in not_ignored(signal.SIGINT):  # Ctrl-C ends it at once, even while it compiles
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    outcome = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries must not print into the outcome
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        called = pickle.dumps((function(*arguments), None))
    except Exception as error:
        text = traceback.format_exc()  # the parent lacks it
        if not isinstance(error, UserError):
            error.add_note(text)
        try:
            pickle.loads(called := pickle.dumps((None, error)))
        except Exception:  # its class cannot be pickled
            called = pickle.dumps((None, RuntimeError(text)))
    with outcome:
        outcome.write(called)
    flush_streams()
    os._exit(0)  # without waiting for threads of libraries


if __name__ == "__main__":
    main()
