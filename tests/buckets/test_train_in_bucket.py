"""Runs in buckets, trained: on other machines, under other layouts, killed, and with servers that fail."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_lm.addresses import working_copy
from spmd_lm.cli import main
from spmd_lm.errors import Exit
from spmd_lm.files import walk_files
from tests import processes
from tests.reliability.jobs import losses

RUN = ["train", str(processes.ROOT / "configs/debug.yaml"), "model.layers=2", "model.width=16", "model.context=16"]
RUN += ["data.source=synthetic", "train.batch=8", "train.log_every=1", "train.eval_every=0"]
RUN += [f"run.compilation_cache={processes.ROOT / '.cache/compilations'}"]
QUICK = [*RUN, "model.layers=1", "parallel.data=8", "--devices=8", "checkpoint.every=2", "optim.warmup=0"]

# In place of the command line's program: one whose claims and sends are quick.
PROGRAM = """
import sys
from spmd_lm.buckets import claim
from spmd_lm.checkpoints import bucket_run
from spmd_lm.cli import main
claim.Claim.__init__.__defaults__ = 0.3, 2.0
bucket_run.SENT_EVERY = 0.3
main()
"""


def move(machine: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run on a disk, of four steps."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    assert main([*QUICK, f"run.dir={directory}", "train.steps=4"]) == Exit.DONE
    return directory


def texts(directory: Path) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in walk_files(directory))


@pytest.mark.parametrize("scheme", ["s3", pytest.param("gs", marks=pytest.mark.slow)])
def test_a_run_moves_between_machines(alone, server, scheme, tmp_path, monkeypatch, capsys):
    """Its losses are those of a run on a disk, bit for bit, and every verb reads it by its address."""
    address = f"{scheme}://bucket/runs/é a"
    for machine, steps in (("one", 2), ("two", 4)):
        move(machine, tmp_path, monkeypatch)
        assert main([*QUICK, f"run.dir={address}", f"train.steps={steps}"]) == Exit.DONE
    assert losses(working_copy(address)) == losses(alone)
    prefix = "runs/é a/checkpoints/"
    assert {name.removeprefix(prefix).split("/")[0] for name in server.objects("bucket", prefix)} == {"2", "4"}
    move("three", tmp_path, monkeypatch)
    capsys.readouterr()
    assert main(["ckpt", "ls", address]) == Exit.DONE
    assert re.search(r"^\s*4\b", capsys.readouterr().out, re.MULTILINE)
    assert main(["ckpt", "diff", f"{address}@4", f"{alone}@4"]) == Exit.DONE
    assert main(["eval", address]) == Exit.DONE
    assert main(["report", address, "--out", str(tmp_path / "report.html")]) == Exit.DONE
    told = capsys.readouterr()
    assert server.SECRET not in (told.out + told.err + texts(tmp_path)) and server.ACCESS_KEY not in texts(tmp_path)
    assert {host for _, _, host in server.requests} == {f"127.0.0.1:{server.port}"}


def test_what_no_run_wrote_is_neither_read_nor_overwritten(server, scheme, capsys):
    server.put("bucket", "data/config.yaml", b"model: {layers: 2}")
    assert main([*QUICK, f"run.dir={scheme}://bucket/data", "train.steps=2"]) == Exit.CONFIG
    assert "config.yaml is there, and neither a status.json nor a checkpoint" in capsys.readouterr().err
    assert server.objects("bucket")["data/config.yaml"] == b"model: {layers: 2}"


REFUSED = {
    "merge": ["runs/a", "URL"],
    "quantize": ["runs/a", "URL"],
    "import": ["dir", "URL"],
    "export": ["runs/a", "URL"],
    "train": ["debug", "run.init_from=URL"],
    "generate": ["URL/"],
    "eval": ["URL//b"],
    "report": ["URL/../b"],
    "supervise": ["--", "train", "debug", "run.dir=URL/"],
}


@pytest.mark.parametrize("verb", REFUSED)
def test_other_addresses_are_refused_in_a_sentence(verb, server, scheme, capsys):
    url = f"{scheme}://bucket/a"
    assert main([verb, *(argument.replace("URL", url) for argument in REFUSED[verb])]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert url in error or "after the bucket's name write a key" in error
    assert not server.objects("bucket") and not server.requests


# With processes of their own.

KILLS = 20
STEPS, EVERY = 60 * (KILLS + 1), 10
LONG = [*RUN, "--devices=2", "checkpoint.async=true", f"checkpoint.every={EVERY}", f"train.steps={STEPS}"]


class Runs:
    """Starts a run in a bucket on one machine or another.  Their output is in one file."""

    def __init__(self, server, scheme: str, path: Path):
        self.server, self.scheme, self.path, self.output = server, scheme, path, path / "output"
        self.address = f"{scheme}://bucket/runs/a"

    def start(self, machine: str, *overrides: str, directory: str | Path = "") -> subprocess.Popen:
        own = {"XDG_CACHE_HOME": str(self.path / machine)}
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= self.server.environment(self.scheme) | own
        command = [sys.executable, "-c", PROGRAM, *LONG, f"run.dir={directory or self.address}", *overrides]
        with open(self.output, "a") as output:
            return subprocess.Popen(command, cwd=self.path, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def copy(self, machine: str, monkeypatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.path / machine))
        return working_copy(self.address)

    def finish(self, process: subprocess.Popen) -> None:
        assert processes.exit_codes(process) == [Exit.DONE], self.output.read_text()[-3000:]

    def check_secrecy(self) -> None:
        everything = texts(self.path) + "".join(v.decode("latin-1") for v in self.server.objects("bucket").values())
        assert self.server.SECRET not in everything and self.server.ACCESS_KEY not in everything
        assert "Traceback" not in self.output.read_text()
        assert {host for _, _, host in self.server.requests} == {f"127.0.0.1:{self.server.port}"}


@pytest.fixture
def runs(server, scheme, tmp_path):
    return Runs(server, scheme, tmp_path)


def steps_done(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_equal_runs(runs: Runs, copy: Path, step: int = STEPS) -> None:
    """The last checkpoints too, the bucket's by another machine."""
    assert losses(copy) == losses(runs.path / "alone")
    os.environ["XDG_CACHE_HOME"] = str(runs.path / "reader")  # which the fixture restores
    assert main(["ckpt", "diff", f"{runs.address}@{step}", f"{runs.path / 'alone'}@{step}"]) == Exit.DONE
    assert main(["ckpt", "verify", runs.address]) == Exit.DONE
    assert losses(working_copy(runs.address)) == losses(runs.path / "alone")


