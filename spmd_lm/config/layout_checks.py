"""Checks of how a model and a batch are laid out over devices: what must be divisible by what."""

import functools
import math
import re
from collections.abc import Callable

from spmd_lm.axes import BATCH_AXES, DATA
from spmd_lm.config import overlap
from spmd_lm.config.adapters import Adapter, NoAdapter
from spmd_lm.config.context_parallel import choose_context_attention, too_few_heads, with_form
from spmd_lm.config.schema import Model, Objective, Parallel, Precision, Remat, Run, RunConfig, Train
from spmd_lm.config.suggest import Problems, divisors, nearest, nearest_multiple, use

HEADS = "parallel.context_attention=heads"
RING = "parallel.context_attention=ring"


def for_each_kind(check: Callable[..., Problems]) -> Callable[..., Problems]:
    """Runs a check written for one kind of layer on each kind in model.period, with the form of attention over
    `context` that all kinds have."""

    @functools.wraps(check)
    def check_each(*, model: Model, **sections: object) -> Problems:
        found: list[str] = []
        if isinstance(parallel := sections.get("parallel"), Parallel):
            sections["parallel"] = with_form(model, parallel)
        for kind, of_kind in zip(model.kinds, model.of_each_kind, strict=True):
            for problem in check(model=of_kind, **sections):
                for key in kind.own_sizes:
                    own = f"model.period[{(model.period or ()).index(kind)}].{key}"
                    problem = re.sub(rf"\bmodel\.{key}\b", own, problem)
                found.append(problem)
        yield from dict.fromkeys(found)

    return check_each


@for_each_kind
def tensor_parallel_divides(model: Model, parallel: Parallel, run: Run) -> Problems:
    degree, mlps = parallel.model, _mlp_widths(model)
    degrees = _fitting_degrees(math.gcd(model.heads, *(width for *_, width in mlps)), parallel, run)
    if model.heads % degree:
        # The larger of two equally near numbers of heads: more heads cost nothing.
        heads = [n for n in divisors(model.width) if n % degree == 0]
        closest = min(heads, key=lambda n: (abs(n - model.heads), -n), default=None)
        problem = f"{model.heads=} is not divisible by {parallel.model=} (attention query, dim 'heads')"
        yield use(problem, degrees, f"model.heads={closest}" if closest else "")
    for mlp_width, what, width in mlps:
        if width % degree:
            derived = "" if model.mlp_width or "mlp." in mlp_width else f" (4 x {model.width=})"
            problem = f"{mlp_width}{derived} is not divisible by {parallel.model=} ({what}, dim 'mlp')"
            yield use(problem, degrees, nearest_multiple(mlp_width, degree))
    if parallel.sequence and model.context % degree:
        over = f"{parallel.model=}, over which parallel.sequence=true shards it"
        ways = _fitting_degrees(model.context, parallel, run), nearest_multiple(f"{model.context=}", degree)
        yield use(f"{model.context=} is not divisible by {over}", *ways)


def _mlp_widths(model: Model) -> list[tuple[str, str, int]]:
    """(setting, what it is the hidden width of, width) of a layer's MLPs."""
    moe, of_mlp = model.moe, f"model.mlp_width={model.mlp_dim}"
    if moe is None:
        return [(of_mlp, "MLP", model.mlp_dim)]
    widths = [(f"model.mlp.width={moe.width}", "experts", moe.width)] if moe.width else []
    widths = widths or [(of_mlp, "experts", model.mlp_dim)]
    if moe.shared:
        widths.append((f"model.mlp.shared={moe.shared}", "shared MLP", moe.shared))
    return widths


def _fitting_degrees(size: int, parallel: Parallel, run: Run) -> str:
    """The nearest degrees of `model` that divide `size` and leave a whole number of devices to `data`.  With 0 devices,
    an unknown number, every divisor fits."""
    others = parallel.pipe * parallel.replica * parallel.expert * parallel.context
    fits = [n for n in divisors(size) if run.simulate_devices % (others * n) == 0]
    return nearest(f"{parallel.model=}", fits or [1])


