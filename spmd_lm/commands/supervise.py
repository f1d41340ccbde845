"""`spmd-lm supervise -- train ...`: starts training again when it was preempted, hung, killed, or lost a peer."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from spmd_lm.commands.common import Arguments, at_least, load_configuration
from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.runtime.outputs import print_line


def run(arguments: Arguments) -> int:
    verb, given = arguments.supervised
    if verb != "train":
        raise ConfigError(f"spmd-lm supervise: {verb} has nothing to resume from. Supervise `train`.")
    if arguments.json:
        raise ConfigError("spmd-lm supervise has no result for --json. Write it behind the --, for `train`.")
    from spmd_lm.runtime.supervisor import Supervisor

    directory = load_configuration(given).run.directory  # a wrong configuration is refused before the first start

    def saved() -> int:
        return sum(map(saved_steps, directory.glob("cells/*") if given.seeds else [directory]))

    command = [sys.executable, "-m", "spmd_lm", *arguments.command]
    return Supervisor(command, saved, arguments.attempts, log).run()


def saved_steps(run: Path) -> int:
    """The newest saved step of the run in this directory, else 0."""
    from spmd_lm.runtime.metrics import Status

    with suppress(CheckpointError):  # the run itself reports it
        if status := Status.read(run):  # local checkpoints show in where the last attempt began
            resumed = [attempt.first_step - 1 for attempt in status.attempts[-1:]]
            return max(status.saved_step or 0, *resumed, 0)
    return 0


def log(line: str) -> None:
    print_line(f"supervise: {line}", sys.stderr)


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "restarts in a row that may bring no newer checkpoint (default 5)"
    parser.add_argument("--attempts", type=at_least(1), default=5, metavar="N", help=help)
