"""`spmd-lm preflight`: compiles the step for hardware that may be absent, and reports fit, speed and cost."""

import argparse

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.commands.common import (
    HARDWARE_HELP,
    Arguments,
    amount,
    check_apart,
    check_writable,
    load_configuration,
    refuse_devices,
    write_result,
)
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.formatting import LARGEST_PRICE, LARGEST_TOKENS


def run(arguments: Arguments) -> int:
    if arguments.topology is None:
        raise ConfigError("preflight needs hardware. Add --topology T, such as h100:8x8 or v5p:4x4x4.")
    refuse_devices(arguments)
    parse_topology(arguments.topology)
    if arguments.picture is not None:
        check_writable("--picture", arguments.picture)
        check_apart(arguments, "picture")
    arguments.overrides.append("run.simulate_devices=0")  # api.preflight refuses those of `cpu`
    config = load_configuration(arguments)
    from spmd_lm.api import preflight

    options = {name: getattr(arguments, name) for name in ("price", "tokens", "picture", "hardware")}
    report = preflight(config, arguments.topology, **options)
    write_result(arguments, report, str(report))
    return Exit.DONE if report["fits"] and report["matches_theory"] else Exit.CHECK_FAILED


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", metavar="T", help="hardware, present or not: v5p:4x4x4, 2*v5e:16x16, h100:2x8")
    help = "of a device and hour, for the cost of the run"
    parser.add_argument(
        "--price", metavar="USD", type=amount("dollars for a device and hour, as in 2.5", LARGEST_PRICE), help=help
    )
    help = "that the run trains on, as in 300e9; default: those of train.steps"
    parser.add_argument(
        "--tokens", metavar="N", type=amount("a number of tokens, as in 300e9", LARGEST_TOKENS), help=help
    )
    parser.add_argument("--picture", metavar="FILE", help="a picture of one step by stage, as PNG or SVG")
    parser.add_argument("--hardware", metavar="FILE", help=HARDWARE_HELP)
