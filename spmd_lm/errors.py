"""Errors that users can fix, and the exit codes that scripts see.

Every message says where, what is wrong, and how to fix it.  Our own invariants are asserts instead."""

import enum
from pathlib import Path
from typing import Any


class Exit(enum.IntEnum):
    DONE = 0  # done
    CHECK_FAILED = 1  # a check failed
    CONFIG = 2  # configuration, or a directory that cannot be written
    PREEMPTED = 3  # preempted; progress is saved: start again to resume
    DATA = 4  # data
    CHECKPOINT = 5  # checkpoint
    NON_FINITE = 6  # a loss, a gradient norm or a state is not finite
    HANG = 7  # a step hangs
    PEER_LOST = 8  # another process of the job is gone
    INTERRUPTED = 130  # Ctrl-C; progress is saved, unless it was pressed twice


class UserError(ValueError):
    """A mistake that the user can fix.  Subclasses set the exit code."""

    code = Exit.CONFIG

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickles without __init__, whose parameters differ from `args`."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ConfigError(UserError):
    """An invalid configuration.  Holds every problem found, one line each."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class OutputError(UserError):
    """A file of a run, or a result, that cannot be written."""


class LayoutError(ConfigError):
    """A layout that does not divide the model, the batch or the devices."""


class HostBorderError(LayoutError):
    """A layout of whose `data` no part lies within a host and another across hosts, as parallel.secondary needs."""


class CompilerError(ConfigError):
    """A step that the compiler rejects.  reason: the compiler's.  out_of_memory: the devices have too little memory."""

    def __init__(self, problem: str, reason: str, out_of_memory: bool):
        self.reason, self.out_of_memory = reason, out_of_memory
        super().__init__(problem)


class DataError(UserError):
    """Data that is missing, empty or corrupt."""

    code = Exit.DATA


class FitError(UserError):
    """Points that do not determine the curve to be fitted to them."""

    code = Exit.DATA


class CheckpointError(UserError):
    """A checkpoint that is missing, corrupt, or of another model."""

    code = Exit.CHECKPOINT


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that was complete and differs from what was saved.  Missing permission, memory exhaustion and disk
    errors are not damage: the data may still be intact."""

    def __init__(self, directory: Path, what: str):
        self.directory, self.what = directory, what
        super().__init__(f"{directory} is damaged: {what}.")


class ReplicaError(UserError):
    """Copies of the same numbers that differ between devices."""

    code = Exit.CHECK_FAILED


class OffloadError(UserError):
    """State that optim.offload=disk wrote and cannot read back."""

    code = Exit.CHECK_FAILED


class NonFiniteError(UserError):
    """A loss, a gradient norm or a state to be saved that is NaN or infinite."""

    code = Exit.NON_FINITE
