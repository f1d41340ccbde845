"""Every key of a run's YAML: its type, its default, its meaning.

A section is frozen and strict, and knows only itself.  What two sections must agree on is a check of `checks.py`.
Values that follow from others are properties; no field is ever rewritten.  This package does not import jax: a bad file
fails in no time."""

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from spmd_lm.config.remat import Policy, RematPolicy, cheapest_block_size

Dtype = Literal["bfloat16", "float16", "float32", "float64"]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False, protected_namespaces=()
    )


def possible_path(path: str) -> str:
    """The path, if a file system could have it; whether it may be written is found out when it is."""
    try:
        parts = Path(path).expanduser().parts
    except RuntimeError:
        raise PydanticCustomError("path_home", "expected ~ or the ~name of a user of this machine") from None
    if "\0" in path:
        raise PydanticCustomError("path_nul", "expected a path without NUL characters")
    if any(len(part.encode()) > 255 for part in parts):
        raise PydanticCustomError("path_length", "expected names of at most 255 bytes between slashes")
    return path


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$"), AfterValidator(possible_path)] = "run"  # under runs/
    dir: Annotated[str, AfterValidator(possible_path)] | None = None  # default: runs/<name>
    init_from: Annotated[str, AfterValidator(possible_path)] | None = None  # a run whose model this one starts as
    simulate_devices: Natural = 0  # CPU devices to pretend to have; 0 takes what is there

    @property
    def directory(self) -> Path:
        return Path(self.dir or f"runs/{self.name}").expanduser()


