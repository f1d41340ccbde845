"""Steps of Megatron-LM and DeepSpeed, whose times papers measured, operation by operation, as PyTorch runs them.

Matmuls are those of arXiv:1909.08053, section 3; backward has two for each forward one.  Elements are counted operation
by operation, as arXiv:2205.05198, section 4, counts saved ones: an operation reads its operands and writes its result,
in the dtype of activations.  A dropout mask is one byte, half an element of 16 bits.  Kernels, links and hardware are
those of spmd_lm/cost_model."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from megatron_collectives import megatron_collectives

from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.compute_time import head_seconds
from spmd_lm.cost_model.counted_step import ExpectedCollective
from spmd_lm.cost_model.hardware import Hardware
from spmd_lm.cost_model.kernels import Kernels, Product
from spmd_lm.cost_model.sizes import tokens_per_device
from spmd_lm.cost_model.step_time import Compute, StepTime, combine
from spmd_lm.ops.attention_spec import unmasked_scores
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Plan

DROPOUT_MASK = 0.5  # elements
LOGIT_BYTES, OPTIMIZER_BYTES = 60, 62  # per logit, per parameter: see megatron.yaml
Window = Literal["compute", "last_microbatch"]


class Profile(NamedTuple):
    """A system's profile; megatron.yaml explains each field."""

    name: str
    source: str
    attention: Literal["materialized", "fused"]
    fuses_elementwise: bool
    software: float
    kernel_overhead: float = 4e-6
    hidden_tensor_parallelism: float = 0.0
    beside: dict[str, Window] = {}  # noqa: RUF012 - never changed
    one_adapter: bool = False


@functools.cache
def profiles() -> dict[str, Profile]:
    """All profiles by name."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {row["name"]: Profile(**row) for row in rows}


class LayerSeconds(NamedTuple):
    """One layer and one microbatch.  attention: its part of forward, from queries, keys and values to the context."""

    forward: float
    backward: float
    attention: float


def elementwise(kernels: Kernels, elements: float, operations: float) -> float:
    """Seconds of `operations` kernels that read and write `elements`."""
    return kernels.traffic(elements * kernels.size) + operations * kernels.overhead


class LayerWork:
    """Matmuls, reads and writes of one layer of a GPT for one microbatch on a device."""

    def __init__(self, config: RunConfig, plan: Plan, profile: Profile):
        m, self.profile = config.model, profile
        self.model, self.shards, self.tokens = m, plan.layout.model, tokens_per_device(config, plan.layout)
        self.separate = not profile.fuses_elementwise  # biases, dropout, scale and mask are operations of their own
        self.heads = self.tokens / m.context * m.heads / self.shards  # in all sequences
        self.stream = self.tokens * m.width / (self.shards if plan.sequence else 1)
        self.hidden, self.qkv = self.tokens * m.mlp_dim / self.shards, self.tokens * self.qkv_width

    @property
    def qkv_width(self) -> float:
        """Width of a device's queries, keys and values."""
        return 3 * self.model.query_width / self.shards

    @property
    def products(self) -> list[Product]:
        """Matmuls with the layer's weights."""
        m, n, tokens = self.model, self.shards, self.tokens
        return [
            Product(tokens, m.width, self.qkv_width),
            Product(tokens, m.query_width / n, m.width),
            Product(tokens, m.width, m.mlp_dim / n),
            Product(tokens, m.mlp_dim / n, m.width),
        ]

    def seconds(self, kernels: Kernels) -> LayerSeconds:
        attention, attention_backward = self._attention(kernels)
        forward = sum(map(kernels.product, self.products)) + elementwise(kernels, *self._forward_elements())
        of_backward = sum(kernels.product(each) for product in self.products for each in product.of_backward)
        backward = of_backward + elementwise(kernels, *self._backward_elements())
        return LayerSeconds(forward + attention, backward + attention_backward, attention)

    def _attention(self, kernels: Kernels) -> tuple[float, float]:
        """Seconds forward and backward.  A fused kernel skips the scores that a causal mask hides, and recomputes the
        others in backward: five matmuls for two."""
        context, head = self.model.context, self.model.head_dim
        products = [Product(context, head, context, self.heads), Product(context, context, head, self.heads)]
        if self.profile.attention == "fused":
            flops = sum(product.flops for product in products) * unmasked_scores(context, self.model.causal, None)
            return kernels.attention(flops), kernels.attention(2.5 * flops)
        # Softmax, and dropout with its mask; scale and causal mask, if they are operations of their own.
        scores, dropout = self.heads * context**2, self.model.attention_dropout > 0
        operations = 1 + dropout + 2 * self.separate
        forward = elementwise(kernels, scores * (2 * operations + DROPOUT_MASK * dropout), operations)
        backward = elementwise(kernels, scores * (3 + (2 + DROPOUT_MASK) * dropout), 1 + dropout)
        of_backward = sum(kernels.product(each) for product in products for each in product.of_backward)
        return forward + sum(map(kernels.product, products)), backward + of_backward

    def _forward_elements(self) -> tuple[float, float]:
        """(elements, operations) of all but attention and matmuls: two norms; two sums of a branch and the residual,
        with bias and dropout; the activation; and layout changes of queries, keys and values, and of the context.
        Biases and dropout may be operations of their own."""
        qkv, out, mlp = (self.separate * self.model.has_bias(each) for each in ("qkv", "out", "mlp"))
        dropout = self.model.dropout > 0
        stream = 4 + 2 * (3 + DROPOUT_MASK * dropout + out + mlp + 2 * dropout * self.separate)
        context = self.tokens * self.model.query_width / self.shards
        sharded = self.hidden * (2 + 2 * mlp) + self.qkv * (2 + 2 * qkv) + 2 * context
        return self.stream * stream + sharded, 8 + qkv + out + 2 * mlp + 2 * dropout * self.separate

    def _backward_elements(self) -> tuple[float, float]:
        """The same for backward, with the sum of the gradients where a branch begins."""
        stream = 6 + 2 * (2 + DROPOUT_MASK * (self.model.dropout > 0)) + 2 * 2
        context = self.tokens * self.model.query_width / self.shards
        biases = self.model.has_bias("qkv") + self.model.has_bias("out") + 2 * self.model.has_bias("mlp")
        return self.stream * stream + 3 * self.hidden + 2 * self.qkv + 2 * context, 10 + self.separate * biases


