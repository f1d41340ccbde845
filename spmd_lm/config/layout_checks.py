"""Checks of how a model and a batch lie on devices: what must divide what."""

import math
from collections.abc import Callable

from spmd_lm.config.numbers import Messages, divisors, multiples, nearest
from spmd_lm.config.schema import Model, Objective, Parallel, Remat, Run, RunConfig, Train


def tensor_parallel_divides(model: Model, parallel: Parallel, run: Run) -> Messages:
    degree = parallel.model
    both = divisors(math.gcd(model.heads, model.mlp_dim))
    fits = [n for n in both if _fills(parallel, n, run.simulate_devices)] or [1]
    degrees = nearest("parallel.model", degree, fits)
    if model.heads % degree:
        # Of two numbers of heads as near, the larger: more heads cost nothing.
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


def keys_serve_queries(model: Model, parallel: Parallel) -> Messages:
    """Heads of keys and values, each for as many of queries, and on one device with them."""
    groups, degree = model.kv_heads, parallel.model
    if groups is None or model.heads % groups == 0 == groups % degree:
        return
    fits = [n for n in divisors(model.heads) if n % degree == 0]
    ways = [nearest("model.kv_heads", groups, fits)]
    if model.heads % groups:
        what = f"does not divide model.heads={model.heads}"
    else:
        what = f"is not divisible by parallel.model={degree} (attention key, dim 'heads')"
        ways.insert(0, nearest("parallel.model", degree, divisors(groups)))
    yield f"model.kv_heads={groups} {what}. Use {', or '.join(filter(None, ways)) or 'parallel.model=1'}."


def shared_layers_are_on_one_stage(model: Model, parallel: Parallel) -> Messages:
    if model.share_layers and parallel.pipe > 1:
        yield (
            f"model.share_layers=true with parallel.pipe={parallel.pipe}: every stage would need the one layer. "
            "Use parallel.pipe=1, or model.share_layers=false."
        )


def sequence_divides(model: Model, parallel: Parallel, run: Run) -> Messages:
    degree = parallel.model
    if parallel.sequence and model.context % degree:
        fits = [n for n in divisors(model.context) if _fills(parallel, n, run.simulate_devices)] or [1]
        yield (
            f"model.context={model.context} is not divisible by parallel.model={degree}, over which "
            f"parallel.sequence=true splits it. Use {nearest('parallel.model', degree, fits)}, "
            f"or {nearest('model.context', model.context, multiples(model.context, degree))}."
        )


def microbatches_divide_batch(train: Train, parallel: Parallel) -> Messages:
    if train.batch % parallel.microbatches:
        yield (
            f"train.batch={train.batch} is not divisible by parallel.microbatches={parallel.microbatches}. "
            f"Use {nearest('parallel.microbatches', parallel.microbatches, divisors(train.batch))}, "
            f"or {nearest('train.batch', train.batch, multiples(train.batch, parallel.microbatches))}."
        )


