"""What sections of a configuration must agree on.

A check is a generator of messages whose parameter names say which sections it needs, so that it can run as soon as
those are sound.  A message begins with the keys at odds, as section.key=value, and ends with the nearest settings that
would do."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from spmd_lm.config.schema import (
    AdamW,
    CausalLM,
    Data,
    MaskedLM,
    Model,
    Parallel,
    Precision,
    Run,
    RunConfig,
    Section,
    Synthetic,
    Text,
    Train,
)

BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
Messages = Iterator[str]


def heads_divide_width(model: Model) -> Messages:
    if model.width % model.heads:
        yield (
            f"model.width={model.width} is not divisible by model.heads={model.heads}. "
            f"Use {_nearest('model.heads', model.heads, divisors(model.width))}, "
            f"or {_nearest('model.width', model.width, multiples(model.width, model.heads))}."
        )


def tensor_parallel_divides(model: Model, parallel: Parallel, run: Run) -> Messages:
    degree = parallel.model
    both = divisors(math.gcd(model.heads, model.mlp_width))
    fits = [n for n in both if _fills(parallel, n, run.simulate_devices)] or [1]
    degrees = _nearest("parallel.model", degree, fits)
    if model.heads % degree:
        # Of two numbers of heads as near, the larger: more heads cost nothing.
        heads = [n for n in divisors(model.width) if n % degree == 0]
        nearest = min(heads, key=lambda n: (abs(n - model.heads), -n), default=None)
        yield (
            f"model.heads={model.heads} is not divisible by parallel.model={degree} (attention query, dim 'heads'). "
            f"Use {degrees}" + (f", or model.heads={nearest}." if nearest else ".")
        )
    if model.mlp_width % degree:
        derived = "" if model.hidden else f" (4 x model.width={model.width})"
        yield (
            f"model.hidden={model.mlp_width}{derived} is not divisible by parallel.model={degree} (MLP, dim 'mlp'). "
            f"Use {degrees}, or {_nearest('model.hidden', model.mlp_width, multiples(model.mlp_width, degree))}."
        )


def keys_serve_queries(model: Model, parallel: Parallel) -> Messages:
    """Heads of keys and values, each for as many of queries, and on one device with them."""
    groups, degree = model.kv_heads, parallel.model
    if groups is None or model.heads % groups == 0 == groups % degree:
        return
    fits = [n for n in divisors(model.heads) if n % degree == 0]
    ways = [_nearest("model.kv_heads", groups, fits)]
    if model.heads % groups:
        what = f"does not divide model.heads={model.heads}"
    else:
        what = f"is not divisible by parallel.model={degree} (attention key, dim 'heads')"
        ways.insert(0, _nearest("parallel.model", degree, divisors(groups)))
    yield f"model.kv_heads={groups} {what}. Use {', or '.join(filter(None, ways)) or 'parallel.model=1'}."


def features_turn_in_pairs(model: Model) -> Messages:
    if model.positions == "rotary" and model.width % model.heads == 0 and model.head_width % 2:
        fits = [n for n in divisors(model.width) if model.width // n % 2 == 0]
        heads = f"{_nearest('model.heads', model.heads, fits)}, or " if fits else ""
        yield (
            f"model.positions=rotary with model.width={model.width} and model.heads={model.heads}: heads are "
            f"{model.head_width} wide, and features turn in pairs. Use {heads}model.positions=learned."
        )


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
            f"parallel.sequence=true splits it. Use {_nearest('parallel.model', degree, fits)}, "
            f"or {_nearest('model.context', model.context, multiples(model.context, degree))}."
        )


def microbatches_divide_batch(train: Train, parallel: Parallel) -> Messages:
    if train.batch % parallel.microbatches:
        yield (
            f"train.batch={train.batch} is not divisible by parallel.microbatches={parallel.microbatches}. "
            f"Use {_nearest('parallel.microbatches', parallel.microbatches, divisors(train.batch))}, "
            f"or {_nearest('train.batch', train.batch, multiples(train.batch, parallel.microbatches))}."
        )


def stages_have_layers(model: Model, parallel: Parallel, run: Run) -> Messages:
    stages, chunks = parallel.pipe, parallel.chunks
    parts = stages * chunks
    if stages == 1 or model.layers % parts == 0:
        return
    by = f"parallel.pipe={stages}" + (f" x parallel.chunks={chunks}" if chunks > 1 else "")
    ways = []
    if chunks > 1 and model.layers % stages == 0:
        ways.append(_nearest("parallel.chunks", chunks, divisors(model.layers // stages)))
    others = parallel.replica * parallel.model * max(parallel.data, 1)
    fits = [n for n in divisors(model.layers) if n == 1 or (chunks == 1 and run.simulate_devices % (n * others) == 0)]
    ways.append(_nearest("parallel.pipe", stages, fits))
    ways.append(_nearest("model.layers", model.layers, multiples(model.layers, parts)))
    yield f"model.layers={model.layers} is not divisible by {by}. Use {', or '.join(ways)}."


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
    ways = [_nearest("parallel.microbatches", m, [n for n in fits if train.batch % n == 0]), "parallel.chunks=1"]
    yield (
        f"parallel.schedule={parallel.schedule} with parallel.microbatches={m} and parallel.pipe={p}: {why}. "
        f"Use {', or '.join(filter(None, ways))}."
    )


def layout_fills_devices(run: Run, parallel: Parallel, train: Train) -> Messages:
    if run.simulate_devices:
        yield from _layout(parallel, train, run.simulate_devices)


def data_is_a_degree(parallel: Parallel) -> Messages:
    if parallel.data == 0:
        yield "parallel.data=0 is no number of devices. Use parallel.data=-1 for all that the other axes leave."


def vocabulary_holds_tokens(model: Model, data: Data | Synthetic, objective: CausalLM | MaskedLM) -> Messages:
    """Of a vocabulary in a file nothing is known before it is read."""
    masked = isinstance(objective, MaskedLM)
    least = 260 if masked else 256
    if isinstance(data, Data) and data.tokenizer == "bytes" and model.vocab < least:
        more = ", with the four that objective.kind=masked_lm adds" if masked else ""
        yield (
            f"model.vocab={model.vocab} is less than the {least} tokens of data.tokenizer=bytes{more}. "
            f"Use model.vocab={least}."
        )
    if isinstance(data, Synthetic) and data.branching > model.vocab:
        most = model.vocab
        yield f"data.branching={data.branching} is more than model.vocab={most}. Use data.branching={most}."


def objective_has_a_model(model: Model, objective: CausalLM | MaskedLM) -> Messages:
    kind = {"causal_lm": "gpt", "masked_lm": "bert"}
    if model.kind != kind[objective.kind]:
        (other,) = kind.keys() - {objective.kind}
        sees = "sees what it is to predict" if model.kind == "bert" else "sees only what stands before a hidden word"
        yield (
            f"objective.kind={objective.kind} with model.kind={model.kind}, which {sees}. "
            f"Use model.kind={kind[objective.kind]}, or objective.kind={other}."
        )


def objective_has_words(data: Data | Synthetic, objective: CausalLM | MaskedLM) -> Messages:
    if isinstance(objective, MaskedLM) and isinstance(data, Synthetic):
        yield (
            "objective.kind=masked_lm with data.source=synthetic: a chain has no words to hide. "
            "Use data.source=python-stdlib, or objective.kind=causal_lm with model.kind=gpt."
        )


def rows_hold_pieces(model: Model, objective: CausalLM | MaskedLM) -> Messages:
    """Rows of masked text are [CLS] A [SEP] B [SEP]."""
    if isinstance(objective, MaskedLM) and model.context < 8:
        yield (
            f"model.context={model.context} with objective.kind=masked_lm: [CLS] and [SEP] would leave no room for "
            "text. Use model.context=8 or more."
        )


def types_have_parts(model: Model, objective: CausalLM | MaskedLM) -> Messages:
    types = model.token_types
    if types and isinstance(objective, CausalLM):
        yield (
            f"model.token_types={types} with objective.kind=causal_lm: running text has no parts. "
            "Use model.token_types=0."
        )
    if types == 1 and isinstance(objective, MaskedLM) and objective.sentence_order:
        yield (
            "model.token_types=1 with objective.sentence_order=true: a row has two pieces. "
            "Use model.token_types=0 or 2, or objective.sentence_order=false."
        )


def spans_leave_words(objective: CausalLM | MaskedLM) -> Messages:
    """No two spans touch, so that there are as many words between them as there are spans, or more."""
    if not isinstance(objective, MaskedLM):
        return
    longest, rate = objective.max_span, objective.rate
    mean = longest / sum(1 / n for n in range(1, longest + 1))
    most = mean / (mean + 1)
    if rate == 0:
        yield "objective.rate=0.0 hides nothing, so nothing is learned. Use objective.rate=0.15."
    elif rate > most:
        yield (
            f"objective.rate={rate} with objective.max_span={longest}: spans of {mean:.2g} words on average, a word or "
            f"more between them, hide at most {most:.0%}. Use objective.rate={math.floor(100 * most) / 100} or less."
        )


def text_has_a_path(data: Data | Synthetic) -> Messages:
    if isinstance(data, Text) and not (data.paths and all(data.paths)):
        yield f"data.path={data.path} names no file. Give a file, a directory or a pattern: data.path='corpus/*.txt'."


def schedule_descends(optim: AdamW, train: Train) -> Messages:
    if optim.min_lr > optim.lr:
        tenth = optim.lr / 10
        yield f"optim.min_lr={optim.min_lr:g} is more than optim.lr={optim.lr:g}. Use optim.min_lr={tenth:g} or less."
    end = optim.decay_steps or train.steps
    if optim.decay != "constant" and optim.warmup > end:
        key = "optim.decay_steps" if optim.decay_steps else "train.steps"
        yield (
            f"optim.warmup={optim.warmup} is longer than {key}={end}, where the decay ends. "
            f"Use optim.warmup={end // 10}, or optim.decay_steps={optim.warmup * 10}."
        )


def parameters_hold_compute(precision: Precision) -> Messages:
    if 16 < BITS[precision.params] < BITS[precision.compute]:  # 16: not_in_this_version says so
        yield (
            f"precision.params={precision.params} is narrower than precision.compute={precision.compute}. "
            f"Use precision.params={precision.compute}, or precision.compute={precision.params}."
        )


def float16_is_scaled(precision: Precision) -> Messages:
    compute, scale = f"precision.compute={precision.compute}", f"precision.loss_scale={precision.loss_scale}"
    if (precision.compute == "float16") > (precision.loss_scale == "dynamic"):
        yield (
            f"{compute} with {scale}: gradients below 6e-8 would be zero. "
            f"Use precision.loss_scale=dynamic, or precision.compute=bfloat16."
        )
    if (precision.compute == "float16") < (precision.loss_scale == "dynamic"):
        yield (
            f"{scale} with {compute}: only float16 has a range so small. "
            f"Use precision.loss_scale=none, or precision.compute=float16."
        )
    if precision.initial_scale < precision.min_scale:
        first, least = (f"{value:.17g}" for value in (precision.initial_scale, precision.min_scale))
        yield (
            f"precision.initial_scale={first} is less than precision.min_scale={least}. "
            f"Use precision.initial_scale={least}, or precision.min_scale={first}."
        )


def kernel_has_dropout(model: Model) -> Messages:
    if model.attention in ("cudnn", "splash") and model.attention_dropout:
        yield (
            f"model.attention={model.attention} with model.attention_dropout={model.attention_dropout}: "
            "these kernels have no such dropout. Use model.attention=xla, or model.attention_dropout=0."
        )


def kernel_takes_shapes(model: Model, precision: Precision) -> Messages:
    """What an explicit choice would meet as a traceback; `auto` chooses by what is there."""
    asked, otherwise = f"model.attention={model.attention}", "model.attention=xla"
    if model.attention == "cudnn" and BITS[precision.compute] != 16:
        yield (
            f"{asked} with precision.compute={precision.compute}: cuDNN takes 16-bit types. "
            f"Use precision.compute=bfloat16, or {otherwise}."
        )
    fits = [n for n in divisors(model.width) if _cudnn_takes(model.width // n)]
    if model.attention == "cudnn" and model.width % model.heads == 0 and not _cudnn_takes(model.head_width):
        heads = f"{_nearest('model.heads', model.heads, fits)}, or " if fits else ""
        yield (
            f"{asked} with model.width={model.width} and model.heads={model.heads}: heads are {model.head_width} wide, "
            f"and cuDNN takes multiples of 8 up to 128. Use {heads}{otherwise}."
        )
    if model.attention == "splash" and model.context % 128:
        contexts = _nearest("model.context", model.context, multiples(model.context, 128))
        yield (
            f"{asked} with model.context={model.context}: splash takes multiples of 128 positions. "
            f"Use {contexts}, or {otherwise}."
        )


def _cudnn_takes(head_width: int) -> bool:
    return head_width % 8 == 0 and head_width <= 128  # from Hopper on 256, but a configuration knows no device


def not_in_this_version(precision: Precision) -> Messages:
    """Refused, since a key that is read and then ignored would be a lie."""
    if precision.reduce == "float16":
        yield (
            "precision.reduce=float16 is not in this version: a sum of gradients would overflow where none of them "
            "does. Use precision.reduce=float32."
        )
    if BITS[precision.params] == 16:
        yield (
            f"precision.params={precision.params} is not in this version: moments and accumulated gradients would be "
            "16-bit. Use precision.params=float32."
        )


CHECKS: tuple[Callable[..., Messages], ...] = (
    heads_divide_width,
    tensor_parallel_divides,
    keys_serve_queries,
    features_turn_in_pairs,
    shared_layers_are_on_one_stage,
    sequence_divides,
    microbatches_divide_batch,
    stages_have_layers,
    chunks_have_a_schedule,
    microbatches_fill_stages,
    data_is_a_degree,
    layout_fills_devices,
    vocabulary_holds_tokens,
    objective_has_a_model,
    objective_has_words,
    rows_hold_pieces,
    types_have_parts,
    spans_leave_words,
    text_has_a_path,
    schedule_descends,
    parameters_hold_compute,
    float16_is_scaled,
    kernel_has_dropout,
    kernel_takes_shapes,
    not_in_this_version,
)


def problems(sections: Mapping[str, Section]) -> list[str]:
    """The messages of every check whose sections are all there."""
    found: list[str] = []
    for check in CHECKS:
        needs = inspect.signature(check).parameters
        if needs.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in needs})
    return found


def subjects(message: str) -> list[tuple[str, str]]:
    """The (section, key) pairs at odds: those of a message's first sentence."""
    return re.findall(r"\b([a-z]+)\.(\w+)=", message.split(". ")[0])


