"""Checks of how a model and a batch are laid out over devices: what must be divisible by what."""

import math
from collections.abc import Callable

from spmd_lm.config.schema import Model, Objective, Parallel, Remat, Run, RunConfig, Train
from spmd_lm.config.suggest import Problems, divisors, nearest, nearest_multiple, use


def tensor_parallel_divides(model: Model, parallel: Parallel, run: Run) -> Problems:
    degree = parallel.model
    fits_both = _fitting_degrees(math.gcd(model.heads, model.mlp_dim), parallel, run)
    if model.heads % degree:
        # Of two equally near numbers of heads the larger: more heads cost nothing.
        heads = [n for n in divisors(model.width) if n % degree == 0]
        closest = min(heads, key=lambda n: (abs(n - model.heads), -n), default=None)
        yield use(
            f"{model.heads=} is not divisible by {parallel.model=} (attention query, dim 'heads')",
            fits_both,
            f"model.heads={closest}" if closest else "",
        )
    if model.mlp_dim % degree:
        derived = "" if model.mlp_width else f" (4 x {model.width=})"
        yield use(
            f"model.mlp_width={model.mlp_dim}{derived} is not divisible by {parallel.model=} (MLP, dim 'mlp')",
            fits_both,
            nearest_multiple("model.mlp_width", model.mlp_dim, degree),
        )
    if parallel.sequence and model.context % degree:
        problem = f"not divisible by {parallel.model=}, over which parallel.sequence=true shards it"
        context = nearest_multiple("model.context", model.context, degree)
        yield use(f"{model.context=} is {problem}", _fitting_degrees(model.context, parallel, run), context)


def _fitting_degrees(size: int, parallel: Parallel, run: Run) -> str:
    """The nearest degrees of `model` that divide `size` and leave a whole number of devices to `data`.  All do if the
    number of devices is 0, not known yet."""
    others = parallel.pipe * parallel.replica
    fits = [n for n in divisors(size) if run.simulate_devices % (others * n) == 0]
    return nearest("parallel.model", parallel.model, fits or [1])


def tensor_parallel_divides_kv_heads(model: Model, parallel: Parallel) -> Problems:
    """Each key/value head serves the same number of query heads, and is on the same device as they are."""
    kv_heads, degree = model.kv_heads or model.heads, parallel.model
    fits = nearest("model.kv_heads", kv_heads, [n for n in divisors(model.heads) if n % degree == 0])
    if model.heads % kv_heads:
        yield use(f"{model.kv_heads=} does not divide {model.heads=}", fits or "parallel.model=1")
    elif model.kv_heads and kv_heads % degree:
        problem = f"{model.kv_heads=} is not divisible by {parallel.model=} (attention key, dim 'heads')"
        yield use(problem, nearest("parallel.model", degree, divisors(kv_heads)), fits)


def shared_layers_are_on_one_stage(model: Model, parallel: Parallel) -> Problems:
    if model.share_layers and parallel.pipe > 1:
        problem = f"model.share_layers=true with {parallel.pipe=}: every stage would need the shared layer"
        yield use(problem, "parallel.pipe=1", "model.share_layers=false")


def microbatches_divide_batch(train: Train, parallel: Parallel) -> Problems:
    if train.batch % parallel.microbatches:
        yield use(
            f"{train.batch=} is not divisible by {parallel.microbatches=}",
            nearest("parallel.microbatches", parallel.microbatches, divisors(train.batch)),
            nearest_multiple("train.batch", train.batch, parallel.microbatches),
        )


def stages_divide_layers(model: Model, parallel: Parallel, run: Run) -> Problems:
    stages, chunks = parallel.pipe, parallel.chunks
    if stages == 1 or model.layers % (stages * chunks) == 0:
        return
    others = parallel.replica * parallel.model * max(parallel.data, 1)
    fits = [n for n in divisors(model.layers) if n == 1 or (chunks == 1 and run.simulate_devices % (n * others) == 0)]
    per_stage, rest = divmod(model.layers, stages)
    yield use(
        f"{model.layers=} is not divisible by {parallel.pipe=}" + (f" x {parallel.chunks=}" if chunks > 1 else ""),
        "" if rest else nearest("parallel.chunks", chunks, divisors(per_stage)),
        nearest("parallel.pipe", stages, fits),
        nearest_multiple("model.layers", model.layers, stages * chunks),
    )


def remat_blocks_divide_chunk(model: Model, parallel: Parallel, remat: Remat) -> Problems:
    if remat.block_size is None:
        return
    if remat.policy != "block":
        yield use(f"{remat.block_size=} with {remat.policy=!s} has no effect", "remat.policy=block")
    chunks = parallel.pipe * parallel.chunks if parallel.pipe > 1 else 1
    layers, rest = divmod(model.layers, chunks)
    if not rest and layers % remat.block_size:
        where = f" in each of the pipeline's {chunks} chunks" if chunks > 1 else ""
        problem = f"{remat.block_size=} does not divide the {layers} of {model.layers=}{where}"
        yield use(problem, nearest("remat.block_size", remat.block_size, divisors(layers)))


