"""The processes of one job: what each launcher tells them, and two of them on this machine."""

import json
import signal
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.runtime.devices import simulate_devices
from spmd_lm.runtime.launchers import ProcessInfo, detect_process, join_address, split_address
from spmd_lm.runtime.processes import (
    _connection,
    differences,
    in_a_job,
    in_tpu_slice,
    is_peer_failure,
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
    "PMIX_NAMESPACE": "3170762753",
}
JAX_ADDRESS = {"JAX_COORDINATOR_ADDRESS": "h:1"}
JAX = {**JAX_ADDRESS, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
POD = {"JAX_COORDINATOR_ADDRESS": "train-workers-0-0.train:1234", "JAX_NUM_PROCESSES": "4", "JOB_COMPLETION_INDEX": "2"}


def resolver(known: set[str]):
    def getaddrinfo(host, _):
        if host not in known:
            raise OSError
        return [host]

    return getaddrinfo


@pytest.fixture
def names(monkeypatch):
    """Hosts that have an address: a set, to change."""
    known = {"n004", "10.0.0.4"}
    monkeypatch.setattr("socket.getaddrinfo", resolver(known))
    return known


@pytest.mark.parametrize(
    ("environment", "process"),
    [
        ({}, None),
        (JAX, ProcessInfo(2, 1, "h:1")),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "localhost:1"}, ProcessInfo(2, 1, "localhost:1", 2)),
        (POD, ProcessInfo(4, 2, "train-workers-0-0.train:1234")),
        (SLURM, ProcessInfo(7, 3, "n004:61506", 2)),
        (
            SLURM | {"SLURM_NODEID": "3", "SLURM_PROCID": "6"},
            ProcessInfo(7, 6, "n004:61506", 1),
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "n004,m[1-2]"}, ProcessInfo(7, 3, "n004:61506", 2)),
        (SLURM | ONE_NODE, ProcessInfo(2, 1, "127.0.0.1:61506", 2)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "h:1"}, ProcessInfo(7, 3, "h:1", 2)),
        (SLURM | JAX, ProcessInfo(2, 1, "h:1")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # sbatch's script is no step
        (OPEN_MPI, ProcessInfo(4, 3, "127.0.0.1:61510", 4)),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "JAX_COORDINATOR_ADDRESS": "h:1"},
            ProcessInfo(4, 3, "h:1", 2),
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_each_launcher_says_where_a_process_is(names, environment, process):
    assert detect_process(environment) == process


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "WORLD_SIZE": "16",
    "RANK": "11",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "MASTER_ADDR": "n004",
    "MASTER_PORT": "29500",  # where torchrun itself listens
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", **JAX_ADDRESS}
MPIRUN_24 = OPEN_MPI | {
    "OMPI_COMM_WORLD_SIZE": "24",
    "OMPI_COMM_WORLD_RANK": "9",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "12",
    "JAX_COORDINATOR_ADDRESS": "n004:1",
}
STEP_OF_2 = SLURM | {  # mpirun starts its daemons with srun, one on each node
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
}
BATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[004-005]"}
LOCAL = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "process"),
    [
        (STEP_OF_2 | MPIRUN_24, ProcessInfo(24, 9, "n004:1", 12)),
        (BATCH | MPIRUN_24, ProcessInfo(24, 9, "n004:1", 12)),  # on the first node, where no daemon is needed
        (STEP_OF_2 | OPEN_MPI, ProcessInfo(4, 3, "127.0.0.1:61510", 4)),  # all on the second node
        (STEP_OF_2 | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (STEP_OF_2 | MPICH, ProcessInfo(4, 3, "h:1", 2)),
        (STEP_OF_2 | {"PMI_SIZE": "2", "PMI_RANK": "1"}, ProcessInfo(2, 1, "n004:61506", 1)),  # srun --mpi=pmi2
        (TORCHRUN, ProcessInfo(16, 11, "n004:61974", 8)),
        (STEP_OF_2 | TORCHRUN, ProcessInfo(16, 11, "n004:61974", 8)),
        (STEP_OF_2 | MPIRUN_24 | TORCHRUN, ProcessInfo(16, 11, "n004:1", 8)),
        (STEP_OF_2 | TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        (SLURM | {"WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "n004"}, ProcessInfo(7, 3, "n004:61506", 2)),
        *((outer | LOCAL, ProcessInfo(2, 1, "127.0.0.1:1", 2)) for outer in (SLURM, BATCH, MPIRUN_24, TORCHRUN)),
    ],
)
def test_the_innermost_launcher_counts(names, environment, process):
    assert detect_process(environment) == process


HEXTETS = st.lists(st.integers(0, 2**16 - 1), min_size=8, max_size=8).map(lambda n: ":".join(f"{x:x}" for x in n))
IPV6 = st.one_of(st.ip_addresses(v=6).map(str), HEXTETS, st.sampled_from(["::", "::1", "fd00::1", "::ffff:10.0.0.1"]))
ZONED = st.builds("{}%{}".format, st.sampled_from(["fe80::1", "fe80::a:b"]), st.sampled_from(["eth0", "1", "en-x.2"]))
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,8}){0,3}", fullmatch=True)
IPV4_OR_NAME = st.one_of(st.ip_addresses(v=4).map(str), NAMES, st.just("train-workers-0-0.train"))


@given(host=st.one_of(IPV6, ZONED, IPV4_OR_NAME), port=st.integers(1, 2**16 - 1))
def test_an_address_is_read_as_it_is_written(host, port):
    assert split_address(join_address(host, port)) == (host, port)


@given(host=st.one_of(IPV6, ZONED), port=st.integers(0, 10**6))
def test_an_ipv6_address_needs_brackets_and_a_port(host, port):
    """Brackets tell the last group from the port."""
    for text in (f"{host}:{port}", host, f"[{host}]", f"[{host}", f"{host}]:{port}", f"[[{host}]]:{port}"):
        with pytest.raises(ConfigError, match="expected host:port"):
            split_address(text)


@given(host=IPV4_OR_NAME, port=st.integers(2**16, 10**9))
def test_other_texts_are_no_addresses(host, port):
    ports = "{}", "{}:", "{}:0", f"{{}}:{port}", "{}:-1", "{}:1-2", "{}:1/", "{}:1 ", "{}:1\n"
    for text in (*ports, "[{}]:1", ":{}", "http://{}:1", "{} :1", "a@{}:1", "{},b:1"):
        with pytest.raises(ConfigError, match="expected host:port"):
            split_address(text.format(host))


@given(host=IPV6 | ZONED)
def test_an_ipv6_address_of_slurm_s_gets_brackets(host):
    with mock.patch("socket.getaddrinfo", resolver({host})):
        process = detect_process(SLURM | {"SLURM_LAUNCH_NODE_IPADDR": host})
    assert process.coordinator_address == f"[{host}]:61506"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "[::1]", "[0:0:0:0:0:0:0:1]"])
