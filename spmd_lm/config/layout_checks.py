"""Checks of how a model and a batch are laid out over devices: what must be divisible by what."""

import math
from collections.abc import Callable

from spmd_lm.config.schema import Model, Objective, Parallel, Remat, Run, RunConfig, Train
from spmd_lm.config.suggest import Problems, divisors, multiples, nearest


def tensor_parallel_divides(model: Model, parallel: Parallel, run: Run) -> Problems:
    degree = parallel.model
    divide_both = divisors(math.gcd(model.heads, model.mlp_dim))
    fits = [n for n in divide_both if _devices_are_divisible(run, parallel, n)] or [1]
    degrees = nearest("parallel.model", degree, fits)
    if model.heads % degree:
        # Of two equally near numbers of heads the larger: more heads cost nothing.
        heads = [n for n in divisors(model.width) if n % degree == 0]
        closest = min(heads, key=lambda n: (abs(n - model.heads), -n), default=None)
        yield (
            f"model.heads={model.heads} is not divisible by parallel.model={degree} (attention query, dim 'heads'). "
            f"Use {degrees}" + (f", or model.heads={closest}." if closest else ".")
        )
    if model.mlp_dim % degree:
        derived = "" if model.mlp_width else f" (4 x model.width={model.width})"
        yield (
            f"model.mlp_width={model.mlp_dim}{derived} is not divisible by parallel.model={degree} (MLP, dim 'mlp'). "
            f"Use {degrees}, or {nearest('model.mlp_width', model.mlp_dim, multiples(model.mlp_dim, degree))}."
        )


def tensor_parallel_divides_kv_heads(model: Model, parallel: Parallel) -> Problems:
    """Each key/value head serves the same number of query heads, and is on the same device as they are."""
    kv_heads, degree = model.kv_heads, parallel.model
    if kv_heads is None or (model.heads % kv_heads == 0 and kv_heads % degree == 0):
        return
    ways = []
    if model.heads % kv_heads:
        problem = f"does not divide model.heads={model.heads}"
    else:
        problem = f"is not divisible by parallel.model={degree} (attention key, dim 'heads')"
        ways.append(nearest("parallel.model", degree, divisors(kv_heads)))
    fits = [n for n in divisors(model.heads) if n % degree == 0]
    if fits:
        ways.append(nearest("model.kv_heads", kv_heads, fits))
    yield f"model.kv_heads={kv_heads} {problem}. Use {', or '.join(ways) or 'parallel.model=1'}."


def shared_layers_are_on_one_stage(model: Model, parallel: Parallel) -> Problems:
    if model.share_layers and parallel.pipe > 1:
        yield (
            f"model.share_layers=true with parallel.pipe={parallel.pipe}: every stage would need the shared layer. "
            "Use parallel.pipe=1, or model.share_layers=false."
        )


def tensor_parallel_divides_sequence(model: Model, parallel: Parallel, run: Run) -> Problems:
    degree = parallel.model
    if parallel.sequence and model.context % degree:
        fits = [n for n in divisors(model.context) if _devices_are_divisible(run, parallel, n)] or [1]
        yield (
            f"model.context={model.context} is not divisible by parallel.model={degree}, over which "
            f"parallel.sequence=true shards it. Use {nearest('parallel.model', degree, fits)}, "
            f"or {nearest('model.context', model.context, multiples(model.context, degree))}."
        )


def microbatches_divide_batch(train: Train, parallel: Parallel) -> Problems:
    if train.batch % parallel.microbatches:
        yield (
            f"train.batch={train.batch} is not divisible by parallel.microbatches={parallel.microbatches}. "
            f"Use {nearest('parallel.microbatches', parallel.microbatches, divisors(train.batch))}, "
            f"or {nearest('train.batch', train.batch, multiples(train.batch, parallel.microbatches))}."
        )


