"""Small models of every architecture, directories that hold them, and runs imported from them."""

import json
from pathlib import Path

import numpy as np

from spmd_lm.config.schema import RunConfig
from spmd_lm.huggingface.directory import make_run_config, open_directory
from spmd_lm.huggingface.safetensors_io import write_tensors
from spmd_lm.huggingface.transfer import import_hf

FLOAT32 = [f"precision.{key}=float32" for key in ("params", "compute", "reduce")]
FLOAT64 = [f"precision.{key}=float64" for key in ("params", "compute", "reduce")]
SMALL = ["train.batch=8", "train.eval_batches=1"]

GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}
ODD = {"vocab_size": 61, "n_positions": 12, "n_embd": 24, "n_layer": 1, "n_head": 2, "n_inner": 40}
ODD |= {"activation_function": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}
SIZES = {"vocab_size": 64, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "intermediate_size": 48}
GROUPED = SIZES | {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
ROPE = {"rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 8}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 0.125, "high_freq_factor": 0.5}  # wavelengths 16 to 64
YARN = ROPE | {"rope_type": "yarn", "beta_fast": 1.0, "beta_slow": 0.1}  # a ramp from the first pair to the last
SCALED = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
BYTES = SIZES | {"vocab_size": 264}  # bytes and special tokens
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-odd": ("GPT2LMHeadModel", ODD),
    "bert": ("BertForPreTraining", BYTES),
    "bert-masked": (
        "BertForMaskedLM",
        BYTES | {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    ),
    "bert-classes": ("BertForSequenceClassification", BYTES | {"id2label": {0: "a", 1: "b", 2: "c"}}),
    "bert-choices": ("BertForMultipleChoice", BYTES),
    "bert-spans": ("BertForQuestionAnswering", BYTES),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-llama3": ("LlamaForCausalLM", SCALED | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", SCALED | {"rope_parameters": YARN}),
    "llama-tied": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
}
FILES = ["data.source=task", "data.path=train", "data.validation_path=dev"]  # not opened
TASKS = {
    "classification": [*FILES, "data.task=jsonl"],
    "multiple_choice": [*FILES, "data.task=race", "train.batch=32"],  # a question for each of eight devices
    "span": [*FILES, "data.task=squad"],
}


def random_model(name: str, hf_config: dict, dtype: str):
    """A model of this class of transformers with random parameters, biases and norms included."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    config = getattr(transformers, name).config_class(**hf_config, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, p in model.named_parameters():
            norm = p.ndim == 1 and path.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=draw) * 0.2 + norm)
    return model.to(getattr(torch, dtype))


def import_directory(directory: Path, run: Path, *overrides: str) -> RunConfig:
    """Imports a directory, and returns the configuration of the run."""
    model_dir = open_directory(directory)
    task = TASKS.get(model_dir.config.objective["kind"], [])
    config = make_run_config(model_dir, str(run), None, [*SMALL, *task, *overrides])
    import_hf(model_dir, config)
    return config


HF_CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2}


def make_tensors(hf_config: dict = HF_CONFIG, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random weights of a tied GPT-2, by their names."""
    w, r = hf_config["n_embd"], np.random.default_rng(3)
    block = {"ln_1.weight": (w,), "ln_1.bias": (w,), "ln_2.weight": (w,), "ln_2.bias": (w,)}
    block |= {"attn.c_attn.weight": (w, 3 * w), "attn.c_attn.bias": (3 * w,), "attn.c_proj.weight": (w, w)}
    block |= {"attn.c_proj.bias": (w,), "mlp.c_fc.weight": (w, 4 * w), "mlp.c_fc.bias": (4 * w,)}
    block |= {"mlp.c_proj.weight": (4 * w, w), "mlp.c_proj.bias": (w,)}
    shapes = {"wte.weight": (hf_config["vocab_size"], w), "wpe.weight": (hf_config["n_positions"], w)}
    shapes |= {"ln_f.weight": (w,), "ln_f.bias": (w,)}
    shapes |= {f"h.{layer}.{name}": shape for layer in range(hf_config["n_layer"]) for name, shape in block.items()}
    return {f"transformer.{name}": r.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def make_directory(path: Path, tensors: dict[str, np.ndarray], hf_config: dict = HF_CONFIG, most: int = 10**9) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config))
    write_tensors(path, tensors, iter(tensors.values()), most)
    return path
