"""`spmd-lm report`: one HTML page about a run, or about several, overlaid."""

import argparse
import os

from spmd_lm.commands.common import Arguments, check_json, write_result
from spmd_lm.runtime.formatting import pluralize


def run(arguments: Arguments) -> int:
    check_json(arguments)
    from spmd_lm.api import report

    path = report(*arguments.RUN, out=arguments.out)
    runs = len({os.path.realpath(each) for each in arguments.RUN})
    return write_result(arguments, {"report": str(path)}, f"{path}: the report on {pluralize(runs, 'run')}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="the page to write (default RUN/report.html, of the first run)")
