"""`spmd-lm audit`: compiles the train step and compares its collectives with theory."""

import argparse

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.commands.common import Arguments, Verb, load_configuration, set_up_devices, write_result
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.devices import simulate_devices


def run(arguments: Arguments) -> int:
    topology = parse_topology(arguments.topology) if arguments.topology is not None else None
    if topology and arguments.devices is not None:
        raise ConfigError("--topology has devices of its own. Leave out --devices.")
    if topology:  # its devices, and no others
        simulated = topology.size if topology.platform == "cpu" else 0
        arguments.overrides.append(f"run.simulate_devices={simulated}")
    config = set_up_devices(load_configuration(arguments))
    if topology and topology.platform != "cpu":
        simulate_devices(1)  # compiling ahead of time runs on the CPU
    from spmd_lm.planning.audit import audit, render

    result = audit(config, topology)
    write_result(arguments, result, render(result))
    return Exit.DONE if result["ok"] else Exit.CHECK_FAILED


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", metavar="T", help="compile for T, present or not: cpu:8, v5p:4x4x4, 2*v5e:16x16, h100:2x8"
    )


VERB = Verb("compiles the step and compares its collectives with theory", run, add_options)
