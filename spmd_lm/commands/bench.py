"""`spmd-lm bench`: times training steps."""

import argparse
from pathlib import Path

from spmd_lm.commands.common import Arguments, at_least, check_writable, load_configuration, write_result
from spmd_lm.runtime.devices import set_up_devices
from spmd_lm.runtime.outputs import require_replaceable

MOST_STEPS = 1_000_000


def run(arguments: Arguments) -> int:
    if arguments.calibrate is not None:
        check_writable("--calibrate", arguments.calibrate)
    config = set_up_devices(load_configuration(arguments))
    if arguments.calibrate is not None:
        from spmd_lm.training import calibrate

        require_replaceable("--calibrate", Path(arguments.calibrate), calibrate.MEASURED)
        row = calibrate.calibrate(config.precision.compute)
        calibrate.write_row(row, Path(arguments.calibrate))
        return write_result(arguments, row, calibrate.render(row))
    from spmd_lm.training.bench import bench, render

    result = bench(config, arguments.steps, arguments.warmup)
    return write_result(arguments, result, render(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=at_least(1, MOST_STEPS), default=10, metavar="N", help="timed steps (default 10)"
    )
    parser.add_argument(
        "--warmup", type=at_least(0, MOST_STEPS), default=2, metavar="N", help="steps before them (default 2)"
    )
    help = "measure these devices in precision.compute instead, for the cost model, and write FILE (docs/planning.md)"
    parser.add_argument("--calibrate", metavar="FILE", help=help)
