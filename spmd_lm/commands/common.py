"""What all verbs share: the Verb record, reading the configuration, setting up devices, and writing the result.

A verb imports its implementation when it runs, after its configuration is valid and its devices are set up: --help and
error messages never wait for jax."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_lm.errors import ConfigError, Exit, UserError
from spmd_lm.runtime.devices import simulate_devices
from spmd_lm.runtime.distributed import initialize_distributed, process_count

if TYPE_CHECKING:
    from spmd_lm.config.schema import RunConfig

Arguments = argparse.Namespace


def no_options(parser: argparse.ArgumentParser) -> None:
    """For verbs without options of their own."""


@dataclass(frozen=True)
class Verb:
    """One verb of the command line.  `run` returns the exit code; `positionals` come before the overrides."""

    help: str
    run: Callable[[Arguments], int]
    add_options: Callable[[argparse.ArgumentParser], None] = no_options
    positionals: tuple[str, ...] = ("CONFIG",)


def load_configuration(arguments: Arguments, positional: str = "CONFIG") -> "RunConfig":
    """The configuration that this positional argument (a file or a run's directory) and the overrides give."""
    path = Path(getattr(arguments, positional))
    from spmd_lm.config.load import load, load_run

    config = (load_run if path.is_dir() else load)(path, [*arguments.overrides, *device_override(arguments)])
    check_json(arguments)
    return config


def device_override(arguments: Arguments) -> list[str]:
    """--devices as an override."""
    return [] if arguments.devices is None else [f"run.simulate_devices={arguments.devices}"]


def check_json(arguments: Arguments) -> None:
    """Raises ConfigError before the work, not after it, if --json cannot be written."""
    if arguments.json not in (None, "-"):
        target = Path(arguments.json)
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise ConfigError(f"--json {target}: cannot be written. Give a file in a writable directory.")


def set_up_devices(config: "RunConfig") -> "RunConfig":
    """The same configuration, after simulating its devices and joining the job's other processes: for the verbs that
    compute."""
    if devices := config.run.simulate_devices:
        simulate_devices(devices, process_count())
    initialize_distributed()
    return config


def write_result(arguments: Arguments, result: Any, text: str) -> int:
    """Writes a verb's result: as JSON where --json says, and as text on standard output unless the JSON went there."""
    if arguments.json:
        as_json = json.dumps(without_nan(result), indent=2, allow_nan=False)
        write_text(as_json, arguments.json)
    if text and arguments.json != "-":
        write_text(text)
    return Exit.DONE


def write_text(text: str, path: str = "-") -> None:
    """Writes text to a file, or to standard output for `-`.  A reader that closes the pipe, as `head` does, is no
    error."""
    try:
        if path == "-":
            print(text, flush=True)
        else:
            Path(path).write_text(text + "\n")
    except OSError as error:
        if path == "-":  # Python would flush what is left in the buffer at exit, and fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            target = "standard output" if path == "-" else f"--json {path}"
            raise UserError(f"{target}: cannot be written: {error.strerror}. Make room, or write elsewhere.") from error


def without_nan(value: Any) -> Any:
    """The same value with null for NaN and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `low`."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {low}, got '{text}'")
        return int(text)

    return count
