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
"""A mapping from targets to numbers; the first target that matches applies."""

Alpha = Annotated[float, Field(gt=0, le=2**20)]
ALL_LINEAR = "all-linear"
Base = Literal["none", "int8", "nf4", "nf4-double"]

CODED = ("codes", "absmax", "nested_absmax", "offset")
"""Last keys of the arrays of a quantized matrix; none is cast to another dtype."""

SUFFIX = "_adapter"
"""Suffix of an adapter's key, beside its matrix's: query_adapter beside query."""


def is_adapter(path: Sequence[str]) -> bool:
    return any(key.endswith(SUFFIX) for key in path)


def numbers_per_element(key: str, dtype: str) -> int:
    """Model parameters per array element: in codes 2 for uint8, else 1; in a scale 0; in other arrays 1."""
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
        **{f"mlp.shared.{name}": (f"mlp.shared_expert.{name}_proj",) for name in ("gate", "up", "down")},
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
"""Hugging Face's module names for a layer's matrices, by model.kind."""

HF_LAYERS = {"gpt": ("model.layers", "transformer.h", "gpt_neox.layers"), "bert": ("bert.encoder.layer",)}
"""Hugging Face's paths of the layers, without the layer number."""

HF_NAMES = {
    **dict.fromkeys(("embed_tokens", "wte", "embed_in", "word_embeddings"), "embedding.tokens"),
    **dict.fromkeys(("lm_head", "embed_out"), "head.tokens"),
    **dict.fromkeys(("classifier", "score", "qa_outputs"), "head"),
    **dict.fromkeys(("norm", "ln_f", "final_layer_norm"), "head.norm"),
    "pooler": "head.pooler",
}
"""Our names for Hugging Face's modules outside the layers."""


class NoAdapter(Section):
    """No adapter: the model itself is trained."""

    kind: Literal["none"] = "none"
    base: ClassVar[Base] = "none"


class Adapter(Section):
    """Small trained parameters beside the blocks' matrices.  The rest is frozen, except modules_to_save."""

    kind: str
    # adapted matrices of blocks: names, such as attention.query, query or Hugging Face's q_proj; a regular expression
    # that matches whole names; or all-linear
    targets: Names | Name = ALL_LINEAR
    # other parameters to train, such as head.tokens; a task's head is always trained
    modules_to_save: Names = ()
    base: Base = "none"  # storage of the blocks' matrices: not quantized, or in 8 or 4 bits (docs/adapters.md)


class IA3(Adapter):
    """Learned scales (arXiv:2205.05638) of a matrix's outputs, or of its inputs if it ends a residual branch."""

    kind: Literal["ia3"]
    targets: Names | Name = ("key", "value", "down")


class LoRA(Adapter):
    """Low-rank adaptation (arXiv:2106.09685): a matrix W becomes W + scaling x A B."""

    kind: Literal["lora"]
    rank: Count = 8  # columns of A, rows of B
    alpha: Alpha = 16.0  # scaling is alpha / rank
    rank_pattern: Pattern[Count] = ()  # ranks of some matrices, by name or regular expression
    alpha_pattern: Pattern[Alpha] = ()  # alphas of some matrices, likewise
    rslora: bool = False  # scaling is alpha / sqrt(rank) (arXiv:2312.03732)
    dropout: DropoutRate = 0.0  # dropout rate on A's input
    bias: Literal["none", "all", "lora_only"] = "none"  # biases to train too; lora_only: those of adapted matrices
