"""Llama, Llama 2, 3, 3.1, 3.2 and 3.3."""

from spmd_lm.huggingface.architectures import Architecture
from spmd_lm.huggingface.families import decoder

BIASES = decoder.bias_keys(attention_bias=(False, ("qkv", "out")), mlp_bias=(False, ("mlp",)))
LLAMA = Architecture(
    model_type="llama",
    classes={"LlamaForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(),
    config_keys=(*decoder.config_keys(), decoder.SILU),
    key_groups=(decoder.rope(), decoder.head_dim(), BIASES),
    fixed=decoder.DECODER,
    required={"sliding_window": None},
    buffers=decoder.BUFFERS,
)
