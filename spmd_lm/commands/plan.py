"""`spmd-lm plan`: describes a run before it starts, without its devices; with --search, finds the fastest layout."""

import argparse

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.commands.common import (
    HARDWARE_HELP,
    Arguments,
    at_least,
    check_apart,
    check_writable,
    load_configuration,
    refuse_devices,
    use_topology,
    write_result,
)
from spmd_lm.errors import ConfigError


def run(arguments: Arguments) -> int:
    return _search(arguments) if arguments.search else _plan(arguments)


def _plan(arguments: Arguments) -> int:
    for option in ("top", "no_compile", "out", "hardware"):
        if not any(getattr(arguments, option) is unset for unset in (None, False)):
            raise ConfigError(f"--{option.replace('_', '-')} is of a search. Add --search, or leave it out.")
    if len(arguments.topology or ()) > 1:
        raise ConfigError("a plan is for one --topology. Name one, or add --search.")
    topology = arguments.topology[0] if arguments.topology else None
    if topology is not None:
        use_topology(arguments, topology)
    from spmd_lm.api import plan

    report = plan(load_configuration(arguments), topology)
    return write_result(arguments, report, str(report))


def _search(arguments: Arguments) -> int:
    if not arguments.topology:
        raise ConfigError("--search needs hardware to search on. Add --topology T, such as h100:8x8 or v5p:4x4x4.")
    refuse_devices(arguments)
    for topology in arguments.topology:
        parse_topology(topology)
    if arguments.out is not None:
        check_writable("--out", arguments.out)
        check_apart(arguments, "out")
    config = load_configuration(arguments)
    from spmd_lm.api import search_layouts

    top = 0 if arguments.no_compile else 1 if arguments.top is None else arguments.top
    report = search_layouts(config, arguments.topology, top=top, out=arguments.out, hardware=arguments.hardware)
    return write_result(arguments, report, str(report))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--search", action="store_true", help="cost every layout on --topology, and show the fastest")
    help = (
        "plan for T, present or not: cpu:8, v5p:4x4x4, 2*v5e:16x16, h100:2x8; of a search, may be given several times"
    )
    parser.add_argument("--topology", metavar="T", action="append", help=help)
    help = "of a search, compile the fastest layouts, down the list, until N of them fit; default 1"
    parser.add_argument("--top", metavar="N", type=at_least(0), help=help)
    parser.add_argument("--no-compile", action="store_true", help="of a search, compile nothing")
    parser.add_argument("--out", metavar="FILE", help="of a search, write the run under the fastest layout as YAML")
    parser.add_argument("--hardware", metavar="FILE", help=HARDWARE_HELP)
