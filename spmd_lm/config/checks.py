"""Constraints between sections of a configuration; layout_checks.py has those of the layout over devices.

A check is a generator of problems.  Its parameters are named after the sections it needs, and it runs once these are
valid.  A problem begins with the conflicting keys, as section.key=value, and ends with the nearest settings that
satisfy the check."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from pydantic import BaseModel

from spmd_lm.config import layout_checks
from spmd_lm.config.adapters import Adapter, NoAdapter
from spmd_lm.config.attention_kernels import FUSED_KERNELS, obstacles
from spmd_lm.config.context_parallel import ring_chunks
from spmd_lm.config.data_sections import (
    TRAINED_TOKENIZERS,
    CustomData,
    Data,
    Documents,
    Instructions,
    Synthetic,
    Task,
    Tokens,
    packs_documents,
)
from spmd_lm.config.schema import (
    Checkpoint,
    MaskedLM,
    Model,
    Objective,
    OptimizerConfig,
    Parallel,
    Precision,
    Run,
    Train,
)
from spmd_lm.config.suggest import Problems, divisors, nearest, nearest_multiple, use

BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}

# The kind of objective and the sizes that each task requires.
TASKS: dict[str, tuple[str, dict[str, int]]] = {
    "mnli": ("classification", {"classes": 3}),
    "qqp": ("classification", {"classes": 2}),
    "sst2": ("classification", {"classes": 2}),
    "cola": ("classification", {"classes": 2}),
    "race": ("multiple_choice", {"choices": 4}),
    "squad": ("span", {}),
    "jsonl": ("classification", {}),  # as many classes as the files have labels
}


@layout_checks.for_each_kind
def heads_divide_width(model: Model) -> Problems:
    if not model.head_width and model.width % model.heads:
        ways = nearest(f"{model.heads=}", divisors(model.width)), nearest_multiple(f"{model.width=}", model.heads)
        yield use(f"{model.width=} is not divisible by {model.heads=}", *ways)
    elif model.positions == "rotary" and model.rope_fraction == 1 and model.head_dim % 2:
        even = [n for n in divisors(model.width) if model.width // n % 2 == 0]
        chosen = f"model.positions=rotary with {model.width=} and {model.heads=}"
        if model.head_width:
            chosen = f"model.positions=rotary with {model.head_width=}"
        problem = f"{chosen}: heads are {model.head_dim} wide, but features are rotated in pairs"
        way = f"model.head_width={model.head_dim + 1}" if model.head_width else nearest(f"{model.heads=}", even)
        yield use(problem, way, "model.positions=learned")


def parallel_branches_have_their_norms(model: Model) -> Problems:
    if model.parallel_branches and model.norm != "pre":
        yield use(f"{model.parallel_branches=} with {model.norm=!s}: both branches read one stream", "model.norm=pre")


def rotary_keys_have_an_effect(model: Model) -> Problems:
    if model.positions == "rotary":
        return
    chosen = f"with {model.positions=!s}"
    if model.rope_fraction != 1:
        yield use(f"{model.rope_fraction=} has no effect {chosen}", "model.positions=rotary", "model.rope_fraction=1.0")
    if model.rope_scaling:
        problem = f"model.rope_scaling={model.rope_scaling.kind} has no effect {chosen}"
        yield use(problem, "model.positions=rotary", "model.rope_scaling=null")
    for key in ("rope_theta", "rope_scaling"):
        if any(getattr(kind, key) for kind in model.period or ()):
            yield use(f"{key} in model.period has no effect {chosen}", "model.positions=rotary")


@layout_checks.for_each_kind
def rotated_features_are_pairs(model: Model) -> Problems:
    m, rotated = model, model.rotated_width
    if m.positions != "rotary" or (not m.head_width and m.width % m.heads):
        return
    chosen = f"{model.rope_fraction=} rotates {rotated} of the {m.head_dim} features of a head"
    if m.rope_fraction < 1 and (rotated % 2 or not rotated):
        even = [n for n in range(2, m.head_dim, 2) if int(n / m.head_dim * m.head_dim) == n]
        near = sorted(even, key=lambda n: abs(n - m.rope_fraction * m.head_dim))[:2]
        ways = " or ".join(f"{n / m.head_dim}" for n in sorted(near)) or (m.head_dim == 2 and "1.0")
        way = f"model.rope_fraction={ways}" if ways else "model.positions=learned"
        yield use(f"{chosen}, but features are rotated in pairs", way)
    elif m.rope_scaling and m.rope_scaling.kind == "dynamic" and rotated < 4:
        wider = "model.head_width=4" if m.head_width else f"model.heads={m.heads // 2 or 1}"
        way = "model.rope_fraction=1.0" if m.head_dim > 2 else wider
        yield use(f"{chosen}, with model.rope_scaling=dynamic, which needs at least 4", way)
    if m.rope_scaling and m.rope_scaling.kind == "yarn" and m.rope_theta <= 1:
        problem = (
            f"{model.rope_theta=} with {model.positions=!s} and model.rope_scaling=yarn, which takes its logarithm"
        )
        yield use(problem, "model.rope_theta=10000.0")


def settings_have_an_effect(model: Model, objective: Objective) -> Problems:
    if isinstance(model.use_bias, tuple) and "norm" in model.use_bias and model.norm_type != "layer":
        others = ", ".join(each for each in model.use_bias if each != "norm")
        problem = f"model.use_bias has norm, but norms of {model.norm_type=!s} have no biases"
        yield use(problem, f"model.use_bias=[{others}]" if others else "model.use_bias=false", "model.norm_type=layer")
    if model.use_bias == ("head",) and objective.kind == "causal_lm":
        problem = f"model.use_bias=[head] with {objective.kind=!s}, whose head has no biases"
        yield use(problem, "model.use_bias=false")
    if model.logit_softcap and not objective.predicts_tokens:
        problem = f"{model.logit_softcap=} with {objective.kind=!s}, whose head has no logits of tokens"
        yield use(problem, "model.logit_softcap=null")


@layout_checks.for_each_kind
def routers_can_choose(model: Model) -> Problems:
    """Requires experts enough for a token's choices, groups that divide a row, and room for a choice in each expert."""
    if (moe := model.moe) is None:
        return
    experts, per_token = f"model.mlp.experts={moe.experts}", f"model.mlp.per_token={moe.per_token}"
    if moe.per_token > moe.experts:
        yield use(f"{per_token} is more than {experts}", f"model.mlp.per_token={moe.experts}")
    if model.context % (group := moe.group or model.context):
        chosen = f"model.mlp.group={group}"
        ways = nearest(chosen, divisors(model.context)), nearest_multiple(f"{model.context=}", group)
        yield use(f"{model.context=} is not divisible by {chosen}, the tokens that compete for experts", *ways)
    elif moe.capacity != "none" and moe.capacity * moe.per_token * group < moe.experts:
        least = math.ceil(100 * moe.experts / (moe.per_token * group)) / 100
        problem = f"model.mlp.capacity={moe.capacity:g} leaves an expert less than one of a group's {group} tokens"
        ways = f"model.mlp.capacity={least:g} or more", "model.mlp.capacity=none"
        yield use(f"{problem}, with {experts} and {per_token}", *ways)
    if moe.shared_gate and not moe.shared:
        problem = "model.mlp.shared_gate=true has no effect without model.mlp.shared, whose output it multiplies"
        yield use(problem, "model.mlp.shared_gate=false", f"model.mlp.shared={moe.width or model.mlp_dim}")


