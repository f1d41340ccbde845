"""Sets up a notebook in its first cell: installs spmd_lm for this machine's devices, then starts jax on them.

It runs before anything is installed, in Google Colab beside an older jax, so at first it imports only the standard
library.  The kernel keeps imported modules: if a package is replaced later, only a new kernel has the new one."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import NamedTuple

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.devices import hide_xla_warnings, simulate_devices
from spmd_lm.runtime.programs import ask

CUDA_13_DRIVER, CUDA_13_CAPABILITY = 580, 7.5  # NVIDIA's oldest driver and GPU for CUDA 13

DRIVER_SECONDS = 30.0  # for nvidia-smi, which takes seconds with eight GPUs

PCI_DEVICES = Path("/sys/bus/pci/devices")
# jax's devices of a TPU chip, by its PCI id: v2 and v3, v4, v5p, v5e, v6e, 7x (jax/_src/hardware_utils.py).
TPU_DEVICES = {"0x0027": 2, "0x005e": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}

RESTART = "Restart the runtime (Colab: Runtime > Restart session; else restart the kernel), and run this cell again."


class Accelerators(NamedTuple):
    platform: str
    devices: int
    extra: str  # the extra in pyproject.toml that installs jax for them


def set_up_notebook(devices: int = 8) -> None:
    """Installs spmd_lm, if missing, and starts jax on this machine's TPU or GPUs; if there are fewer than `devices`, on
    as many simulated devices.  Raises ConfigError if this kernel has to be restarted first, or if jax finds other
    devices than the machine has."""
    found = find_accelerators()
    simulated = found is None or found.devices < devices
    extra = found.extra if found and not simulated else ""
    if list(missing_requirements(extra)):
        install(Path(__file__).parents[2], extra)
    if missing := list(missing_requirements(extra)):
        raise ConfigError(f"pip has installed spmd_lm, and yet there is no {', '.join(missing)}. {RESTART}")
    if replaced := list(replaced_modules()):
        raise ConfigError(f"This kernel had imported {', '.join(replaced)}, which a newer one has replaced. {RESTART}")
    start_jax(None if simulated else found, devices)
    if simulated and found:
        print(f"Not used: {found.devices} {found.platform.upper()} device(s), fewer than {devices}.")


def find_accelerators() -> Accelerators | None:
    """The TPU chips or NVIDIA GPUs of this machine, found without jax."""
    tpu_devices = 0
    for vendor in PCI_DEVICES.glob("*/vendor"):
        if vendor.read_text().strip() == "0x1ae0":  # Google's
            tpu_devices += TPU_DEVICES.get(vendor.with_name("device").read_text().strip(), 0)
    if tpu_devices:
        return Accelerators("tpu", tpu_devices, "tpu")
    answer = ask_nvidia_smi()
    gpus = re.findall(r"^ *(\d{1,9})(?:\.\d{1,9})* *, *(\d{1,9}(?:\.\d{1,9})?) *$", answer, re.MULTILINE | re.ASCII)
    if not gpus:
        if answer.strip():
            print(f"Not understood, so that GPUs are not used: nvidia-smi says {answer.strip()[:80]!r}.")
        return None
    new = all(int(driver) >= CUDA_13_DRIVER and float(gpu) >= CUDA_13_CAPABILITY for driver, gpu in gpus)
    # CUDA 12 runs on new drivers too: an existing plugin for it, as in Colab, is upgraded, not joined by another.
    return Accelerators("gpu", len(gpus), "gpu" if new and not is_installed("jax-cuda12-plugin") else "gpu12")


def ask_nvidia_smi() -> str:
    """A line `driver, compute capability` for each GPU; '' on failure, as without a GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        code, answer = ask(query, DRIVER_SECONDS)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            print(f"Not used: GPUs, of which nvidia-smi does not tell: {error.strerror}.")
        return ""
    return "" if code else answer


def is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def missing_requirements(extra: str = "") -> Iterator[str]:
    """Requirements of spmd_lm with this extra that are not installed in a suitable version."""
    if not (is_installed("spmd-lm") and is_installed("packaging")):
        yield "spmd-lm"
        return
    if extra and extra not in metadata("spmd-lm").get_all("Provides-Extra", []):
        yield f"spmd-lm[{extra}]"  # installed before there was this extra
    from packaging.requirements import Requirement

    wanted = [("spmd-lm", extra)]
    while wanted:
        distribution, extra = wanted.pop()
        for each in map(Requirement, requires(distribution) or []):
            if each.marker and not each.marker.evaluate({"extra": extra}):
                continue
            if not is_installed(each.name) or version(each.name) not in each.specifier:
                yield str(each)
            else:
                wanted += [(each.name, of_it) for of_it in each.extras]


def install(root: Path, extra: str) -> None:
    """Installs the repository's package into this kernel's environment, quietly except for pip's errors."""
    what = f"{root}[{extra}]" if extra else str(root)
    print(f"installing {what}, which takes a minute or two", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", what]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"pip could not install {what}:\n{done.stdout}{done.stderr}")
    importlib.invalidate_caches()


def replaced_modules() -> Iterator[str]:
    """Imported modules whose installed version differs."""
    for name in ("jax", "jaxlib", "flax", "ml_dtypes", "numpy", "matplotlib", "pydantic"):
        loaded = getattr(sys.modules.get(name), "__version__", None)
        if loaded and is_installed(name) and loaded != version(name):
            yield f"{name} {loaded}"


def start_jax(accelerators: Accelerators | None, devices: int) -> None:
    """Starts jax on these, or on simulated devices, and prints which."""
    hide_xla_warnings()
    if accelerators is None:
        simulate_devices(devices)
    import jax

    platform = accelerators.platform if accelerators else "cpu"
    if jax.default_backend() != platform:
        raise ConfigError(f"This machine has a {platform}, and jax runs on {jax.default_backend()}. {RESTART}")
    kind = jax.devices()[0].device_kind if accelerators else "simulated by the CPU"
    print(f"jax {jax.__version__} on {jax.device_count()} devices: {kind}")
