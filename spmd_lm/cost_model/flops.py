"""Both sides of MFU: model FLOPs, those of a step's math, whatever the layout and remat; and a device's peak matmul
FLOP/s, published by its vendor, or for a CPU measured.

Model FLOPs are those of matmuls: 2 per multiply-add, and backward costs twice as much as forward.  Attention
counts the full square of scores, causal or not, as papers do (arXiv:2104.04473, section 5.1, without its
recomputation); in a window `span` keys a query, or 2 x span - 1 without a causal mask.  Of experts those count that a
token chooses, and their router, whatever the capacity."""

import functools
import timeit
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, Model, MultipleChoice, RunConfig
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.layer_trace import Pass, trace_layers
from spmd_lm.cost_model.trained_head import trains_before_logits, trains_table
from spmd_lm.ops.attention_spec import unmasked_scores
from spmd_lm.parallel.plan import Plan


def forward_per_sequence(config: RunConfig) -> float:
    """FLOPs of the forward pass over one sequence of model.context tokens."""
    return _layers(config, None)[0] + sum(_head(config))


def train_step(config: RunConfig, plan: Plan) -> float:
    """FLOPs of one step over the global batch, forward and backward.

    Backward has two matmuls for each of forward: the gradient of a matrix, if that is trained, and of its input, if
    anything below is.  A stack counts whole if some of its layers are trained, and so do the head's matrices other than
    the table."""
    (forward, backward), (table, head) = _layers(config, plan), _head(config)
    gradients = table * trains_table(config, plan) + head * plan.trains("head")
    inputs = table * trains_before_logits(plan) + head * (plan.trains_below_head or plan.trains("head", "norm"))
    of_layers = forward + backward * plan.trains_below_head
    return config.train.batch * (of_layers + table + head + gradients + inputs)


def _layers(config: RunConfig, plan: Plan | None) -> tuple[float, float]:
    """FLOPs of all layers, forward and backward, over one sequence; attention's backward counts twice its forward."""
    forward = backward = 0.0
    for of_kind, share, traced in trace_layers(config, plan, kernel="traced", remat=RematPolicy("none"), sharded=False):
        m, layers = of_kind.model, share * config.model.layers
        keys = m.context if m.span is None else m.span if m.causal else 2 * m.span - 1
        square = traced.forward.attention_flops / unmasked_scores(m.context, m.causal, m.span)
        attention = square * min(1, keys / m.context)
        forward += layers * (_of_products(traced.forward, m) + attention)
        backward += layers * (_of_products(traced.backward, m) + 2 * attention)
    return forward, backward


def _of_products(traced: Pass, m: Model) -> float:
    """FLOPs of matmuls; of experts' those of the tokens that choose them, whatever the capacity."""
    group = m.moe.group or m.context if m.moe else 1
    slots_in_use = m.moe.per_token * group / (m.moe.experts * m.moe.slots(group)) if m.moe else 1
    return sum(each.times * each.product.flops * (slots_in_use if each.of_experts else 1.0) for each in traced.products)


def _head(config: RunConfig) -> tuple[float, float]:
    """FLOPs of the head's forward over one sequence: (those of the vocabulary's table, those of other matrices)."""
    m, objective, width = config.model, config.objective, config.model.width
    per_token = per_row = 0  # entries of matrices that are applied to each token, or once per row
    match objective:
        case MaskedLM():
            per_token, per_row = width**2, (width + 2) * width * objective.has_sequence_label
        case Classification():
            per_row = (width + objective.classes) * width
        case MultipleChoice():
            per_row = (width + 1) * width
        case ExtractiveQA():
            per_token = 2 * width
    table = 2.0 * m.context * width * m.vocab * objective.predicts_tokens
    return table, 2.0 * (m.context * per_token + per_row)


class Peak(NamedTuple):
    """Peak FLOP/s, and their source."""

    flops: float
    source: str


def peak(device: jax.Device, dtype: str, simulated_devices: int = 1) -> Peak | None:
    """Peak matmul FLOP/s of `device` in `dtype`; None if unknown.  simulated_devices: those that share the CPU."""
    if device.platform == "cpu":
        flops = _measured_flops(device, dtype) / simulated_devices
        return Peak(flops, f"a share of the CPU's measured matrix product in {dtype}")
    hardware = find_hardware(device.device_kind)
    if not hardware or dtype == "float64":
        return None
    # By default float32 inputs run as bfloat16 passes on a TPU, and as TF32 on a GPU.
    shown = "bfloat16" if device.platform == "tpu" else {"float32": "tf32"}.get(dtype, dtype)
    rate = hardware.peak(dtype)
    return Peak(rate, f"{hardware.device_kind}, published, {shown}") if rate else None


class Utilization(NamedTuple):
    """Model FLOPs of a job's step, and the peak of all its devices; None if unknown."""

    model_flops: float
    peak: Peak | None

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, device: jax.Device) -> Self:
        devices = plan.layout.devices
        one, matmul = peak(device, config.precision.compute, devices), config.precision.matmul
        if one and matmul != "none":
            one = one._replace(source=f"{one.source}, though blocks' matrices multiply in {matmul}")
        return cls(train_step(config, plan), one and one._replace(flops=devices * one.flops))

    def mfu(self, step_seconds: float) -> float | None:
        return self.model_flops / step_seconds / self.peak.flops if self.peak else None


@functools.cache
def _measured_flops(device: jax.Device, dtype: str) -> float:
    """FLOP/s of a square matmul: the best of five, because other processes only slow it down."""
    n = 1024
    with jax.default_device(device):
        x = jnp.ones((n, n), dtype)
        matmul = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b))
        matmul(x, x).block_until_ready()
        seconds = min(timeit.repeat(lambda: matmul(x, x).block_until_ready(), repeat=5, number=1))
    return 2 * n**3 / seconds
