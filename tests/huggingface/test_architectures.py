"""The tables cover every parameter, tensor and key, and what they do not cover is refused by name."""

import itertools
import json
import math

import numpy as np
import pytest

from spmd_lm.config.schema import MaskedLM, Model, Objective, variants
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.config_json import build_config, parse_config
from spmd_lm.huggingface.families import ARCHITECTURES, CLASSES
from spmd_lm.huggingface.families.bert import BERT
from spmd_lm.huggingface.families.gpt2 import GPT2

SIZES = {"vocab_size": 64, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "GPT2LMHeadModel": {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "BertForPreTraining": SIZES | {"type_vocab_size": 2},
    "BertForMaskedLM": SIZES | {"type_vocab_size": 2},
    "BertForSequenceClassification": SIZES | {"type_vocab_size": 2, "id2label": {"0": "a", "1": "b", "2": "c"}},
    "BertForMultipleChoice": SIZES | {"type_vocab_size": 2},
    "BertForQuestionAnswering": SIZES | {"type_vocab_size": 2},
    "LlamaForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 8},
    "MistralForCausalLM": SIZES | {"num_key_value_heads": 2, "sliding_window": 8},
    "Qwen2ForCausalLM": SIZES | {"num_key_value_heads": 2},
    "Qwen3ForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 10},
    "Gemma2ForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 10},
    "Gemma3ForCausalLM": SIZES | {"num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 7},
    "GPTNeoXForCausalLM": SIZES,
    "Phi3ForCausalLM": SIZES | {"num_key_value_heads": 2, "sliding_window": 8, "pad_token_id": 0},
    "MixtralForCausalLM": SIZES | {"num_key_value_heads": 2, "num_local_experts": 3},
    "Qwen2MoeForCausalLM": SIZES
    | {"num_hidden_layers": 5, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"shared_expert_intermediate_size": 28, "num_key_value_heads": 2, "decoder_sparse_step": 2},
    "Qwen3MoeForCausalLM": SIZES
    | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_key_value_heads": 2}
    | {"head_dim": 10, "mlp_only_layers": [0]},
}


def theirs(name: str, **changes) -> dict:
    return {"architectures": [name], "model_type": CLASSES[name].model_type} | CONFIGS[name] | changes


def ours(name: str, **changes) -> tuple[Model, Objective]:
    parsed = parse_config(theirs(name, **changes))
    return Model(**parsed.model), variants("objective")[parsed.objective["kind"]](**parsed.objective)


OUTPUTS = {"multiple_choice": 1, "span": 2}


def leaves(m: Model, objective: Objective) -> dict[str, tuple[int, ...]]:
    """The canonical shapes of a model's parameters, by path."""
    found = {"embedding.tokens": (m.vocab, m.width)}
    if m.positions == "learned":
        found["embedding.positions"] = (m.context, m.width)
    if m.token_types:
        found["embedding.types"] = (m.token_types, m.width)
    kinds = m.kinds
    for place, (kind, of_kind) in enumerate(zip(kinds, m.of_each_kind, strict=False)):
        stack = f"blocks.{place}_{kind.kind}" if len(kinds) > 1 else "blocks"
        layers = len(range(place, m.layers, len(kinds)))
        found |= {f"{stack}.{name}": (layers, *shape) for name, shape in of_layer(of_kind).items()}
    found |= norm(m, "embedding.norm" if m.norm == "post" else "head.norm")
    if objective.kind == "masked_lm":
        found |= norm(m, "head.transform_norm") | linear(m, "head.transform", m.width)
        found["head.output_bias"] = (m.vocab,)
        if objective.sentence_order:
            found |= linear(m, "head.pooler", m.width) | linear(m, "head.binary", 2)
    if not objective.predicts_tokens:
        found |= linear(m, "head.output", OUTPUTS.get(objective.kind) or objective.classes)
        if objective.kind != "span":
            found |= linear(m, "head.pooler", m.width)
    if not m.tie_embeddings:
        found["head.tokens"] = (m.vocab, m.width)
    return found


def linear(m: Model, name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {name: (m.width, size), f"{name}_bias": (size,)}


def norm(m: Model, name: str) -> dict[str, tuple[int, ...]]:
    scale = {f"{name}.scale": (m.width,)}
    return scale | ({f"{name}.bias": (m.width,)} if m.norm_type == "layer" and m.has_bias("norm") else {})


def of_layer(m: Model) -> dict[str, tuple[int, ...]]:
    head = m.head_width or m.width // m.heads
    queries, keys = m.heads * head, (m.kv_heads or m.heads) * head
    matrices = {"attention.query": (queries, "qkv"), "attention.key": (keys, "qkv"), "attention.value": (keys, "qkv")}
    matrices |= {"attention.out": (queries, "out")}
    found = {}
    if moe := m.moe:
        matrices |= {f"mlp.shared.{name}": (moe.shared, "mlp") for name in ("up", "down", "gate") if moe.shared}
        found |= {f"mlp.experts.{name}": (moe.experts, m.width, moe.width) for name in ("up", "down", "gate")}
        found |= {"mlp.router": (m.width, moe.experts)} | ({"mlp.shared_gate": (m.width,)} if moe.shared_gate else {})
    else:
        matrices |= {"mlp.up": (m.mlp_dim, "mlp"), "mlp.down": (m.mlp_dim, "mlp")}
        matrices |= {"mlp.gate": (m.mlp_dim, "mlp")} if m.activation in ("swiglu", "geglu_tanh") else {}
    for name, (size, where) in matrices.items():
        found[name] = (m.width, size)
        if m.has_bias(where):
            found[f"{name}_bias"] = (m.width if name in ("attention.out", "mlp.down") else size,)
    for name in ("norm1", "norm2", *(("post_norm1", "post_norm2") if m.norm == "sandwich" else ())):
        found |= norm(m, name)
    if m.qk_norm:
        found |= {f"attention.{name}_norm.scale": (head,) for name in ("query", "key")}
    return found


EVERY = [(name, tied) for name in CLASSES for tied in (True, False) if tied or CLASSES[name].model_type != "bert"]


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_every_tensor_entry_is_one_parameter_entry(name, tied):
    """Tensors filled from parameters, part by part along every dimension; and joined of them."""
    m, objective = ours(name, tie_word_embeddings=tied)
    shapes, r = leaves(m, objective), np.random.default_rng(0)
    values = {path: r.normal(size=shape) for path, shape in shapes.items()}
    tensors = CLASSES[name].tensors(shapes, m.heads)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert sum(math.prod(tensor.shape) for tensor in tensors) == sum(math.prod(shape) for shape in shapes.values())
    for tensor in tensors:
        whole = [values[part.param][part.at] for part in tensor.parts]
        file = tensor.join(whole)
        assert file.shape == tensor.shape
        for part, value in zip(tensor.parts, whole, strict=True):
            thirds = [[(0, n // 3), (n // 3, n)] for n in value.shape]
            for index in itertools.product(*thirds):
                stored = file[tuple(slice(*span) for span in tensor.index(part, index))]
                np.testing.assert_array_equal(tensor.pick(part, index, stored), value[tuple(slice(*s) for s in index)])


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_names_and_shapes_are_those_of_transformers(name, tied):
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
    kind = transformers.AutoConfig.for_model(CLASSES[name].model_type, **CONFIGS[name], tie_word_embeddings=tied)
    with torch.device("meta"):
        model = getattr(transformers, name)(kind)
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())  # once each, tied or not
    stored = {n: tuple(p.shape) for n, p in revert_weight_conversion(model, parameters).items()}  # as in files
    names = {*revert_weight_conversion(model, model.state_dict())}
    shapes = leaves(*ours(name, tie_word_embeddings=tied))
    assert {tensor.name: tensor.shape for tensor in CLASSES[name].tensors(shapes, 4)} == stored
    assert CLASSES[name].buffer_names(names, shapes) >= names - stored.keys()


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_a_config_round_trips(name, tied):
    parsed = parse_config(theirs(name, tie_word_embeddings=tied))
    assert parsed.unknown_keys == []
    assert parsed.model.keys() == Model.model_fields.keys() - {"scan", "attention"}  # how it is computed is free
    architecture, hf_config = build_config(*ours(name, tie_word_embeddings=tied), CLASSES[name].model_type)
    assert architecture is CLASSES[name] and hf_config["architectures"] == [name]
    again = parse_config(hf_config)
    m, _ = ours(name, tie_word_embeddings=tied)
    assert (again.architecture, Model(**again.model).mlp_dim) == (architecture, m.mlp_dim)
    free = {"mlp_width": 0, "kv_heads": 0}
    assert again.model | free == parsed.model | free
    assert again.objective == parsed.objective


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_of_absent_keys_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    kind = CLASSES[name].model_type
    hf_config = transformers.AutoConfig.for_model(kind).to_dict() | {"architectures": [name]}
    full, bare = parse_config(hf_config), parse_config({"model_type": kind, "architectures": [name]})

    def model(parsed):
        return Model(**parsed.model).model_dump() | {"kv_heads": parsed.model["kv_heads"] or parsed.model["heads"]}

    assert model(full) == model(bare) and full.unknown_keys == []


OF_THE_WINDOW = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
REFUSED = [
    (
        "GPT2LMHeadModel",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=true is not supported",
    ),
    ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights=false is not supported for gpt2, only true"),
    ("GPT2LMHeadModel", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=true is not supported"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=true is not supported"),
    (
        "GPT2LMHeadModel",
        {"activation_function": "relu"},
        'activation_function="relu" is not supported. Supported: gelu, gelu_new',
    ),
    ("GPT2LMHeadModel", {"embd_pdrop": 0.2}, "embd_pdrop and resid_pdrop differ, but here both are model.dropout"),
    ("GPT2LMHeadModel", {"n_embd": "wide"}, 'n_embd: expected an integer, got "wide"'),
    ("GPT2LMHeadModel", {"n_layer": True}, "n_layer: expected an integer, got true"),
    ("GPT2LMHeadModel", {"n_layer": 10**30}, "n_layer: expected an integer"),
    ("GPT2LMHeadModel", {"layer_norm_epsilon": None}, "layer_norm_epsilon: expected a number, got null"),
    ("GPT2LMHeadModel", {"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
    ("GPT2LMHeadModel", {"model_type": "gptj"}, 'model_type="gptj", but GPT2LMHeadModel has model_type=gpt2'),
    (
        "GPT2LMHeadModel",
        {"architectures": ["GPTJForCausalLM"]},
        "GPTJForCausalLM is not supported. The nearest is GPTNeoXForCausalLM. Supported: GPT2LMHeadModel, Bert",
    ),
    (
        "GPT2LMHeadModel",
        {"architectures": None, "model_type": "t5"},
        'model_type="t5" is not supported. Supported: gpt2, bert',
    ),
    ("GPT2LMHeadModel", {"architectures": "GPT2LMHeadModel"}, "expected a list of class names"),
    ("GPT2LMHeadModel", {"quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4} is not supported'),
    ("BertForPreTraining", {"position_embedding_type": "relative_key"}, "position_embedding_type="),
    (
        "BertForPreTraining",
        {"tie_word_embeddings": False},
        "tie_word_embeddings=false is not supported for bert, only true",
    ),
    ("BertForPreTraining", {"is_decoder": True}, "is_decoder=true is not supported for bert, only false"),
    ("BertForPreTraining", {"hidden_act": "silu"}, 'hidden_act="silu" is not supported'),
    ("LlamaForCausalLM", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ("LlamaForCausalLM", {"head_dim": {}}, "head_dim: expected a positive integer, got {}"),
    ("LlamaForCausalLM", {"attention_bias": "yes"}, 'attention_bias: expected true or false, got "yes"'),
    ("MistralForCausalLM", {"sliding_window": "all"}, 'sliding_window: expected a positive integer, got "all"'),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "for each of 2 layers"),
    ("Qwen2ForCausalLM", {"use_sliding_window": "no"}, 'use_sliding_window: expected true or false, got "no"'),
    ("Qwen2ForCausalLM", {"max_window_layers": None}, "max_window_layers: expected an integer, got null"),
    (
        "Qwen3ForCausalLM",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
        "layer_types has sliding_attention, but use_sliding_window is not true",
    ),
    ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 7.0}}, "expected those of full_attention and of sliding"),
    ("Gemma3ForCausalLM", {"rope_parameters": OF_THE_WINDOW}, "rope_type=linear of sliding_attention alone"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
    ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern: expected a positive integer"),
    ("Gemma3ForCausalLM", {"final_logit_softcapping": "x"}, "final_logit_softcapping: expected a number"),
    ("LlamaForCausalLM", {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported. Supported: silu'),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rope_type=longrope is not supported"),
    (
        "LlamaForCausalLM",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 is not supported",
    ),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "not supported here. Supported: default."),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear is not supported here"),
    ("Phi3ForCausalLM", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    ("Phi3ForCausalLM", {"resid_pdrop": 0.1}, "resid_pdrop and embd_pdrop differ"),
    ("MixtralForCausalLM", {"num_local_experts": 1}, "num_local_experts: input should be greater than or equal to 2"),
    ("MixtralForCausalLM", {"num_experts_per_tok": 0}, "num_experts_per_tok: input should be greater than or equal"),
    ("MixtralForCausalLM", {"num_experts_per_tok": "2"}, 'num_experts_per_tok: expected an integer, got "2"'),
    ("MixtralForCausalLM", {"num_experts": 4}, "num_local_experts and num_experts differ"),
    ("MixtralForCausalLM", {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef: input should be greater than"),
    ("MixtralForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported for mixtral"),
    ("MixtralForCausalLM", {"scoring_func": "sigmoid"}, 'scoring_func="sigmoid" is not supported for mixtral, only'),
    ("Qwen3MoeForCausalLM", {"n_group": 8, "topk_group": 4}, "n_group=8 is not supported for qwen3_moe"),
    ("Qwen3MoeForCausalLM", {"n_shared_experts": 1}, "n_shared_experts=1 is not supported for qwen3_moe"),
    ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 0}, "moe_intermediate_size: input should be greater"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 1]}, "mlp_only_layers leave no layer with experts"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": "all"}, 'mlp_only_layers: expected a list of layers, got "all"'),
    ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive integer, got 0"),
    ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 6}, "decoder_sparse_step and mlp_only_layers leave no layer"),
    ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: input should"),
    (
        "Qwen2MoeForCausalLM",
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        "DeepseekV3ForCausalLM is not supported: its router scores experts by a sigmoid",
    ),
    ("Qwen2MoeForCausalLM", {"architectures": None, "model_type": "gpt_oss"}, "gpt_oss is not supported: its router"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[str(changes)[:60] for _, changes, _ in REFUSED])
def test_unsupported_settings_are_refused_by_name(name, changes, message):
    with pytest.raises(ConfigError) as error:
        parse_config(theirs(name, **changes))
    assert message in str(error.value)


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        parse_config(theirs("GPT2LMHeadModel", n_embd=-0.5, scale_attn_weights=False, activation_function="relu"))
    assert len(error.value.problems) == 3


def test_unknown_keys_are_reported():
    assert parse_config(theirs("GPT2LMHeadModel", mystery=1)).unknown_keys == ["mystery"]
    rope = {"full_attention": {"rope_type": "default", "mystery": 1}}
    assert parse_config(theirs("Gemma3ForCausalLM", rope_parameters=rope)).unknown_keys == ["mystery"]


def test_gemma_3_reads_keys_beside_those_by_type():
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 7.0}}
    keys = {"rope_parameters": rope, "rope_theta": 5e5, "rope_local_base_freq": 9.0}
    *windows, full = parse_config(
        theirs("Gemma3ForCausalLM", num_hidden_layers=6, rope_scaling={"rope_type": "linear", "factor": 8.0}, **keys)
    ).model["period"]
    assert full["rope_theta"] == 5e5 and full["rope_scaling"]["factor"] == 8 and windows[0]["kind"] == "window"


def test_qwen_has_no_window_without_its_span():
    assert (
        parse_config(theirs("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=None)).model["period"] is None
    )


@pytest.mark.parametrize("form", ["rope_theta", "rope_parameters"])
def test_both_forms_of_rope_are_read(form):
    rope = (
        {"rope_theta": 5e5}
        if form == "rope_theta"
        else {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    )
    assert parse_config(theirs("LlamaForCausalLM", **rope)).model["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("name", "changes", "objective", "message"),
    [
        ("GPT2LMHeadModel", {"norm_type": "rms"}, None, "nearest is gpt2, except for model.norm_type=rms"),
        ("GPT2LMHeadModel", {"kv_heads": 2}, None, "nearest is gpt2, except for model.kv_heads=2"),
        ("BertForMaskedLM", {"norm": "pre"}, None, "nearest is bert, except for model.norm=pre"),
        ("LlamaForCausalLM", {"activation": "gelu"}, None, "nearest is llama, except for model.activation=gelu"),
        ("GPT2LMHeadModel", {}, MaskedLM(kind="masked_lm"), "nearest is gpt2, except for objective.kind=masked_lm"),
    ],
)
def test_a_model_of_no_architecture_is_refused_with_the_nearest_one(name, changes, objective, message):
    m, own = ours(name)
    with pytest.raises(ConfigError, match="no Hugging Face architecture matches this model") as error:
        build_config(m.model_copy(update=changes), objective or own)
    assert message in str(error.value)


def test_kv_heads_equal_to_heads_are_multi_head_attention():
    m, objective = ours("GPT2LMHeadModel")
    assert build_config(m.model_copy(update={"kv_heads": m.heads}), objective)[0] is GPT2


def test_legacy_names_and_buffers():
    assert GPT2.spellings("transformer.wte.weight") == ["transformer.wte.weight", "wte.weight"]
    assert BERT.spellings("bert.embeddings.LayerNorm.bias")[1] == "bert.embeddings.LayerNorm.beta"
    names = ["h.0.attn.bias", "transformer.h.11.attn.masked_bias", "h.0.attn.c_attn.bias", "lm_head.weight"]
    assert GPT2.buffer_names(names, {}) == {names[0], names[1], names[3]}
    assert GPT2.buffer_names(names, {"head.tokens": (1, 1)}) == {names[0], names[1]}


def test_every_config_is_valid_json():
    for name in CLASSES:
        json.dumps(build_config(*ours(name))[1], allow_nan=False)
    assert {architecture.model_type for architecture in ARCHITECTURES} == {
        *("gpt2", "bert", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "phi3"),
        *("mixtral", "qwen2_moe", "qwen3_moe"),
    }
