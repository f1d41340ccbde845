"""Our models and Hugging Face's, as data: for each architecture one table of names, and one of the keys of config.json.

A row says which of their tensors holds a leaf of ours, and how: whether transposed, and which part of it.  Ours are
[width, other], with layers stacked in front; theirs is one tensor a layer, torch's Linear [out, in] or, in GPT-2,
Conv1D [in, out].  Nothing here reads a file or touches an array.  Names and fields: transformers 5.23,
modeling_gpt2.py, modeling_bert.py, modeling_llama.py and the configuration_*.py beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Shape = tuple[int, ...]
Span = tuple[int, int]
"""Where a part of a dimension begins, and where the next one does."""

LAYER = "{layer}"


@dataclass(frozen=True)
class Row:
    """ours: path of a leaf in the tree of parameters.  theirs: the tensor that holds it, or each of its layers.
    transposed: theirs is ours with its two dimensions exchanged.  part, parts: of their last dimension ours is this one
    of so many equal parts."""

    ours: str
    theirs: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    @property
    def stacked(self) -> bool:
        """Whether ours holds all layers, theirs one."""
        return LAYER in self.theirs

    def shape(self, ours: Shape) -> Shape:
        """Of their tensor, if one layer of our leaf has this shape."""
        *rest, last = ours[::-1] if self.transposed else ours
        return (*rest, self.parts * last)

    def within(self, ours: Sequence[Span], shape: Shape) -> tuple[Span, ...]:
        """Where in their tensor this part of one layer of our leaf, of this shape, lies."""
        *rest, (start, stop) = ours[::-1] if self.transposed else ours
        skipped = self.part * shape[0 if self.transposed else -1]
        return (*rest, (skipped + start, skipped + stop))


@dataclass(frozen=True)
class Key:
    """theirs: of config.json.  ours: of schema.Model.  default: theirs, where config.json says nothing; its type is the
    key's.  words: their values in ours, for keys whose values are words."""

    theirs: str
    ours: str
    default: Any
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """kind: model_type in config.json.  classes: its models, each with the objective that has its heads, the most
    common first.  rows: where each leaf is.  keys: what config.json says of the model.  fixed: what every such model is
    in ours.  only: keys of config.json whose value changes the model, with the one value that we can compute; what is
    not said has that value.  older: spellings of names that are accepted too.  copies: tensors in files that are no
    parameters, or the same ones once more."""

    kind: str
    classes: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any]
    only: Mapping[str, Any]
    older: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()

    def spellings(self, name: str) -> list[str]:
        """A tensor's name, then how else it is found written."""
        return [name, *(name.replace(new, old) for new, old in self.older.items() if new in name)]


# --- the tables -------------------------------------------------------------------------------------------------------


def linear(ours: str, theirs: str, **how: Any) -> tuple[Row, Row]:
    """A matrix and its bias."""
    parts = {key: value for key, value in how.items() if key != "transposed"}
    return Row(ours, f"{theirs}.weight", **how), Row(f"{ours}_bias", f"{theirs}.bias", **parts)


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return Row(f"{ours}.scale", f"{theirs}.weight"), Row(f"{ours}.bias", f"{theirs}.bias")


GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

H = "transformer.h.{layer}"
GPT2 = Architecture(
    kind="gpt2",
    classes={"GPT2LMHeadModel": {"kind": "causal_lm"}},
    rows=(
        Row("embedding.tokens", "transformer.wte.weight"),
        Row("embedding.positions", "transformer.wpe.weight"),
        *norm("blocks.norm1", f"{H}.ln_1"),
        *linear("blocks.attention.query", f"{H}.attn.c_attn", part=0, parts=3),
        *linear("blocks.attention.key", f"{H}.attn.c_attn", part=1, parts=3),
        *linear("blocks.attention.value", f"{H}.attn.c_attn", part=2, parts=3),
        *linear("blocks.attention.out", f"{H}.attn.c_proj", transposed=True),
        *norm("blocks.norm2", f"{H}.ln_2"),
        *linear("blocks.mlp.up", f"{H}.mlp.c_fc"),
        *linear("blocks.mlp.down", f"{H}.mlp.c_proj", transposed=True),
        *norm("head.norm", "transformer.ln_f"),
        Row("head.tokens", "lm_head.weight"),
    ),
    keys=(
        Key("vocab_size", "vocab", 50257),
        Key("n_positions", "context", 1024),
        Key("n_embd", "width", 768),
        Key("n_layer", "layers", 12),
        Key("n_head", "heads", 12),
        Key("n_inner", "mlp_width", None),
        Key("activation_function", "activation", "gelu_new", GELU),
        Key("embd_pdrop", "dropout", 0.1),
        Key("resid_pdrop", "dropout", 0.1),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={
        "kind": "gpt",
        "kv_heads": None,
        "token_types": 0,
        "norm": "pre",
        "norm_type": "layer",
        "positions": "learned",
        "use_bias": True,
        "share_layers": False,
    },
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "quantization_config": None,
    },
    older={"transformer.": ""},
    copies=(f"{H}.attn.bias", f"{H}.attn.masked_bias"),
)

