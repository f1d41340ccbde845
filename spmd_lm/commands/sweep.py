"""`spmd-lm sweep`: runs of one configuration whose keys vary, here or through SLURM."""

import argparse
import contextlib
import sys
from pathlib import Path

from spmd_lm.commands.common import Arguments, at_least, check_json, write_result
from spmd_lm.runtime.outputs import print_line
from spmd_lm.runtime.signals import DURING_SWEEP, StopSignals

MOST_JOBS = 10_000  # at once, as many as a sweep may have cells


def run(arguments: Arguments) -> int:
    from spmd_lm.sweeps.sweep import list_cells, render_cells, run_sweep

    check_json(arguments)
    path = Path(arguments.SWEEP)
    if arguments.dry_run:
        records = list_cells(path, arguments.overrides, arguments.submit)
        return write_result(arguments, {"cells": records}, render_cells(records))
    redirected = contextlib.redirect_stdout(sys.stderr) if arguments.json == "-" else contextlib.nullcontext()
    with redirected, StopSignals(DURING_SWEEP) as signals:
        code, records = run_sweep(path, arguments.overrides, arguments.jobs, arguments.submit, signals, log)
    if arguments.json:
        write_result(arguments, {"cells": records, "exit_code": int(code)}, "")
    return code


def log(line: str) -> None:
    print_line(line, sys.stdout)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=at_least(1, MOST_JOBS), metavar="N", help="cells that run at once; default 1, or all in SLURM"
    )
    parser.add_argument("--submit", choices=["slurm"], help="submit a job for each cell, with launch/slurm.sbatch")
    parser.add_argument("--dry-run", action="store_true", help="list the cells and what plan says of each")
