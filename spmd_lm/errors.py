"""What can go wrong for a person, and the exit code that a script sees.

Every message says where, what, and how to mend.  Our own invariants are asserts, never these."""

import enum


class Exit(enum.IntEnum):
    """The process exit codes of every verb."""

    DONE = 0
    CHECK_FAILED = 1
    CONFIG = 2
    PREEMPTED = 3  # what was done is saved; start me again
    DATA = 4
    CHECKPOINT = 5
    NON_FINITE = 6
    HANG = 7
    PEER_LOST = 8
    INTERRUPTED = 130  # Ctrl-C; saved, unless it was pressed twice


class UserError(ValueError):
    """A mistake that a person can mend.  Subclasses fix the exit code."""

    code = Exit.CONFIG


class ConfigError(UserError):
    """A configuration that cannot run.  Holds every problem found, one line each."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))


class LayoutError(ConfigError):
    """A layout that the model, the batch or the devices do not divide by."""


class DataError(UserError):
    """Data that is missing, empty or damaged."""

    code = Exit.DATA


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model."""

    code = Exit.CHECKPOINT


class NonFiniteError(UserError):
    """A loss, a gradient norm or a state to be saved is no longer a number."""

    code = Exit.NON_FINITE
