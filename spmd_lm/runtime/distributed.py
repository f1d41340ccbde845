"""Several processes as one job: each is told by its environment where the first one listens, how many there are, and
which it is.

    JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 spmd-lm train CONFIG

Where the first is set and the others are not, jax asks its cluster (Slurm, Open MPI, Cloud TPU)."""

import os

from spmd_lm.errors import ConfigError

ADDRESS, NUMBER, WHICH = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def processes() -> int:
    """How many there are.  Raises ConfigError where the environment does not say so."""
    if ADDRESS not in os.environ:
        return 1
    number = _count(NUMBER, "the number of processes, 1 or more", 1)
    if number is None:
        raise ConfigError(f"run.simulate_devices with {ADDRESS} wants {NUMBER} too, and {WHICH}. Set them.")
    return number


def join() -> None:
    """Meets the other processes, if there are any.  Raises ConfigError where that is impossible."""
    number = _count(NUMBER, "the number of processes, 1 or more", 1)
    which = _count(WHICH, "which of them this is, from 0", 0)
    if (number is None) != (which is None):
        raise ConfigError(f"{NUMBER} and {WHICH} go together. Set both, or neither.")
    if ADDRESS not in os.environ:
        if number is not None:
            raise ConfigError(f"{NUMBER} is set, and {ADDRESS} is not: each process would train alone. Set it.")
        return
    if number is not None and which is not None and which >= number:
        raise ConfigError(f"{WHICH}={which} is not below {NUMBER}={number}. Processes are counted from 0.")
    import jax

    try:
        jax.distributed.initialize(num_processes=number, process_id=which)
    except (ValueError, RuntimeError) as e:
        why = (str(e).splitlines() or [type(e).__name__])[0]
        raise ConfigError(
            f"{ADDRESS}={os.environ[ADDRESS]}: the processes cannot meet: {why}. Set it to host:port of the first one, "
            f"with {NUMBER} and {WHICH}."
        ) from e


def _count(name: str, what: str, low: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < low:
        raise ConfigError(f"{name}={text}: expected {what}.")
    return int(text)
