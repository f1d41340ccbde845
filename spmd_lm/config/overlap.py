"""Overlap of communication with computation: weights gathered a layer ahead (parallel.prefetch), and collective matmuls
(parallel.collective_matmul)."""

from collections.abc import Iterator

from spmd_lm.config.adapters import Adapter, NoAdapter
from spmd_lm.config.schema import Model, Parallel, Precision, Remat, RunConfig
from spmd_lm.config.suggest import Obstacle, nearest_multiple


def prefetch_obstacles(model: Model, parallel: Parallel, remat: Remat) -> Iterator[Obstacle]:
    """Obstacles to gathering a layer, or a chunk of a breadth-first pipeline, while the one before it runs."""
    chunks = parallel.pipe * (parallel.chunks if parallel.pipe > 1 else 1)
    if parallel.zero < 3:
        yield Obstacle(f"{parallel.zero=}", "only ZeRO-3 gathers layer by layer", "parallel.zero=3")
    if parallel.reduce_once:
        yield Obstacle("parallel.reduce_once=true", "all layers are gathered at once", "parallel.reduce_once=false")
    if model.share_layers:
        yield Obstacle("model.share_layers=true", "there is one layer to gather", "model.share_layers=false")
    if parallel.pipe > 1 and parallel.schedule == "breadth_first":
        if parallel.chunks == 1:
            yield Obstacle(f"{parallel.chunks=}", "there is no next chunk to gather", "parallel.chunks=2")
        if parallel.run_idle_stages:
            reason = "a chunk's last microbatch would run twice"
            yield Obstacle("parallel.run_idle_stages=true", reason, "parallel.run_idle_stages=false")
        return
    if model.scan is False:
        yield Obstacle("model.scan=false", "there is no loop over layers", "model.scan=true")
    if remat.policy == "block":
        yield Obstacle("remat.policy=block", "a layer is gathered for its block alone", "remat.policy=full")
    if model.layers // len(model.kinds) // chunks < 2:
        yield Obstacle(f"{model.layers=}", "no layer runs before another one in a loop", "more layers, or fewer stages")


def prefetches(config: RunConfig, platform: str) -> bool:
    """The resolution of parallel.prefetch.  `auto` prefetches on GPUs only, and not in pipelines: a CPU overlaps
    nothing, a TPU only with options never tried on hardware, 1F1B's conditionals copy their carries, and breadth-first
    would hold two chunks (docs/performance.md)."""
    p = config.parallel
    wanted = p.prefetch == "on" or (p.prefetch == "auto" and platform == "gpu" and p.pipe == 1)
    return wanted and not any(prefetch_obstacles(config.model, p, config.remat))


def collective_matmul_obstacles(
    model: Model, parallel: Parallel, adapter: Adapter | NoAdapter, precision: Precision
) -> Iterator[Obstacle]:
    """Obstacles to collective matmul."""
    if parallel.model == 1:
        yield Obstacle(f"{parallel.model=}", "no product needs another device's shards", "parallel.model=2")
    if model.module:
        yield Obstacle("model.module", "its products are not this package's", "model.module=null")
    if adapter.kind != "none":
        yield Obstacle(f"adapter.kind={adapter.kind}", "its products do not run in parts", "adapter.kind=none")
    if chosen := precision.few_bits:
        yield Obstacle(chosen, "backward would keep the rounded matrices", f"{chosen.partition('=')[0]}=none")
    if parallel.partitioner == "types":
        yield Obstacle("parallel.partitioner=types", "XLA inserts the collectives", "parallel.partitioner=manual")
    if parallel.pipe > 1 and not parallel.run_idle_stages:
        reason = "a permute would wait for stages that take another branch"
        yield Obstacle(f"{parallel.pipe=}", reason, "parallel.run_idle_stages=true")
    if not parallel.sequence and model.context % parallel.model:
        alternative = nearest_multiple(f"{model.context=}", parallel.model)
        yield Obstacle(f"{model.context=}", f"{parallel.model=} does not divide it", alternative)


LEAST_TOKENS = 2048
"""Least tokens per matmul under `auto`: with fewer, an H100's step gains nothing (docs/performance.md)."""


COLLECTIVE_MATMUL_DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H200 141GB HBM3e")
"""jax's device kinds whose steps collective matmuls shorten, by the schedules of compiled steps."""


BRANCHES = ("attention", "mlp")
"""Branches of a layer, by their keys."""


def collective_matmul_branches(config: RunConfig, platform: str, device_kind: str, tokens: int) -> tuple[str, ...]:
    """Branches that run collective matmuls on this kind of device.
    tokens: per microbatch and device.

    On a TPU only the MLP: in attention, which needs its tokens in order, copying shards into place takes 2% more
    compute, and the estimated step is less than 1% shorter (docs/adr/0021).

    `auto` chooses them on H100 and H200, within a host, with the sequence sharded, and outside pipelines, whose
    schedules were not compared.  Steps are also shorter on v4, and on v5p with options never tried on hardware; they
    are longer on A100, B200 and v5e (docs/performance.md)."""
    p = config.parallel
    helps = device_kind in COLLECTIVE_MATMUL_DEVICES and tokens >= LEAST_TOKENS * p.model
    helps = helps and p.sequence and p.pipe == 1 and not p.model_across_hosts
    wanted = p.collective_matmul == "on" or (p.collective_matmul == "auto" and helps)
    if not wanted or any(collective_matmul_obstacles(config.model, p, config.adapter, config.precision)):
        return ()
    if config.model.mixtures:  # whose matmuls are of slots, not of a row's tokens
        return ("attention",)
    return ("mlp",) if platform == "tpu" else BRANCHES