def schedule_has_chunks(parallel: Parallel) -> Problems:
    microbatches, stages = parallel.microbatches, parallel.pipe
    if parallel.chunks == 1 or stages == 1 or parallel.schedule not in ("gpipe", "1f1b"):
        return
    if parallel.schedule == "gpipe":
        other, fits = "breadth_first", max(microbatches, stages)
    else:
        other, fits = "interleaved", -(-microbatches // stages) * stages
    more = f" parallel.microbatches={fits}" if fits != microbatches else ""
    problem = f"this schedule has one chunk per stage; parallel.schedule={other} has several"
    ways = "parallel.chunks=1", f"parallel.schedule={other}{more}"
    yield use(f"{parallel.schedule=!s} with {parallel.chunks=}: {problem}", *ways)


def microbatches_suit_chunks(parallel: Parallel, train: Train) -> Problems:
    """Schedules with several chunks per stage need enough microbatches to keep all stages busy."""
    microbatches, stages = parallel.microbatches, parallel.pipe
    if parallel.chunks == 1 or stages == 1:
        return
    if parallel.schedule == "interleaved" and microbatches % stages:
        reason, step = "microbatches run in groups of as many as there are stages", stages
    elif parallel.schedule == "breadth_first" and microbatches < stages:
        reason, step = "a stage would reach its next chunk before that chunk's input", 1
    else:
        return
    fits = [n for n in range(stages, train.batch + 1, step) if train.batch % n == 0]
    chosen = f"{parallel.schedule=!s} with {parallel.microbatches=} and {parallel.pipe=}"
    yield use(f"{chosen}: {reason}", nearest("parallel.microbatches", microbatches, fits), "parallel.chunks=1")


def data_degree_is_not_zero(parallel: Parallel) -> Problems:
    if parallel.data == 0:
        yield use("parallel.data=0 is not a number of devices", "parallel.data=-1 for all that the other axes leave")


def layout_uses_all_devices(run: Run, parallel: Parallel, train: Train, objective: Objective) -> Problems:
    if run.simulate_devices:
        yield from check_layout(parallel, train, objective, run.simulate_devices)


def check_devices(config: RunConfig, devices: int) -> list[str]:
    """What keeps `config` from running on exactly this many devices."""
    return [*check_layout(config.parallel, config.train, config.objective, devices)]


def check_layout(parallel: Parallel, train: Train, objective: Objective, devices: int) -> Problems:
    degrees = {axis: getattr(parallel, axis) for axis in ("pipe", "replica", "data", "model")}
    if degrees["data"] == 0:
        return  # data_degree_is_not_zero reports it
    if degrees["data"] == -1:
        del degrees["data"]
    product = math.prod(degrees.values())
    if "data" in degrees and product != devices:
        problem = f"makes {product} devices, but there are {devices}"
    elif devices % product:
        problem = f"does not divide {devices} devices"
    else:
        yield from _batch_is_divisible(parallel, train, objective, devices // (parallel.pipe * parallel.model))
        return
    terms = " x ".join(f"parallel.{axis}={n}" for axis, n in degrees.items() if n > 1) or "parallel.data=1"
    yield use(f"{terms} {problem}; every device must be used", *_nearest_layouts(degrees, devices))


def _batch_is_divisible(parallel: Parallel, train: Train, objective: Objective, shards: int) -> Problems:
    """shards: of the batch, over `replica` and `data`."""
    rows, rest = divmod(train.batch, parallel.microbatches)
    choices = objective.rows_per_example
    if rest or rows % choices or rows // choices % shards == 0:  # other checks report the first two
        return
    fits = [n for n in divisors(train.batch) if train.batch // n % (shards * choices) == 0]
    what = f"{rows // choices} questions of objective.{choices=}" if choices > 1 else f"{rows} sequences"
    by = f"{parallel.replica=} x data={shards // parallel.replica}"
    yield use(
        f"{train.batch=} in {parallel.microbatches=} gives {what}, not divisible by {by}",
        nearest("parallel.microbatches", parallel.microbatches, fits),
        nearest_multiple("train.batch", train.batch, parallel.microbatches * shards * choices),
    )


def _nearest_layouts(degrees: dict[str, int], devices: int) -> list[str]:
    """For each axis, the nearest degrees that fix the layout alone; if none does, data parallelism only.

    degrees: without `data` if it takes what the others leave."""
    ways = []
    for axis, degree in degrees.items():
        others = math.prod(degrees.values()) // degree
        fits = [n for n in divisors(devices) if devices % (others * n) == 0]
        if "data" in degrees:
            fits = [n for n in fits if others * n == devices]
        if fits and (degree > 1 or axis == "data"):
            ways.append(nearest(f"parallel.{axis}", degree, fits) + (" or -1" if axis == "data" else ""))
    data_only = {axis: devices if axis == "data" else 1 for axis, n in degrees.items() if n > 1 or axis == "data"}
    return ways or [" ".join(f"parallel.{axis}={n}" for axis, n in data_only.items())]


CHECKS: tuple[Callable[..., Problems], ...] = (
    tensor_parallel_divides,
    tensor_parallel_divides_kv_heads,
    shared_layers_are_on_one_stage,
    microbatches_divide_batch,
    stages_divide_layers,
    remat_blocks_divide_chunk,
    schedule_has_chunks,
    microbatches_suit_chunks,
    data_degree_is_not_zero,
    layout_uses_all_devices,
)
