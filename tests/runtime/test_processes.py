"""The processes of one job: what each launcher tells them, and two of them on this machine."""

import json
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.runtime.devices import simulate_devices
from spmd_lm.runtime.launchers import ProcessInfo, detect_process
from spmd_lm.runtime.processes import (
    differences,
    in_a_job,
    in_tpu_slice,
    own_gpus,
    require_free_port,
    tells_of_lost_peer,
    wait_for_coordinator,
)
from tests import processes

STEPS = ("train.steps=4", "train.log_every=1", "train.eval_every=4", "checkpoint.every=2", "model.layers=4")


def start(directory: Path, overrides: tuple[str, ...], **environment: str) -> subprocess.Popen:
    return processes.start("train", "configs/pipeline.yaml", f"run.dir={directory}", *STEPS, *overrides, **environment)


def losses(directory: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record.get("loss", record.get("eval_loss"))) for record in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.schedule=1f1b",),  # replicas of the pipeline in each process
        ("parallel.pipe=4", "parallel.data=1", "parallel.schedule=gpipe", "parallel.zero=0"),  # stages in each
    ],
    ids=["data", "pipe"],
)
def test_two_processes_train_what_one_does(tmp_path, overrides):
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    address |= processes.UNCACHED
    both = [start(tmp_path / "two", overrides, **address, JAX_PROCESS_ID=str(which)) for which in (0, 1)]
    processes.wait(*both)
    processes.wait(start(tmp_path / "one", overrides))
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-6)


SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[004-006,009]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.4",
}
ONE_NODE = {
    "SLURM_STEP_NODELIST": "n004",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMIX_NAMESPACE": "3170762753",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train:1234", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture
def names(monkeypatch):
    """Hosts that have an address: a set, to change."""
    known = {"n004", "10.0.0.4"}

    def getaddrinfo(host, _):
        if host not in known:
            raise OSError
        return [host]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize(
    ("environment", "process"),
    [
        ({}, None),
        (JAX, ProcessInfo(2, 1, "h:1")),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "localhost:1"}, ProcessInfo(2, 1, "localhost:1", 2, 1)),
        (POD, ProcessInfo(4, 2, "train-workers-0-0.train:1234")),
        (SLURM, ProcessInfo(7, 3, "n004:61506", 2, 1)),
        (
            SLURM | {"SLURM_NODEID": "3", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"},
            ProcessInfo(7, 6, "n004:61506", 1, 0),
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "n004,m[1-2]"}, ProcessInfo(7, 3, "n004:61506", 2, 1)),
        (SLURM | ONE_NODE, ProcessInfo(2, 1, "127.0.0.1:61506", 2, 1)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "h:1"}, ProcessInfo(7, 3, "h:1", 2, 1)),
        (SLURM | JAX, ProcessInfo(2, 1, "h:1")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # sbatch's script is no step
        (OPEN_MPI, ProcessInfo(4, 3, "127.0.0.1:61510", 4, 3)),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "JAX_COORDINATOR_ADDRESS": "h:1"},
            ProcessInfo(4, 3, "h:1", 2, 3),
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_each_launcher_says_where_a_process_is(names, environment, process):
    assert detect_process(environment) == process


def test_a_node_without_an_address_of_its_name_is_found_by_srun_s(names):
    names.remove("n004")
    assert detect_process(SLURM).coordinator_address == "10.0.0.4:61506"
    names.clear()
    with pytest.raises(ConfigError, match="7 processes, and JAX_COORDINATOR_ADDRESS is not set"):
        detect_process(SLURM)


def test_steps_of_a_job_use_ports_of_their_own(names):
    ports = {detect_process(SLURM | {"SLURM_STEP_ID": str(step)}).coordinator_address for step in range(20)}
    assert len(ports) == 20


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (JAX | {"JAX_PROCESS_ID": None}, "go together"),
        (JAX | {"JAX_NUM_PROCESSES": None}, "go together"),
        (JAX | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two: expected the number"),
        (JAX | {"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES=0: expected the number"),
        (JAX | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 is not below JAX_NUM_PROCESSES=2"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "h"}, "JAX_COORDINATOR_ADDRESS=h: expected host:port"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "h:65536"}, "JAX_COORDINATOR_ADDRESS=h:65536: expected host:port"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": None}, "each process would train alone"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "no launcher says which process this is. Set JAX_NUM_PROCESSES"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "4 processes, and JAX_COORDINATOR_ADDRESS is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "7"}, "OMPI_COMM_WORLD_RANK=7 is not below OMPI_COMM_WORLD_SIZE=4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE=x: expected a whole number from 1"),
        *(
            (JAX | {"JAX_COORDINATOR_ADDRESS": address}, "JAX_COORDINATOR_ADDRESS=.*: expected host:port")
            for address in ("garbage", ":1", "host:abc", "host:²", "[::1]:0", "a b:1", "h" * 5000 + ":1")
        ),
        *(
            (JAX | {name: value}, f"{name}=.*: expected the")
            for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
            for value in ("x", "-1", "", "٣", "1000000000", "9" * 5000)
        ),
        *(
            (SLURM | {name: value}, name)
            for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID")
            for value in ("x", "-1", None, "9" * 5000)
        ),
        *((SLURM | {"SLURM_STEP_TASKS_PER_NODE": value}, "has no node SLURM_NODEID=1") for value in ("x", "7", None)),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is not below SLURM_STEP_NUM_TASKS=7"),
    ],
)
def test_an_inconsistent_environment_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        detect_process({name: value for name, value in environment.items() if value is not None})