def predict_step(config: RunConfig, plan: Plan, hardware: Hardware, profile: Profile) -> StepTime:
    """The step of a GPT as these programs run it: remat recomputes attention (selective) or whole layers, and pipeline
    stages save what backward needs.  Matmuls that compute gradients also sum them over microbatches."""
    overhead = profile.kernel_overhead if hardware.kernel_overhead is None else hardware.kernel_overhead
    kernels = Kernels(hardware, config.precision.compute, profile.software, overhead)
    layer, stages, microbatches = (
        LayerWork(config, plan, profile).seconds(kernels),
        plan.layout.pipe,
        config.parallel.microbatches,
    )
    again = {"none": 0.0, "selective": layer.attention}.get(config.remat.policy, layer.forward)
    layers = config.model.layers / stages * microbatches * (layer.forward + again + layer.backward)
    head = microbatches * head_seconds(config, plan, kernels, logit_bytes=LOGIT_BYTES)
    optimizer = kernels.traffic(OPTIMIZER_BYTES * plan.elements_per_device(trained=True))
    bubble = schedule_counts(config.parallel.schedule, stages, microbatches, config.chunks).bubble
    rows = megatron_collectives(config, plan)
    windows: dict[Window, float] = {"compute": layers + head, "last_microbatch": layers * (1 / microbatches + bubble)}

    def hidden(seconds_of: list[float]) -> Iterator[float]:
        return hidden_seconds(rows, seconds_of, windows, profile)

    compute = Compute(layers, head, optimizer)
    return combine(plan, hardware, compute, rows, hidden, bubble, one_adapter=profile.one_adapter)


def hidden_seconds(
    rows: list[ExpectedCollective], seconds_of: list[float], windows: dict[Window, float], profile: Profile
) -> Iterator[float]:
    """Hidden seconds of each row: a window of compute hides at most its own length in all."""
    left = dict(windows)
    for row, seconds in zip(rows, seconds_of, strict=True):
        if window := profile.beside.get(row.part):
            hidden = min(seconds, left[window])
            left[window] -= hidden
            yield hidden
        else:
            yield profile.hidden_tensor_parallelism * seconds if row.part == "blocks" else 0.0