def stages_divide_layers(model: Model, parallel: Parallel, run: Run) -> Problems:
    stages, chunks = parallel.pipe, parallel.chunks
    if stages == 1 or model.layers % (stages * chunks) == 0:
        return
    by = f"parallel.pipe={stages}" + (f" x parallel.chunks={chunks}" if chunks > 1 else "")
    ways = []
    if chunks > 1 and model.layers % stages == 0:
        ways.append(nearest("parallel.chunks", chunks, divisors(model.layers // stages)))
    others = parallel.replica * parallel.model * max(parallel.data, 1)
    fits = [n for n in divisors(model.layers) if n == 1 or (chunks == 1 and run.simulate_devices % (n * others) == 0)]
    ways.append(nearest("parallel.pipe", stages, fits))
    ways.append(nearest("model.layers", model.layers, multiples(model.layers, stages * chunks)))
    yield f"model.layers={model.layers} is not divisible by {by}. Use {', or '.join(ways)}."


def remat_blocks_divide_chunk(model: Model, parallel: Parallel, remat: Remat) -> Problems:
    size = remat.block_size
    if size is None:
        return
    if remat.policy != "block":
        yield f"remat.block_size={size} with remat.policy={remat.policy} has no effect. Use remat.policy=block."
    chunks = parallel.pipe * parallel.chunks if parallel.pipe > 1 else 1
    layers = model.layers // chunks
    if model.layers % chunks == 0 and layers % size:
        where = f" in each of the pipeline's {chunks} chunks" if chunks > 1 else ""
        yield (
            f"remat.block_size={size} does not divide the {layers} of model.layers={model.layers}{where}. "
            f"Use {nearest('remat.block_size', size, divisors(layers))}."
        )


def schedule_has_chunks(parallel: Parallel) -> Problems:
    other = {"gpipe": "breadth_first", "1f1b": "interleaved"}.get(parallel.schedule)
    if parallel.pipe > 1 and parallel.chunks > 1 and other:
        yield (
            f"parallel.schedule={parallel.schedule} with parallel.chunks={parallel.chunks}: this schedule has one "
            f"chunk per stage; parallel.schedule={other} has several. "
            f"Use parallel.chunks=1, or {_settings_for_chunks(other, parallel)}."
        )


def _settings_for_chunks(schedule: str, parallel: Parallel) -> str:
    """This schedule, with a number of microbatches that suits several chunks per stage."""
    microbatches, stages = parallel.microbatches, parallel.pipe
    fits = max(microbatches, stages) if schedule == "breadth_first" else -(-microbatches // stages) * stages
    return f"parallel.schedule={schedule}" + (f" parallel.microbatches={fits}" if fits != microbatches else "")


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
    ways = [nearest("parallel.microbatches", microbatches, fits)] if fits else []
    yield (
        f"parallel.schedule={parallel.schedule} with parallel.microbatches={microbatches} and parallel.pipe={stages}: "
        f"{reason}. Use {', or '.join([*ways, 'parallel.chunks=1'])}."
    )


def layout_uses_all_devices(run: Run, parallel: Parallel, train: Train, objective: Objective) -> Problems:
    if run.simulate_devices:
        yield from check_layout(parallel, train, objective, run.simulate_devices)


def data_degree_is_not_zero(parallel: Parallel) -> Problems:
    if parallel.data == 0:
        yield "parallel.data=0 is not a number of devices. Use parallel.data=-1 for all that the other axes leave."


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
    if product != devices and ("data" in degrees or devices % product):
        terms = " x ".join(f"parallel.{axis}={n}" for axis, n in degrees.items() if n > 1) or "parallel.data=1"
        if "data" in degrees:
            problem = f"makes {product} devices, but there are {devices}"
        else:
            problem = f"does not divide {devices} devices"
        yield f"{terms} {problem}; every device must be used. Use {_nearest_layouts(degrees, devices)}."
        return
    yield from _batch_is_divisible(parallel, train, objective, devices // (parallel.pipe * parallel.model))


def _batch_is_divisible(parallel: Parallel, train: Train, objective: Objective, shards: int) -> Problems:
    """shards: of the batch, over `replica` and `data`."""
    rows, rest = divmod(train.batch, parallel.microbatches)
    choices = objective.rows_per_example
    if rest or rows % choices:  # other checks report these
        return
    if rows // choices % shards:
        fits = [n for n in divisors(train.batch) if train.batch // n % (shards * choices) == 0]
        ways = [nearest("parallel.microbatches", parallel.microbatches, fits)] if fits else []
        batches = multiples(train.batch, parallel.microbatches * shards * choices)
        ways.append(nearest("train.batch", train.batch, batches))
        what = f"{rows // choices} questions of objective.choices={choices}" if choices > 1 else f"{rows} sequences"
        yield (
            f"train.batch={train.batch} in parallel.microbatches={parallel.microbatches} gives {what}, "
            f"not divisible by parallel.replica={parallel.replica} x data={shards // parallel.replica}. "
            f"Use {', or '.join(ways)}."
        )


def _nearest_layouts(degrees: dict[str, int], devices: int) -> str:
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
    return ", or ".join(ways) or " ".join(f"parallel.{axis}={n}" for axis, n in data_only.items())


def _devices_are_divisible(run: Run, parallel: Parallel, model: int) -> bool:
    """Whether this degree of `model` leaves a whole number of devices to `data`.  It does if 0, not known yet."""
    return run.simulate_devices % (parallel.pipe * parallel.replica * model) == 0


CHECKS: tuple[Callable[..., Problems], ...] = (
    tensor_parallel_divides,
    tensor_parallel_divides_kv_heads,
    shared_layers_are_on_one_stage,
    tensor_parallel_divides_sequence,
    microbatches_divide_batch,
    stages_divide_layers,
    remat_blocks_divide_chunk,
    schedule_has_chunks,
    microbatches_suit_chunks,
    data_degree_is_not_zero,
    layout_uses_all_devices,
)