def mixtures_have_as_many_experts(model: Model) -> Problems:
    numbers = list(dict.fromkeys(moe.experts for moe in model.mixtures))
    if len(numbers) > 1:
        counts = " and ".join(map(str, numbers))
        yield use(f"model.period has kinds with {counts} experts: metrics have one table for all", "the same number")


def layers_can_be_shared(model: Model) -> Problems:
    if model.share_layers and len(model.kinds) > 1:
        yield use("model.share_layers=true with several kinds in model.period", "model.share_layers=false")


def frozen_parameters_have_their_dtype(
    precision: Precision, adapter: Adapter | NoAdapter, optim: OptimizerConfig
) -> Problems:
    if precision.frozen and adapter.kind == "none" and not optim.freeze:
        yield use(f"{precision.frozen=!s} has no effect where nothing is frozen", "precision.frozen=null")


def offload_keys_have_an_effect(optim: OptimizerConfig) -> Problems:
    if optim.offload_update == "host" and optim.offload == "none":
        problem = f"{optim.offload_update=!s} has no effect with {optim.offload=!s}"
        yield use(problem, "optim.offload=host", "optim.offload_update=device")
    if optim.offload_dir and optim.offload != "disk":
        problem = f"{optim.offload_dir=!s} has no effect with {optim.offload=!s}"
        yield use(problem, "optim.offload=disk", "optim.offload_dir=null")


