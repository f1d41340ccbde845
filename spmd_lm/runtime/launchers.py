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

ADDRESS, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LOCALHOST = "127.0.0.1"

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
    match = re.fullmatch(r".+:(\d+)", process.coordinator_address)
    if not match or int(match[1]) not in range(1, 2**16):
        raise ConfigError(f"{ADDRESS}={process.coordinator_address}: expected host:port, as in {LOCALHOST}:1234.")
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
    if "SLURM_STEP_NODELIST" not in environment or environment["SLURM_STEP_NUM_TASKS"] == "1":
        return None
    tasks = _tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    processes = int(environment["SLURM_STEP_NUM_TASKS"])
    if tasks == processes:
        host = LOCALHOST
    else:
        # Where srun ran, if only SLURM knows the node by this name: sbatch's script runs on the first node.
        hosts = _first_node(environment["SLURM_STEP_NODELIST"]), environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
        host = next(filter(_resolves, hosts), "")
    port = _port(environment["SLURM_JOB_ID"], int(environment["SLURM_STEP_ID"]))
    address = f"{host}:{port}" if host else None
    return ProcessInfo(processes, int(environment["SLURM_PROCID"]), address, tasks, int(environment["SLURM_LOCALID"]))


def _from_open_mpi(environment: Environment) -> ProcessInfo | None:
    """A rank that mpirun started; on several hosts it does not say where rank 0 is."""
    names = ("WORLD_SIZE", "WORLD_RANK", "WORLD_LOCAL_SIZE", "WORLD_LOCAL_RANK")
    values = [int(environment.get(f"OMPI_COMM_{name}", "1")) for name in names]
    processes, process_id, local_processes, local_id = values
    if processes == 1:
        return None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    address = f"{LOCALHOST}:{_port(job)}" if local_processes == processes and job else None
    return ProcessInfo(processes, process_id, address, local_processes, local_id)


def _first_node(text: str) -> str:
    """SLURM's `n[004-006,009],m1` begins with n004."""
    return "".join(re.findall(r"^([^,[]+)(?:\[(\d+))?", text)[0])


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's `2(x3),1` is [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in runs for _ in range(int(nodes or 1))]


def _port(job: str, step: int = 0) -> int:
    """A port that all processes of a job's step agree on: above those that Linux gives to outgoing connections."""
    return 61440 + (zlib.crc32(job.encode()) + step) % 4096


def _resolves(host: str) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, None))
    except OSError:
        return False


def _integer(environment: Environment, name: str, meaning: str, minimum: int) -> int | None:
    text = environment.get(name)
    if text is not None and (not text.isdecimal() or int(text) < minimum):
        raise ConfigError(f"{name}={text}: expected {meaning}.")
    return None if text is None else int(text)