def check_devices(config: RunConfig, devices: int) -> list[str]:
    """What keeps `config` from running on exactly this many devices."""
    return [*_layout(config.parallel, config.train, devices)]


def _layout(parallel: Parallel, train: Train, devices: int) -> Messages:
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
    if rest == 0 and rows % shards:  # with a rest, microbatches_divide_batch has said so
        fits = [n for n in divisors(train.batch) if train.batch // n % shards == 0]
        smaller = f"{_nearest('parallel.microbatches', parallel.microbatches, fits)}, or " if fits else ""
        batches = multiples(train.batch, parallel.microbatches * shards)
        yield (
            f"train.batch={train.batch} in parallel.microbatches={parallel.microbatches} gives {rows} sequences, "
            f"not divisible by parallel.replica={parallel.replica} x data={shards // parallel.replica}. "
            f"Use {smaller}{_nearest('train.batch', train.batch, batches)}."
        )


def _layouts(degrees: dict[str, int], devices: int) -> str:
    """For each axis, the nearest degree that would mend the layout alone; where none would, a layout over data only."""
    ways = []
    exact = "data" in degrees  # else data takes what the others leave
    for axis, degree in degrees.items():
        rest = math.prod(degrees.values()) // degree
        fits = [n for n in divisors(devices) if devices % (rest * n) == 0 and (rest * n == devices or not exact)]
        if fits and (degree > 1 or axis == "data"):
            ways.append(_nearest(f"parallel.{axis}", degree, fits) + (" or -1" if axis == "data" else ""))
    plain = {axis: devices if axis == "data" else 1 for axis, n in degrees.items() if n > 1 or axis == "data"}
    return ", or ".join(ways) or " ".join(f"parallel.{axis}={n}" for axis, n in plain.items())


def _fills(parallel: Parallel, model: int, devices: int) -> bool:
    """Whether this degree of `model` would leave a whole number of devices to `data`; unknown devices do not object."""
    return devices % (parallel.pipe * parallel.replica * model) == 0


def divisors(n: int) -> list[int]:
    """In order; all of them up to n = 2**32.  Beyond, where no run is, not those between 65,536 and n / 65,536: looking
    for them would take minutes."""
    small = [d for d in range(1, min(math.isqrt(n), 2**16) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def multiples(n: int, step: int) -> list[int]:
    """The multiples of `step` on either side of `n`."""
    return [m for m in (n // step * step, n // step * step + step) if m]


def _nearest(key: str, value: int, choices: Iterable[int]) -> str:
    """The two choices nearest to `value`, as in 'parallel.model=4 or 6'; nothing if there are none."""
    nearest = sorted(sorted(choices, key=lambda n: (abs(n - value), n))[:2])
    return f"{key}={' or '.join(map(str, nearest))}" if nearest else ""