def adapted_layers_are_not_shared(adapter: Adapter | NoAdapter, model: Model) -> Problems:
    if adapter.kind != "none" and model.share_layers:
        yield use(f"model.share_layers=true with {adapter.kind=!s}", "model.share_layers=false", "adapter.kind=none")


def experts_are_not_quantized(adapter: Adapter | NoAdapter, model: Model) -> Problems:
    if adapter.base != "none" and model.mixtures:
        problem = f"{adapter.base=!s} with model.mlp.kind=moe: stacks of experts, most of the model, have no codes"
        yield use(problem, "adapter.base=none")


def codes_are_of_dense_matrices(precision: Precision, adapter: Adapter | NoAdapter, model: Model) -> Problems:
    group, none = precision.quantized_group, "precision.quantized=none"
    if precision.quantized == "none":
        if group is not None:
            yield use(f"precision.quantized_group={group} has no effect with {none}", "precision.quantized_group=null")
        return
    chosen = f"{precision.quantized=!s}"
    if precision.quantized == "nf4" and group is None:
        yield use(f"{chosen} with precision.quantized_group=null", "precision.quantized_group=64")
    if precision.quantized != "int8" and (group or 2) % 2:
        yield use(
            f"{chosen} with precision.quantized_group={group}: a byte holds the codes of two inputs", "an even one"
        )
    if precision.fake_quant != "none":
        yield use(f"{precision.fake_quant=!s} with {chosen}: matrices are rounded already", "precision.fake_quant=none")
    if adapter.kind != "none":
        problem = f"{adapter.kind=!s} with {chosen}: an adapter's base is quantized by adapter.base"
        yield use(problem, "the run that was quantized, with adapter.base=nf4")
    if model.mixtures:
        yield use(f"{chosen} with model.mlp.kind=moe: stacks of experts, most of the model, have no codes", none)


def rounded_matrices_are_dense(precision: Precision, adapter: Adapter | NoAdapter, model: Model) -> Problems:
    chosen, none = f"{precision.fake_quant=!s} with", "precision.fake_quant=none"
    if precision.fake_quant == "none":
        return
    if adapter.kind != "none":
        yield use(f"{chosen} {adapter.kind=!s}: nothing rounds what an adapter adds", none, "adapter.kind=none")
    if model.mixtures:
        yield use(f"{chosen} model.mlp.kind=moe: stacks of experts, most of the model, are not rounded", none)


def eight_bits_are_of_dense_matrices(precision: Precision, adapter: Adapter | NoAdapter, model: Model) -> Problems:
    chosen, none = f"{precision.matmul=!s}", "precision.matmul=none"
    if precision.matmul == "none":
        if precision.emulate:
            yield use(f"precision.emulate=true has no effect with {none}", "precision.emulate=false")
        return
    if few := precision.few_bits:
        yield use(f"{chosen} with {few}: matrices are rounded already", none, few.partition("=")[0] + "=none")
    if adapter.kind != "none":
        problem = f"{chosen} with {adapter.kind=!s}: what an adapter adds would not be in eight bits"
        yield use(problem, none, "adapter.kind=none")
    if model.mixtures:
        problem = f"{chosen} with model.mlp.kind=moe: stacks of experts, most of the model, would not be in eight bits"
        yield use(problem, none)


