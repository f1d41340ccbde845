"""Devices that are not there: one CPU posing as many, so that every layout can be run, and tested, anywhere.

XLA reads these settings once, when its backend starts; hence `simulate` comes before the first use of jax."""

import os
import re
import sys

from spmd_lm.errors import ConfigError

FLAG = "--xla_force_host_platform_device_count"


def simulate(devices: int, processes: int = 1) -> None:
    """Makes jax see this many CPU devices, a part of them in each process.  Raises ConfigError where jax already runs
    on others."""
    here, rest = divmod(devices, processes)
    if rest:
        raise ConfigError(
            f"run.simulate_devices={devices} is not divisible by JAX_NUM_PROCESSES={processes}. Use a multiple of it."
        )
    flags = re.sub(rf"{FLAG}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), f"{FLAG}={here}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA's CPU client sizes its thread pool by NPROC, else by the cores.  A collective holds threads of that pool for
    # every device until the last one has joined: with 8 devices on 2 cores and jax 0.10.2, 4 of 4 runs deadlocked
    # within 4,000 steps; with NPROC at 16 or 64 none did.
    os.environ.setdefault("NPROC", str(max(4 * here, 64)))

    jax = sys.modules.get("jax")
    if jax and processes == 1:  # imported, perhaps not started yet: asking starts it
        jax.config.update("jax_platforms", "cpu")
        found = f"{jax.device_count()} {jax.default_backend()}"
        if found != f"{devices} cpu":
            raise ConfigError(
                f"run.simulate_devices={devices}: jax already runs on {found} device(s). "
                "Simulate devices before the first use of jax, or in a new process."
            )


def quiet() -> None:
    """Leaves XLA's errors on standard error, without its warnings, which are for those who build XLA."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
