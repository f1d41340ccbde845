"""`spmd-lm prepare`: makes a data set of tokens out of raw documents."""

import sys
from pathlib import Path

from spmd_lm.commands.common import Arguments, check_json, write_result
from spmd_lm.runtime.outputs import print_line


def run(arguments: Arguments) -> int:
    check_json(arguments)
    from spmd_lm.prepare.pipeline import prepare
    from spmd_lm.prepare.recipe import read_recipe
    from spmd_lm.prepare.report import render_report

    config = read_recipe(Path(arguments.RECIPE), arguments.overrides)
    report = prepare(config, log)
    return write_result(arguments, report, render_report(report))


def log(line: str) -> None:
    print_line(line, sys.stderr)