def vocabulary_holds_tokens(model: Model, data: Data | Synthetic, objective: Objective) -> Problems:
    """Checks tokenizers without a file; a vocabulary file is checked when it is read."""
    least, more = 256, ""
    if objective.kind != "causal_lm":
        least, more = 260, f", with the four special tokens of {objective.kind=!s}"
    if isinstance(data, CustomData):
        least = 0  # its ids need not be bytes
    if isinstance(data, Data) and data.tokenizer == "bytes" and model.vocab < least:
        problem = f"{model.vocab=} is less than the {least} tokens of data.tokenizer=bytes{more}"
        yield use(problem, f"model.vocab={least}")
    if isinstance(data, Data) and data.tokenizer in TRAINED_TOKENIZERS:
        least = {"bpe": 257, "wordpiece": 300}[data.tokenizer]  # the bytes and a separator; letters and special tokens
        if not isinstance(data, Documents):
            problem = f"{data.tokenizer=!s} with {data.source=!s}, which has no documents to train it on"
            yield use(problem, "data.tokenizer=bytes", "the path of a vocabulary")
        elif model.vocab < least:
            yield use(f"{model.vocab=} is too few tokens for {data.tokenizer=!s}", f"model.vocab={least} or more")
    if isinstance(data, Synthetic) and data.branching > model.vocab:
        yield use(f"{data.branching=} is more than {model.vocab=}", f"data.branching={model.vocab}")


def model_suits_objective(model: Model, objective: Objective) -> Problems:
    chosen, is_causal_lm = f"{objective.kind=!s} with {model.kind=!s}", objective.kind == "causal_lm"
    if is_causal_lm and not model.causal:
        problem = f"{chosen}, whose attention sees the tokens that it has to predict"
        yield use(problem, "model.kind=gpt", "objective.kind=masked_lm")
    if model.causal and not is_causal_lm:
        yield use(f"{chosen}, whose attention sees only earlier tokens", "model.kind=bert", "objective.kind=causal_lm")
    if model.context < 8 and not is_causal_lm:  # rows are [CLS] A [SEP] B [SEP]
        problem = f"{model.context=} with {objective.kind=!s}: [CLS] and [SEP] would leave no room for text"
        yield use(problem, "model.context=8 or more")
    if model.token_types and is_causal_lm:
        problem = f"{model.token_types=} with {objective.kind=!s}: its rows are not divided into segments"
        yield use(problem, "model.token_types=0")
    if model.token_types == 1 and isinstance(objective, MaskedLM) and objective.sentence_order:
        problem = "model.token_types=1 with objective.sentence_order=true: a row has two segments"
        yield use(problem, "model.token_types=0 or 2", "objective.sentence_order=false")
    if model.token_types == 1 and not objective.predicts_tokens:
        yield use(f"model.token_types=1 with {objective.kind=!s}: a row may hold two texts", "model.token_types=0 or 2")


def data_suits_objective(data: Data | Synthetic, objective: Objective) -> Problems:
    """Only a task's files have labels, and only objectives with labels read them."""
    if isinstance(objective, MaskedLM) and isinstance(data, Synthetic):
        problem = "objective.kind=masked_lm with data.source=synthetic: a Markov chain has no words to mask"
        yield use(problem, "data.source=python-stdlib", "objective.kind=causal_lm with model.kind=gpt")
    if isinstance(data, Data) and data.bos is True and objective.kind != "causal_lm":
        problem = f"data.bos=true with {objective.kind=!s}, whose rows begin with a token of their own"
        yield use(problem, "data.bos=auto")
    if isinstance(data, Instructions) and objective.kind != "causal_lm":
        problem = f"{objective.kind=!s} with data.source=instructions, whose answers are predicted token by token"
        yield use(problem, "objective.kind=causal_lm with model.kind=gpt")
        return
    if isinstance(data, CustomData):
        if objective.rows_per_example > 1:
            yield use(f"{objective.kind=!s} with data.source=custom, of rows by themselves", "data.source=task")
        elif not (objective.predicts_tokens or objective.module):
            problem = f"{objective.kind=!s} with data.source=custom, whose labels only a head of one's own evaluates"
            yield use(problem, "objective.module", "data.source=task")
    elif not isinstance(data, Task) and not objective.predicts_tokens:
        problem = f"{objective.kind=!s} with {data.source=!s}, which has no labels"
        yield use(problem, "data.source=task, with data.task, data.path and data.validation_path")
    if not isinstance(data, Task):
        return
    kind, sizes = TASKS[data.task]
    if objective.kind != kind:
        settings = "".join(f" objective.{key}={size}" for key, size in sizes.items())
        hint = ", with as many classes as there are labels" if data.task == "jsonl" else ""
        yield use(f"{data.task=!s} with {objective.kind=!s}", f"objective.kind={kind}{settings}{hint}")
        return
    for key, size in sizes.items():
        if (given := getattr(objective, key)) != size:
            yield use(f"objective.{key}={given} with {data.task=!s}, which has {size}", f"objective.{key}={size}")


