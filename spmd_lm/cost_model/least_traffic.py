"""Least bytes that a step reads from and writes to device memory, whatever its kernels."""

from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.counted_step import layer_passes
from spmd_lm.cost_model.memory import saved_activations
from spmd_lm.cost_model.sizes import at_least_float32, dtype_bytes, tokens_per_device
from spmd_lm.own_optimizer import bytes_of_moments
from spmd_lm.parallel.padding import padded_vocab
from spmd_lm.parallel.plan import Plan


def least_traffic(config: RunConfig, plan: Plan) -> dict[str, float]:
    """Bytes by kind, of one device in one step, the mean over pipeline stages.

    Each saved value, logit and logit's gradient is written once and read once; a weight is read forward and backward
    for each microbatch; its gradient is written, and with several microbatches or stages added to a sum, else read; the
    update reads and writes weight and moments, reads the gradient for its norm and for itself, and writes the weight in
    the compute dtype."""
    p, layout, microbatches = config.precision, plan.layout, config.parallel.microbatches
    compute, accum = dtype_bytes(p.compute), dtype_bytes(at_least_float32(p.compute))
    tokens = microbatches * tokens_per_device(config, layout)
    vocab = padded_vocab(config.model.vocab, layout.model) if config.objective.predicts_tokens else 0
    logits = compute if p.logits == "compute" else accum
    weights = microbatches * used_bytes(plan, p.compute, gathered=True)
    gradients = microbatches * used_bytes(plan, p.compute, gathered=not plan.zero.scatters_in_backward, trained=True)
    state = 2 * (dtype_bytes(p.params) + bytes_of_moments(config.optim, p.params)) + 2 * dtype_bytes(p.reduce) + compute
    return {
        "saved values": saved_traffic(config, plan),
        "logits": 2 * (logits + compute) * tokens * vocab / layout.model / layout.pipe,
        "weights": (1 + (layer_passes(config, plan)[1] > 0)) * weights,
        "gradients": (1 + 2 * accum / compute if microbatches > 1 or layout.pipe > 1 else 2) * gradients,
        "optimizer": float(state * plan.elements_per_device(trained=True)),
    }


def used_bytes(plan: Plan, dtype: str, *, gathered: bool, trained: bool = False) -> float:
    """Bytes, in this dtype, of all or trained parameters that a device uses for a microbatch, the mean over stages: one
    uses the embedding, one the head."""
    layers = plan.bytes_per_device(dtype, "blocks", gathered=gathered, trained=trained)
    rest = plan.bytes_per_device(dtype, gathered=gathered, trained=trained) - layers
    return layers + rest / plan.layout.pipe


def saved_traffic(config: RunConfig, plan: Plan) -> float:
    """Bytes that a step moves to write and read once what it saves for backward."""
    return 2 * saved_activations(config, plan) * config.parallel.microbatches
