"""launch/local: several processes of one job on this machine, as users start it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_lm.errors import Exit
from tests import processes

LOCAL = processes.ROOT / "launch" / "local"
FLOAT64 = [f"precision.{key}=float64" for key in ("params", "compute", "reduce")]
LONG = ["train.steps=100000", "model.layers=2", "checkpoint.every=0"]  # until something ends it


def launch(number: int, *arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, LOCAL, "-n", str(number), "--", *arguments]
    return processes.start_command(command, **processes.UNCACHED | environment)


def train(directory: Path, *overrides: str) -> list[str]:
    return ["train", "configs/debug.yaml", "--devices", "8", f"run.dir={directory}", *overrides]


def lines_until(process: subprocess.Popen, pattern: str) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def end(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and remaining output."""
    output, _ = processes.communicate(process)
    return process.returncode, output


def launch_instead(directory: Path, code: str) -> subprocess.Popen:
    """launch/local of two processes that run `code` where spmd_lm would be; its output is bytes."""
    (directory / "spmd_lm").mkdir()
    (directory / "spmd_lm" / "__init__.py").touch()
    (directory / "spmd_lm" / "__main__.py").write_text(f"import os, sys, time\n{code}\n")
    command = [sys.executable, LOCAL, "-n", "2", "--", "verb"]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_output_of_any_bytes_is_copied(tmp_path):
    """The bytes are not UTF-8, longer than a pipe holds, and without a final newline."""
    line = b"a\0\xe9\r" + b"x" * 200_000
    job = launch_instead(tmp_path, f"sys.stdout.buffer.write({line!r} + b'\\n[Gloo] no\\nlast')")
    output, _ = processes.communicate(job)
    assert job.returncode == 0
    lines = [b"[%d] %b" % (number, text) for number in range(2) for text in (line, b"last")]
    assert sorted(output.removesuffix(b"\n").split(b"\n")) == sorted(lines)


