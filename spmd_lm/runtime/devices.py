"""The devices of a run: simulated ones, and those of the job's other processes.

Simulated devices are one CPU posing as many, so that every layout can be run, and tested, anywhere.  XLA reads these
settings once, when its backend starts: before the first use of jax.

Each process of a job learns from its environment where the first process listens, how many processes there are, and
which one it is; where only the first is set, jax asks the cluster (Slurm, Open MPI, Cloud TPU).

    JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 spmd-lm train CONFIG"""

import os
import re
import sys
from typing import TYPE_CHECKING

from spmd_lm.errors import ConfigError

if TYPE_CHECKING:
    from spmd_lm.config.schema import RunConfig

FLAG = "--xla_force_host_platform_device_count"
COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def set_up_devices(config: "RunConfig") -> "RunConfig":
    """The same configuration, after simulating its devices and joining the job's other processes: for what computes.
    ConfigError if one of them is impossible."""
    address, (processes, process_id) = os.environ.get(COORDINATOR_ADDRESS), read_processes()
    if devices := config.run.simulate_devices:
        if address is not None and processes is None:
            where = f"run.simulate_devices with {COORDINATOR_ADDRESS}"
            raise ConfigError(f"{where} needs {NUM_PROCESSES} too, and {PROCESS_ID}. Set them.")
        simulate_devices(devices, processes or 1)
    if address is None:
        return config
    import jax

    try:
        jax.distributed.initialize(num_processes=processes, process_id=process_id)
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{COORDINATOR_ADDRESS}={address}: the processes cannot connect: {reason}. "
            f"Set it to host:port of the first process, with {NUM_PROCESSES} and {PROCESS_ID}."
        ) from error
    return config


def read_processes() -> tuple[int | None, int | None]:
    """How many processes this job has, and which one this is; None where the environment does not say.  ConfigError
    where it contradicts itself."""
    number = _read_integer(NUM_PROCESSES, "the number of processes, 1 or more", 1)
    process_id = _read_integer(PROCESS_ID, "the index of this process, from 0", 0)
    if number is None and process_id is None:
        return None, None
    if number is None or process_id is None:
        raise ConfigError(f"{NUM_PROCESSES} and {PROCESS_ID} go together. Set both, or neither.")
    if COORDINATOR_ADDRESS not in os.environ:
        what = f"{NUM_PROCESSES} is set, and {COORDINATOR_ADDRESS} is not"
        raise ConfigError(f"{what}: each process would train alone. Set it.")
    if process_id >= number:
        raise ConfigError(f"{PROCESS_ID}={process_id} is not below {NUM_PROCESSES}={number}. Counting starts at 0.")
    return number, process_id


def _read_integer(name: str, meaning: str, minimum: int) -> int | None:
    text = os.environ.get(name)
    if text is not None and (not text.isdecimal() or int(text) < minimum):
        raise ConfigError(f"{name}={text}: expected {meaning}.")
    return None if text is None else int(text)


def simulate_devices(devices: int, processes: int = 1) -> None:
    """Makes jax see this many CPU devices, divided among the processes.  ConfigError if jax already runs on others."""
    local_devices, remainder = divmod(devices, processes)
    if remainder:
        raise ConfigError(
            f"run.simulate_devices={devices} is not divisible by {NUM_PROCESSES}={processes}. Use a multiple of it."
        )
    flags = re.sub(rf"{FLAG}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), f"{FLAG}={local_devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA's CPU client sizes its thread pool by NPROC, else by the cores.  A collective holds threads of that pool for
    # every device until the last one has joined: with 8 devices on 2 cores and jax 0.10.2, 4 of 4 runs deadlocked
    # within 4,000 steps; with NPROC at 16 or 64 none did.
    os.environ.setdefault("NPROC", str(max(4 * local_devices, 64)))

    jax = sys.modules.get("jax")
    if jax and processes == 1:  # imported, perhaps not started yet: device_count starts it
        jax.config.update("jax_platforms", "cpu")
        present = f"{jax.device_count()} {jax.default_backend()}"
        if present != f"{devices} cpu":
            raise ConfigError(
                f"run.simulate_devices={devices}: jax already runs on {present} device(s). "
                "Simulate devices before the first use of jax, or in a new process."
            )


def hide_xla_warnings() -> None:
    """Hides XLA's warnings, which are for XLA's developers; its errors still reach standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