@for_each_kind
def tensor_parallel_divides_kv_heads(model: Model, parallel: Parallel) -> Problems:
    """Requires equal groups of query heads per key/value head on each device; with fewer key/value heads than devices,
    each device has a copy of the one that its queries need."""
    kv_heads = model.kv_heads or model.heads
    fits = nearest(f"model.{kv_heads=}", [n for n in divisors(model.heads) if n % parallel.model == 0])
    if model.heads % kv_heads:
        yield use(f"{model.kv_heads=} does not divide {model.heads=}", fits or "parallel.model=1")
    elif model.kv_heads and kv_heads % parallel.model and parallel.model % kv_heads:
        problem = f"{model.kv_heads=} neither divides {parallel.model=} nor is divisible by it (attention key)"
        yield use(problem, nearest(f"{parallel.model=}", divisors(kv_heads)), fits)


def shared_layers_are_on_one_stage(model: Model, parallel: Parallel) -> Problems:
    if model.share_layers and parallel.pipe > 1:
        problem = f"model.share_layers=true with {parallel.pipe=}: every stage would need the shared layer"
        yield use(problem, "parallel.pipe=1", "model.share_layers=false")


def stages_divide_layers(model: Model, parallel: Parallel, run: Run) -> Problems:
    stages, chunks, period = parallel.pipe, parallel.chunks, len(model.kinds)
    periods = 1 if model.layers % period else model.layers // period
    if stages > 1 and periods % (stages * chunks):
        others = parallel.replica * parallel.expert * parallel.context * parallel.model * max(parallel.data, 1)
        fits = [n for n in divisors(periods) if n == 1 or run.simulate_devices % (n * others) == 0]
        per_stage, rest = divmod(periods, stages)
        where = f"{parallel.pipe=}" + (f" x {parallel.chunks=}" if chunks > 1 else "")
        where += f" x the {period} layers of model.period: stages are alike" if period > 1 else ""
        yield use(
            f"{model.layers=} is not divisible by {where}",
            "" if rest else nearest(f"{parallel.chunks=}", divisors(per_stage)),
            nearest(f"{parallel.pipe=}", fits if chunks == 1 else [1]),
            nearest_multiple(f"{model.layers=}", stages * chunks * period),
        )


def remat_blocks_divide_chunk(model: Model, parallel: Parallel, remat: Remat) -> Problems:
    if remat.policy == "block" and len(model.kinds) > 1:
        yield use("remat.policy=block with several kinds in model.period", "remat.policy=full")
    if remat.block_size is None:
        return
    if remat.policy != "block":
        yield use(f"{remat.block_size=} with {remat.policy=!s} has no effect", "remat.policy=block")
    chunks = parallel.pipe * parallel.chunks if parallel.pipe > 1 else 1
    layers, rest = divmod(model.layers, chunks)
    if not rest and layers % remat.block_size:
        where = f" in each of the pipeline's {chunks} chunks" if chunks > 1 else ""
        problem = f"{remat.block_size=} does not divide the {layers} of {model.layers=}{where}"
        yield use(problem, nearest(f"{remat.block_size=}", divisors(layers)))


def experts_are_divisible(model: Model, parallel: Parallel) -> Problems:
    """Requires experts for parallel.expert to divide, the same number on each of its devices."""
    if parallel.expert > 1 and not model.mixtures:
        problem = f"{parallel.expert=} with {model.mlp.kind=!s}: there are no experts to divide"
        yield use(problem, "parallel.expert=1", "model.mlp='{kind: moe, experts: 8}'")
    yield from _divided_experts(model=model, parallel=parallel)


@for_each_kind
def _divided_experts(model: Model, parallel: Parallel) -> Problems:
    if (moe := model.moe) and moe.experts % parallel.expert:
        chosen, degree = f"model.mlp.experts={moe.experts}", f"{parallel.expert=}"
        ways = nearest(degree, divisors(moe.experts)), nearest_multiple(chosen, parallel.expert)
        yield use(f"{chosen} is not divisible by {degree}", *ways)


def experts_are_manual(model: Model, parallel: Parallel) -> Problems:
    if parallel.partitioner == "types" and model.mixtures:
        reason = "tokens go to slots of buffers, which sharding types cannot describe"
        yield use(f"{parallel.partitioner=!s} with model.mlp.kind=moe: {reason}", "parallel.partitioner=auto")


