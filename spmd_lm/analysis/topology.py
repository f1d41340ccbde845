"""Hardware by name, present or not: `cpu:8`, `v5p:4x4x4`, `2*v5e:16x16`, `h100:2x8`.

The devices of absent hardware can be compiled for, not run on: the extra `aot` brings the real compilers."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.errors import ConfigError
from spmd_lm.runtime.compiler_workarounds import deepen_compiler_stacks


class Tpu(NamedTuple):
    """A kind of TPU.

    kind: jax's device_kind.
    host_bounds: chips of one host along each dimension of a slice.
    max_length: most chips along one dimension.
    libtpu: libtpu's name for it, if it differs.
    chip_config: libtpu's configuration of a chip.
    devices_per_chip: jax's devices."""

    kind: str
    host_bounds: tuple[int, ...]
    max_length: int
    libtpu: str = ""
    chip_config: str = "default"
    devices_per_chip: int = 1


class Gpu(NamedTuple):
    """Sizes that XLA needs to compile for a GPU (vendor data sheets), in bytes; hardware.yaml has the speeds."""

    name: str
    capability: str
    cores: int
    fpus: int
    memory: int
    l2: int
    shared: int
    ghz: float
    threads: int = 2048  # per core


TPUS = {
    "v4": Tpu("TPU v4", (2, 2, 1), 16, chip_config="megacore"),  # one device a chip, as on a Cloud TPU VM
    "v5p": Tpu("TPU v5", (2, 2, 1), 28),
    "v5e": Tpu("TPU v5 lite", (2, 2), 16),
    "v6e": Tpu("TPU v6 lite", (2, 2), 16),
    "7x": Tpu("TPU7x", (2, 2, 1), 24, libtpu="tpu7x", devices_per_chip=2),
}
GPUS = {
    "t4": Gpu("Tesla T4", "7.5", 40, 64, 15_843_721_216, 4 << 20, 64 << 10, 1.59, 1024),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 64, 85_100_068_864, 40 << 20, 164 << 10, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 128, 84_942_979_072, 50 << 20, 228 << 10, 1.98),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", "9.0", 132, 128, 150_109_106_995, 50 << 20, 228 << 10, 1.98),
    "b200": Gpu("NVIDIA B200", "10.0", 148, 128, 191_510_872_064, 126 << 20, 228 << 10, 1.965),
    "gb200": Gpu("NVIDIA GB200", "10.0", 152, 128, 197_897_748_480, 129 << 20, 228 << 10, 2.062),
}
MOST_DEVICES = 2**16

KNOWN = (
    "Known: cpu:8 (simulated devices); "
    + ", ".join(f"{kind}:{'4x4x4' if len(tpu.host_bounds) == 3 else '16x16'}" for kind, tpu in TPUS.items())
    + " (chips of a TPU slice), 2*v5e:16x16 (two slices); "
    + ", ".join(f"{kind}:2x8" for kind in GPUS)
    + " (hosts, or racks of NVLink, x GPUs)."
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hardware by name.

    kind: 'cpu', or a key of TPUS or GPUS.
    shape: chips along each dimension of a TPU slice, (hosts, GPUs per host), or (simulated CPU devices,).
    slices: TPU slices, connected by the network of their hosts."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def platform(self) -> str:
        if self.kind == "cpu":
            return "cpu"
        return "tpu" if self.kind in TPUS else "gpu"

    @property
    def device_kind(self) -> str:
        """jax's device_kind."""
        if self.kind in TPUS:
            return TPUS[self.kind].kind
        return GPUS[self.kind].name if self.kind in GPUS else self.kind

    @property
    def domain(self) -> int:
        """Number of devices that share fast links: a TPU slice's, a GPU host's, or all that a CPU simulates."""
        return self.shape[1] if self.platform == "gpu" else self.size // self.slices

    @property
    def host(self) -> int | None:
        """GPUs per host; None for other devices."""
        return self.shape[1] if self.platform == "gpu" else None

    @property
    def size(self) -> int:
        """Number of devices."""
        tpu = TPUS.get(self.kind)
        return self.slices * math.prod(self.shape) * (tpu.devices_per_chip if tpu else 1)

    @property
    def simulated(self) -> int:
        """CPU devices to simulate; 0 for accelerators."""
        return self.size if self.platform == "cpu" else 0

    def __str__(self) -> str:
        slices = f"{self.slices}*" if self.slices > 1 else ""
        return f"{slices}{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def lacks_compiler(self) -> str | None:
        """Text on a missing compiler for it, and how to install that; None if nothing is missing."""
        compiler = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}.get(self.platform)
        if compiler is None or is_installed(compiler):
            return None
        return (
            f"--topology {self}: needs its compiler, and {compiler} is not installed. pip install 'spmd-lm[aot]', "
            f"or -e '.[aot]' in a clone."
        )

    def devices(self) -> list[Any]:
        """jax devices to compile for.  For `cpu` they must be simulated before jax starts."""
        import jax
        from jax.experimental import topologies

        if self.platform == "cpu":
            devices = jax.devices("cpu")
            assert len(devices) >= self.size, (len(devices), self.size)
            return devices[: self.size]
        if problem := self.lacks_compiler:
            raise ConfigError(problem)
        try:
            options = _tpu_options(self) if self.platform == "tpu" else _gpu_options(self)
            return list(topologies.get_topology_desc(**options).devices)
        except jax.errors.JaxRuntimeError as e:
            reason = str(e).splitlines()[0]
            raise ConfigError(f"--topology {self}: its compiler does not know these devices: {reason}. {KNOWN}") from e


