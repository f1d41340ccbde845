"""Mixtral (arXiv:2401.04088): Mistral with experts in place of the MLP."""

from spmd_lm.huggingface.architectures import Architecture, ConfigKey
from spmd_lm.huggingface.families import decoder, experts

MIXTRAL = Architecture(
    model_type="mixtral",
    classes={"MixtralForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(*experts.weights("block_sparse_moe", gate="w1", up="w3", down="w2")),
    config_keys=(
        *decoder.config_keys(
            max_position_embeddings=131072, num_key_value_heads=8, intermediate_size=14336, rms_norm_eps=1e-5
        ),
        decoder.SILU,
    ),
    key_groups=(
        decoder.rope(default_theta=1e6),
        decoder.head_dim(),
        decoder.same_window(),
        experts.mixture(
            ConfigKey("num_local_experts", "experts", 8),
            ConfigKey("num_experts_per_tok", "per_token", 2),
            ConfigKey("intermediate_size", "width", 14336),
            experts.BALANCE,
            other_name="num_experts",
            renormalize=True,
        ),
    ),
    fixed=decoder.DECODER,
    required={"layer_types": None, "router_jitter_noise": 0.0} | experts.ROUTER_KEYS,
    buffers=decoder.BUFFERS,
)
