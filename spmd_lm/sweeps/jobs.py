"""Backends that run the cells of a sweep: processes of this machine, or jobs of a SLURM cluster.

A local process is stopped with the sweep; a SLURM job continues without it, and the next sweep finds it by the number
in its cell's directory."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from spmd_lm.config.load import CONFIG_FILE
from spmd_lm.config.schema import Parallel
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.files import open_regular, read_bytes, write_atomically
from spmd_lm.runtime.metrics import Status
from spmd_lm.runtime.processes import PARENT
from spmd_lm.runtime.programs import ask
from spmd_lm.sweeps.cells import Cell

JOB_FILE = "slurm_job"  # in a cell's directory
SLURM_SECONDS = 120.0  # timeout of SLURM's commands, which retry for a minute if its controller is busy


class Jobs(Protocol):
    name: str  # for messages
    outlive_sweep: bool  # they continue when the sweep is stopped

    def start(self, cell: Cell, slot: int) -> None: ...  # slot: index among concurrent cells

    def poll(self, cell: Cell) -> int | None:
        """The exit code of a started cell, or None while it runs."""

    def stop(self, number: signal.Signals) -> None:
        """Sends a signal to all running cells, once."""


def devices_used(p: Parallel, most: int) -> int:
    """The devices that a layout uses: `most` for data: -1; otherwise the product of its degrees, up to `most`."""
    return most if p.data == -1 else min(p.pipe * p.replica * p.data * p.model, most)


class LocalJobs:
    """A process for each cell, `spmd-lm train cells/ID/config.yaml`.

    gpus: each slot's GPUs, as in CUDA_VISIBLE_DEVICES; empty on a machine without GPUs.
    environment: variables for all processes that use GPUs."""

    name, outlive_sweep = "this machine", False

    def __init__(self, gpus: Sequence[Sequence[str]] = (), environment: Mapping[str, str] = MappingProxyType({})):
        self._gpus, self._environment = gpus, environment
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._told: set[tuple[str, int]] = set()  # (ID, signal)

    def start(self, cell: Cell, slot: int) -> None:
        environment = os.environ | {PARENT: str(os.getpid())}
        if self._gpus and not cell.config.run.simulate_devices:
            own = self._gpus[slot]
            environment |= self._environment
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own[: devices_used(cell.config.parallel, len(own))])
        command = [sys.executable, "-m", "spmd_lm", "train", str(cell.directory / CONFIG_FILE)]
        with open(cell.directory / "output.log", "ab", opener=open_regular) as output:
            # A session of its own: Ctrl-C reaches the sweep alone, which passes it on once.
            self._processes[cell.id] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def poll(self, cell: Cell) -> int | None:
        code = self._processes[cell.id].poll()
        if code in (-signal.SIGTERM, -signal.SIGHUP) and (cell.id, -code) in self._told:
            return int(Exit.PREEMPTED)  # stopped while Python started: there was nothing to save
        return 128 - code if code is not None and code < 0 else code

    def stop(self, number: signal.Signals) -> None:
        for cell_id, process in self._processes.items():
            if process.poll() is None and (cell_id, number) not in self._told:
                process.send_signal(number)
                self._told.add((cell_id, number))


class SlurmJobs:
    """A job for each cell, `sbatch SCRIPT train cells/ID/config.yaml`, with SCRIPT's nodes, time and partition.  Raises
    ConfigError without SLURM or the script."""

    name, outlive_sweep = "SLURM", True

    def __init__(self, script: Path = Path("launch/slurm.sbatch"), seconds_between_polls: float = 2.0):
        if not shutil.which("sbatch"):
            raise ConfigError(
                "--submit slurm: there is no sbatch here. Run this on a login node, or leave out --submit."
            )
        if not script.is_file():
            raise ConfigError(f"--submit slurm: no {script} here. Copy it from the repository, and edit its head.")
        self._script, self._seconds = script, seconds_between_polls
        self._queue: set[str] = set()  # numbers of jobs when SLURM was last asked
        self._asked = -self._seconds

    def start(self, cell: Cell, slot: int) -> None:
        with suppress(OSError):
            if _job_number(cell) in self._queued():
                return  # submitted by a sweep that was stopped
        options = [f"--job-name={cell.config.run.name}", f"--output={cell.directory.resolve() / 'output.log'}"]
        command = ["sbatch", "--parsable", *options, str(self._script), "train", str(cell.directory / CONFIG_FILE)]
        try:
            code, answer = ask(command, SLURM_SECONDS)
        except OSError as error:
            raise ConfigError(f"sbatch: {error.strerror}. See whether SLURM answers: sinfo.") from error
        said = " ".join(answer.split())[:300]
        if code:
            raise ConfigError(f"sbatch refused the job: {said}. Edit the head of {self._script}.")
        # The number, or NUMBER;CLUSTER, may stand among warnings.
        if not (number := re.search(r"^([0-9]{1,10})(;\S*)?$", answer, re.MULTILINE)):
            raise ConfigError(
                f"sbatch does not say a job's number, but: {said}. Submit {self._script} by hand, and see."
            )
        self._queue.add(number[1])
        write_atomically(cell.directory / JOB_FILE, number[1] + "\n")

    def poll(self, cell: Cell) -> int | None:
        if _job_number(cell) in self._queued():
            return None
        return self._exit_code(cell)

    def stop(self, number: signal.Signals) -> None: ...  # jobs stay in the queue

    def _exit_code(self, cell: Cell) -> int:
        """SLURM's exit code while it remembers the job, else the run's own; 1 if neither is known."""
        number = _job_number(cell)
        job = ""
        with suppress(OSError):
            _, job = ask(["scontrol", "--oneliner", "show", "job", number], SLURM_SECONDS)
        if ended := re.search(r"JobState=(?:COMPLETED|FAILED) .* ExitCode=(\d+):0 ", job):
            return int(ended[1])
        status = Status.read(cell.directory)
        if status is None or status.exit_code is None:  # killed by SLURM
            return int(Exit.CHECK_FAILED)
        return status.exit_code

    def _queued(self) -> set[str]:
        """Numbers of jobs that are waiting, running, being requeued or ending."""
        if time.monotonic() - self._asked >= self._seconds:
            with suppress(OSError):  # or an exit code: the controller is away, so nothing is known to have changed
                code, answer = ask(["squeue", "--noheader", "--me", "--format=%i"], SLURM_SECONDS)
                self._queue = self._queue if code else {*answer.split()}
            self._asked = time.monotonic()
        return self._queue


def _job_number(cell: Cell) -> str:
    return read_bytes(cell.directory / JOB_FILE, 100).decode(errors="replace").strip()