def test_a_billion_nodes_are_not_counted_out():
    assert detect_process(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x900000000)"}).local_processes == 2


@pytest.mark.parametrize(
    ("process", "visible", "own"),
    [
        (ProcessInfo(4, 1, "h:1"), "0,1", None),
        (ProcessInfo(2, 1, "h:1", 1, 0), "0,1,2,3,4,5,6,7", None),  # a process for each host
        (ProcessInfo(16, 11, "h:1", 8, 3), "0,1,2,3,4,5,6,7", [3]),  # a process for each GPU
        (ProcessInfo(16, 11, "h:1", 8, 3), "5", None),  # SLURM has divided them
        (ProcessInfo(4, 3, "h:1", 2, 1), "0,1,2,3,4,5,6,7", [4, 5, 6, 7]),
    ],
)
def test_processes_of_a_host_share_its_gpus(monkeypatch, process, visible, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_gpus(process) == own


@pytest.mark.parametrize(
    ("environment", "vendor", "expected"),
    [
        ({}, "0x8086", False),
        ({}, "0x1ae0", True),  # a Cloud TPU VM
        ({"COLAB_RELEASE_TAG": "1"}, "0x1ae0", False),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, "0x1ae0", False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "0x1ae0", True),  # GKE
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "0x1ae0", True),
    ],
)
def test_workers_of_a_tpu_slice_join(monkeypatch, tmp_path, environment, vendor, expected):
    (tmp_path / "vendor").write_text(vendor + "\n")
    monkeypatch.setattr("glob.glob", lambda _: [tmp_path / "vendor"])
    assert in_tpu_slice(environment) == expected


@pytest.mark.parametrize(
    ("host", "reason"), [("nowhere.invalid", "[Nn]ame"), ("127.0.0.1", "Connection refused"), ("[::1]", "")]
)
def test_a_first_process_that_does_not_answer_is_reported(monkeypatch, host, reason):
    monkeypatch.setattr("spmd_lm.runtime.processes.CONNECT_SECONDS", 0)
    with pytest.raises(ConfigError, match=f"the first process does not answer: .*{reason}"):
        wait_for_coordinator(f"{host}:{processes.free_port()}")


def test_a_port_that_is_taken_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}: cannot listen there: Address already in use. Choose"):
            require_free_port(f"127.0.0.1:{port}")
    require_free_port(f"127.0.0.1:{port}")


def test_a_first_process_that_starts_later_is_waited_for():
    port = processes.free_port()
    code = f"import socket, time; time.sleep(0.5); socket.create_server(('127.0.0.1', {port})).accept()"
    with subprocess.Popen([sys.executable, "-c", code]) as first:
        wait_for_coordinator(f"127.0.0.1:{port}")
    assert first.returncode == 0


def test_what_differs_is_named():
    first = {"host": "a", "facts": {"x": "1", "y": "2"}}
    assert not differences("files", [first, first])
    (line,) = differences("files", [first, first, {"host": "b", "facts": {"x": "3", "z": "4"}}])
    assert "process 2 on b and process 0 on a differ in their files: x=3, not 1; y=None, not 2; z=4, not None." in line


def test_simulated_devices_are_divided_among_the_processes():
    with pytest.raises(ConfigError, match=r"run\.simulate_devices=9 is not divisible by the 2 processes"):
        simulate_devices(9, processes=2)


# A parent that waits for its child; the child says which signal ends it.
CHILD = """
import os, signal, sys, time
from spmd_lm.runtime.processes import end_with_parent

signal.signal(signal.SIGTERM, lambda number, _: sys.exit(signal.Signals(number).name))
end_with_parent()
print("started", os.environ.get("SPMD_LM_PARENT"), flush=True)
time.sleep(60)
"""
WITH_CHILD = """
import os, subprocess, sys
variable = {"SPMD_LM_PARENT": str(os.getpid())}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=os.environ | variable, start_new_session=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone signals the death of a parent")
def test_a_process_ends_with_the_one_that_started_it():
    parent = processes.start_command([sys.executable, "-c", WITH_CHILD, CHILD])
    assert parent.stdout.readline() == "started None\n"  # which does not inherit the variable
    parent.kill()
    assert parent.communicate(timeout=30)[0] == "SIGTERM\n"  # the child's last word; then it has closed the pipe


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone signals the death of a parent")
def test_a_process_that_lost_its_parent_before_it_began_ends_at_once():
    lost = processes.start("--version", SPMD_LM_PARENT="-1")
    assert lost.communicate(timeout=30) == ("", "") and lost.returncode == 128 + signal.SIGTERM


def test_a_signal_while_jax_is_imported_asks_no_job(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    assert not in_a_job()


@pytest.mark.parametrize(
    ("message", "lost"), [("UNAVAILABLE: Failed to send RPC", True), ("INVALID_ARGUMENT: a shape", False)]
)
def test_what_fails_for_want_of_a_process_says_so(message, lost):
    """A save, too, which says why in its cause."""
    cause = jax.errors.JaxRuntimeError(message)
    save = CheckpointError("10 was not saved")
    save.__cause__ = cause
    assert [tells_of_lost_peer(error) for error in (cause, save, ValueError(message))] == [lost, lost, False]