def masked_spans_leave_words(objective: Objective) -> Problems:
    """Spans do not touch, so there are at least as many words between spans as there are spans."""
    if not isinstance(objective, MaskedLM):
        return
    mean = objective.max_span / sum(1 / n for n in range(1, objective.max_span + 1))
    most = mean / (mean + 1)
    if objective.mask_prob == 0:
        yield use("objective.mask_prob=0.0 masks nothing, so nothing is learned", "objective.mask_prob=0.15")
    elif objective.mask_prob > most:
        spans = f"spans of {mean:.2g} words on average, with at least one word between them, mask at most {most:.0%}"
        largest = f"objective.mask_prob={math.floor(100 * most) / 100} or less"
        yield use(f"{objective.mask_prob=} with {objective.max_span=}: {spans}", largest)


def tokens_have_one_path(data: Data | Synthetic, objective: Objective) -> Problems:
    if not isinstance(data, Tokens):
        return
    if (data.path is None) == (data.blend is None):
        if data.path is None:
            problem = "data.source=tokens with neither data.path nor data.blend"
            yield f"{problem}. Give data.path of one data set, or data.blend of several."
        else:
            yield use("data.source=tokens with both data.path and data.blend", "data.path=null", "data.blend=null")
    if data.pack and objective.kind != "causal_lm":
        yield use(f"data.pack=true with {objective.kind=!s}, whose rows are of one document each", "data.pack=false")


def evaluations_have_data(data: Data | Synthetic, train: Train) -> Problems:
    if isinstance(data, Instructions) and train.eval_every and not data.validation_path:
        problem = f"{train.eval_every=} with data.source=instructions and no data.validation_path"
        yield use(problem, "data.validation_path", "train.eval_every=0")


def tasks_can_be_evaluated(objective: Objective, train: Train) -> Problems:
    if train.eval_tasks and not train.eval_every:
        yield use("train.eval_tasks with train.eval_every=0, which evaluates nothing", "train.eval_every=100")
    if train.eval_tasks and objective.kind != "causal_lm":
        problem = f"train.eval_tasks with {objective.kind=!s}, which gives a text no likelihood"
        yield use(problem, "train.eval_tasks=null", "objective.kind=causal_lm with model.kind=gpt")


def best_checkpoints_have_figures(train: Train, checkpoint: Checkpoint) -> Problems:
    if not checkpoint.keep_best:
        return
    of_evaluations = checkpoint.keep_best.startswith("eval_")
    key = "eval_every" if of_evaluations else "log_every"
    chosen, every = f"{checkpoint.keep_best=!s}", getattr(train, key)
    if not of_evaluations and not checkpoint.keep_best.endswith("loss"):
        problem = f"{chosen}, which says nothing of how good a model is, as losses and figures of evaluations do"
        yield use(problem, "checkpoint.keep_best=eval_loss", "checkpoint.keep_best=loss")
    elif not checkpoint.every:
        yield use(f"{chosen} with checkpoint.every=0, which saves nothing", f"checkpoint.every={every or 100}")
    elif not every:
        yield use(f"{chosen} with train.eval_every=0, which evaluates nothing", f"train.eval_every={checkpoint.every}")
    elif checkpoint.every % every:
        problem = f"{chosen} with {checkpoint.every=}, which is no multiple of train.{key}={every}: some have no figure"
        yield use(problem, nearest_multiple(f"{checkpoint.every=}", every), f"train.{key}={checkpoint.every}")


def paths_are_not_empty(data: Data | Synthetic) -> Problems:
    for key, value in data:
        if key in ("path", "validation_path") and value is not None and not (value and all(value)):
            yield f"data.{key}={value} names no file. Give a file, a directory or a pattern: data.{key}='corpus/*.txt'."