def test_a_job_goes_on_when_nobody_reads_its_output(tmp_path):
    job = launch_instead(tmp_path, "print('up')\ntime.sleep(0.5)\nprint('x' * 200_000)\nopen(str(os.getpid()), 'w')")
    assert job.stdout.readline().endswith(b"up\n")
    job.stdout.close()
    assert processes.exit_codes(job) == [0] and len([*tmp_path.iterdir()]) == 3


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    two = launch(2, *train(tmp_path / "two", *FLOAT64, "parallel.model=2"))
    output, _ = processes.communicate(two)
    assert two.returncode == Exit.DONE, output
    processes.run(*train(tmp_path / "one", *FLOAT64, "parallel.model=2"))
    got, want = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    assert [record["step"] for record in got] == list(range(1, 21))
    assert [record["loss"] for record in got] == pytest.approx([record["loss"] for record in want], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others(tmp_path, victim):
    job = launch(2, *train(tmp_path, *LONG))
    lines_until(job, "step 3/")
    os.kill(children(job)[victim], signal.SIGKILL)
    code, _ = end(job)
    assert code == 128 + signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the launcher", "one process"])
def test_a_job_that_is_told_to_stop_saves(tmp_path, to):
    """A signal to one process alone stops all after the same step."""
    job = launch(2, *train(tmp_path, *LONG))
    lines_until(job, "step 3/")
    os.kill(job.pid if to == "the launcher" else children(job)[1], signal.SIGTERM)
    code, output = end(job)
    assert code == Exit.PREEMPTED, output
    step = int(re.search(r"stopped after step (\d+) of 100000, saved", output)[1])
    assert (tmp_path / "checkpoints" / str(step) / "commit_success.txt").exists()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "preempted"


@pytest.mark.slow
def test_two_jobs_at_once_each_do_a_benchmark():
    bench = ["bench", "configs/debug.yaml", "--devices=2", "model.layers=1", "--steps=1", "--warmup=0"]
    for job in [launch(2, *bench) for _ in range(2)]:
        code, output = end(job)
        assert code == Exit.DONE, output


@pytest.mark.slow
def test_a_verb_that_does_not_train_ends_at_once(tmp_path):
    """A job's SIGTERM ends eval; jax, once it watches SIGTERM, would continue."""
    processes.run(*train(tmp_path / "run", "train.steps=1"))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    cache["JAX_ENABLE_COMPILATION_CACHE"] = "1"
    job = launch(2, "eval", str(tmp_path / "run"), "train.eval_batches=1000000", **cache)
    processes.wait_until(lambda: [*tmp_path.glob("jit_*")], job)  # it has compiled something, so it has joined
    job.terminate()
    assert end(job)[0] == 128 + signal.SIGTERM


SCRIPT = """
import sys, spmd_lm
first, last = (spmd_lm.load_config("configs/debug.yaml", *options.split()) for options in sys.argv[1:])
print(spmd_lm.evaluate(spmd_lm.train(first))["step"])
try:
    spmd_lm.train(last)
except KeyboardInterrupt as stop:
    print(stop, flush=True)
"""


@pytest.mark.slow
def test_a_script_of_several_processes_trains_twice_and_stops_when_told(tmp_path):
    options = [
        " ".join(["run.simulate_devices=8", f"run.dir={tmp_path / name}", "train.log_every=1", *overrides])
        for name, overrides in (("first", ["train.steps=2"]), ("last", LONG))
    ]
    job = {"JAX_COORDINATOR_ADDRESS": f"localhost:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    job |= processes.UNCACHED
    command = [sys.executable, "-c", SCRIPT, *options]
    both = [processes.start_command(command, JAX_PROCESS_ID=str(number), **job) for number in range(2)]
    lines_until(both[0], "step 3/100000")
    both[1].terminate()
    outputs = [end(process) for process in both]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "saved" in outputs[0][1] and all("stopped; training" in output for _, output in outputs)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone signals the death of a parent")
def test_a_job_whose_launcher_is_killed_saves(tmp_path):
    job = launch(2, *train(tmp_path, *LONG))
    lines_until(job, "step 3/")
    progress = processes.Progress(*children(job))
    job.kill()
    while (state := json.loads((tmp_path / "status.json").read_text()))["state"] == "running":
        assert not (problem := progress.problem()), problem
        time.sleep(0.1)
    assert state["state"] == "preempted" and state["exit_code"] == Exit.PREEMPTED
    assert (tmp_path / "checkpoints" / str(state["step"]) / "commit_success.txt").exists()


@pytest.mark.slow
def test_seeds_are_trained_by_all_processes(tmp_path):
    """Seeds are jobs: the processes of the sweep start the same one, and agree on its end."""
    job = launch(
        2,
        *train(tmp_path, "train.steps=2", "optim.warmup=0", "train.eval_every=2", "train.eval_batches=1"),
        "--seeds",
        "2",
    )
    code, output = end(job)
    assert code == Exit.DONE, output
    assert "seed-1: done" in output and "eval_loss" in output and "[1]" not in output
    for seed in range(2):
        status = json.loads((tmp_path / "cells" / f"seed-{seed}" / "status.json").read_text())
        assert (status["state"], status["lives"][0]["processes"]) == ("done", 2)


def start_apart(directories: list[Path], own: list[list[str]], *overrides: str) -> list[subprocess.Popen]:
    """Two processes of a job without a launcher, each in a directory of its own, as on two hosts: they train on its
    text.txt."""
    job = {"JAX_COORDINATOR_ADDRESS": f"localhost:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-m", "spmd_lm", "train", str(processes.ROOT / "configs" / "debug.yaml"), "--devices=4"]
    command += ["data.source=text", "data.path=text.txt", *overrides]
    return [
        processes.start_command(
            [*command, *own[number]],
            cwd=directory,
            PYTHONPATH=f"{directory}:{processes.ROOT}",
            JAX_PROCESS_ID=str(number),
            **job,
        )
        for number, directory in enumerate(directories)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_fails_ends_the_others_without_a_launcher(tmp_path, victim):
    """The others end with its exit code, and name it."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    (tmp_path / str(1 - victim) / "text.txt").write_text("to be or not to be " * 200)
    both = start_apart([tmp_path / "0", tmp_path / "1"], [[], []], f"run.dir={tmp_path / 'run'}", *LONG)
    outputs = [processes.communicate(process)[0] for process in both]
    assert [process.returncode for process in both] == [Exit.DATA] * 2, outputs
    assert "text.txt: " in outputs[victim] and "failed" not in outputs[victim]
    assert re.search(rf"error: process {victim} on \S+ failed with exit code 4:", outputs[1 - victim])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["configuration", "dataset", "version"])
def test_processes_that_differ_all_leave(tmp_path, what):
    """Both exit with 2, and say which process differs, and in what."""
    texts = tmp_path / "texts"
    for number in range(2):
        (texts / str(number)).mkdir(parents=True)
        (texts / str(number) / "text.txt").write_text(f"{number if what == 'dataset' else 0} to be or not to be " * 200)
        (texts / str(number) / "sitecustomize.py").write_text(
            "import importlib.metadata as m; real = m.version\n"
            "m.version = lambda name: '0.0.1' if name == 'optax' else real(name)\n"
            if what == "version" and number
            else ""
        )
    own = ["optim.lr=0.002"] if what == "configuration" else []
    both = start_apart([texts / "0", texts / "1"], [[], own], f"run.dir={tmp_path / 'run'}", *LONG)
    outputs = [processes.communicate(process)[0] for process in both]
    assert [process.returncode for process in both] == [Exit.CONFIG] * 2, outputs
    difference = {
        "configuration": "their configuration: optim.lr=0.002, not 0.001.",
        "dataset": "their dataset: sha256=",
        "version": "their versions: optax=0.0.1, not ",
    }[what]
    for output in outputs:
        assert re.search(rf"process 1 on \S+ and process 0 on \S+ differ in {re.escape(difference)}", output), output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
