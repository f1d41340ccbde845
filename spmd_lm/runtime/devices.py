"""The devices of a run: those of all its job's processes, or simulated ones.

Simulated devices are one CPU posing as many, so that every layout can be run, and tested, anywhere.  XLA reads these
settings once, when its backend starts, so they are made before the first use of jax."""

import os
import re
import sys
from typing import TYPE_CHECKING

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.compilation_cache import use_compilation_cache
from spmd_lm.runtime.compiler_workarounds import (
    deepen_compiler_stacks,
    enlarge_thread_pool,
    number_channels,
    run_in_order,
)
from spmd_lm.runtime.gpu_memory import allocated_share
from spmd_lm.runtime.launchers import detect_process
from spmd_lm.runtime.outputs import print_line
from spmd_lm.runtime.processes import assert_equal, has_tpu, in_a_job, join, versions

if TYPE_CHECKING:
    import jax

    from spmd_lm.config.schema import RunConfig

FLAG = "--xla_force_host_platform_device_count"
MOST_SIMULATED = 512  # by one process: these take 5 s and 0.7 GiB to start
GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # jax's own signs of a GPU


def set_up_devices(config: "RunConfig") -> "RunConfig":
    """Simulates devices and joins the job's other processes; returns `config`.  Raises ConfigError if one of these is
    impossible, or a process has other versions or another configuration."""
    process = detect_process(os.environ)
    deepen_compiler_stacks()
    if devices := config.run.simulate_devices:
        simulate_devices(devices, process.num_processes if process else 1)
    if process or not devices:
        join(process)
    if in_a_job():
        require_same_job(config)
    elif not devices:
        devices_present()
    use_compilation_cache(config.run.compilation_cache, lambda line: print_line(line, sys.stderr))
    return config


def devices_present() -> "list[jax.Device]":
    """Devices of the job; starts jax.  Raises ConfigError if a platform of JAX_PLATFORMS, or of an installed plugin,
    has no usable device, or the environment requests memory that no GPU has: jax would drop its plugin, and use the
    CPU."""
    import jax

    if any(map(os.path.exists, GPU_FILES)):
        allocated_share()

    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX_PLATFORMS=cuda without a GPU: an AssertionError, no text
        reason = re.sub(r" \((set JAX_PLATFORMS|you may need).*", "", str(error).partition("\n")[0]).rstrip(".")
        if asked := jax.config.values["jax_platforms"]:
            problem = f"JAX_PLATFORMS={asked}: jax does not find these devices: {reason or 'this machine has none'}. "
            problem += "Unset it, or set it to cpu."
        else:
            problem = f"jax does not start: {reason}. Mend its plugin, or set JAX_PLATFORMS=cpu."
        raise ConfigError(problem) from error


def require_same_job(config: "RunConfig") -> None:
    """Raises ConfigError in all processes of a job if one has other versions, another configuration or other
    devices."""
    import jax

    assert_equal("versions", versions())
    assert_equal("configuration", config.by_key)
    devices_present()
    devices = jax.local_devices()
    assert_equal("devices", {"number": len(devices), "kind": devices[0].device_kind})


def simulate_devices(devices: int, processes: int = 1) -> None:
    """Makes jax see this many CPU devices, divided among processes.  Raises ConfigError if jax already runs on
    others."""
    local_devices, remainder = divmod(devices, processes)
    if remainder:
        raise ConfigError(
            f"run.simulate_devices={devices} is not divisible by the {processes} processes. Use a multiple of it."
        )
    if local_devices > MOST_SIMULATED:
        raise ConfigError(
            f"run.simulate_devices={devices}: a process simulates at most {MOST_SIMULATED}. Use fewer; `plan` takes "
            "any number of them, and audit --topology accelerators that are not here."
        )
    flags = re.sub(rf"{FLAG}=\S*", "", os.environ.get("XLA_FLAGS", "")).split()
    os.environ["XLA_FLAGS"] = " ".join([*run_in_order(flags), f"{FLAG}={local_devices}"])
    use_cpu_alone()
    enlarge_thread_pool(local_devices)

    jax = sys.modules.get("jax")
    number_channels()  # imports jax, which can still be configured
    if jax and processes == 1:  # imported, perhaps not started yet: device_count starts it
        present = f"{jax.device_count()} {jax.default_backend()}"
        if present != f"{devices} cpu":
            raise ConfigError(
                f"run.simulate_devices={devices}: jax already runs on {present} device(s). "
                "Simulate devices before the first use of jax, or in a new process."
            )


def use_cpu_alone() -> None:
    """Leaves accelerators alone, unless jax has started already."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_platforms", "cpu")


def hide_xla_warnings() -> None:
    """Hides XLA's warnings, which are for XLA's developers, and those of installed jax plugins about missing hardware;
    errors still reach standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not any(map(os.path.exists, GPU_FILES)):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # else a traceback: no driver, no cuDNN
    if not has_tpu():  # libtpu asks for them, and writes to standard error if it finds none
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