def learning_rate_decays_after_warmup(optim: OptimizerConfig, train: Train) -> Problems:
    if optim.min_lr > optim.lr:
        yield use(f"{optim.min_lr=:g} is more than {optim.lr=:g}", f"optim.min_lr={optim.lr / 10:g} or less")
    end = optim.decay_steps or train.steps
    if optim.decay != "constant" and optim.warmup > end:
        last = f"{optim.decay_steps=}" if optim.decay_steps else f"{train.steps=}"
        ways = f"optim.warmup={end // 10}", f"optim.decay_steps={optim.warmup * 10}"
        yield use(f"{optim.warmup=} is longer than {last}, where the decay ends", *ways)
    elif optim.decay_start is not None:
        if optim.decay == "constant":
            ways = "optim.decay=linear", "optim.decay_start=null"
            yield use(f"{optim.decay_start=} has no effect with optim.decay=constant", *ways)
        elif not optim.warmup <= optim.decay_start < end:
            last = f"{optim.decay_steps=}" if optim.decay_steps else f"{train.steps=}"
            problem = f"{optim.decay_start=} is not between {optim.warmup=} and {last}, where the decay ends"
            yield use(problem, f"optim.decay_start={max(optim.warmup, end - max(1, end // 5))}")


def precisions_suit_each_other(precision: Precision) -> Problems:
    params, compute = f"{precision.params=!s}", f"{precision.compute=!s}"
    if BITS[precision.params] == 16:
        problem = "is not supported: the optimizer's moments and accumulated gradients would be 16-bit"
        yield use(f"{params} {problem}", "precision.params=float32")
    elif BITS[precision.params] < BITS[precision.compute]:
        ways = f"precision.params={precision.compute}", f"precision.compute={precision.params}"
        yield use(f"{params} is narrower than {compute}", *ways)
    if precision.reduce == "float16":
        problem = "is not supported: a sum of gradients can overflow where no single gradient does"
        yield use(f"precision.reduce=float16 {problem}", "precision.reduce=float32")
    if precision.compute == "float16" and precision.loss_scale == "none":
        problem = f"{compute} with precision.loss_scale=none: gradients below 6e-8 would underflow to zero"
        yield use(problem, "precision.loss_scale=dynamic", "precision.compute=bfloat16")
    if precision.compute != "float16" and precision.loss_scale == "dynamic":
        reason = "only float16 has so small a range that it needs loss scaling"
        problem = f"precision.loss_scale=dynamic with {compute}: {reason}"
        yield use(problem, "precision.loss_scale=none", "precision.compute=float16")
    if precision.initial_scale < precision.min_scale:
        problem = f"{precision.initial_scale=:.17g} is less than {precision.min_scale=:.17g}"
        initial, least = f"{precision.initial_scale:.17g}", f"{precision.min_scale:.17g}"
        yield use(problem, f"precision.initial_scale={least}", f"precision.min_scale={initial}")


@layout_checks.for_each_kind
def kernel_supports_model(
    run: Run, model: Model, precision: Precision, parallel: Parallel, data: Data | Synthetic
) -> Problems:
    """Refuses an explicit choice that would fail later; `auto` falls back to the chunked kernel."""
    asked, chunks = f"{model.attention=!s}", ring_chunks(model, parallel)
    if model.attention == "xla" and chunks > 1:
        reason = "the dense kernel does not return its sums of exponentials, by which a ring's results are merged"
        yield use(f"{asked} in a ring over {parallel.context=}: {reason}", "model.attention=chunked")
    if kernel := FUSED_KERNELS.get(model.attention):
        packs, deterministic = packs_documents(data), run.deterministic
        for settings, reason, alternative in obstacles(
            kernel, model, precision.compute, packs=packs, chunks=chunks, deterministic=deterministic
        ):
            yield use(f"{asked} with {settings}: {reason}", alternative, "model.attention=chunked")


def options_are_deterministic(run: Run) -> Problems:
    name, own = "xla_gpu_deterministic_ops", run.compiler_options  # as in runtime/xla_options.yaml
    if run.deterministic and isinstance(own, dict) and not own.get(name, True):
        problem = f"run.deterministic=true with {name}={own[name]} of run.compiler_options"
        yield use(problem, "run.deterministic=false", "run.compiler_options without it")


