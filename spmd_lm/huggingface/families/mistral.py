"""Mistral 7B (arXiv:2310.06825), whose first version attends within a window."""

from spmd_lm.huggingface.architectures import Architecture
from spmd_lm.huggingface.families import decoder

MISTRAL = Architecture(
    model_type="mistral",
    classes={"MistralForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(),
    config_keys=(
        *decoder.config_keys(max_position_embeddings=131072, num_key_value_heads=8, intermediate_size=14336),
        decoder.SILU,
    ),
    key_groups=(decoder.rope(), decoder.head_dim(), decoder.same_window(4096)),
    fixed=decoder.DECODER,
    required={"layer_types": None},  # transformers' class does not read them
    buffers=decoder.BUFFERS,
)
