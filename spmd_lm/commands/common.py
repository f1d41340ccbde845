"""Shared parts of the verbs: reading the configuration, argument types, and writing the result.

A verb imports modules that need jax only after its configuration is valid and its devices are set up, so that --help
and error messages never wait for it."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.errors import ConfigError, Exit, OutputError
from spmd_lm.runtime.formatting import LARGEST_COUNT, parse_count, to_json
from spmd_lm.runtime.outputs import escape_controls, print_line, silence

if TYPE_CHECKING:
    from spmd_lm.config.schema import RunConfig

Arguments = argparse.Namespace
OVERRIDE = re.compile(r"\w+(\.\w+)+=")
HARDWARE_HELP = "speeds that bench --calibrate measured, before published ones"


def load_configuration(arguments: Arguments, positional: str = "CONFIG") -> "RunConfig":
    """The configuration from this positional argument (a file or a run's directory) and the overrides."""
    from spmd_lm.api import load_config

    config = load_config(getattr(arguments, positional), *arguments.overrides)
    from spmd_lm.config.plausible import doubts

    for doubt in doubts(config):
        print_line(f"warning: {doubt}", sys.stderr)
    check_json(arguments)
    return config


def use_topology(arguments: Arguments, text: str) -> None:
    """Makes the configuration simulate a topology's devices, or none for real ones.  Raises ConfigError for an unknown
    topology, or if --devices is given too."""
    topology = parse_topology(text)
    refuse_devices(arguments)
    arguments.overrides.append(f"run.simulate_devices={topology.simulated}")


def refuse_devices(arguments: Arguments) -> None:
    if arguments.devices is not None:
        raise ConfigError("--topology has devices of its own. Leave out --devices.")


def check_json(arguments: Arguments) -> None:
    """Raises ConfigError before the work, not after it, if --json cannot be written."""
    if arguments.json not in (None, "-"):
        check_writable("--json", arguments.json)
        check_apart(arguments, "json")


def check_writable(option: str, path: str) -> None:
    """Raises ConfigError if an option's file cannot be written, or is an override."""
    target = Path(path)
    if OVERRIDE.match(path):
        raise ConfigError(f"{option} {path}: that is an override, not a file. Name the file first.")
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"{option} {target}: cannot be written. Give a file in a writable directory.")


def check_apart(arguments: Arguments, option: str) -> None:
    """Raises ConfigError if an option's output is also an input of the command, or another option's output."""
    path = getattr(arguments, option)
    for name in ("CONFIG", "json", "out", "hlo", "picture", "hardware"):
        other = getattr(arguments, name, None)
        if name != option and other is not None and Path(other).resolve() == Path(path).resolve():
            raise ConfigError(
                f"--{option} {path}: is {name if name.isupper() else '--' + name} too. Name another file."
            )


def write_result(arguments: Arguments, result: Any, text: str) -> int:
    """Writes a verb's result: as JSON to --json, and as text on standard output unless the JSON went there."""
    if arguments.json:
        write_text(to_json(result, indent=2), arguments.json)
    if text and arguments.json != "-":
        write_text(escape_controls(text))
    return Exit.DONE


def write_text(text: str, path: str = "-") -> None:
    """Writes to a file, or standard output for `-`.  A reader that closes the pipe, as `head` does, is not an error."""
    try:
        if path == "-":
            print(text, flush=True)
        else:
            Path(path).write_text(text + "\n")
    except OSError as error:
        if path == "-":
            silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            target = "standard output" if path == "-" else f"--json {path}"
            raise OutputError(
                f"{target}: cannot be written: {error.strerror}. Make room, or write elsewhere."
            ) from error


def add_fallback(parser: argparse.ArgumentParser) -> None:
    help = "if the newest checkpoint is damaged, use the newest that is not"
    parser.add_argument("--fallback", action="store_true", help=help)


def amount(what: str, most: float) -> Callable[[str], float]:
    """An argparse type: a number above 0, up to `most`.  what: its description, with an example."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number <= most:
            raise argparse.ArgumentTypeError(f"expected {what}, got '{text:.40}'")
        return number

    return parse


def at_least(low: int, most: int = LARGEST_COUNT) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `most`."""

    def count(text: str) -> int:
        number = parse_count(text, most)
        if number is None or number < low:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {most:,}, got '{text:.40}'")
        return number

    return count