def context_divides_rows(model: Model, parallel: Parallel, run: Run) -> Problems:
    """Requires two equal chunks of a row for each device along `context`, and of a device's tokens equal shards."""
    if (degree := parallel.context) == 1:
        return
    each = math.lcm(2, parallel.model) if parallel.sequence else 2
    if model.context % (degree * each):
        others = parallel.pipe * parallel.replica * parallel.expert * parallel.model
        fits = [
            n for n in divisors(model.context) if model.context % (n * each) == run.simulate_devices % (n * others) == 0
        ]
        what = "two chunks" if each == 2 else f"two chunks and the shards of parallel.sequence=true, {each} parts,"
        problem = f"{model.context=} is not divisible by the {what} of each device of {parallel.context=}"
        ways = nearest(f"{parallel.context=}", fits or [1]), nearest_multiple(f"{model.context=}", degree * each)
        yield use(problem, *ways)


def attention_reaches_over_context(model: Model, parallel: Parallel) -> Problems:
    """Requires enough heads for context_attention=heads, and of a ring what it can compute."""
    if parallel.context > 1 and not any(each.heads % parallel.model for each in model.of_each_kind):
        kinds, asked = model.of_each_kind, parallel.context_attention
        why = choose_context_attention(model, parallel).why
        fits = nearest(f"{parallel.context=}", divisors(math.gcd(*(each.heads // parallel.model for each in kinds))))
        of_ring = "parallel.context=1" if any(too_few_heads(each, parallel) for each in kinds) else HEADS
        ways = {
            "instead_of_heads": "" if any(each.span for each in kinds) else RING,
            "instead_of_ring": of_ring if asked == "ring" else fits,
        }
        yield from _attention_reaches(model=model, parallel=parallel, asked=asked, why=why, fits=fits, **ways)


@for_each_kind
def _attention_reaches(
    model: Model, parallel: Parallel, asked: str, why: str, fits: str, instead_of_heads: str, instead_of_ring: str
) -> Problems:
    """asked: the form.  why: the reason of the one that is taken.  fits: degrees with enough heads.
    instead_of_heads, instead_of_ring: settings that all kinds of layers can take, or ''."""
    if asked == "heads" and (too_few := too_few_heads(model, parallel)):
        yield use(f"{HEADS}: {too_few}", instead_of_heads, fits)
    if parallel.context_attention == "ring" and model.span:
        because = RING if asked == "ring" else f"{parallel.context=}, where {why}"
        problem = (
            f"span={model.span} of model.period with {because}: a ring's hops are whole or causal, without windows"
        )
        yield use(problem, instead_of_ring)


def rings_are_in_no_branch(model: Model, parallel: Parallel) -> Problems:
    """Requires that all stages of a pipeline take part in a ring's permutes."""
    if parallel.context == 1 or parallel.pipe == 1 or parallel.run_idle_stages or model.heads % parallel.model:
        return
    if choose_context_attention(model, parallel).form != "ring":
        return
    too_few = any(too_few_heads(each, parallel) for each in model.of_each_kind)
    reason = "idle stages would not take part in its permutes, which all devices wait for"
    problem = f"{parallel.pipe=} with a ring over {parallel.context=}: {reason}"
    yield use(problem, "parallel.run_idle_stages=true", "" if too_few else HEADS)


@for_each_kind
def context_divides_groups(model: Model, parallel: Parallel) -> Problems:
    """Requires that tokens which compete for an expert are on one device."""
    moe, degree = model.moe, parallel.context
    if moe is None or degree == 1 or (moe.capacity == "none" and moe.group is None):
        return
    chunks = degree * (2 if choose_context_attention(model, parallel).is_zigzag(model) else 1)
    size, rest = divmod(model.context, chunks)
    if not rest and size % (moe.group or model.context):
        group = f"model.mlp.group={moe.group or 'null'}"
        problem = (
            f"{group} with {parallel.context=}: tokens that share an expert's capacity would be on several devices"
        )
        way = nearest(group, divisors(size)) if moe.group else f"model.mlp.group={size}"
        yield use(problem, way, "model.mlp.capacity=none model.mlp.group=null")


def context_is_manual(parallel: Parallel) -> Problems:
    if parallel.partitioner == "types" and parallel.context > 1:
        reason = "devices exchange heads or send keys around, which sharding types do not describe"
        yield use(f"{parallel.partitioner=!s} with {parallel.context=}: {reason}", "parallel.partitioner=auto")


def pipelines_do_not_offload(parallel: Parallel, remat: Remat) -> Problems:
    if remat.policy == "offload" and parallel.pipe > 1:
        reason = "inputs of layers wait for a task's backward alone, too short to be worth a copy"
        yield use(f"remat.policy=offload with {parallel.pipe=}: {reason}", "remat.policy=full")


def pipelines_are_manual(parallel: Parallel) -> Problems:
    if parallel.partitioner == "types" and parallel.pipe > 1:
        reason = "stages run different programs, which sharding types cannot describe"
        yield use(f"{parallel.partitioner=!s} with {parallel.pipe=}: {reason}", "parallel.partitioner=auto")


def prefetch_has_layers_to_gather(model: Model, parallel: Parallel, remat: Remat) -> Problems:
    if parallel.prefetch == "on":
        for settings, reason, alternative in overlap.prefetch_obstacles(model, parallel, remat):
            yield use(f"{parallel.prefetch=!s} with {settings}: {reason}", alternative, "parallel.prefetch=auto")


def codes_are_of_zero_3(parallel: Parallel) -> Problems:
    alone = {"gathers": "only ZeRO-3 gathers layer by layer", "scatters": "they are of ZeRO-3, beside coded weights"}
    for key, sent in (("quantize_gather", "gathers"), ("quantize_scatter", "scatters")):
        if (codes := getattr(parallel, key)) == "none":
            continue
        chosen, off = f"parallel.{key}={codes} with", f"parallel.{key}=none"
        if parallel.zero < 3:
            yield use(f"{chosen} {parallel.zero=}: {alone[sent]}", "parallel.zero=3", off)
        if parallel.partitioner == "types":
            reason = f"XLA inserts the {sent}, and sends numbers as they are"
            yield use(f"{chosen} {parallel.partitioner=!s}: {reason}", "parallel.partitioner=auto", off)


def secondary_copies_are_gathered_again(model: Model, parallel: Parallel) -> Problems:
    if parallel.secondary == "none":
        return
    chosen, off = f"{parallel.secondary=!s} with", "parallel.secondary=none"
    if parallel.zero < 3:
        yield use(f"{chosen} {parallel.zero=}: only ZeRO-3 gathers layers more than once", "parallel.zero=3", off)
    if parallel.reduce_once:
        reason = "layers are gathered once per step in any case"
        yield use(f"{chosen} parallel.reduce_once=true: {reason}", "parallel.reduce_once=false", off)
    if model.unique_layers == 1:
        layers = "model.share_layers=true" if model.share_layers else f"{model.layers=}"
        yield use(f"{chosen} {layers}: a single layer is gathered once per step", off)
    if parallel.partitioner == "types":
        yield use(f"{chosen} {parallel.partitioner=!s}: XLA inserts the gathers", "parallel.partitioner=auto", off)


def adapters_are_manual(adapter: Adapter | NoAdapter, parallel: Parallel) -> Problems:
    if adapter.kind != "none" and parallel.partitioner == "types":
        reason = "types would sum a low-rank product's addends before the matrix's own are added"
        yield use(f"{parallel.partitioner=!s} with {adapter.kind=!s}: {reason}", "parallel.partitioner=auto")


def whole_groups_are_rounded(precision: Precision, parallel: Parallel) -> Problems:
    if not precision.few_bits:
        return
    if parallel.partitioner == "types":
        reason = "types cannot tell that groups of inputs are on one device"
        yield use(f"{parallel.partitioner=!s} with {precision.few_bits}: {reason}", "parallel.partitioner=auto")
    if parallel.quantize_gather != "none":
        problem = f"{parallel.quantize_gather=!s} with {precision.few_bits}: what is rounded would be rounded already"
        yield use(
            problem, "parallel.quantize_gather=none", "precision.fake_quant=none" * (precision.fake_quant != "none")
        )


def scales_are_of_shards(precision: Precision, parallel: Parallel) -> Problems:
    if precision.matmul != "none" and parallel.partitioner == "types":
        reason = "types cannot tell that a scale is of one device's shard"
        yield use(f"{parallel.partitioner=!s} with {precision.matmul=!s}: {reason}", "parallel.partitioner=auto")


def products_have_parts(
    model: Model, parallel: Parallel, adapter: Adapter | NoAdapter, precision: Precision
) -> Problems:
    if parallel.collective_matmul == "on":
        for settings, reason, alternative in overlap.collective_matmul_obstacles(model, parallel, adapter, precision):
            problem = f"{parallel.collective_matmul=!s} with {settings}: {reason}"
            yield use(problem, alternative, "parallel.collective_matmul=auto")


ONE_CHUNK = {"gpipe": "breadth_first", "1f1b": "interleaved"}  # their counterparts with several chunks


def schedule_has_chunks(parallel: Parallel) -> Problems:
    microbatches, stages, chosen = parallel.microbatches, parallel.pipe, f"{parallel.schedule=!s} with"
    if parallel.chunks > 1 and stages > 1 and parallel.schedule in ONE_CHUNK:
        other = ONE_CHUNK[parallel.schedule]
        enough = max(microbatches, stages) if other == "breadth_first" else -(-microbatches // stages) * stages
        more = f" parallel.microbatches={enough}" if enough != microbatches else ""
        problem = f"this schedule has one chunk per stage; parallel.schedule={other} has several"
        yield use(f"{chosen} {parallel.chunks=}: {problem}", "parallel.chunks=1", f"parallel.schedule={other}{more}")


def microbatches_suit_chunks(parallel: Parallel, train: Train) -> Problems:
    """Schedules with several chunks per stage need enough microbatches to keep all stages busy."""
    microbatches, stages, chosen = parallel.microbatches, parallel.pipe, f"{parallel.schedule=!s} with"
    if parallel.chunks == 1 or stages == 1 or parallel.schedule in ONE_CHUNK:
        return
    if parallel.schedule == "interleaved":
        reason, step = "microbatches run in groups of as many as there are stages", stages
    else:
        reason, step = "a stage would reach its next chunk before that chunk's input", 1
    if microbatches < stages or microbatches % step:
        fits = [n for n in divisors(train.batch) if n >= stages and n % step == 0]
        problem = f"{chosen} {parallel.microbatches=} and {parallel.pipe=}: {reason}"
        yield use(problem, nearest(f"{parallel.microbatches=}", fits), "parallel.chunks=1")


MAX_TASKS = 2**18  # in a pipeline's schedule table: 64 stages with 8 chunks each and 512 microbatches


def schedule_fits_a_table(parallel: Parallel) -> Problems:
    stages, chunks, microbatches = parallel.pipe, parallel.chunks, parallel.microbatches
    if stages > 1 and stages * chunks * microbatches > MAX_TASKS:
        product = f"{parallel.pipe=} x {parallel.chunks=} x {parallel.microbatches=}"
        most = MAX_TASKS // (stages * chunks)
        way = f"parallel.microbatches={most} or less" if most else "fewer stages, or fewer chunks"
        yield use(f"{product} is more than the {MAX_TASKS:,} tasks that a schedule may have", way)


def check_devices(config: RunConfig, devices: int) -> list[str]:
    """Problems of running `config` on exactly this many devices."""
    return [*layout_uses_all_devices(Run(simulate_devices=devices), config.parallel, config.train, config.objective)]


def data_degree_is_not_zero(parallel: Parallel) -> Problems:
    if parallel.data == 0:
        yield use("parallel.data=0 is not a number of devices", "parallel.data=-1 for all that the other axes leave")


def layout_uses_all_devices(run: Run, parallel: Parallel, train: Train, objective: Objective) -> Problems:
    devices = run.simulate_devices  # 0 if their number is not known yet
    degrees = {axis: degree for axis, degree in parallel.degrees.items() if degree != -1}
    product, batch_shards = math.prod(degrees.values()), 1
    if product == 0:  # data_degree_is_not_zero reports it
        devices = 0
    elif devices % product or (DATA in degrees and devices not in (0, product)):
        terms = " x ".join(f"parallel.{axis}={n}" for axis, n in degrees.items() if n > 1) or "parallel.data=1"
        problem = f"makes {product} devices, but there are {devices}"
        if DATA not in degrees:
            problem = f"does not divide {devices} device{'s' * (devices > 1)}"
        yield use(f"{terms} {problem}; every device must be used", *_nearest_layouts(degrees, devices))
    elif devices:
        batch_shards = devices // math.prod(degree for axis, degree in degrees.items() if axis not in BATCH_AXES)
    yield from _microbatch_is_divisible(parallel, train, objective, batch_shards)


def _nearest_layouts(degrees: dict[str, int], devices: int) -> list[str]:
    """The nearest degrees of each axis that alone make the layout fit; if there are none, data parallelism only.
    degrees: without `data` if it takes the remaining devices."""
    ways = []
    for axis, degree in degrees.items():
        others = math.prod(degrees.values()) // degree
        fits = [n for n in divisors(devices) if devices % (others * n) == 0]
        if DATA in degrees:
            fits = [n for n in fits if others * n == devices]
        if fits and (degree > 1 or axis == DATA):
            ways.append(nearest(f"parallel.{axis}={degree}", fits) + (" or -1" if axis == DATA else ""))
    data_only = {axis: devices if axis == DATA else 1 for axis, n in degrees.items() if n > 1 or axis == DATA}
    return ways or [" ".join(f"parallel.{axis}={n}" for axis, n in data_only.items())]


def microbatches_divide_batch(train: Train, parallel: Parallel) -> Problems:
    batch, microbatches = f"{train.batch=}", f"{parallel.microbatches=}"
    if train.batch % parallel.microbatches:
        ways = nearest(microbatches, divisors(train.batch)), nearest_multiple(batch, parallel.microbatches)
        yield use(f"{batch} is not divisible by {microbatches}", *ways)


def _microbatch_is_divisible(parallel: Parallel, train: Train, objective: Objective, shards: int) -> Problems:
    """Checks divisibility by a question's rows, which share a device, then by the shards over the batch's axes."""
    rows, rest = divmod(train.batch, parallel.microbatches)
    choices = objective.rows_per_example
    batch, microbatches = f"{train.batch=}", f"{parallel.microbatches=}"
    if rest:  # microbatches_divide_batch
        return
    if rows % choices:
        problem = f"gives {rows} rows, not divisible by objective.{choices=}, the rows of one question"
        yield use(f"{batch} in {microbatches} {problem}", nearest_multiple(batch, parallel.microbatches * choices))
    elif rows // choices % shards:
        fits = [n for n in divisors(train.batch) if train.batch // n % (shards * choices) == 0]
        what = f"{rows // choices} questions of objective.{choices=}" if choices > 1 else f"{rows} sequences"
        data = shards // (parallel.replica * parallel.expert)
        others = f"{parallel.replica=} x data={data}" + f" x {parallel.expert=}" * (parallel.expert > 1)
        problem = f"gives {what}, not divisible by {others}"
        ways = nearest(microbatches, fits), nearest_multiple(batch, parallel.microbatches * shards * choices)
        yield use(f"{batch} in {microbatches} {problem}", *ways)


CHECKS: tuple[Callable[..., Problems], ...] = (
    tensor_parallel_divides,
    tensor_parallel_divides_kv_heads,
    microbatches_divide_batch,
    shared_layers_are_on_one_stage,
    stages_divide_layers,
    pipelines_are_manual,
    experts_are_divisible,
    experts_are_manual,
    context_divides_rows,
    attention_reaches_over_context,
    context_divides_groups,
    rings_are_in_no_branch,
    context_is_manual,
    codes_are_of_zero_3,
    secondary_copies_are_gathered_again,
    adapters_are_manual,
    whole_groups_are_rounded,
    scales_are_of_shards,
    prefetch_has_layers_to_gather,
    products_have_parts,
    remat_blocks_divide_chunk,
    pipelines_do_not_offload,
    schedule_has_chunks,
    microbatches_suit_chunks,
    schedule_fits_a_table,
    layout_uses_all_devices,
    data_degree_is_not_zero,
)