def parse_topology(text: str) -> Topology:
    """The topology that `text` names.  Raises ConfigError if no such hardware exists."""
    if not isinstance(text, str):
        raise ConfigError(f"a topology is a text, as 'h100:2x8', not {text!r:.40}. {KNOWN}")
    match = re.fullmatch(r"(?:([0-9]{1,18})\*)?(\w+):([0-9]{1,18}(?:x[0-9]{1,18}){,3})", text)
    if not match:
        raise ConfigError(f"--topology {text!r:.40}: not the form of a topology. {KNOWN}")
    topology = Topology(kind=match[2], shape=tuple(map(int, match[3].split("x"))), slices=int(match[1] or 1))
    if problem := _problem(topology):
        raise ConfigError(f"--topology {text}: {problem}. {KNOWN}")
    return topology


def _problem(topology: Topology) -> str | None:
    """The reason why no such hardware exists; None if it does."""
    kind, shape, tpu = topology.kind, topology.shape, TPUS.get(topology.kind)
    if kind not in ("cpu", *TPUS, *GPUS):
        return f"'{kind}' is not known"
    dims = len(tpu.host_bounds) if tpu else {"cpu": 1}.get(kind, 2)
    if len(shape) != dims or 0 in shape or topology.slices < 1 or (topology.slices > 1 and not tpu):
        return f"{kind} does not come in this shape"
    if tpu:
        undivided = [f"{n} by {host}" for n, host in zip(shape, tpu.host_bounds, strict=True) if n > 1 and n % host]
        if undivided:
            return f"hosts of {kind} do not divide {', '.join(undivided)}"
        if max(shape) > tpu.max_length:
            return f"no slice of {kind} is {max(shape)} chips long"
    if topology.size > MOST_DEVICES:
        return f"{topology.size:,} devices, of at most {MOST_DEVICES:,}"
    return None


def is_installed(module: str) -> bool:
    """True if a module can be imported.  find_spec would raise if its parent package is missing."""
    parts = module.split(".")
    return all(importlib.util.find_spec(".".join(parts[: n + 1])) for n in range(len(parts)))


def _tpu_options(topology: Topology) -> dict[str, Any]:
    """Arguments of get_topology_desc."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not query a metadata server about this host
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes may compile side by side
    deepen_compiler_stacks()
    tpu = TPUS[topology.kind]
    host = [min(n, chips) for n, chips in zip(topology.shape, tpu.host_bounds, strict=True)]
    return {
        "platform": "tpu",
        "topology_name": str(dataclasses.replace(topology, kind=tpu.libtpu or topology.kind, slices=1)),
        "chip_config_name": tpu.chip_config,
        "chips_per_host_bounds": (*host, *[1] * (3 - len(host))),
        "num_slices": topology.slices,
    }


def _gpu_options(topology: Topology) -> dict[str, Any]:
    """Arguments of get_topology_desc.  target_config: XLA's GpuTargetConfigProto in text format.  Without a runtime's
    version XLA makes bfloat16 of fp8 matmuls."""
    import jax

    with contextlib.suppress(RuntimeError):  # finds no device, but loads the plugin
        jax.devices("cuda")
    hosts, gpus = topology.shape
    gpu = GPUS[topology.kind]
    major, minor = gpu.capability.split(".")
    hardware = find_hardware(gpu.name)
    assert hardware and hardware.memory, gpu.name
    target_config = f"""
gpu_device_info {{
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {gpu.shared} shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {gpu.shared - (1 << 10)}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus} clock_rate_ghz: {gpu.ghz}
  memory_bandwidth: {round(hardware.memory.bandwidth)} l2_cache_size: {gpu.l2} device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  dnn_version: "9.10.0" runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""
    shape = f"1x{hosts}x{gpus}"
    return {"platform": "cuda", "topology_name": topology.kind, "topology": shape, "target_config": target_config}
