"""Hardware by name, whether it is there or not: `cpu:8`, `v5p:4x4x4`, `2*v5e:16x16`, `h100:2x8`.

A slice of TPUs or a cluster of GPUs that is not there has devices that compile and cannot run: the real compilers come
with their wheels (the extra `aot`)."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

from spmd_lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Tpu:
    """host: chips of one host along each dimension of the slice.  dims: of the slice.  most: chips along one of
    them."""

    host: tuple[int, ...]
    dims: int
    most: int


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA must know of a GPU to compile for it (vendor data sheets).  Bytes, bytes per second."""

    name: str
    capability: int
    cores: int
    fpus: int
    memory: int
    bandwidth: int
    l2: int
    shared: int
    ghz: float


TPUS = {
    "v5e": Tpu((2, 2), 2, 16),
    "v5p": Tpu((2, 2, 1), 3, 28),
    "v6e": Tpu((2, 2), 2, 16),
}
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 85_100_068_864, 2_039_040_000_000, 40 << 20, 164 << 10, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 84_942_979_072, 3_352_320_000_000, 50 << 20, 228 << 10, 1.98),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 9, 132, 128, 151_397_597_184, 4_800_000_000_000, 50 << 20, 228 << 10, 1.98),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """kind: 'cpu', or a key of TPUS or GPUS.  shape: chips along each dimension of a slice; hosts and GPUs of each; or
    the CPU's simulated devices.  slices: joined by a network alone."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def platform(self) -> str:
        return "cpu" if self.kind == "cpu" else "tpu" if self.kind in TPUS else "gpu"

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.slices * math.prod(self.shape)

    def __str__(self) -> str:
        times = f"{self.slices}*" if self.slices > 1 else ""
        return f"{times}{self.kind}:{'x'.join(map(str, self.shape))}"

    def devices(self) -> list[Any]:
        """Of jax, to compile for.  Those of `cpu` must have been simulated before jax started."""
        import jax

        try:
            return {"cpu": _cpus, "tpu": _tpus, "gpu": _gpus}[self.platform](self)
        except jax.errors.JaxRuntimeError as e:
            why = str(e).splitlines()[0]
            raise ConfigError(f"--topology {self}: its compiler knows no such devices: {why}. {_known()}") from e

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """Without a GPU nothing can be timed, and untimed XLA's own matrix products may find no tiles: cuBLAS's do."""
        return {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False} if self.platform == "gpu" else None


def parse(text: str) -> Topology:
    """Raises ConfigError for what no such hardware is called."""
    match = re.fullmatch(r"(?:([0-9]+)\*)?([a-z]\w*):([0-9]+(?:x[0-9]+)*)", text)
    if not match:
        raise ConfigError(f"--topology {text}: no topology is written like this. {_known()}")
    slices, kind, shape = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    dims = 1 if kind == "cpu" else TPUS[kind].dims if kind in TPUS else 2
    if kind not in ("cpu", *TPUS, *GPUS):
        raise ConfigError(f"--topology {text}: '{kind}' is not known. {_known()}")
    if len(shape) != dims or slices < 1 or 0 in shape or (kind not in TPUS and slices > 1):
        raise ConfigError(f"--topology {text}: {kind} does not come in this shape. {_known()}")
    if kind in TPUS:
        wrong = [f"{n} by {host}" for n, host in zip(shape, TPUS[kind].host, strict=True) if n > 1 and n % host]
        if wrong:
            raise ConfigError(f"--topology {text}: hosts of {kind} do not divide {', '.join(wrong)}. {_known()}")
        if max(shape) > TPUS[kind].most:
            raise ConfigError(f"--topology {text}: no slice of {kind} is {max(shape)} chips long. {_known()}")
    return Topology(kind, shape, slices)


def _known() -> str:
    three, two = ([k for k, tpu in TPUS.items() if tpu.dims == n] for n in (3, 2))
    chips = ", ".join([f"{k}:4x4x4" for k in three] + [f"{k}:16x16" for k in two])
    hosts = ", ".join(f"{k}:2x8" for k in GPUS)
    return (
        f"Known: cpu:8 (simulated devices); {chips} (chips of a TPU slice), 2*v5e:16x16 (two slices); {hosts} "
        f"(hosts x GPUs)."
    )


def installed(module: str) -> bool:
    """Also where a parent of it is missing, which find_spec alone would raise for."""
    parts = module.split(".")
    return all(importlib.util.find_spec(".".join(parts[: n + 1])) for n in range(len(parts)))


def _need(module: str, what: str) -> None:
    if not installed(module):
        raise ConfigError(
            f"compiling for {what} needs its compiler, and {module} is not installed. pip install 'spmd-lm[aot]', or "
            f"-e '.[aot]' in a clone."
        )


def _cpus(topology: Topology) -> list[Any]:
    import jax

    devices = jax.devices("cpu")
    assert len(devices) >= topology.size, (len(devices), topology.size)
    return devices[: topology.size]


def _tpus(topology: Topology) -> list[Any]:
    _need("libtpu", f"a {topology.kind}")
    # No host is asked what it is, and several of these may run beside each other.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    host = [min(n, chips) for n, chips in zip(topology.shape, TPUS[topology.kind].host, strict=True)]
    bounds = (*host, *[1] * (3 - len(host)))
    name = f"{topology.kind}:{'x'.join(map(str, topology.shape))}"
    described = topologies.get_topology_desc(
        platform="tpu",
        topology_name=name,
        chip_config_name="default",
        chips_per_host_bounds=bounds,
        num_slices=topology.slices,
    )
    return list(described.devices)


def _gpus(topology: Topology) -> list[Any]:
    _need("jax_plugins.xla_cuda13", f"a {topology.kind}")
    import jax
    from jax.experimental import topologies

    with contextlib.suppress(RuntimeError):  # there is no device to find, but the plugin is loaded
        jax.devices("cuda")
    hosts, gpus = topology.shape
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology.kind,
        topology=f"1x{hosts}x{gpus}",
        target_config=_target_config(GPUS[topology.kind]),
    )
    return list(described.devices)


def _target_config(gpu: Gpu) -> str:
    """XLA's GpuTargetConfigProto, as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {gpu.shared - (1 << 10)}
  shared_memory_per_core: {gpu.shared}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {gpu.capability} }}
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""