def stages_have_layers(model: Model, parallel: Parallel, run: Run) -> Messages:
    stages, chunks = parallel.pipe, parallel.chunks
    parts = stages * chunks
    if stages == 1 or model.layers % parts == 0:
        return
    by = f"parallel.pipe={stages}" + (f" x parallel.chunks={chunks}" if chunks > 1 else "")
    ways = []
    if chunks > 1 and model.layers % stages == 0:
        ways.append(nearest("parallel.chunks", chunks, divisors(model.layers // stages)))
    others = parallel.replica * parallel.model * max(parallel.data, 1)
    fits = [n for n in divisors(model.layers) if n == 1 or (chunks == 1 and run.simulate_devices % (n * others) == 0)]
    ways.append(nearest("parallel.pipe", stages, fits))
    ways.append(nearest("model.layers", model.layers, multiples(model.layers, parts)))
    yield f"model.layers={model.layers} is not divisible by {by}. Use {', or '.join(ways)}."


def kept_layers_divide_a_chunk(model: Model, parallel: Parallel, remat: Remat) -> Messages:
    every = remat.block_size
    if every and remat.policy != "block":
        yield f"remat.block_size={every} with remat.policy={remat.policy} keeps nothing. Use remat.policy=block."
    parts = parallel.pipe * (parallel.chunks if parallel.pipe > 1 else 1)
    if every and model.layers % parts == 0 and (together := model.layers // parts) % every:
        fits = nearest("remat.block_size", every, divisors(together))
        of = f" on each of {parts} parts of a pipeline" if parts > 1 else ""
        yield f"remat.block_size={every} does not divide the {together} of model.layers={model.layers}{of}. Use {fits}."


def chunks_have_a_schedule(parallel: Parallel) -> Messages:
    instead = {"gpipe": "breadth_first", "1f1b": "interleaved"}.get(parallel.schedule)
    if parallel.pipe > 1 and parallel.chunks > 1 and instead:
        yield (
            f"parallel.schedule={parallel.schedule} with parallel.chunks={parallel.chunks}: it has one chunk a stage; "
            f"parallel.schedule={instead} has several. Use parallel.chunks=1, or {_chunked(instead, parallel)}."
        )


def _chunked(schedule: str, parallel: Parallel) -> str:
    """Settings for several chunks a stage."""
    m, p = parallel.microbatches, parallel.pipe
    fits = m % p == 0 if schedule == "interleaved" else m >= p
    more = "" if fits else f" parallel.microbatches={-(-m // p) * p if schedule == 'interleaved' else p}"
    return f"parallel.schedule={schedule}{more}"


def microbatches_fill_stages(parallel: Parallel, train: Train) -> Messages:
    """What several chunks a stage need of their schedule."""
    m, p = parallel.microbatches, parallel.pipe
    if parallel.chunks == 1 or p == 1:
        return
    if parallel.schedule == "interleaved" and m % p:
        why, fits = "microbatches go round in groups of as many as there are stages", range(p, train.batch + 1, p)
    elif parallel.schedule == "breadth_first" and m < p:
        why, fits = "a chunk would come round before there is anything for it", range(p, train.batch + 1)
    else:
        return
    ways = [nearest("parallel.microbatches", m, [n for n in fits if train.batch % n == 0]), "parallel.chunks=1"]
    yield (
        f"parallel.schedule={parallel.schedule} with parallel.microbatches={m} and parallel.pipe={p}: {why}. "
        f"Use {', or '.join(filter(None, ways))}."
    )


def layout_fills_devices(run: Run, parallel: Parallel, train: Train, objective: Objective) -> Messages:
    if run.simulate_devices:
        yield from layout(parallel, train, objective, run.simulate_devices)


def data_is_a_degree(parallel: Parallel) -> Messages:
    if parallel.data == 0:
        yield "parallel.data=0 is no number of devices. Use parallel.data=-1 for all that the other axes leave."


def check_devices(config: RunConfig, devices: int) -> list[str]:
    """What keeps `config` from running on exactly this many devices."""
    return [*layout(config.parallel, config.train, config.objective, devices)]


def layout(parallel: Parallel, train: Train, objective: Objective, devices: int) -> Messages:
    degrees = {axis: getattr(parallel, axis) for axis in ("pipe", "replica", "data", "model")}
    if 0 in degrees.values():
        return  # data_is_a_degree says so
    others = parallel.pipe * parallel.replica * parallel.model
    if degrees["data"] == -1:
        del degrees["data"]
    product = math.prod(degrees.values())
    if product != devices and ("data" in degrees or devices % product):
        terms = " x ".join(f"parallel.{axis}={n}" for axis, n in degrees.items() if n > 1) or "parallel.data=1"
        makes = f"makes {product} devices, not the {devices} there are"
        what = makes if "data" in degrees else f"does not divide {devices} devices"
        yield f"{terms} {what}; every device must be used. Use {_layouts(degrees, devices)}."
        return
    shards = parallel.replica * (devices // others)
    rows, rest = divmod(train.batch, parallel.microbatches)
    together = objective.rows_of_one
    if rest == 0 and rows % together == 0 and rows // together % shards:  # with a rest, other checks have said so
        fits = [n for n in divisors(train.batch) if train.batch // n % (shards * together) == 0]
        smaller = f"{nearest('parallel.microbatches', parallel.microbatches, fits)}, or " if fits else ""
        batches = multiples(train.batch, parallel.microbatches * shards * together)
        what = f"{rows // together} questions of objective.choices={together}" if together > 1 else f"{rows} sequences"
        yield (
            f"train.batch={train.batch} in parallel.microbatches={parallel.microbatches} gives {what}, "
            f"not divisible by parallel.replica={parallel.replica} x data={shards // parallel.replica}. "
            f"Use {smaller}{nearest('train.batch', train.batch, batches)}."
        )


def _layouts(degrees: dict[str, int], devices: int) -> str:
    """For each axis, the nearest degree that would mend the layout alone; where none would, a layout over data only."""
    ways = []
    exact = "data" in degrees  # else data takes what the others leave
    for axis, degree in degrees.items():
        rest = math.prod(degrees.values()) // degree
        fits = [n for n in divisors(devices) if devices % (rest * n) == 0 and (rest * n == devices or not exact)]
        if fits and (degree > 1 or axis == "data"):
            ways.append(nearest(f"parallel.{axis}", degree, fits) + (" or -1" if axis == "data" else ""))
    plain = {axis: devices if axis == "data" else 1 for axis, n in degrees.items() if n > 1 or axis == "data"}
    return ", or ".join(ways) or " ".join(f"parallel.{axis}={n}" for axis, n in plain.items())


def _fills(parallel: Parallel, model: int, devices: int) -> bool:
    """Whether this degree of `model` would leave a whole number of devices to `data`; unknown devices do not object."""
    return devices % (parallel.pipe * parallel.replica * model) == 0


CHECKS: tuple[Callable[..., Messages], ...] = (
    tensor_parallel_divides,
    keys_serve_queries,
    shared_layers_are_on_one_stage,
    sequence_divides,
    microbatches_divide_batch,
    stages_have_layers,
    kept_layers_divide_a_chunk,
    chunks_have_a_schedule,
    microbatches_fill_stages,
    data_is_a_degree,
    layout_fills_devices,
)