def checkpoints_can_be_read(run: Run) -> Problems:
    """Rejects paths that orbax 0.12 saves to but cannot read from: it takes some for URLs, and others for patterns,
    which then match nothing, or another run."""
    path = run.directory
    with suppress(OSError):  # the current directory was removed
        path = path.absolute()
    odd = [character for character in "*?[\\" if character in str(path)]
    problem = f"run.dir={str(path)!r}: to orbax, {' and '.join(odd)} in a path is a pattern"
    if is_url := "gs:" in path.parts or path.parts[:2] in [("/", name) for name in ("gs", "s3", "az", "hf")]:
        problem = f"run.dir={str(path)!r}: to orbax, this is a URL"
    if odd or is_url:
        yield f"{problem}, and checkpoints in it could not be read. Choose another path."


def profiled_steps_are_taken(train: Train) -> Problems:
    """The first step has costs that no other has, so it is not traced."""
    if train.profile:
        first, last = train.profile.steps
        if not 2 <= first <= last <= train.steps:
            problem = f"train.profile.steps={train.profile.steps} are not two steps from 2 to {train.steps=}, in order"
            first = min(max(first, 2), train.steps)
            yield use(problem, f"train.profile={{steps: [{first}, {min(max(first, last), train.steps)}]}}")


MAX_ELEMENTS = 2**60  # per array: XLA counts its bytes in 63 bits


@layout_checks.for_each_kind
def arrays_can_be_counted(model: Model, train: Train) -> Problems:
    m, rows, moe = model, train.batch * model.context, model.moe
    stacked = moe.experts * (moe.width or m.mlp_dim) if moe else 0
    arrays = {
        f"{m.layers=} x {m.width=} x mlp_width={m.mlp_dim}": m.layers * m.width * m.mlp_dim,
        f"{m.layers=} x {m.width=} x model.mlp's {stacked} wide in all": m.layers * m.width * stacked,
        f"{m.vocab=} x {m.width=}": m.vocab * m.width,
        f"{m.context=} x {m.width=}": m.context * m.width,
        f"{train.batch=} x {m.context=} x {m.layers=} x {m.width=}": rows * m.layers * m.width,
        f"{train.batch=} x {m.heads=} x {m.context=}^2": rows * m.heads * m.context,
        f"{train.batch=} x {m.context=} x {m.vocab=}": rows * m.vocab,
    }
    for what, numbers in arrays.items():
        if numbers > MAX_ELEMENTS:
            what = re.sub(r"\bm\.", "model.", what)
            yield f"{what}: an array of {numbers:.1e} numbers, of at most {MAX_ELEMENTS:.1e}. Use smaller values."
            return


CHECKS: tuple[Callable[..., Problems], ...] = (
    heads_divide_width,
    parallel_branches_have_their_norms,
    rotary_keys_have_an_effect,
    rotated_features_are_pairs,
    routers_can_choose,
    mixtures_have_as_many_experts,
    layers_can_be_shared,
    adapted_layers_are_not_shared,
    experts_are_not_quantized,
    codes_are_of_dense_matrices,
    rounded_matrices_are_dense,
    eight_bits_are_of_dense_matrices,
    frozen_parameters_have_their_dtype,
    offload_keys_have_an_effect,
    settings_have_an_effect,
    *layout_checks.CHECKS,
    vocabulary_holds_tokens,
    model_suits_objective,
    data_suits_objective,
    tokens_have_one_path,
    masked_spans_leave_words,
    evaluations_have_data,
    tasks_can_be_evaluated,
    best_checkpoints_have_figures,
    paths_are_not_empty,
    learning_rate_decays_after_warmup,
    checkpoints_can_be_read,
    profiled_steps_are_taken,
    precisions_suit_each_other,
    kernel_supports_model,
    options_are_deterministic,
    arrays_can_be_counted,
)


def problems(sections: Mapping[str, BaseModel]) -> list[str]:
    """Problems found by all checks whose sections are present."""
    found: list[str] = []
    for check in CHECKS:
        needed = inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            found += check(**{name: sections[name] for name in needed})
    return found
