"""XLA options for compiling a step: run.compiler_options, or a table by hardware."""

import functools
import os
import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import Literal, NamedTuple

import yaml

Value = bool | int | float | str
Setting = Literal["auto", "none"] | dict[str, Value]


class Option(NamedTuple):
    name: str
    value: Value
    reason: str

    def __str__(self) -> str:
        return f"xla     {self.name}={self.value}: {self.reason}"


class HardwareOptions(NamedTuple):
    """Options for some hardware; xla_options.yaml explains the fields."""

    platform: str
    options: dict[str, Value]
    reason: str
    measured: str
    compilers: str
    source: str
    kinds: Sequence[str] = ()
    absent: bool = False
    required: bool = False
    present: bool = False
    deterministic: bool = False
    environment: str = ""

    def fits(self, platform: str, kind: str, *, absent: bool) -> bool:
        here = self.absent if absent else self.present
        return here and self.platform == platform and (not self.kinds or kind in self.kinds)

    @property
    def is_set(self) -> bool:
        """True if this process has the environment variable that the options need."""
        name, _, needed = self.environment.partition("=")
        return needed.lstrip("-") in _effective_flags(os.environ.get(name, ""))

    def advice(self, *, absent: bool) -> str:
        """Advice to set the missing environment variable."""
        name, _, value = self.environment.partition("=")
        add = f"add {value} to {name} of every process before it starts, so that {self.reason}"
        return f"xla     where this runs, {add}" if absent else f"xla     options are not set: {add}"


def _effective_flags(arguments: str) -> list[str]:
    """NAME=VALUE of each flag, without dashes; the last of repeated ones."""
    try:
        flags = [argument.lstrip("-") for argument in shlex.split(arguments)]
    except ValueError:  # an unclosed quotation
        return []
    return list({flag.partition("=")[0]: flag for flag in flags}.values())


@functools.cache
def table() -> tuple[HardwareOptions, ...]:
    text = files("spmd_lm.runtime").joinpath("xla_options.yaml").read_text()
    return tuple(HardwareOptions(**row) for row in yaml.safe_load(text))


class XlaOptions(NamedTuple):
    options: list[Option]
    advice: list[str]  # lines about options that need other environment variables
    deterministic: dict[str, Value]  # options of run.deterministic, needed by every program of a run

    @property
    def values(self) -> dict[str, Value]:
        return {option.name: option.value for option in self.options}

    @property
    def lines(self) -> list[str]:
        return [*map(str, self.options), *self.advice]


def options_for(setting: Setting, platform: str, kind: str, *, absent: bool, deterministic: bool = False) -> XlaOptions:
    """Options of `setting` for a device of this platform and kind.
    absent: it is compiled for, not run on.  deterministic: run.deterministic."""
    own = setting if isinstance(setting, dict) else {}
    fitting = [row for row in table() if row.fits(platform, kind, absent=absent)]
    rows = [row for row in fitting if (deterministic if row.deterministic else row.required or setting == "auto")]
    missing = [row for row in rows if row.environment and not row.is_set]
    options = [
        Option(name, value, row.reason)
        for row in rows
        if absent or row not in missing
        for name, value in row.options.items()
        if name not in own
    ]
    options += (Option(name, value, "run.compiler_options") for name, value in own.items())
    asked_for = {name: value for row in rows if row.deterministic for name, value in row.options.items()}
    return XlaOptions(options, [row.advice(absent=absent) for row in missing], asked_for)
