"""The section `adapter`: small trained parameters for a model that is otherwise frozen."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from spmd_lm.config.section import Section
from spmd_lm.config.types import Count, DropoutRate, without_repeats

Name = Annotated[str, Field(min_length=1, max_length=1000)]


def _from_yaml(names: Any) -> Any:  # a tuple, because configurations are hashed
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(without_repeats(names) if texts else names) if isinstance(names, list) else names


Names = Annotated[tuple[Name, ...], BeforeValidator(_from_yaml)]

Number = TypeVar("Number", int, float)
Pattern = Annotated[
    tuple[tuple[Name, Number], ...],
    BeforeValidator(lambda pattern: tuple(pattern.items()) if isinstance(pattern, dict) else pattern),
    PlainSerializer(dict),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
"""Numbers by targets, written as a mapping; the first target that matches counts."""

Alpha = Annotated[float, Field(gt=0, le=2**20)]
ALL_LINEAR = "all-linear"
Base = Literal["none", "int8", "nf4", "nf4-double"]

CODED = ("codes", "absmax", "nested_absmax", "offset")
"""Last keys of the arrays that encode a quantized matrix; each is used in its own dtype."""

SUFFIX = "_adapter"
"""End of the key of an adapter, beside that of its matrix: query_adapter."""


def is_adapter(path: Sequence[str]) -> bool:
    return any(key.endswith(SUFFIX) for key in path)


def numbers_per_element(key: str, dtype: str) -> int:
    """Model parameters per array element: 2 or 1 in a byte of codes, 0 in a scale."""
    if key not in CODED:
        return 1
    return 0 if key != CODED[0] else 2 if dtype == "uint8" else 1


HF_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt": {
        "attention.query": ("self_attn.q_proj", "attn.c_attn", "attention.query_key_value", "self_attn.qkv_proj"),
        "attention.key": ("self_attn.k_proj", "attn.c_attn", "attention.query_key_value", "self_attn.qkv_proj"),
        "attention.value": ("self_attn.v_proj", "attn.c_attn", "attention.query_key_value", "self_attn.qkv_proj"),
        "attention.out": ("self_attn.o_proj", "attn.c_proj", "attention.dense"),
        "mlp.gate": ("mlp.gate_proj", "mlp.gate_up_proj"),
        "mlp.up": ("mlp.up_proj", "mlp.c_fc", "mlp.dense_h_to_4h", "mlp.gate_up_proj"),
        "mlp.down": ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h"),
    },
    "bert": {
        "attention.query": ("attention.self.query",),
        "attention.key": ("attention.self.key",),
        "attention.value": ("attention.self.value",),
        "attention.out": ("attention.output.dense",),
        "mlp.up": ("intermediate.dense",),
        "mlp.down": ("output.dense",),
    },
}
"""Hugging Face's names of a layer's matrices, by model.kind."""

HF_LAYERS = {"gpt": ("model.layers", "transformer.h", "gpt_neox.layers"), "bert": ("bert.encoder.layer",)}
"""Paths of their layers, before the layer's number."""

HF_NAMES = {
    **dict.fromkeys(("embed_tokens", "wte", "embed_in", "word_embeddings"), "embedding.tokens"),
    **dict.fromkeys(("lm_head", "embed_out"), "head.tokens"),
    **dict.fromkeys(("classifier", "score", "qa_outputs"), "head"),
    **dict.fromkeys(("norm", "ln_f", "final_layer_norm"), "head.norm"),
    "pooler": "head.pooler",
}
"""Our names of their modules outside the layers."""


class NoAdapter(Section):
    """The model itself is trained."""

    kind: Literal["none"] = "none"
    base: ClassVar[Base] = "none"


class Adapter(Section):
    """Small parameters beside the matrices of blocks.  These, the embedding and the head stay as they are."""

    kind: str
    # matrices of blocks that have one: names, as attention.query, query, or Hugging Face's q_proj; a regular expression
    # of a whole name; or all-linear
    targets: Names | Name = ALL_LINEAR
    # trained too: parts of the parameters, as head.tokens; the head of a task always is
    modules_to_save: Names = ()
    base: Base = "none"  # how the matrices of blocks are stored: in 8 or 4 bits (docs/adapters.md)


class IA3(Adapter):
    """Learned scales (arXiv:2205.05638) of a matrix's outputs, or of its inputs where it ends a branch."""

    kind: Literal["ia3"]
    targets: Names | Name = ("key", "value", "down")


class LoRA(Adapter):
    """Low-rank adaptation (arXiv:2106.09685): a matrix W becomes W + scaling x A B."""

    kind: Literal["lora"]
    rank: Count = 8  # columns of A, rows of B
    alpha: Alpha = 16.0  # scaling is alpha / rank
    rank_pattern: Pattern[Count] = ()  # of some matrices, by names or regular expressions
    alpha_pattern: Pattern[Alpha] = ()  # likewise
    rslora: bool = False  # scaling is alpha / sqrt(rank) (arXiv:2312.03732)
    dropout: DropoutRate = 0.0  # of A's input
    bias: Literal["none", "all", "lora_only"] = "none"  # biases that are trained too; lora_only: of adapted matrices
