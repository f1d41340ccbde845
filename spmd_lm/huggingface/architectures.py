"""GPT-2, BERT and Llama as tables: where Hugging Face stores each of our parameters, and what each key of config.json
means here.

Our matrices are [width, other], whichever of the two is the input, with all layers stacked in front.  Hugging Face has
one tensor per layer: torch's Linear is [out, in], GPT-2's Conv1D is [in, out].  Nothing here reads a file or touches an
array.  Names follow transformers 5.23: modeling_gpt2.py, modeling_bert.py, modeling_llama.py and configuration_*.py."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Shape = tuple[int, ...]
Index = tuple[tuple[int, int], ...]  # [start, stop) along each dimension

LAYER = "{layer}"  # stands for the layer's number in the names of tensors
OUTPUT_EMBEDDING = "head.tokens"  # a model with tied embeddings does not have it, although its files may


@dataclass(frozen=True)
class WeightMapping:
    """Where Hugging Face stores one parameter of ours.

    param: path in our parameter tree.  tensor: name of the tensor, with LAYER if there is one per layer.  transposed:
    the tensor has the parameter's two dimensions swapped.  fused_index, fused_count: the tensor concatenates so many
    parameters of equal shape along its last dimension, and this is one of them (GPT-2's c_attn)."""

    param: str
    tensor: str
    transposed: bool = False
    fused_index: int = 0
    fused_count: int = 1

    @property
    def stacked(self) -> bool:
        """Whether the parameter stacks all layers, one tensor each."""
        return LAYER in self.tensor

    def layer_shape(self, param_shape: Shape) -> Shape:
        """The shape of what one tensor stores: one layer of a stacked parameter, all of any other."""
        return param_shape[1:] if self.stacked else param_shape

    def tensor_shape(self, layer_shape: Shape) -> Shape:
        *leading, last = layer_shape[::-1] if self.transposed else layer_shape
        return (*leading, self.fused_count * last)

    def tensor_index(self, index: Index, layer_shape: Shape) -> Index:
        """The slice of the tensor that stores the slice `index` of one layer of the parameter."""
        *leading, (start, stop) = index[::-1] if self.transposed else index
        offset = self.fused_index * layer_shape[0 if self.transposed else -1]
        return (*leading, (offset + start, offset + stop))


@dataclass(frozen=True)
class HFTensor:
    """A tensor, and the parameters that it concatenates; only their layer `layer` if they stack all layers."""

    name: str
    shape: Shape
    mappings: tuple[WeightMapping, ...]
    layer: int | None


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json and the key of our section `model` that means the same.

    default: what a config.json without the key means; its type is the key's, and None stands for an integer.  choices:
    for keys with named values, each of Hugging Face's names and ours."""

    hf_key: str
    model_key: str
    default: Any
    choices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """Model classes whose weights and configuration read alike.

    model_type: as in config.json.  classes: most common first, each with the objective whose heads it has.  weights:
    the embedding's, then the layers', then the head's.  fixed: keys of our section `model` that are the same for all
    such models.  required: keys of config.json that change what they compute, each with the only value that we support,
    which is also the default.  legacy_names: parts of tensor names, each with an older spelling that is read too.
    buffers: tensors that are not parameters, or duplicate one."""

    model_type: str
    classes: Mapping[str, Mapping[str, Any]]
    weights: tuple[WeightMapping, ...]
    config_keys: tuple[ConfigKey, ...]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any]
    legacy_names: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()

    def spellings(self, name: str) -> list[str]:
        """A tensor's name, then its older spellings."""
        return [name, *(name.replace(new, old) for new, old in self.legacy_names.items() if new in name)]

    def tensors(self, param_shapes: Mapping[str, Shape]) -> list[HFTensor]:
        """The tensors of a model with these canonical parameters: embeddings, then layer by layer, then the head."""
        by_name: dict[str, list[WeightMapping]] = {}
        for mapping in self.weights:
            if mapping.param in param_shapes:
                by_name.setdefault(mapping.tensor, []).append(mapping)
        covered = {mapping.param for mappings in by_name.values() for mapping in mappings}
        assert covered == param_shapes.keys(), covered ^ param_shapes.keys()
        num_layers = next(shape[0] for param, shape in param_shapes.items() if param.startswith("blocks."))
        result = []
        for stacked, names in itertools.groupby(by_name, lambda name: LAYER in name):
            for layer, name in itertools.product(range(num_layers) if stacked else [None], names):
                first = by_name[name][0]
                shape = first.tensor_shape(first.layer_shape(param_shapes[first.param]))
                result.append(HFTensor(name.format(layer=layer), shape, tuple(by_name[name]), layer))
        return result

    def buffer_names(self, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
        """Those of these tensor names that hold no parameter, or one that another tensor holds as well."""
        output = {mapping.tensor for mapping in self.weights if mapping.param == OUTPUT_EMBEDDING}
        templates = (*self.buffers, *(output if OUTPUT_EMBEDDING not in param_shapes else ()))
        spellings = (spelling for template in templates for spelling in self.spellings(template))
        pattern = re.compile("|".join(re.escape(each).replace(re.escape(LAYER), r"\d+") for each in spellings))
        return {name for name in names if pattern.fullmatch(name)}

    def unused_head_names(self, names: Iterable[str], param_shapes: Mapping[str, Shape]) -> set[str]:
        """Those of these tensor names that hold heads which this model, by its objective, lacks."""
        present = {*param_shapes, OUTPUT_EMBEDDING}
        return {mapping.tensor for mapping in self.weights if mapping.param not in present}.intersection(names)


# --- the tables -------------------------------------------------------------------------------------------------------


def linear(param: str, module: str, **storage: Any) -> tuple[WeightMapping, WeightMapping]:
    """A matrix and its bias.  storage: how the tensors store them; transposing a bias does nothing."""
    matrix = WeightMapping(param, f"{module}.weight", **storage)
    return matrix, WeightMapping(f"{param}_bias", f"{module}.bias", **storage)


def norm(param: str, module: str) -> tuple[WeightMapping, WeightMapping]:
    """A LayerNorm's scale and bias."""
    return WeightMapping(f"{param}.scale", f"{module}.weight"), WeightMapping(f"{param}.bias", f"{module}.bias")


DECODER = {"kind": "gpt", "token_types": 0, "norm": "pre", "period": None, "module": None}
GPT2_BERT = {"kv_heads": None, "norm_type": "layer", "positions": "learned", "use_bias": True, "share_layers": False}
GELU_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

GPT2_LAYER = "transformer.h.{layer}"
GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": {"kind": "causal_lm"}},
    weights=(
        WeightMapping("embedding.tokens", "transformer.wte.weight"),
        WeightMapping("embedding.positions", "transformer.wpe.weight"),
        *norm("blocks.norm1", f"{GPT2_LAYER}.ln_1"),
        *linear("blocks.attention.query", f"{GPT2_LAYER}.attn.c_attn", fused_index=0, fused_count=3),
        *linear("blocks.attention.key", f"{GPT2_LAYER}.attn.c_attn", fused_index=1, fused_count=3),
        *linear("blocks.attention.value", f"{GPT2_LAYER}.attn.c_attn", fused_index=2, fused_count=3),
        *linear("blocks.attention.out", f"{GPT2_LAYER}.attn.c_proj", transposed=True),
        *norm("blocks.norm2", f"{GPT2_LAYER}.ln_2"),
        *linear("blocks.mlp.up", f"{GPT2_LAYER}.mlp.c_fc"),
        *linear("blocks.mlp.down", f"{GPT2_LAYER}.mlp.c_proj", transposed=True),
        *norm("head.norm", "transformer.ln_f"),
        WeightMapping("head.tokens", "lm_head.weight"),
    ),
    config_keys=(
        ConfigKey("vocab_size", "vocab", 50257),
        ConfigKey("n_positions", "context", 1024),
        ConfigKey("n_embd", "width", 768),
        ConfigKey("n_layer", "layers", 12),
        ConfigKey("n_head", "heads", 12),
        ConfigKey("n_inner", "mlp_width", None),
        ConfigKey("activation_function", "activation", "gelu_new", GELU_NAMES),
        ConfigKey("embd_pdrop", "dropout", 0.1),
        ConfigKey("resid_pdrop", "dropout", 0.1),
        ConfigKey("attn_pdrop", "attention_dropout", 0.1),
        ConfigKey("layer_norm_epsilon", "norm_eps", 1e-5),
        ConfigKey("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed=DECODER | GPT2_BERT,
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False}
    | {"add_cross_attention": False, "quantization_config": None},
    legacy_names={"transformer.": ""},
    buffers=(f"{GPT2_LAYER}.attn.bias", f"{GPT2_LAYER}.attn.masked_bias"),
)

BERT_LAYER = "bert.encoder.layer.{layer}"
BERT_ENCODER = (
    WeightMapping("embedding.tokens", "bert.embeddings.word_embeddings.weight"),
    WeightMapping("embedding.positions", "bert.embeddings.position_embeddings.weight"),
    WeightMapping("embedding.types", "bert.embeddings.token_type_embeddings.weight"),
    *norm("embedding.norm", "bert.embeddings.LayerNorm"),
    *linear("blocks.attention.query", f"{BERT_LAYER}.attention.self.query", transposed=True),
    *linear("blocks.attention.key", f"{BERT_LAYER}.attention.self.key", transposed=True),
    *linear("blocks.attention.value", f"{BERT_LAYER}.attention.self.value", transposed=True),
    *linear("blocks.attention.out", f"{BERT_LAYER}.attention.output.dense"),
    *norm("blocks.norm1", f"{BERT_LAYER}.attention.output.LayerNorm"),
    *linear("blocks.mlp.up", f"{BERT_LAYER}.intermediate.dense", transposed=True),
    *linear("blocks.mlp.down", f"{BERT_LAYER}.output.dense"),
    *norm("blocks.norm2", f"{BERT_LAYER}.output.LayerNorm"),
)
BERT_POOLER = linear("head.pooler", "bert.pooler.dense", transposed=True)
BERT = Architecture(
    model_type="bert",
    classes={
        "BertForPreTraining": {"kind": "masked_lm", "sentence_order": True},
        "BertForMaskedLM": {"kind": "masked_lm", "sentence_order": False},
    },
    weights=(
        *BERT_ENCODER,
        *BERT_POOLER,
        *linear("head.transform", "cls.predictions.transform.dense", transposed=True),
        *norm("head.transform_norm", "cls.predictions.transform.LayerNorm"),
        WeightMapping("head.output_bias", "cls.predictions.bias"),
        *linear("head.binary", "cls.seq_relationship", transposed=True),
    ),
    config_keys=(
        ConfigKey("vocab_size", "vocab", 30522),
        ConfigKey("max_position_embeddings", "context", 512),
        ConfigKey("hidden_size", "width", 768),
        ConfigKey("num_hidden_layers", "layers", 12),
        ConfigKey("num_attention_heads", "heads", 12),
        ConfigKey("intermediate_size", "mlp_width", 3072),
        ConfigKey("type_vocab_size", "token_types", 2),
        ConfigKey("hidden_act", "activation", "gelu", GELU_NAMES),
        ConfigKey("hidden_dropout_prob", "dropout", 0.1),
        ConfigKey("attention_probs_dropout_prob", "attention_dropout", 0.1),
        ConfigKey("layer_norm_eps", "norm_eps", 1e-12),
    ),
    fixed={"kind": "bert", "norm": "post", "tie_embeddings": True, "period": None, "module": None} | GPT2_BERT,
    # An untied model has a second bias in place of cls.predictions.bias.
    required={"tie_word_embeddings": True, "position_embedding_type": "absolute", "is_decoder": False}
    | {"add_cross_attention": False, "quantization_config": None},
    legacy_names={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    | {"cls.predictions.bias": "cls.predictions.decoder.bias"},
    buffers=("bert.embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
)
BERT_POOLED = replace(
    BERT,
    classes={"BertForSequenceClassification": {"kind": "classification"}}
    | {"BertForMultipleChoice": {"kind": "multiple_choice"}},
    weights=(*BERT_ENCODER, *BERT_POOLER, *linear("head.output", "classifier", transposed=True)),
)
BERT_SPAN = replace(
    BERT,
    classes={"BertForQuestionAnswering": {"kind": "span"}},
    weights=(*BERT_ENCODER, *linear("head.output", "qa_outputs", transposed=True)),
)

LLAMA_LAYER = "model.layers.{layer}"
LLAMA = Architecture(
    model_type="llama",
    classes={"LlamaForCausalLM": {"kind": "causal_lm"}},
    weights=(
        WeightMapping("embedding.tokens", "model.embed_tokens.weight"),
        WeightMapping("blocks.norm1.scale", f"{LLAMA_LAYER}.input_layernorm.weight"),
        WeightMapping("blocks.attention.query", f"{LLAMA_LAYER}.self_attn.q_proj.weight", transposed=True),
        WeightMapping("blocks.attention.key", f"{LLAMA_LAYER}.self_attn.k_proj.weight", transposed=True),
        WeightMapping("blocks.attention.value", f"{LLAMA_LAYER}.self_attn.v_proj.weight", transposed=True),
        WeightMapping("blocks.attention.out", f"{LLAMA_LAYER}.self_attn.o_proj.weight"),
        WeightMapping("blocks.norm2.scale", f"{LLAMA_LAYER}.post_attention_layernorm.weight"),
        WeightMapping("blocks.mlp.gate", f"{LLAMA_LAYER}.mlp.gate_proj.weight", transposed=True),
        WeightMapping("blocks.mlp.up", f"{LLAMA_LAYER}.mlp.up_proj.weight", transposed=True),
        WeightMapping("blocks.mlp.down", f"{LLAMA_LAYER}.mlp.down_proj.weight"),
        WeightMapping("head.norm.scale", "model.norm.weight"),
        WeightMapping("head.tokens", "lm_head.weight"),
    ),
    config_keys=(
        ConfigKey("vocab_size", "vocab", 32000),
        ConfigKey("max_position_embeddings", "context", 2048),
        ConfigKey("hidden_size", "width", 4096),
        ConfigKey("num_hidden_layers", "layers", 32),
        ConfigKey("num_attention_heads", "heads", 32),
        ConfigKey("num_key_value_heads", "kv_heads", None),
        ConfigKey("intermediate_size", "mlp_width", 11008),
        ConfigKey("hidden_act", "activation", "silu", {"silu": "swiglu"}),
        ConfigKey("attention_dropout", "attention_dropout", 0.0),
        ConfigKey("rms_norm_eps", "norm_eps", 1e-6),
        ConfigKey("tie_word_embeddings", "tie_embeddings", False),
    ),
    fixed=DECODER
    | {"norm_type": "rms", "positions": "rotary", "use_bias": False, "share_layers": False}
    | {"rope_fraction": 1.0},
    required={"partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False}
    | {"sliding_window": None, "quantization_config": None},
    buffers=(f"{LLAMA_LAYER}.self_attn.rotary_emb.inv_freq",),
)

ARCHITECTURES = (GPT2, BERT, BERT_POOLED, BERT_SPAN, LLAMA)
MODEL_TYPES = {architecture.model_type: architecture for architecture in (GPT2, BERT, LLAMA)}
CLASSES = {name: architecture for architecture in ARCHITECTURES for name in architecture.classes}

# Keys of config.json that generation needs.
SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Keys of config.json that do not change what a model computes from its parameters.
IGNORED_KEYS = {
    *SPECIAL_TOKEN_KEYS,
    *("_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "id2label"),
    *("label2id", "problem_type", "task_specific_params", "output_attentions", "output_hidden_states", "return_dict"),
    *("use_cache", "initializer_range", "gradient_checkpointing", "classifier_dropout", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "n_ctx", "pretraining_tp", "_attn_implementation", "directionality"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
}
