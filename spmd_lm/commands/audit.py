"""`spmd-lm audit`: compiles the train step and compares its collectives with theory."""

import argparse

from spmd_lm.commands.common import (
    Arguments,
    check_apart,
    check_writable,
    load_configuration,
    use_topology,
    write_result,
)
from spmd_lm.errors import ConfigError, Exit


def run(arguments: Arguments) -> int:
    if arguments.topology is not None:  # its devices, and no others
        use_topology(arguments, arguments.topology)
    from spmd_lm.api import audit

    config = load_configuration(arguments)
    if arguments.hlo is not None:
        if arguments.hlo == "-":
            raise ConfigError(f"--hlo {arguments.hlo}: the program needs a file of its own. Name another one.")
        check_writable("--hlo", arguments.hlo)
        check_apart(arguments, "hlo")
    report = audit(config, arguments.topology, arguments.hlo)
    write_result(arguments, report, str(report))
    return Exit.DONE if report["ok"] else Exit.CHECK_FAILED


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "compile for T, present or not: cpu:8, v5p:4x4x4, 2*v5e:16x16, h100:2x8"
    parser.add_argument("--topology", metavar="T", help=help)
    parser.add_argument(
        "--hlo", metavar="FILE", help="write the compiled program's text, HLO, which the report is about"
    )