class Model(Section):
    kind: Literal["gpt", "bert"] = "gpt"  # bert: every token sees the whole row
    layers: Count
    width: Count
    heads: Count
    context: Count
    vocab: Count
    mlp_width: Count | None = None  # of the MLP; default 4 x width
    kv_heads: Count | None = None  # heads of keys and values, each for heads / kv_heads queries; default heads
    token_types: Natural = 0  # parts of a row, each with its own embedding (BERT: 2)
    dropout: Rate = 0.1  # after the embedding and at the end of each residual branch
    attention_dropout: Rate = 0.1  # on attention probabilities; > 0 takes the XLA path
    norm: Literal["pre", "post"] = "pre"  # before the residual branch, or after its sum (the first BERT)
    norm_type: Literal["layer", "rms"] = "layer"
    norm_eps: Positive = 1e-5
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: Positive = 10_000.0
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"  # GPT-2 used the tanh form
    use_bias: bool = True
    tie_embeddings: bool = True
    share_layers: bool = False  # one layer's weights serve all of them (ALBERT, arXiv:1909.11942)
    scan: bool = True  # one compiled block for all layers; false unrolls: 4% to 11% faster on a CPU, slower to compile
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"

    @property
    def mlp_dim(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def layers_kept(self) -> int:
        """Layers that have weights of their own."""
        return 1 if self.share_layers else self.layers

    @property
    def causal(self) -> bool:
        """Whether a token sees none of those that follow."""
        return self.kind == "gpt"


class Objective(Section):
    """What a model is trained for."""

    kind: str
    of_tokens: ClassVar[bool] = True  # whether it predicts words, out of the vocabulary

    @property
    def of_rows(self) -> bool:
        """Whether it says one thing of a whole row."""
        return not self.of_tokens

    @property
    def rows_of_one(self) -> int:
        """Rows that are judged together."""
        return 1

    def ties(self, model: Model) -> bool:
        """Whether the embedding's table is the head's as well."""
        return model.tie_embeddings and self.of_tokens


class CausalLM(Objective):
    kind: Literal["causal_lm"] = "causal_lm"


class MaskedLM(Objective):
    """Whole words are hidden in spans, and predicted."""

    kind: Literal["masked_lm"]
    mask_prob: Rate = 0.15  # of a row's tokens
    max_span: Annotated[int, Field(ge=1, le=16)] = 3  # words; a span of n has probability proportional to 1/n
    short_seq_prob: Rate = 0.1  # of the rows, which end early
    sentence_order: bool = True  # a row is two pieces of text; which came first is predicted too

    @property
    def of_rows(self) -> bool:
        return self.sentence_order


class Classification(Objective):
    """A row, of one text or of two, is of one of several classes."""

    kind: Literal["classification"]
    of_tokens: ClassVar[bool] = False
    classes: Annotated[int, Field(ge=2)]


class MultipleChoice(Objective):
    """Of as many rows as there are choices, one is right; `train.batch` counts rows."""

    kind: Literal["multiple_choice"]
    of_tokens: ClassVar[bool] = False
    choices: Annotated[int, Field(ge=2)] = 4

    @property
    def rows_of_one(self) -> int:
        return self.choices


class Span(Objective):
    """A question's answer stands in the text after it: where it begins, and where it ends.  A text too long for a row
    is read in several, which overlap."""

    kind: Literal["span"]
    of_tokens: ClassVar[bool] = False
    doc_stride: Count = 128  # tokens from where one of these rows begins to where the next does, at most
    max_answer_length: Count = 30  # tokens of an answer

    @property
    def of_rows(self) -> bool:
        return False


class Data(Section):
    source: str  # which of the classes below; stands first in what is written
    tokenizer: Annotated[str, AfterValidator(possible_path)] = (
        "bytes"  # or a vocabulary's path: data/tokenizers/subwords.py
    )


class Documents(Data):
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of the documents; of a single document, its end


def _several(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


class PythonStdlib(Documents):
    """The standard library's own sources: text that is on every machine with Python."""

    source: Literal["python-stdlib"]


class Text(Documents):
    """UTF-8 files: paths, globs or directories, relative to where the command runs."""

    source: Literal["text"]
    path: str | list[str]

    @property
    def paths(self) -> list[str]:
        return _several(self.path)


class Task(Data):
    """Labelled examples in a task's own files: `data/tasks/files.py` tells each one's form."""

    source: Literal["task"]
    task: Literal["mnli", "qqp", "sst2", "cola", "race", "squad", "jsonl"]
    path: str | list[str]  # to train on; files, globs or directories
    validation_path: str | list[str]  # to be judged by, the whole of it

    @property
    def paths(self) -> list[str]:
        return _several(self.path)

    @property
    def held_out(self) -> list[str]:
        return _several(self.validation_path)


class Synthetic(Section):
    """A Markov chain whose entropy per token is known: each token has `branching` equally likely successors."""

    source: Literal["synthetic"]
    branching: Count = 4

    @property
    def entropy(self) -> float:
        """Nats per token; no model's expected loss is lower."""
        return math.log(self.branching)


class Parallel(Section):
    pipe: Count = 1
    data: Annotated[int, Field(ge=-1)] = -1  # -1 takes the devices that the other axes leave
    model: Count = 1
    replica: Count = 1
    sequence: bool = False
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    schedule: Literal["gpipe", "1f1b", "interleaved", "breadth_first"] = "1f1b"
    chunks: Count = 1
    microbatches: Count = 1
    reduce_once: bool = False
    run_idle_stages: bool = (
        False  # idle stages of a pipeline work too, and it is thrown away: no device takes another branch
    )


class Precision(Section):
    params: Dtype = "float32"
    compute: Dtype = "bfloat16"
    reduce: Dtype = "float32"
    loss_scale: Literal["none", "dynamic"] = "none"  # dynamic: for float16, as step/loss_scale.py says
    initial_scale: Annotated[float, Field(gt=0, le=2**64)] = 2.0**32  # far too much for most: halved in the first steps
    scale_window: Count = 1000  # steps without overflow, in a row, that double the scale
    hysteresis: Count = 2  # overflows, up to the first that halves it; a full window counts anew
    min_scale: Positive = 1.0


class AdamW(Section):
    kind: Literal["adamw"] = "adamw"
    lr: Positive
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    warmup: Natural = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: Count | None = None  # step at which min_lr is reached; default train.steps
    b1: Rate = 0.9
    b2: Rate = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1  # none on biases and norms
    clip: Annotated[float, Field(ge=0)] = 1.0  # of the global gradient norm; 0 switches it off
    freeze: str = ""  # patterns of names, spaces between: these parameters stay as they are; step/freeze.py


class Remat(Section):
    policy: Policy = "none"
    block_size: Count | None = None  # layers per remat block of policy block; default: the one that saves least


class Train(Section):
    steps: Count
    batch: Count  # sequences per step, over all devices
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # one word of the dropout generator's key
    log_every: Count = 10
    eval_every: Natural = 0  # 0: never
    eval_batches: Count = 8  # batches of validation sequences in one evaluation; of a task all that there are


class Checkpoint(Section):
    every: Natural = 0  # 0: never
    keep: Count = 2
    asynchronous: bool = Field(True, alias="async")


class RunConfig(Section):
    """One run, whole.  `config.load.load` is the way to one."""

    run: Run = Run()
    model: Model
    objective: Annotated[CausalLM | MaskedLM | Classification | MultipleChoice | Span, Field(discriminator="kind")] = (
        CausalLM()
    )
    data: Annotated[PythonStdlib | Text | Task | Synthetic, Field(discriminator="source")]
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    optim: AdamW
    remat: Remat = Remat()
    train: Train
    checkpoint: Checkpoint = Checkpoint()

    @property
    def chunks(self) -> int:
        """Chunks of layers per pipeline stage; `parallel.chunks` means nothing where there is one stage."""
        return self.parallel.chunks if self.parallel.pipe > 1 else 1

    @property
    def layers_per_chunk(self) -> int:
        """Layers that run in one loop: those of a stage, or of one of its chunks."""
        return self.model.layers // (self.parallel.pipe * self.chunks)

    @property
    def scan_layers(self) -> bool:
        """Whether layers run in a loop; a single one does not."""
        return self.model.scan and self.layers_per_chunk > 1

    @property
    def remat_policy(self) -> RematPolicy:
        """`remat`, resolved.

        A pipeline saves only a chunk's input and runs the chunk again; where remat would save no more than that, the
        chunk would run a third time, and the policy is `none`."""
        policy, size = self.remat.policy, 1
        if policy == "block":
            size = self.remat.block_size or cheapest_block_size(self.layers_per_chunk, self._activations_per_layer)
            policy = "full" if size == 1 else policy
        if self.parallel.pipe > 1 and policy in ("full", "block") and size == self.layers_per_chunk:
            policy = "none"
        return RematPolicy(policy, size if policy == "block" else 1, self.model.norm == "post", self.model.scan)

    @property
    def _activations_per_layer(self) -> float:
        """Of a block's input; as arXiv:2205.05198, section 4.1, counts them."""
        m = self.model
        return 17 + (2.5 * m.heads * m.context / m.width if m.attention_dropout else 0)
