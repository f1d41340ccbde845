"""Keys of a run's YAML, with types, defaults and meanings; data_sections.py has those of `data:`.

A section is frozen and strict, and knows only itself.  Constraints between sections are checks in checks.py.  Derived
values are properties; no field is ever rewritten.  This package does not import jax, so that a bad file fails at
once."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import AfterValidator, Field, field_serializer, field_validator
from pydantic.types import NonNegativeFloat, PositiveFloat

from spmd_lm.addresses import is_bucket, working_copy
from spmd_lm.axes import MESH_AXES
from spmd_lm.config.adapters import IA3, LoRA, NoAdapter
from spmd_lm.config.context_parallel import with_form
from spmd_lm.config.data_sections import CustomData, Instructions, PythonStdlib, Synthetic, Task, Text, Tokens
from spmd_lm.config.layers import BlockLayer, LayerKind, LayerKinds, shortest
from spmd_lm.config.mlp import DenseMLP, MLPKind, MoE
from spmd_lm.config.remat import Policy, RematPolicy, cheapest_block_size
from spmd_lm.config.rope import RopeScaling
from spmd_lm.config.section import Section
from spmd_lm.config.types import (
    MOST,
    Bias,
    Biases,
    Bits,
    Count,
    CountOrZero,
    DropoutRate,
    Dtype,
    FakeQuantKind,
    Fraction,
    MatmulKind,
    OwnModule,
    PathOrBucket,
    ValidPath,
    without_repeats,
)


class Run(Section):
    in_buckets = frozenset({"dir"})

    name: Annotated[ValidPath, Field(pattern=r"^[\w-][\w.-]*$")] = "run"  # name of its directory under runs/
    dir: PathOrBucket | None = None  # a directory, or s3://BUCKET/KEY or gs://BUCKET/KEY; default: runs/<name>
    init_from: ValidPath | None = None  # the run whose parameters this one starts from
    simulate_devices: CountOrZero = 0  # CPU devices to simulate; 0: use the real devices
    # XLA's options for the step: auto (those of runtime/xla_options.yaml), none, or {name: value}
    compiler_options: Literal["auto", "none"] | dict[str, bool | int | float | str] = "auto"
    deterministic: bool = False  # a GPU computes the same bits on every start, but more slowly; docs/reliability.md
    # cache of compilations of a second or more: auto (in the user's cache directory), none, or a directory
    compilation_cache: ValidPath = "auto"
    # trackers that receive the records of metrics.jsonl; docs/reports.md
    trackers: Annotated[list[Literal["wandb", "trackio"]], AfterValidator(without_repeats)] | None = None

    @property
    def bucket_address(self) -> str:  # '' for a run in a directory
        return self.dir if self.dir and is_bucket(self.dir) else ""

    @property
    def directory(self) -> Path:
        """The run's directory on this machine: of one in a bucket, its working copy."""
        if self.bucket_address:
            return working_copy(self.bucket_address)
        return Path(self.dir or f"runs/{self.name}").expanduser()