def test_an_address_that_only_this_host_has_means_one_host(host):
    process = detect_process(JAX | {"JAX_COORDINATOR_ADDRESS": f"{host}:1"})
    assert process.on_one_host and _connection(process)["coordinator_bind_address"] == "127.0.0.1:1"


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
            for address in (
                "garbage",
                ":1",
                "fd00::1:61440",
                "::1",
                "host:abc",
                "host:²",
                "[::1]:0",
                "a b:1",
                "h" * 5000 + ":1",
            )
        ),
        *(
            (JAX | {name: value}, f"{name}=.*: expected the")
            for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
            for value in ("x", "-1", "", "٣", "1000000000", "9" * 5000)
        ),
        *(
            (SLURM | {name: value}, name)
            for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_ID")
            for value in ("x", "-1", None, "9" * 5000)
        ),
        *(
            (SLURM | {"SLURM_STEP_TASKS_PER_NODE": value}, "has no node SLURM_NODEID=1")
            for value in ("x", "7", None, "", "2(x3", "4_3", "4,0", "2 2", "2;2", "0(x2),7", "2(x0),2", "2,2,", "2(3x)")
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "17"}, "LOCAL_WORLD_SIZE=17 is above WORLD_SIZE=16"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE=5 is above"),
        (MPICH | {"MPI_LOCALNRANKS": "5"}, "MPI_LOCALNRANKS=5 is above PMI_SIZE=4"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is not below SLURM_STEP_NUM_TASKS=7"),
    ],
)
def test_an_inconsistent_environment_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        detect_process({name: value for name, value in environment.items() if value is not None})


@pytest.mark.parametrize("outer", [{}, BATCH, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}])
@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({"WORLD_SIZE": "16", "RANK": "3", "MASTER_ADDR": "m", "MASTER_PORT": "23456"}, "WORLD_SIZE=16 and RANK=3"),
        ({"WORLD_SIZE": "x", "RANK": ""}, "WORLD_SIZE=x and RANK= "),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE=4 and PMI_RANK=0"),
    ],
)
def test_one_of_several_does_not_train_alone(outer, environment, given):
    with pytest.raises(ConfigError, match=f"{given}.*each process would train alone. Set JAX_COORDINATOR_ADDRESS, "):
        detect_process(outer | environment)
    assert detect_process(JAX | environment) == ProcessInfo(2, 1, "h:1")
    size, rank = (*environment,)[:2]
    for alone in ({size: "1", rank: "0"}, {size: "8"}, {rank: "0"}):
        assert detect_process(outer | alone) is None


@pytest.mark.parametrize("job", ["\udcff", "caf\u00e9", "\udce9t", "x\x1b[31m"])
@pytest.mark.parametrize(
    ("launcher", "name"), [("slurm", "SLURM_JOB_ID"), ("torchrun", "TORCHELASTIC_RUN_ID"), ("mpi", "PMIX_NAMESPACE")]
)
def test_any_name_of_a_job_makes_a_port(names, launcher, name, job):
    environment = {"slurm": SLURM, "torchrun": TORCHRUN, "mpi": OPEN_MPI}[launcher]
    process = detect_process(environment | {name: job})
    assert process == detect_process(environment | {name: job}) and split_address(process.coordinator_address)


def test_a_billion_nodes_are_not_counted_out():
    assert detect_process(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x900000000)"}).local_processes == 2


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
    assert processes.communicate(parent)[0] == "SIGTERM\n"  # the child's last word; then it has closed the pipe


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone signals the death of a parent")
def test_a_process_that_lost_its_parent_before_it_began_ends_at_once():
    lost = processes.start("--version", SPMD_LM_PARENT="-1")
    assert processes.communicate(lost) == ("", "") and lost.returncode == 128 + signal.SIGTERM


def test_a_signal_while_jax_is_imported_asks_no_job(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    assert not in_a_job()


@pytest.mark.parametrize(
    ("message", "lost"), [("UNAVAILABLE: Failed to send RPC", True), ("INVALID_ARGUMENT: a shape", False)]
)
def test_what_fails_for_want_of_a_process_says_so(message, lost):
    """A save says so too, by its cause."""
    cause = jax.errors.JaxRuntimeError(message)
    save = CheckpointError("10 was not saved")
    save.__cause__ = cause
    assert [is_peer_failure(error) for error in (cause, save, ValueError(message))] == [lost, lost, False]
