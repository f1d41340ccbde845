"""Runs the Python file of a user's own module, once."""

import sys
import traceback
from types import ModuleType
from typing import Any

from spmd_lm.config.own_modules import ModuleRef, sealed
from spmd_lm.errors import ConfigError


def load_object(text: str) -> Any:
    """The object named by `path.py:Name@hash`.  Raises ConfigError for a file that was changed, that cannot be
    imported, or that does not define it."""
    ref = ModuleRef.parse(text)
    ref = ref if ref.hash else ModuleRef.parse(sealed(text))
    try:
        return getattr(_run(ref), ref.name)
    except AttributeError:
        raise ConfigError(f"{ref.path} defines no {ref.name} once it is imported. Correct that file.") from None


def _run(ref: ModuleRef) -> ModuleType:
    """Runs this file unless one with the same bytes has run before; returns the module."""
    name = f"spmd_lm_own_{ref.hash}"
    if name in sys.modules:
        return sys.modules[name]
    code, module = compile(ref.read(), ref.path, "exec"), ModuleType(name)
    module.__file__ = ref.path
    sys.modules[name] = module  # its definitions may look it up, as dataclasses do
    try:
        exec(code, module.__dict__)
    except Exception as error:
        del sys.modules[name]
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        advice = "It may import installed packages, and no file beside it. Correct that file"
        raise ConfigError(f"{ref.path}{line_in(ref.path, error)}: {reason}. {advice}.") from error
    return module


def line_in(path: str, error: BaseException) -> str:
    """`, line N`, the last line of this file in the traceback; '' if there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f", line {lines[-1]}" if lines else ""
