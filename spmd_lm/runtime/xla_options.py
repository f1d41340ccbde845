"""The options that XLA compiles a step with: those of run.compiler_options, or of a table by hardware."""

import functools
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
    """Options for some hardware; xla_options.yaml says what each field means."""

    platform: str
    options: dict[str, Value]
    reason: str
    source: str
    kind: str = ""
    absent: bool = False


@functools.cache
def table() -> tuple[HardwareOptions, ...]:
    text = files("spmd_lm.runtime").joinpath("xla_options.yaml").read_text()
    return tuple(HardwareOptions(**row) for row in yaml.safe_load(text))


def options_for(setting: Setting, platform: str, kind: str, *, absent: bool) -> list[Option]:
    """Those of `setting` for a device of this platform and kind.  absent: it is compiled for, not run on."""
    if not isinstance(setting, str):
        return [Option(name, value, "run.compiler_options") for name, value in setting.items()]
    rows = table() if setting == "auto" else ()
    fitting = [row for row in rows if row.platform == platform and row.kind in kind and row.absent == absent]
    return [Option(name, value, row.reason) for row in fitting for name, value in row.options.items()]
