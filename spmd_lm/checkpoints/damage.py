"""Classifies failures to read or write a checkpoint: damaged files, or files that cannot be read now."""

import errno
from pathlib import Path

import jax

from spmd_lm.files import walk_files

NOT_DAMAGE = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "Permission denied", "Out of memory")
"""Words in errors that do not concern the files: TensorStore's, which lack an errno, and XLA's about a device or a
collective."""


def root_cause(error: BaseException) -> str:
    """The first line of the original error: orbax wraps load failures in a long error about handlers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def unreadable(path: Path, error: BaseException) -> str:
    """The reason why files of `path` cannot be read now; '' if all can, so that a decoding error means damage."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    missing = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    for each in chain:
        if isinstance(each, OSError) and each.errno not in (None, *missing):
            return f"{each.strerror} ({each.filename or path})"
        is_ours = isinstance(each, MemoryError | ImportError | TimeoutError | jax.errors.JaxRuntimeError)
        if is_ours or any(word in str(each) for word in NOT_DAMAGE):
            return root_cause(each)
    try:
        for file in walk_files(path):
            with open(file, "rb") as opened:
                while opened.read(2**24):
                    pass
    except OSError as problem:
        return "" if problem.errno in missing else f"{problem.strerror} ({problem.filename or path})"
    return ""
