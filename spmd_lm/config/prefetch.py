"""Prefetch: which runs gather weights for a layer while the layer before it runs."""

from collections.abc import Iterator

from spmd_lm.config.schema import Model, Parallel, Remat, RunConfig
from spmd_lm.config.suggest import Obstacle


def obstacles(model: Model, parallel: Parallel, remat: Remat) -> Iterator[Obstacle]:
    """Whatever keeps a run from gathering layers one by one, in a loop."""
    chunks = parallel.pipe * (parallel.chunks if parallel.pipe > 1 else 1)
    if parallel.zero < 3:
        yield Obstacle(f"{parallel.zero=}", "only ZeRO-3 gathers layer by layer", "parallel.zero=3")
    if parallel.reduce_once:
        yield Obstacle("parallel.reduce_once=true", "all layers are gathered at once", "parallel.reduce_once=false")
    if parallel.pipe > 1 and parallel.schedule == "breadth_first":
        yield Obstacle(f"{parallel.schedule=!s}", "a chunk is gathered as a whole", "parallel.schedule=1f1b")
    if model.share_layers:
        yield Obstacle("model.share_layers=true", "there is one layer to gather", "model.share_layers=false")
    if not model.scan:
        yield Obstacle("model.scan=false", "there is no loop over layers", "model.scan=true")
    if remat.policy == "block":
        yield Obstacle("remat.policy=block", "a layer is gathered for its block alone", "remat.policy=full")
    if model.layers // chunks < 2:
        yield Obstacle(f"{model.layers=}", "no layer runs before another one in a loop", "more layers, or fewer stages")


def prefetches(config: RunConfig, platform: str) -> bool:
    """Whether `config` does so on this platform.

    `auto` does on GPUs alone: on a CPU nothing overlaps, and on a TPU nothing does without options that no hardware has
    run.  Nor does it in a pipeline, whose conditionals copy what they carry: docs/performance.md."""
    p = config.parallel
    wanted = p.prefetch == "on" or (p.prefetch == "auto" and platform == "gpu" and p.pipe == 1)
    return wanted and not any(obstacles(config.model, p, config.remat))