@pytest.mark.slow
def test_a_run_killed_at_random_loses_nothing(runs, server, scheme, monkeypatch):
    """On the machine where it was, and on others; in a step, a save, a send, a fetch, or what a start does."""
    runs.finish(runs.start("", directory=runs.path / "alone"))
    rng, machine, newest = random.Random(scheme), "0", 0
    for number in range(KILLS):
        machine = str(number) if number % 2 else machine
        local = f"checkpoint.local={{dir: {runs.path / machine}/local, every: 3}}"
        process, copy = runs.start(machine, local), runs.copy(machine, monkeypatch)
        if number % 5 == 4:
            time.sleep(rng.uniform(0.0, 8.0))
        else:
            goal = min(newest + rng.randint(1, 2 * EVERY), STEPS)
            processes.wait_until(
                lambda copy=copy, goal=goal, p=process: steps_done(copy) >= goal or p.poll() is not None, process
            )
            time.sleep(rng.uniform(0.0, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        newest = steps_done(copy)
    runs.finish(runs.start(machine))
    assert_equal_runs(runs, runs.copy(machine, monkeypatch))
    runs.check_secrecy()


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_on_another_machine(runs, monkeypatch):
    """Killed at once after a checkpoint was sent.  In float64: to rounding."""
    how = [*(f"precision.{key}=float64" for key in ("params", "compute", "reduce")), "checkpoint.every=5"]
    how += ["optim.decay=constant"]
    process = runs.start("one", *how, "train.steps=100000")
    processes.wait_until(lambda: any("/5/record.json" in name for name in runs.server.objects("bucket")), process)
    process.send_signal(signal.SIGSTOP)
    saved = max(int(name.split("/")[3]) for name in runs.server.objects("bucket") if "record.json" in name)
    process.kill()
    process.wait()
    more = ["--devices=8", "parallel.model=2", f"train.steps={saved + 10}"]
    runs.finish(runs.start("two", *how, *more))
    runs.finish(runs.start("", *how, f"train.steps={saved + 10}", directory=runs.path / "alone"))
    pairs = zip(losses(runs.copy("two", monkeypatch)), losses(runs.path / "alone"), strict=True)
    for got, expected in pairs:
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [{"down": True}, {"delay": 1.0}, {"status": 500}, {"status": 429}, {"status": 403}], ids=str
)
def test_a_fault_in_the_middle_of_a_run_changes_nothing(fault, runs, server, monkeypatch):
    steps = 30 * EVERY
    runs.finish(runs.start("", f"train.steps={steps}", directory=runs.path / "alone"))
    process, copy = runs.start("one", f"train.steps={steps}"), runs.copy("one", monkeypatch)
    processes.wait_until(lambda: steps_done(copy) >= 2 * EVERY, process)
    with server.failing(**fault):
        time.sleep(3.0)
        assert process.poll() is None or fault.get("delay")
    runs.finish(process)
    assert_equal_runs(runs, copy, steps)
    runs.check_secrecy()
