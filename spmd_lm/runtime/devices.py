"""Simulated devices: one CPU posing as many, so that every layout can be run, and tested, anywhere.

XLA reads these settings once, when its backend starts; call `simulate_devices` before the first use of jax."""

import os
import re
import sys

from spmd_lm.errors import ConfigError

FLAG = "--xla_force_host_platform_device_count"


def simulate_devices(devices: int, processes: int = 1) -> None:
    """Makes jax see this many CPU devices, divided among the processes.  ConfigError if jax already runs on others."""
    local_devices, remainder = divmod(devices, processes)
    if remainder:
        raise ConfigError(
            f"run.simulate_devices={devices} is not divisible by JAX_NUM_PROCESSES={processes}. Use a multiple of it."
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
