"""Both sides of MFU: model FLOPs, what the math of a step needs, whatever the layout and whatever is recomputed; and a
device's peak matrix FLOP/s, published by its vendor, or for a CPU measured.

Model FLOPs are those of matrix products: 2 per multiply-add, and backward costs twice as much as forward.  Attention
counts the full square of scores, causal or not, as papers do (arXiv:2104.04473, section 5.1, without its
recomputation); in a window `span` keys a query, or 2 x span - 1 without a causal mask."""

import functools
import math
import timeit
from collections import defaultdict
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from spmd_lm.config.adapters import is_adapter
from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, MultipleChoice, RunConfig
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.own_layer import has_own_block, trace_layer
from spmd_lm.cost_model.trained_head import trains_before_logits, trains_table
from spmd_lm.parallel.plan import Plan


class _Forward(NamedTuple):
    """FLOPs of products, forward over one sequence: of a layer's matrices by their keys, all layers together, of blocks
    of one's own all products; of attention's scores and their averages; of the vocabulary's table; and of the head's
    other matrices."""

    matrices: dict[tuple[str, ...], float]
    scores: float
    table: float
    head: float

    @property
    def total(self) -> float:
        return sum(self.matrices.values()) + self.scores + self.table + self.head


def _forward(config: RunConfig) -> _Forward:
    m = config.model
    per_token, per_row = _head_weights(config)
    matrices, scores = defaultdict[tuple[str, ...], float](float), 0.0
    for place, of_kind in enumerate(config.of_each_kind):
        c = of_kind.model
        if has_own_block(config):
            matrices[()] += m.layers_like(place) * trace_layer(of_kind, fused=False).flops
            continue
        per_layers = 2.0 * m.context * m.layers_like(place)
        attention = {"query": c.query_width, "key": c.kv_width, "value": c.kv_width, "out": c.query_width}
        mlp = dict.fromkeys(("up", "gate", "down") if c.gated else ("up", "down"), c.mlp_dim)
        for name, branch in {"attention": attention, "mlp": mlp}.items():
            for key, size in branch.items():
                matrices[name, key] += per_layers * m.width * size
        keys = m.context if c.span is None else c.span if c.causal else 2 * c.span - 1
        scores += 2 * per_layers * c.query_width * min(m.context, keys)
    return _Forward(
        matrices=dict(matrices),
        scores=scores,
        table=2.0 * m.context * m.width * m.vocab * config.objective.predicts_tokens,
        head=2.0 * (m.context * per_token + per_row),
    )


def forward_per_sequence(config: RunConfig) -> float:
    """FLOPs of the forward pass over one sequence of model.context tokens."""
    return _forward(config).total


def train_step(config: RunConfig, plan: Plan) -> float:
    """FLOPs of one step over the global batch, forward and backward.

    Backward has two products for each of forward: the gradient of a matrix, if that is trained, and of what it is
    multiplied with, if anything below is.  A stack of which some layers are trained counts whole, and so do the head's
    matrices apart from the table."""
    forward, trains, below = _forward(config), plan.trains, plan.trains_below_head
    adapters = [each for each in plan.parameters if is_adapter(each.path)]
    of_adapters, trained = (
        2.0 * config.model.context * sum(math.prod(each.shape) for each in chosen)
        for chosen in (adapters, [each for each in adapters if each.trained])
    )
    gradients = trained + sum(flops for path, flops in forward.matrices.items() if trains("blocks", *path))
    gradients += forward.table * trains_table(config, plan) + forward.head * trains("head")
    inputs = (of_adapters + sum(forward.matrices.values()) + 2 * forward.scores) * below
    inputs += forward.table * trains_before_logits(plan) + forward.head * (below or trains("head", "norm"))
    return config.train.batch * (forward.total + of_adapters + gradients + inputs)


def _head_weights(config: RunConfig) -> tuple[int, int]:
    """Entries of the head's matrices, without the vocabulary's: (applied to each token, applied once per row)."""
    width, objective = config.model.width, config.objective
    match objective:
        case MaskedLM():
            return width**2, (width + 2) * width * objective.has_sequence_label
        case Classification():
            return 0, (width + objective.classes) * width
        case MultipleChoice():
            return 0, (width + 1) * width
        case ExtractiveQA():
            return 2 * width, 0
    return 0, 0


class Peak(NamedTuple):
    """flops: per second, of one device.  source: where the figure comes from."""

    flops: float
    source: str


def peak(device: jax.Device, dtype: str, simulated_devices: int = 1) -> Peak | None:
    """The peak matrix FLOP/s of `device` in `dtype`; None where no figure is published.

    simulated_devices: how many of them share the CPU."""
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
    """Model FLOPs of a job's step, and the peak rate of all its devices; None where none is published."""

    model_flops: float
    peak: Peak | None

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, device: jax.Device) -> Self:
        devices = plan.layout.devices
        one = peak(device, config.precision.compute, devices)
        return cls(train_step(config, plan), one and one._replace(flops=devices * one.flops))

    def mfu(self, step_seconds: float) -> float | None:
        return self.model_flops / step_seconds / self.peak.flops if self.peak else None


@functools.cache
def _measured_flops(device: jax.Device, dtype: str) -> float:
    """FLOP/s of a square product: the best of five, because other processes only ever slow it down."""
    n = 1024
    with jax.default_device(device):
        x = jnp.ones((n, n), dtype)
        matmul = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b))
        matmul(x, x).block_until_ready()
        seconds = min(timeit.repeat(lambda: matmul(x, x).block_until_ready(), repeat=5, number=1))
    return 2 * n**3 / seconds
