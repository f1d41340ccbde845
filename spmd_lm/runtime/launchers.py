"""Reads a launcher's environment variables: the number of a job's processes, this one's index, and the coordinator.

SLURM, the MPIs, torchrun and Kubernetes have variables of their own.  Anything else sets jax's:

    JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 spmd-lm train CONFIG

Nested launchers inherit variables, so the innermost counts: jax's, set by the user or by launch/local, then torchrun's,
then an mpirun's, which starts its daemons with srun, then SLURM's."""

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.formatting import parse_count

ADDRESS, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LOCALHOST = "127.0.0.1"
MOST_PROCESSES = 2**20

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """Environment variables of a launcher that starts each process itself."""

    sign: str  # set by this launcher alone
    processes: str
    process_id: str
    local_processes: str
    job: tuple[str, ...]  # identify the job, equal in all processes
    host: str = ""  # the first process's, if the launcher sets it


TORCHRUN_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
OPEN_MPI_JOB, OPEN_MPI = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), "OMPI_COMM_WORLD_"
LAUNCHERS = (  # the innermost first
    Launcher("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", TORCHRUN_JOB, "MASTER_ADDR"),
    Launcher(f"{OPEN_MPI}SIZE", f"{OPEN_MPI}SIZE", f"{OPEN_MPI}RANK", f"{OPEN_MPI}LOCAL_SIZE", OPEN_MPI_JOB),
    Launcher("MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", ()),  # MPICH, Intel MPI
)


