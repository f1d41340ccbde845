"""What launchers tell the processes of a job, in their environment: how many there are, which one this is, and where
the first one listens.

SLURM, Open MPI and Kubernetes have variables of their own.  Anything else sets jax's:

    JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 spmd-lm train CONFIG"""

import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.formatting import parse_count

ADDRESS, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LOCALHOST = "127.0.0.1"
MOST_PROCESSES = 2**20

Environment = Mapping[str, str]


@dataclass(frozen=True)
class ProcessInfo:
    """One process's place in its job.  local_*: among those on its host, where the launcher says it."""

    num_processes: int
    process_id: int
    coordinator_address: str | None = None  # host:port of process 0
    local_processes: int | None = None
    local_id: int | None = None

    @property
    def on_one_host(self) -> bool:
        host = (self.coordinator_address or "").rpartition(":")[0]
        return self.local_processes == self.num_processes or host in ("localhost", LOCALHOST, "[::1]")


def detect_process(environment: Environment) -> ProcessInfo | None:
    """What the launcher says; None for a single process, and on a Cloud TPU.  ConfigError if it contradicts itself."""
    address = environment.get(ADDRESS)
    process = _from_jax(environment) or _from_slurm(environment) or _from_open_mpi(environment)
    if process is None:
        if address is not None:
            problem = f"{ADDRESS}={address} is set, and no launcher says which process this is"
            raise ConfigError(f"{problem}. Set {NUM_PROCESSES} and {PROCESS_ID}.")
        return None
    process = replace(process, coordinator_address=address or process.coordinator_address)
    if process.coordinator_address is None:
        what = f"{process.num_processes} processes, and {ADDRESS} is not set"
        raise ConfigError(f"{what}: each process would train alone. Set it to host:port of the first one.")
    match = re.fullmatch(r"\S{1,255}:([0-9]{1,5})", process.coordinator_address)
    if not match or int(match[1]) not in range(1, 2**16):
        given = f"{process.coordinator_address:.300}"
        raise ConfigError(f"{ADDRESS}={given}: expected host:port, as in {LOCALHOST}:1234.")
    if process.on_one_host:
        process = replace(process, local_processes=process.num_processes, local_id=process.process_id)
    return process


def _from_jax(environment: Environment) -> ProcessInfo | None:
    """jax's own variables; in a pod of an indexed Kubernetes Job its index is the process's."""
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
    """A task of a step, as srun starts it; sbatch's own script is no step."""
    if "SLURM_STEP_NODELIST" not in environment or environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    processes = _required(environment, "SLURM_STEP_NUM_TASKS", 1)
    process_id, local_id, node, step = (
        _required(environment, f"SLURM_{name}", 0) for name in ("PROCID", "LOCALID", "NODEID", "STEP_ID")
    )
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if (tasks := _tasks_of_node(per_node, node)) is None or process_id >= processes:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={per_node:.40} has no node SLURM_NODEID={node}, or SLURM_PROCID={process_id} "
            f"is not below SLURM_STEP_NUM_TASKS={processes}. Start it with srun, or unset SLURM_STEP_NODELIST."
        )
    if tasks == processes:
        host = LOCALHOST
    else:
        # Where srun ran, if only SLURM knows the node by this name: sbatch's script runs on the first node.
        hosts = _first_node(environment["SLURM_STEP_NODELIST"]), environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        host = next(filter(_resolves, hosts), "")
    port = _port(environment.get("SLURM_JOB_ID", ""), step)
    address = f"{host}:{port}" if host else None
    return ProcessInfo(processes, process_id, address, tasks, local_id)


def _from_open_mpi(environment: Environment) -> ProcessInfo | None:
    """A rank that mpirun started; on several hosts it does not say where rank 0 is."""
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
        return None
    processes, local_processes = (_required(environment, f"OMPI_COMM_WORLD_{name}SIZE", 1) for name in ("", "LOCAL_"))
    process_id, local_id = (_required(environment, f"OMPI_COMM_WORLD_{name}RANK", 0) for name in ("", "LOCAL_"))
    if process_id >= processes:
        raise ConfigError(f"OMPI_COMM_WORLD_RANK={process_id} is not below OMPI_COMM_WORLD_SIZE={processes}.")
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    address = f"{LOCALHOST}:{_port(job)}" if local_processes == processes and job else None
    return ProcessInfo(processes, process_id, address, local_processes, local_id)


def _first_node(text: str) -> str:
    """SLURM's `n[004-006,009],m1` begins with n004."""
    found = re.match(r"([^,[]+)(?:\[(\d+))?", text)
    return "".join(filter(None, found.groups())) if found else ""


def _tasks_of_node(text: str, node: int) -> int | None:
    """SLURM's `2(x3),1` are 2, 2, 2 and 1 tasks on nodes 0 to 3; None for a node that it does not have."""
    for tasks, nodes in re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", text):
        if node < (count := int(nodes or 1)):
            return int(tasks)
        node -= count
    return None


def _port(job: str, step: int = 0) -> int:
    """A port that all processes of a job's step agree on: above those that Linux gives to outgoing connections."""
    return 61440 + (zlib.crc32(job.encode()) + step) % 4096


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
    """What a launcher sets in every process."""
    if (number := _integer(environment, name, f"a whole number from {minimum}", minimum)) is None:
        raise ConfigError(f"{name} is not set, but other variables of its launcher are. Start the job with it again.")
    return number
