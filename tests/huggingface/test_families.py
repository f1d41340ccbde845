"""Models of every family, made by transformers: the same logits and tokens here, and the same files back."""

import json

import numpy as np
import pytest

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.huggingface.transfer import export_hf
from tests.huggingface.small_models import FLOAT32, SIZES, import_directory, random_model
from tests.huggingface.test_import_export import assert_same_tensors, our_logits, some_rows, their_logits

SLOW = pytest.mark.slow
CONTEXT = 72
BASE = SIZES | {"max_position_embeddings": CONTEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE_HEADS, ONE_HEAD = {"head_dim": 10}, {"num_key_value_heads": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24}
GEMMA = BASE | {"head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 7}
PHI = BASE | {"pad_token_id": 0}  # whose default is beyond this vocabulary
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN2_MOE = BASE | MOE | {"shared_expert_intermediate_size": 28, "num_experts_per_tok": 4}
QWEN3_MOE = BASE | MOE | {"head_dim": 10}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3_ROPE = {FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}}
GEMMA3_ROPE |= {SLIDING: {"rope_type": "default", "rope_theta": 1e3}}
FAMILIES = {
    "LlamaForCausalLM": [
        BASE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
        BASE | {"attention_bias": True, "mlp_bias": True} | ONE_HEAD,
        BASE | WIDE_HEADS | {"rope_parameters": LLAMA3 | {"factor": 2.0}},
    ],
    "MistralForCausalLM": [
        BASE | {"sliding_window": 9},
        BASE | {"sliding_window": None} | WIDE_HEADS,
        BASE | {"sliding_window": 5} | ONE_HEAD,
    ],
    "Qwen2ForCausalLM": [
        BASE | {"tie_word_embeddings": True},
        BASE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        BASE | {"rms_norm_eps": 1e-3} | ONE_HEAD,
    ],
    "Qwen3ForCausalLM": [
        BASE | {"head_dim": 10, "tie_word_embeddings": True},
        BASE | {"head_dim": 8, "attention_bias": True} | ONE_HEAD,
        BASE | {"head_dim": 16},
    ],
    "Gemma2ForCausalLM": [
        GEMMA | {"num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        GEMMA | {"final_logit_softcapping": None, "attn_logit_softcapping": None, "attention_bias": True},
        GEMMA | {"query_pre_attn_scalar": 6} | ONE_HEAD,
    ],
    "Gemma3ForCausalLM": [
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE},
        GEMMA | {"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2} | ONE_HEAD,
        GEMMA | {"layer_types": [SLIDING, FULL] * 2},
    ],
    "GPTNeoXForCausalLM": [
        SIZES | {"max_position_embeddings": CONTEXT, "rotary_pct": 0.5},
        SIZES
        | {
            "max_position_embeddings": CONTEXT,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rotary_pct": 0.5,
        },
        SIZES | {"max_position_embeddings": CONTEXT, "hidden_act": "gelu_new", "rotary_pct": 1.0},
    ],
    "Phi3ForCausalLM": [
        PHI | {"sliding_window": 9},
        PHI | {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}} | ONE_HEAD,
        PHI | {"tie_word_embeddings": True} | WIDE_HEADS,
    ],
    "MixtralForCausalLM": [
        BASE | {"num_local_experts": 4, "num_experts_per_tok": 1},
        BASE | {"num_local_experts": 4, "sliding_window": 9} | WIDE_HEADS,
        BASE | {"num_local_experts": 6, "num_experts_per_tok": 4, "tie_word_embeddings": True} | ONE_HEAD,
    ],
    "Qwen2MoeForCausalLM": [
        QWEN2_MOE | {"num_hidden_layers": 3, "decoder_sparse_step": 2, "qkv_bias": False},
        QWEN2_MOE | {"norm_topk_prob": True, "num_experts_per_tok": 1, "mlp_only_layers": [1, 3]},
        QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4} | ONE_HEAD,
    ],
    "Qwen3MoeForCausalLM": [
        QWEN3_MOE | {"num_experts_per_tok": 4, "norm_topk_prob": True, "attention_bias": True},
        QWEN3_MOE | {"num_experts_per_tok": 1, "head_dim": 8} | ONE_HEAD,
        QWEN3_MOE | {"mlp_only_layers": [0, 2], "use_sliding_window": True, "sliding_window": 5},
    ],
}
LAYOUTS = ([], ["parallel.model=2"], ["parallel.pipe=2", "parallel.microbatches=2"])
QUICK = "Qwen3ForCausalLM", 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=() if (name, shape) == QUICK else SLOW)
        for name in FAMILIES
        for shape in range(3)
    ],
)
def test_logits_tokens_and_files_are_those_of_transformers(tmp_path, name, shape):
    torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    model = random_model(name, FAMILIES[name][shape], "float32")
    model.save_pretrained(tmp_path / "theirs")
    config = import_directory(tmp_path / "theirs", tmp_path / "run", *FLOAT32, *LAYOUTS[shape])
    program, params, _ = open_run(config)
    rows = some_rows(config)
    ours, theirs = our_logits(program, params, rows)["tokens"], their_logits(model, rows)["tokens"]
    assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()

    prompt = np.array([3, 1, 4])
    (text,) = Generator(program, 1, Sampling(tokens=64, greedy=True)).generate(params, [prompt])
    begun = torch.tensor(prompt[None])
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(begun)}
    assert text.tolist() == model.generate(begun, max_new_tokens=64, **how)[0].tolist()

    export_hf(config, tmp_path / "back", "float32", 5 * 10**9)
    assert_same_tensors(tmp_path / "theirs", tmp_path / "back")
    before, after = (json.loads((tmp_path / at / "config.json").read_text()) for at in ("theirs", "back"))
    assert after["model_type"] == before["model_type"]
    loaded = type(model).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    np.testing.assert_array_equal(their_logits(loaded, rows)["tokens"], theirs)
