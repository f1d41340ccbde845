"""`spmd-lm train`: trains, or resumes, a run; with --seeds several runs of one configuration."""

import argparse
import contextlib
import sys
from typing import Any

from spmd_lm.commands.common import Arguments, at_least, load_configuration, write_result
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.signals import StopSignals, interruptible


def run(arguments: Arguments) -> int:
    with StopSignals() as signals:  # from here on: the imports below take seconds
        with interruptible():
            config = set_up_devices(load_configuration(arguments))
            from spmd_lm.training.loop import train

            if arguments.seeds is not None:
                from spmd_lm.training.seeds import render, train_seeds

        result: dict[str, Any] = {"directory": str(config.run.directory)}
        with contextlib.redirect_stdout(sys.stderr) if arguments.json == "-" else contextlib.nullcontext():
            if arguments.seeds is None:
                code = train(config, signals)
            else:
                code, figures = train_seeds(config, arguments.seeds, signals)
                result |= figures
    text = render(result) if "median" in result else ""
    if arguments.json or text:
        write_result(arguments, result | {"exit_code": int(code)}, text)
    return code


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "train N seeds, from train.seed on, in run.dir/seed-N, and report median metrics"
    parser.add_argument("--seeds", type=at_least(1), metavar="N", help=help)
