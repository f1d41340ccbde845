"""Several processes as one job.  Each learns from its environment where the first process listens, how many processes
there are, and which one it is.

    JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 spmd-lm train CONFIG

Where only the first is set, jax asks the cluster (Slurm, Open MPI, Cloud TPU)."""

import os

from spmd_lm.errors import ConfigError

COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def process_count() -> int:
    """The number of processes of this job.  ConfigError if there are several and the environment has no number."""
    if COORDINATOR_ADDRESS not in os.environ:
        return 1
    number = _read_num_processes()
    if number is None:
        raise ConfigError(
            f"run.simulate_devices with {COORDINATOR_ADDRESS} needs {NUM_PROCESSES} too, and {PROCESS_ID}. Set them."
        )
    return number


def initialize_distributed() -> None:
    """Connects to the job's other processes, if there are any.  ConfigError if that is impossible."""
    number, process_id = _read_num_processes(), _read_integer(PROCESS_ID, "the index of this process, from 0", 0)
    if (number is None) != (process_id is None):
        raise ConfigError(f"{NUM_PROCESSES} and {PROCESS_ID} go together. Set both, or neither.")
    if COORDINATOR_ADDRESS not in os.environ:
        if number is not None:
            raise ConfigError(
                f"{NUM_PROCESSES} is set, and {COORDINATOR_ADDRESS} is not: each process would train alone. Set it."
            )
        return
    if number is not None and process_id is not None and process_id >= number:
        raise ConfigError(f"{PROCESS_ID}={process_id} is not below {NUM_PROCESSES}={number}. Counting starts at 0.")
    import jax

    try:
        jax.distributed.initialize(num_processes=number, process_id=process_id)
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{COORDINATOR_ADDRESS}={os.environ[COORDINATOR_ADDRESS]}: the processes cannot connect: {reason}. "
            f"Set it to host:port of the first process, with {NUM_PROCESSES} and {PROCESS_ID}."
        ) from error


def _read_num_processes() -> int | None:
    return _read_integer(NUM_PROCESSES, "the number of processes, 1 or more", 1)


def _read_integer(name: str, meaning: str, minimum: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name}={text}: expected {meaning}.")
    return int(text)