B = "bert.encoder.layer.{layer}"
BODY = (
    Row("embedding.tokens", "bert.embeddings.word_embeddings.weight"),
    Row("embedding.positions", "bert.embeddings.position_embeddings.weight"),
    Row("embedding.types", "bert.embeddings.token_type_embeddings.weight"),
    *norm("embedding.norm", "bert.embeddings.LayerNorm"),
    *linear("blocks.attention.query", f"{B}.attention.self.query", transposed=True),
    *linear("blocks.attention.key", f"{B}.attention.self.key", transposed=True),
    *linear("blocks.attention.value", f"{B}.attention.self.value", transposed=True),
    *linear("blocks.attention.out", f"{B}.attention.output.dense"),
    *norm("blocks.norm1", f"{B}.attention.output.LayerNorm"),
    *linear("blocks.mlp.up", f"{B}.intermediate.dense", transposed=True),
    *linear("blocks.mlp.down", f"{B}.output.dense"),
    *norm("blocks.norm2", f"{B}.output.LayerNorm"),
)
BERT = Architecture(
    kind="bert",
    classes={
        "BertForPreTraining": {"kind": "masked_lm", "sentence_order": True},
        "BertForMaskedLM": {"kind": "masked_lm", "sentence_order": False},
    },
    rows=(
        *BODY,
        *linear("head.pooler", "bert.pooler.dense", transposed=True),
        *linear("head.transform", "cls.predictions.transform.dense", transposed=True),
        *norm("head.transform_norm", "cls.predictions.transform.LayerNorm"),
        Row("head.output_bias", "cls.predictions.bias"),
        *linear("head.binary", "cls.seq_relationship", transposed=True),
    ),
    keys=(
        Key("vocab_size", "vocab", 30522),
        Key("max_position_embeddings", "context", 512),
        Key("hidden_size", "width", 768),
        Key("num_hidden_layers", "layers", 12),
        Key("num_attention_heads", "heads", 12),
        Key("intermediate_size", "mlp_width", 3072),
        Key("type_vocab_size", "token_types", 2),
        Key("hidden_act", "activation", "gelu", GELU),
        Key("hidden_dropout_prob", "dropout", 0.1),
        Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
        Key("layer_norm_eps", "norm_eps", 1e-12),
    ),
    fixed={
        "kind": "bert",
        "kv_heads": None,
        "norm": "post",
        "norm_type": "layer",
        "positions": "learned",
        "use_bias": True,
        "share_layers": False,
        "tie_embeddings": True,
    },
    only={
        "tie_word_embeddings": True,  # untied, a second bias takes the place of cls.predictions.bias
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "quantization_config": None,
    },
    older={
        "LayerNorm.weight": "LayerNorm.gamma",
        "LayerNorm.bias": "LayerNorm.beta",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    },
    copies=("bert.embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
)
LABELLED = replace(
    BERT,
    classes={
        "BertForSequenceClassification": {"kind": "classification"},
        "BertForMultipleChoice": {"kind": "multiple_choice"},
    },
    rows=(
        *BODY,
        *linear("head.pooler", "bert.pooler.dense", transposed=True),
        *linear("head.output", "classifier", transposed=True),
    ),
)
ANSWERING = replace(
    BERT,
    classes={"BertForQuestionAnswering": {"kind": "span"}},
    rows=(*BODY, *linear("head.output", "qa_outputs", transposed=True)),
)

L = "model.layers.{layer}"
LLAMA = Architecture(
    kind="llama",
    classes={"LlamaForCausalLM": {"kind": "causal_lm"}},
    rows=(
        Row("embedding.tokens", "model.embed_tokens.weight"),
        Row("blocks.norm1.scale", f"{L}.input_layernorm.weight"),
        Row("blocks.attention.query", f"{L}.self_attn.q_proj.weight", transposed=True),
        Row("blocks.attention.key", f"{L}.self_attn.k_proj.weight", transposed=True),
        Row("blocks.attention.value", f"{L}.self_attn.v_proj.weight", transposed=True),
        Row("blocks.attention.out", f"{L}.self_attn.o_proj.weight"),
        Row("blocks.norm2.scale", f"{L}.post_attention_layernorm.weight"),
        Row("blocks.mlp.gate", f"{L}.mlp.gate_proj.weight", transposed=True),
        Row("blocks.mlp.up", f"{L}.mlp.up_proj.weight", transposed=True),
        Row("blocks.mlp.down", f"{L}.mlp.down_proj.weight"),
        Row("head.norm.scale", "model.norm.weight"),
        Row("head.tokens", "lm_head.weight"),
    ),
    keys=(
        Key("vocab_size", "vocab", 32000),
        Key("max_position_embeddings", "context", 2048),
        Key("hidden_size", "width", 4096),
        Key("num_hidden_layers", "layers", 32),
        Key("num_attention_heads", "heads", 32),
        Key("num_key_value_heads", "kv_heads", None),
        Key("intermediate_size", "mlp_width", 11008),
        Key("hidden_act", "activation", "silu", {"silu": "swiglu"}),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("rope_theta", "rope_theta", 10_000.0),
        Key("tie_word_embeddings", "tie_embeddings", False),
    ),
    fixed={
        "kind": "gpt",
        "token_types": 0,
        "norm": "pre",
        "norm_type": "rms",
        "positions": "rotary",
        "use_bias": False,
        "share_layers": False,
    },
    only={
        "rope_type": "default",
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "quantization_config": None,
    },
    copies=(f"{L}.self_attn.rotary_emb.inv_freq",),
)

ARCHITECTURES = (GPT2, BERT, LABELLED, ANSWERING, LLAMA)
CLASSES = {name: architecture for architecture in ARCHITECTURES for name in architecture.classes}

CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that say nothing of the model, and everything to who generates with it."""

HARMLESS = {
    *CARRIED,
    *("_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "id2label"),
    *("label2id", "problem_type", "task_specific_params", "output_attentions", "output_hidden_states", "return_dict"),
    *("use_cache", "initializer_range", "gradient_checkpointing", "classifier_dropout", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "n_ctx", "pretraining_tp", "_attn_implementation", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
}
"""Keys of config.json that change nothing of what a model computes from its parameters."""