class Model(Section):
    kind: Literal["gpt", "bert"] = "gpt"  # bert: bidirectional attention
    layers: Annotated[int, Field(ge=1, le=4096)]
    width: Count  # width of the residual stream
    heads: Count  # query heads
    context: Count  # tokens per row
    vocab: Count  # tokens; padded if it is sharded
    head_width: Count | None = None  # width of each head; default: width / heads
    mlp_width: Count | None = None  # hidden width of the MLP; default: 4 x width
    mlp: MLPKind = DenseMLP()  # {kind: moe, experts: 8} for a mixture of experts; docs/models.md
    kv_heads: Count | None = None  # key/value heads, one for heads / kv_heads queries (grouped-query); default: heads
    token_types: CountOrZero = 0  # size of the token type (segment) embedding (BERT: 2); 0: none
    dropout: DropoutRate = 0.1  # after the embedding and at the end of each residual branch
    attention_dropout: DropoutRate = 0.1  # on attention probabilities; > 0 excludes cudnn and splash
    # norms before the residual branch, after the sum (original BERT), or before and after the branch (Gemma 2)
    norm: Literal["pre", "post", "sandwich"] = "pre"
    norm_type: Literal["layer", "rms", "zero_centered_rms"] = "layer"  # zero_centered: scales are 1 + the stored values
    norm_eps: PositiveFloat = 1e-5
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: PositiveFloat = 10_000.0  # base of rotary positions (arXiv:2104.09864)
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of a head's features that rotate, the first ones
    rope_scaling: RopeScaling | None = None  # scaling of rotary positions to longer rows: {kind: linear, factor: 4}
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"] = "gelu_tanh"  # GPT-2 uses the tanh approximation
    use_bias: bool | Biases = True  # biases in all projections and norms; or a list, as in [qkv]
    qk_norm: bool = False  # RMS norms of each head's queries and keys (Qwen3)
    parallel_branches: bool = False  # attention and MLP read the same residual stream (GPT-J, GPT-NeoX)
    query_pre_attn_scalar: Count | None = None  # queries are divided by its square root; default: head_width
    attention_softcap: PositiveFloat | None = None  # scores become cap x tanh(score / cap) (arXiv:2408.00118)
    logit_softcap: PositiveFloat | None = None  # the same for the head's logits
    scale_embeddings: bool = False  # multiply embeddings by the square root of width (Gemma)
    tie_embeddings: bool = True  # the head reuses the token embedding
    # kinds of layers, repeated in this order, as in [{kind: window, span: 4096}, block]; docs/models.md
    period: LayerKinds | None = None
    share_layers: bool = False  # all layers share one set of weights (ALBERT, arXiv:1909.11942)
    scan: Literal["auto"] | bool = "auto"  # loop over layers with lax.scan; auto: unroll on GPUs if it pays
    # kernel; xla: all scores of a row; chunked: in blocks; auto: a library's kernel where one fits, else chunked, or on
    # a CPU in short rows xla
    attention: Literal["auto", "xla", "chunked", "cudnn", "splash"] = "auto"
    # user-defined block, head or all modules: path.py:Name, relative to this file; docs/own-model.md
    module: OwnModule | None = None

    @property
    def mlp_dim(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def moe(self) -> MoE | None:
        """The mixture of experts, for models with one kind of layer; None for a dense MLP."""
        return self.mlp if isinstance(self.mlp, MoE) else None

    @property
    def mixtures(self) -> tuple[MoE, ...]:
        """Those of all kinds of layers."""
        return tuple(each.moe for each in self.of_each_kind if each.moe)

    @property
    def head_dim(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Total width of the keys, and of the values."""
        return (self.kv_heads or self.heads) * self.head_dim

    @property
    def gated(self) -> bool:
        """True if a second projection gates the MLP's hidden layer (arXiv:2002.05202)."""
        return self.activation in ("swiglu", "geglu_tanh")

    def has_bias(self, where: Bias | None = None) -> bool:
        """True if these projections or norms have biases; with None, if user-defined blocks have."""
        return self.use_bias if isinstance(self.use_bias, bool) else where in self.use_bias

    @property
    def rotated_width(self) -> int:
        """Features per head that rotary positions rotate."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def unique_layers(self) -> int:
        return 1 if self.share_layers else self.layers

    @field_serializer("use_bias")
    def _biases_as_written(self, use_bias: bool | Biases) -> bool | list[str]:
        return use_bias if isinstance(use_bias, bool) else [*use_bias]

    @field_serializer("period")
    def _period_as_written(self, period: LayerKinds | None) -> list[str | dict[str, Any]] | None:
        return None if period is None else [kind.as_written for kind in period]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers in the shortest repeating period; the last repeat may be cut short."""
        return shortest(self.period or (BlockLayer(),), self.layers)

    @property
    def of_each_kind(self) -> "tuple[Model, ...]":
        """One model per layer of the period, with all layers of that kind."""
        if self.period is None:
            return (self,)
        return tuple(self.model_copy(update=kind.own_sizes | {"period": (kind,)}) for kind in self.kinds)

    def layers_like(self, place: int) -> int:
        """Number of layers at this place in their period."""
        return -(-(self.layers - place) // len(self.kinds))

    @property
    def span(self) -> int | None:
        """Tokens that each token attends to, None for the whole row; for models with one kind of layer."""
        (kind,) = self.kinds
        return getattr(kind, "span", None)

    @property
    def causal(self) -> bool:
        return self.kind == "gpt"


class Objective(Section):
    kind: str
    # user-defined head with its losses, in place of the objective's: path.py:Name; docs/own-model.md
    module: OwnModule | None = None
    predicts_tokens: ClassVar[bool] = True

    @property
    def has_sequence_label(self) -> bool:
        """True if the first token of each row predicts a class."""
        return not self.predicts_tokens

    @property
    def rows_per_example(self) -> int:
        return 1

    def ties_embeddings(self, model: Model) -> bool:
        return model.tie_embeddings and self.predicts_tokens


class CausalLM(Objective):
    kind: Literal["causal_lm"] = "causal_lm"


class MaskedLM(Objective):
    """Predicts masked tokens; spans of whole words are masked."""

    kind: Literal["masked_lm"]
    mask_prob: Fraction = 0.15  # share of a row's tokens that is masked
    max_span: Annotated[int, Field(ge=1, le=16)] = 3  # words; a span of n has probability proportional to 1/n
    short_seq_prob: Fraction = 0.1  # share of rows that are cut short
    sentence_order: bool = True  # also predict which of a row's two segments of text came first

    @property
    def has_sequence_label(self) -> bool:
        return self.sentence_order


class Classification(Objective):
    """Predicts the class of a row, which holds one text or two."""

    kind: Literal["classification"]
    predicts_tokens: ClassVar[bool] = False
    classes: Annotated[int, Field(ge=2, le=MOST)]  # number of labels


class MultipleChoice(Objective):
    """Predicts which of a question's rows, one per choice, is the right answer; `train.batch` counts rows."""

    kind: Literal["multiple_choice"]
    predicts_tokens: ClassVar[bool] = False
    choices: Annotated[int, Field(ge=2, le=MOST)] = 4  # rows per question

    @property
    def rows_per_example(self) -> int:
        return self.choices


class ExtractiveQA(Objective):
    """Extractive question answering: predicts where the answer starts and ends in the text after the question.  A text
    too long for one row is read in several overlapping rows."""

    kind: Literal["span"]
    predicts_tokens: ClassVar[bool] = False
    doc_stride: Count = 128  # tokens between the starts of consecutive rows of one text, at most
    max_answer_length: Count = 30  # tokens

    @property
    def has_sequence_label(self) -> bool:
        return False


class Parallel(Section):
    pipe: Count = 1  # stages of the pipeline
    data: Annotated[int, Field(ge=-1, le=MOST)] = -1  # -1: all devices that the other axes leave
    model: Count = 1  # degree of tensor parallelism
    expert: Count = 1  # shards of the experts of model.mlp, and of the batch; docs/parallelism/experts.md
    context: Count = 1  # shards of each row's tokens; docs/parallelism/context.md
    # how devices along `context` attend to one another's tokens: each with some heads of the whole row (heads), or with
    # keys and values that travel from device to device (ring); auto: heads if there are enough of them
    context_attention: Literal["auto", "heads", "ring"] = "auto"
    replica: Count = 1  # copies of a ZeRO group, outside `data`
    # who inserts the collectives: the step itself (manual), or XLA from sharding types (types; not in pipelines);
    # auto: types if the compiled step is as good, config/partitioner.py
    partitioner: Literal["auto", "types", "manual"] = "auto"
    sequence: bool = False  # activations between layers are sharded over `model` along the sequence
    # 1 shards the optimizer's state over `data`, 2 gradients too, 3 parameters too
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    schedule: Literal["gpipe", "1f1b", "interleaved", "breadth_first"] = "1f1b"
    chunks: Count = 1  # chunks of layers per stage, for interleaved and breadth_first
    microbatches: Count = 1  # parts that a step's batch is split into
    reduce_once: bool = False  # ZeRO gathers and scatters once per step, not per microbatch: less sent, more memory
    # ZeRO-3 gathers layers across hosts once per step, and then within a host alone (ZeRO++'s hpZ); not on TPUs
    secondary: Literal["none", "within_host"] = "none"
    # ZeRO-3 gathers weights of matrices as int8 codes, rounded once more: half the bytes of bfloat16 (ZeRO++'s qwZ)
    quantize_gather: Literal["none", "int8"] = "none"
    # ZeRO-3 sends gradients of matrices as codes, and sums them in float32 (ZeRO++'s qgZ); int4 loses more
    quantize_scatter: Literal["none", "int8", "int4"] = "none"
    # ZeRO-3 gathers the weights that a layer uses first while the layer before it runs, in a breadth-first pipeline
    # those of the next chunk; auto: on GPUs, without a pipeline
    prefetch: Literal["auto", "on", "off"] = "auto"
    # linears sharded over `model` multiply shard by shard, while the next shard travels; auto: on H100 and H200, with
    # the sequence sharded and at least 2,048 tokens per shard
    collective_matmul: Literal["auto", "on", "off"] = "auto"
    model_across_hosts: bool = False  # `model` may span hosts of GPUs or TPU slices, whose network is slower
    run_idle_stages: bool = False  # idle pipeline stages compute and discard, so that all devices take one branch

    @property
    def degrees(self) -> dict[str, int]:
        """Devices along each mesh axis; -1 for all remaining devices."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}


LEAST_SCALE = 2**-14
"""Smallest scale: below it, float16 loses digits or underflows to zero."""


class Precision(Section):
    params: Dtype = "float32"  # master weights and optimizer state
    frozen: Dtype | None = None  # parameters that are not trained; default: params
    compute: Dtype = "bfloat16"  # activations and matmuls
    reduce: Dtype = "float32"  # gradients while they are summed over devices
    # written by matmuls in training as float32, or wider if compute is; compute: rounded, half the bytes
    logits: Literal["float32", "compute"] = "float32"
    # rounding of blocks' matrices before they multiply, in training and after it; docs/quantization.md
    fake_quant: FakeQuantKind = "none"
    # codes that blocks' matrices are stored in, which are not trained, in a run that `spmd-lm quantize` has made
    quantized: Literal["none"] | Bits = "none"
    quantized_group: Count | None = None  # inputs that share a scale; default: all of an output
    # operands of matmuls with blocks' matrices in training, forward and backward; docs/quantization.md
    matmul: MatmulKind = "none"
    emulate: bool = False  # multiply them so on devices without such matmuls too, as slowly as that may be
    loss_scale: Literal["none", "dynamic"] = "none"  # dynamic: for float16, see step/loss_scale.py
    # halved in the first steps if it is too large; Megatron-LM begins at 4294967296
    initial_scale: Annotated[float, Field(ge=LEAST_SCALE, le=2**64)] = 2.0**16
    scale_window: Count = 1000  # consecutive steps without overflow that double the scale
    hysteresis: Count = 2  # overflows until the scale is first halved; a full window resets the count
    min_scale: Annotated[float, Field(ge=LEAST_SCALE)] = 1.0  # the scale is never halved below it

    @property
    def few_bits(self) -> str:
        """The setting by which blocks' matrices multiply as few bits, KEY=VALUE; '' if none."""
        keys = [key for key in ("fake_quant", "quantized") if getattr(self, key) != "none"]
        return f"precision.{keys[0]}={getattr(self, keys[0])}" if keys else ""


class OptimizerConfig(Section):
    moments: ClassVar[str]  # name of the optimizer's state
    num_moments: ClassVar[int]  # state values per parameter
    kind: str
    lr: PositiveFloat  # highest learning rate, after warmup
    min_lr: NonNegativeFloat = 0.0  # lowest learning rate, after decay
    warmup: CountOrZero = 0  # steps
    decay: Literal["cosine", "linear", "sqrt", "constant"] = "cosine"  # sqrt: 1 - sqrt, arXiv:2405.18392
    decay_start: CountOrZero | None = None  # step at which the decay begins, lr until then; default: warmup
    decay_steps: Count | None = None  # step at which min_lr is reached; default: train.steps
    weight_decay: NonNegativeFloat = 0.1  # not applied to biases and norms
    clip: NonNegativeFloat = 1.0  # largest global gradient norm; 0: no clipping
    # parameters that are not trained: name patterns, separated by spaces; parallel/freeze.py
    freeze: Annotated[str, Field(max_length=1000)] = ""
    # memory of the optimizer's state, and of the float32 weights, of matrices; docs/memory.md
    offload: Literal["none", "host", "disk"] = "none"
    offload_dir: ValidPath | None = None  # of offload=disk, on each host: scratch; default: RUN/offload
    offload_update: Literal["device", "host"] = "device"  # which of them computes the update of what is offloaded


class AdamW(OptimizerConfig):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    moments = "adam moments"
    num_moments = 2
    kind: Literal["adamw"] = "adamw"
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8


class Lion(OptimizerConfig):
    """Sign of an interpolated momentum (arXiv:2302.06675).  Updates are larger than AdamW's: the paper's lr is 3 to 10
    times smaller, and its weight decay as many times larger."""

    moments = "lion momentum"
    num_moments = 1
    kind: Literal["lion"]
    b1: Fraction = 0.9  # interpolates momentum and gradient for the update
    b2: Fraction = 0.99  # decay of the momentum


class CustomOptimizer(OptimizerConfig):
    """A user-defined optax rule.  Schedule, clipping, weight decay and frozen parameters work as for the others."""

    moments = "optimizer state"
    kind: Literal["custom"]
    module: OwnModule  # path.py:Name, a function that returns an elementwise rule; docs/own-model.md


class Remat(Section):
    policy: Policy = "none"  # activations that backward computes again; config/remat.py
    block_size: Count | None = None  # layers per remat block of policy block; default: whichever saves least


class Profile(Section):
    steps: Annotated[list[Count], Field(min_length=2, max_length=2)]  # the first and the last


class Guard(Section):
    max_skips: CountOrZero = 10  # steps skipped in a row (non-finite loss or gradients, spikes); one more ends the run
    spikes: bool = False  # also skip steps whose loss is far above the last ones
    exclude: list[Count] | None = None  # steps whose batches are not trained on


class Watchdog(Section):
    """Ends the run with exit code 7 if a step takes longer than max(factor x the median step, minimum)."""

    factor: PositiveFloat = 10.0
    minimum: PositiveFloat = 120.0  # seconds


class Train(Section):
    steps: Count  # updates
    batch: Count  # sequences per step, over all devices
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # seed of parameters, data order and dropout (one word of its key)
    log_every: Count = 10  # steps per line of metrics.jsonl
    eval_every: CountOrZero = 0  # 0: never
    eval_batches: Count = 8  # batches of validation sequences per evaluation; a task evaluates on all its examples
    # zero-shot tasks at every evaluation: NAME or NAME=PATH; docs/evaluation.md
    eval_tasks: Annotated[list[str], AfterValidator(without_repeats)] | None = None
    guard: Guard = Guard()
    watchdog: Watchdog = Watchdog()
    replica_check_every: CountOrZero = 0  # steps between comparisons of all copies of the state; 0: never
    profile: Profile | None = None  # {steps: [10, 13]} writes an xprof trace of these steps to run.dir/profile


class LocalCheckpoint(Section):
    dir: ValidPath  # directory on each host: in memory, as under /dev/shm, or on disk
    every: Count  # steps
    keep: Count = 2  # newest checkpoints to keep; at least 2 in jobs of several processes


class Checkpoint(Section):
    every: CountOrZero = 0  # steps; 0: never
    keep: Count = 2  # newest checkpoints to keep
    # a loss or evaluation figure in metrics.jsonl, such as eval_loss: the checkpoint with the best value is kept beside
    # the newest. Best is lowest for a loss, a perplexity or nats, else highest
    keep_best: Annotated[str, Field(pattern=r"^\w+$", max_length=200)] | None = None
    asynchronous: bool = Field(True, alias="async")  # written in the background
    verify: bool = True  # compare checkpoints that are read with the fingerprints of what was saved
    read_back: bool = False  # read each checkpoint back before it counts
    # {dir: /dev/shm/checkpoints, every: 50, keep: 2} also saves local checkpoints, on each process's host
    local: LocalCheckpoint | None = None


DEFAULT_KINDS = {"optim": "adamw"}
"""Kinds of sections that may omit `kind`."""


class RunConfig(Section):
    """The whole configuration of one run, made by `config.load.load`."""

    run: Run = Run()
    model: Model
    objective: Annotated[
        CausalLM | MaskedLM | Classification | MultipleChoice | ExtractiveQA, Field(discriminator="kind")
    ] = CausalLM()
    data: Annotated[
        PythonStdlib | Text | Tokens | Task | Instructions | Synthetic | CustomData, Field(discriminator="source")
    ]
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    optim: Annotated[AdamW | Lion | CustomOptimizer, Field(discriminator="kind")]
    adapter: Annotated[NoAdapter | LoRA | IA3, Field(discriminator="kind")] = NoAdapter()
    remat: Remat = Remat()
    train: Train
    checkpoint: Checkpoint = Checkpoint()

    @field_validator("optim", mode="before")
    @classmethod
    def _default_kind(cls, optim: Any) -> Any:
        return {"kind": DEFAULT_KINDS["optim"]} | optim if isinstance(optim, dict) else optim

    @property
    def by_key(self) -> dict[str, Any]:
        """Values by section.key."""
        sections = self.model_dump(by_alias=True)
        return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}

    @property
    def of_each_kind(self) -> "tuple[RunConfig, ...]":
        """One run per layer of the period, with all layers of that kind."""
        if self.model.period is None:
            return (self,)
        parallel = with_form(self.model, self.parallel)
        return tuple(
            self.model_copy(update={"model": model, "parallel": parallel}) for model in self.model.of_each_kind
        )

    def stack_path(self, place: int) -> tuple[str, ...]:
        """The parameter path of the layers at this place in their periods."""
        kinds = self.model.kinds
        return ("blocks", f"{place}_{kinds[place].kind}") if len(kinds) > 1 else ("blocks",)

    @property
    def chunks(self) -> int:
        """Chunks of layers per stage; `parallel.chunks` has no effect on a single stage."""
        return self.parallel.chunks if self.parallel.pipe > 1 else 1

    @property
    def layers_per_chunk(self) -> int:
        """Layers in one loop: a stage's, or one of its chunks'."""
        return self.model.layers // (self.parallel.pipe * self.chunks)

    @property
    def remat_policy(self) -> RematPolicy:
        """`remat`, resolved.  A pipeline saves only a chunk's input and recomputes the chunk; if remat would save the
        same, it would only run the chunk a third time, so the policy is `none`."""
        (m, *_), policy, size = self.model.of_each_kind, self.remat.policy, 1
        if policy == "block":
            # Relative to the layer's input (arXiv:2205.05198, section 4.1).
            activations = 17 + (2.5 * m.heads * m.context / m.width if m.attention == "xla" else 0)
            size = self.remat.block_size or cheapest_block_size(self.layers_per_chunk, activations)
            policy = "full" if size == 1 else policy
        if self.parallel.pipe > 1 and policy in ("full", "block") and size == self.layers_per_chunk:
            policy = "none"
        needed_sums = 2 if m.norm != "pre" else 0 if m.parallel_branches else 1
        return RematPolicy(policy, size if policy == "block" else 1, needed_sums)


def variants(name: str) -> dict[str, type[Section]]:
    """The section's types by discriminator value; a single type is under ''."""
    field = RunConfig.model_fields[name]
    if not field.discriminator:
        return {"": cast(type[Section], field.annotation)}
    types: tuple[type[Section], ...] = get_args(field.annotation)
    return {get_args(each.model_fields[str(field.discriminator)].annotation)[0]: each for each in types}