@dataclass(frozen=True)
class ProcessInfo:
    num_processes: int
    process_id: int
    coordinator_address: str | None = None  # host:port of process 0
    local_processes: int | None = None  # on its host, if the launcher sets it

    @property
    def on_one_host(self) -> bool:
        host = split_address(self.coordinator_address)[0] if self.coordinator_address else ""
        ip = _parse_ip(host)
        return self.local_processes == self.num_processes or host == "localhost" or (ip is not None and ip.is_loopback)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`, with an IPv6 address in brackets, perhaps with the zone of a link-local one, as in
    [fe80::1%eth0]:1234.  Raises ConfigError for any other text."""
    name = "[A-Za-z0-9_.-]{1,255}"
    match = re.fullmatch(rf"(?:\[([0-9A-Fa-f:.]+(?:%{name})?)\]|({name})):([0-9]{{1,5}})", text)
    if not match or not 0 < int(match[3]) < 2**16 or (match[1] and getattr(_parse_ip(match[1]), "version", 4) != 6):
        examples = f"{LOCALHOST}:1234, or of an IPv6 address [fd00::1]:1234"
        raise ConfigError(f"{ADDRESS}={text:.300}: expected host:port, as in {examples}, with a port from 1 to 65535.")
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def detect_process(environment: Environment) -> ProcessInfo | None:
    """The launcher's information; None for a single process, and on a Cloud TPU.  Raises ConfigError for
    contradictions."""
    address = environment.get(ADDRESS)
    process = _from_jax(environment)
    if process is None:
        launcher = next((each for each in LAUNCHERS if each.sign in environment), None)
        process = _from_launcher(environment, launcher) if launcher else _from_slurm(environment)
    if process is None:
        if address is not None:
            problem = f"{ADDRESS}={address} is set, and no launcher says which process this is"
            raise ConfigError(f"{problem}. Set {NUM_PROCESSES} and {PROCESS_ID}.")
        _require_alone(environment)
        return None
    process = replace(process, coordinator_address=address or process.coordinator_address)
    if process.coordinator_address is None:
        what = f"{process.num_processes} processes, and {ADDRESS} is not set"
        raise ConfigError(f"{what}: each process would train alone. Set it to host:port of the first one.")
    split_address(process.coordinator_address)  # ConfigError if it is not host:port
    return replace(process, local_processes=process.num_processes) if process.on_one_host else process


def _require_alone(environment: Environment) -> None:
    """Raises ConfigError if a launcher's variables announce other processes without its own sign, as in Kubeflow's
    PyTorchJob, which sets torchrun's WORLD_SIZE and RANK."""
    for launcher in LAUNCHERS:
        several = environment.get(launcher.processes, "1") != "1" and launcher.process_id in environment
        if several and launcher.sign not in environment:
            given = " and ".join(
                f"{name}={environment[name]:.40}" for name in (launcher.processes, launcher.process_id)
            )
            advice = f"Set {ADDRESS}, {NUM_PROCESSES} and {PROCESS_ID}, or unset {launcher.processes} if it is alone."
            raise ConfigError(f"{given} are set, but not {launcher.sign}: each process would train alone. {advice}")


def _from_jax(environment: Environment) -> ProcessInfo | None:
    """Reads jax's own variables; in a pod of an indexed Kubernetes Job, its index is the process's."""
    processes = _integer(environment, NUM_PROCESSES, "the number of processes, 1 or more", 1)
    process_id = _integer(environment, PROCESS_ID, "the index of this process, from 0", 0)
    if processes is not None and process_id is None:
        process_id = _integer(environment, "JOB_COMPLETION_INDEX", "the index of this pod, from 0", 0)
    if processes is None and process_id is None:
        return None
    if processes is None or process_id is None:
        raise ConfigError(f"{NUM_PROCESSES} and {PROCESS_ID} go together. Set both, or neither.")
    if process_id >= processes:
        raise ConfigError(f"{PROCESS_ID}={process_id} is not below {NUM_PROCESSES}={processes}. Counting starts at 0.")
    return ProcessInfo(processes, process_id)


def _from_slurm(environment: Environment) -> ProcessInfo | None:
    """Reads the variables of a task in a step, as started by srun; sbatch's own script is not a step."""
    if "SLURM_STEP_NODELIST" not in environment or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    processes = _required(environment, "SLURM_STEP_NUM_TASKS", 1)
    process_id, node, step = (_required(environment, f"SLURM_{name}", 0) for name in ("PROCID", "NODEID", "STEP_ID"))
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if (tasks := _tasks_of_node(per_node, node)) is None or process_id >= processes:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={per_node:.40} has no node SLURM_NODEID={node}, or SLURM_PROCID={process_id} "
            f"is not below SLURM_STEP_NUM_TASKS={processes}. Start it with srun, or unset SLURM_STEP_NODELIST."
        )
    if tasks == processes:
        host = LOCALHOST
    else:
        # The host where srun ran, if only SLURM knows the node by its name: sbatch's script runs on the first node.
        hosts = _first_node(environment["SLURM_STEP_NODELIST"]), environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        host = next(filter(_resolves, hosts), "")
    address = join_address(host, _port(environment.get("SLURM_JOB_ID", ""), step)) if host else None
    return ProcessInfo(processes, process_id, address, tasks)


def _from_launcher(environment: Environment, launcher: Launcher) -> ProcessInfo | None:
    """Reads the variables of one of LAUNCHERS; not all of them locate the first process across hosts."""
    if environment.get(launcher.processes) == "1":
        return None
    processes = _required(environment, launcher.processes, 1)
    local_processes = _required(environment, launcher.local_processes, 1)
    if (process_id := _required(environment, launcher.process_id, 0)) >= processes:
        raise ConfigError(f"{launcher.process_id}={process_id} is not below {launcher.processes}={processes}.")
    if local_processes > processes:
        raise ConfigError(f"{launcher.local_processes}={local_processes} is above {launcher.processes}={processes}.")
    host = LOCALHOST if local_processes == processes else environment.get(launcher.host, "")
    job = ":".join(filter(None, map(environment.get, launcher.job)))
    address = join_address(host, _port(job)) if host and job else None
    return ProcessInfo(processes, process_id, address, local_processes)


def _first_node(text: str) -> str:
    """The first of SLURM's nodes: n004 for `n[004-006,009],m1`."""
    found = re.match(r"([^,[]+)(?:\[(\d+))?", text)
    return "".join(filter(None, found.groups())) if found else ""


def _tasks_of_node(text: str, node: int) -> int | None:
    """A node's tasks, from SLURM's `2(x3),1`: 2, 2, 2 and 1 tasks on nodes 0 to 3; None for an unknown node."""
    part = r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?"
    for tasks, nodes in re.findall(part, text) if re.fullmatch(f"{part}(,{part})*", text) else ():
        if node < (count := int(nodes or 1)):
            return int(tasks)
        node -= count
    return None


def _port(job: str, step: int = 0) -> int:
    """A port that all processes of a job's step agree on, above Linux's range for outgoing connections."""
    return 61440 + (zlib.crc32(os.fsencode(job)) + step) % 4096


def _resolves(host: str) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, None))
    except OSError:
        return False


def _integer(environment: Environment, name: str, meaning: str, minimum: int) -> int | None:
    if (text := environment.get(name)) is None:
        return None
    number = parse_count(text, MOST_PROCESSES)
    if number is None or number < minimum:
        raise ConfigError(f"{name}={text:.40}: expected {meaning}, at most {MOST_PROCESSES:,}.")
    return number


def _required(environment: Environment, name: str, minimum: int) -> int:
    if (number := _integer(environment, name, f"a whole number from {minimum}", minimum)) is None:
        raise ConfigError(f"{name} is not set, but other variables of its launcher are. Start the job with it again.")
    return number
