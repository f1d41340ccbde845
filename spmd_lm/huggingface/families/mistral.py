"""Mistral 7B (arXiv:2310.06825), whose first version attends within a window."""

from spmd_lm.huggingface.architectures import Architecture
from spmd_lm.huggingface.families import decoder
from spmd_lm.huggingface.families.decoder import FULL, SLIDING, layer_types_of


def _all_alike(hf_config, layers):
    return [FULL if hf_config.get("sliding_window", 4096) is None else SLIDING] * layers


WINDOW = decoder.windows(_all_alike, write=lambda model: {"sliding_window": layer_types_of(model)["sliding_window"]})

MISTRAL = Architecture(
    model_type="mistral",
    classes={"MistralForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(),
    config_keys=(
        *decoder.config_keys(max_position_embeddings=131072, num_key_value_heads=8, intermediate_size=14336),
        decoder.SILU,
    ),
    key_groups=(decoder.rope(), decoder.head_dim(), WINDOW),
    fixed=decoder.DECODER,
    required={"layer_types": None},  # transformers' class does not read them
    buffers=decoder.BUFFERS,
)
