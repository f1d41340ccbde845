"""`spmd-lm train`: trains, or resumes, a run; with --seeds several runs of one configuration."""

import argparse
import contextlib
import sys

from spmd_lm.commands.common import Arguments, at_least, load_configuration, write_result
from spmd_lm.errors import ConfigError
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.outputs import print_line, unfailing
from spmd_lm.runtime.signals import DURING_SWEEP, StopSignals, interruptible


def run(arguments: Arguments) -> int:
    if arguments.seeds is not None:
        if arguments.fallback:
            raise ConfigError("--fallback is of one run. Leave it or --seeds out.")
        return run_seeds(arguments)
    with StopSignals() as signals:  # from here on: the imports below take seconds
        with interruptible():
            config = set_up_devices(load_configuration(arguments))
            from spmd_lm.training.loop import train

        with contextlib.redirect_stdout(sys.stderr if arguments.json == "-" else unfailing(sys.stdout)):
            code = train(config, signals, arguments.fallback)
    if arguments.json:
        write_result(arguments, {"directory": str(config.run.directory), "exit_code": int(code)}, "")
    return code


def run_seeds(arguments: Arguments) -> int:
    with StopSignals(DURING_SWEEP) as signals:
        with interruptible():
            config = load_configuration(arguments)
            from spmd_lm.sweeps.seeds import render, train_seeds

        code, result = train_seeds(config, arguments.seeds, signals, lambda line: print_line(line, sys.stderr))
    text = render(result) if result else ""
    if arguments.json or text:
        result = {"directory": str(config.run.directory), **result, "exit_code": int(code)}
        write_result(arguments, result, text)
    return code


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "train N seeds, from train.seed on, in run.dir/cells/seed-N, and report median metrics"
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help=help)
    help = "if run.init_from's newest checkpoint is damaged, take the newest that is not"
    parser.add_argument("--fallback", action="store_true", help=help)
