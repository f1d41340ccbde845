"""What one device computes for one microbatch: the products of a layer and of the head, and the elements that its other
operations read and write.

Products are those of arXiv:1909.08053, section 3; backward has two for each of forward.  Elements are counted operation
by operation, as arXiv:2205.05198, section 4, counts those that are saved: each reads its operands and writes its
result, in the dtype of activations.  A mask of dropout is one byte, half an element of 16 bits."""

import functools
import operator
from typing import NamedTuple, Self

import jax

from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import Model, RunConfig
from spmd_lm.cost_model.activations import shares_of_kinds, tokens_per_device
from spmd_lm.cost_model.kernels import Kernels, Product
from spmd_lm.cost_model.own_layer import has_own_block, trace_layer
from spmd_lm.cost_model.systems import System
from spmd_lm.cost_model.trained_head import trains_before_logits, trains_table
from spmd_lm.ops.attention import computed_scores, unmasked_scores
from spmd_lm.parallel.padding import padded_vocab
from spmd_lm.parallel.plan import Plan

DROPOUT_MASK = 0.5  # elements
HEAD_OPERATIONS = 12  # kernels of cross-entropy, forward and backward


class LayerSeconds(NamedTuple):
    """Of one layer and one microbatch.  Parts of forward: attention, from queries, keys and values to the context;
    scores, what of it backward needs again; and the products that end the branches, attention's and the MLP's."""

    forward: float
    backward: float
    attention: float
    scores: float
    branch_ends: tuple[float, float]

    def repeated(self, remat: RematPolicy, *, eager: bool) -> float:
        """What backward runs again.  eager: all of it; a compiler drops what backward does not need, which is what ends
        in a sum that the policy saves, or in nothing but the next layer's input."""
        match remat.policy:
            case "none":
                return 0.0
            case "selective":
                return self.attention if eager else self.scores
            case "residual" if not eager:
                return self.forward - sum(self.branch_ends)
            case "full" if not eager:
                return self.forward - sum(self.branch_ends[remat.needed_sums :])
        return self.forward


_MATRICES = [
    ("attention", ("query", "key", "value")),
    ("attention", ("out",)),
    ("mlp", ("up", "gate")),
    ("mlp", ("down",)),
]
"""Those of each of LayerWork.products."""


def _trained_share(plan: Plan, branch: str, keys: tuple[str, ...]) -> float:
    """Of the entries of these matrices."""
    elements, trained = (
        sum(plan.elements_per_device("blocks", branch, key, trained=each) for key in keys) for each in (False, True)
    )
    return trained / elements


class LayerWork(NamedTuple):
    """One layer on one device.  model: sizes of a model of such layers.  tokens: of a microbatch.  shards: devices
    along the mesh axis `model`.  sequence: whether the residual stream is sharded over them.  trained: of the columns
    of each of `products`, the share that is.  The rest is as of systems.System."""

    model: Model
    tokens: int
    shards: int
    sequence: bool
    fuses_attention: bool
    fuses_elementwise: bool
    eager: bool
    weight_copies: int
    trained: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, system: System) -> Self:
        return cls(
            model=config.model,
            tokens=tokens_per_device(config, plan.layout),
            shards=plan.layout.model,
            sequence=plan.sequence,
            fuses_attention=system.fuses_attention(config, plan),
            fuses_elementwise=system.fuses_elementwise,
            eager=system.eager,
            weight_copies=system.weight_copies,
            trained=tuple(_trained_share(plan, *group) for group in _MATRICES),
        )

    @property
    def visible(self) -> float:
        """Share of the scores that XLA's attention computes."""
        return 1.0 if self.eager else computed_scores(*self._attended)

    @property
    def unmasked(self) -> float:
        """Share of the scores that no mask hides."""
        return unmasked_scores(*self._attended)

    @property
    def _attended(self) -> tuple[int, bool, int | None]:
        return self.model.context, self.model.causal, self.model.span

    @property
    def attention_heads(self) -> float:
        """Heads of all sequences of a microbatch."""
        return self.tokens / self.model.context * self.model.heads / self.shards

    @property
    def stream(self) -> float:
        return self.tokens * self.model.width / (self.shards if self.sequence else 1)

    @property
    def hidden(self) -> float:
        return self.tokens * self.model.mlp_dim / self.shards

    @property
    def qkv(self) -> float:
        return self.tokens * self.model.qkv_width(self.shards)

    @property
    def norms(self) -> int:
        """Of the residual stream."""
        return 4 if self.model.norm == "sandwich" else 2

    @property
    def normed_heads(self) -> float:
        """Entries of queries and keys that have norms of their own."""
        return self.model.qk_norm * self.tokens * self.model.qk_width(self.shards)

    @property
    def gated(self) -> bool:
        return self.model.gated

    @property
    def separate(self) -> bool:
        """Whether biases, dropout, scale and mask are operations of their own."""
        return not self.fuses_elementwise

    @property
    def products(self) -> list[Product]:
        """With the layer's weights."""
        m, n, tokens = self.model, self.shards, self.tokens
        return [
            Product(tokens, m.width, m.qkv_width(n)),
            Product(tokens, m.query_width / n, m.width),
            Product(tokens, m.width, (1 + self.gated) * m.mlp_dim / n),
            Product(tokens, m.mlp_dim / n, m.width),
        ]

    @property
    def attention_products(self) -> list[Product]:
        """Scores, and their averages of values."""
        context, head = self.model.context, self.model.head_dim
        return [
            Product(context, head, context, self.attention_heads),
            Product(context, context, head, self.attention_heads),
        ]

    @functools.lru_cache(maxsize=256)  # noqa: B019 - by values, of which a search has dozens
    def seconds(self, kernels: Kernels) -> LayerSeconds:
        attention, attention_backward, scores = self._attention(kernels)
        products = [kernels.product(product) for product in self.products]
        of_backward = [
            kernels.product(of_input) + share * kernels.product(of_matrix)
            for share, (of_input, of_matrix) in zip(
                self.trained, (product.of_backward for product in self.products), strict=True
            )
        ]
        copies = kernels.traffic(
            2 * self.weight_copies * sum(p.inner * p.columns for p in self.products) * kernels.size
        )
        forward = sum(products) + kernels.elementwise(*self._forward_elements()) + attention + copies
        backward = sum(of_backward) + kernels.elementwise(*self._backward_elements()) + attention_backward + copies
        return LayerSeconds(forward, backward, attention, scores, (products[1], products[3]))

    def _attention(self, kernels: Kernels) -> tuple[float, float, float]:
        """Forward, backward, and what of forward backward needs again.  In one kernel a causal model's scores that its
        mask hides are not computed, and backward computes the others again: five products for two.  Otherwise it is
        all but the averages of values; a compiled program leaves out a part of the hidden scores."""
        products = self.attention_products
        if self.fuses_attention:
            flops = sum(product.flops for product in products) * self.unmasked
            forward = kernels.attention(flops)
            return forward, kernels.attention(2.5 * flops), forward
        # Softmax, and dropout with its mask; scale and causal mask, where they are operations of their own.
        scores, dropout = self.visible * self.attention_heads * self.model.context**2, self.model.attention_dropout > 0
        operations = 1 + dropout + 2 * self.separate
        forward = kernels.elementwise(scores * (2 * operations + DROPOUT_MASK * dropout), operations)
        backward = kernels.elementwise(scores * (3 + (2 + DROPOUT_MASK) * dropout), 1 + dropout)
        to_scores, to_context = (self.visible * kernels.product(product) for product in products)
        of_backward = sum(kernels.product(each) for product in products for each in product.of_backward)
        again = forward + to_scores
        return again + to_context, backward + self.visible * of_backward, again

    def _forward_elements(self) -> tuple[float, float]:
        """(elements, operations) of all but attention and products: norms; two sums of a branch and the residual, with
        bias and dropout; the activation of one operand or two; and the layout of queries, keys and values, and of the
        context.  Biases and dropout may be operations of their own."""
        qkv, out, mlp = (self.separate * self.model.has_bias(each) for each in ("qkv", "out", "mlp"))
        dropout = self.model.dropout > 0
        stream = 2 * self.norms + 2 * (3 + DROPOUT_MASK * dropout + out + mlp + 2 * dropout * self.separate)
        context = self.tokens * self.model.query_width / self.shards
        sharded = self.hidden * (2 + self.gated + 2 * mlp) + self.qkv * (2 + 2 * qkv) + 2 * context
        operations = 6 + self.norms + qkv + out + 2 * mlp + 2 * dropout * self.separate
        return self.stream * stream + sharded + 2 * self.normed_heads, operations

    def _backward_elements(self) -> tuple[float, float]:
        """The same; and the sum of the gradients where a branch begins."""
        stream = 3 * self.norms + 2 * (2 + DROPOUT_MASK * (self.model.dropout > 0)) + 2 * 2
        context = self.tokens * self.model.query_width / self.shards
        sharded = self.hidden * (3 + 2 * self.gated) + 2 * self.qkv + 2 * context
        of_products = self.model.has_bias("qkv") + self.model.has_bias("out") + 2 * self.model.has_bias("mlp")
        return self.stream * stream + sharded + 3 * self.normed_heads, 8 + self.norms + self.separate * of_products


def layer_seconds(config: RunConfig, plan: Plan, system: System, kernels: Kernels) -> LayerSeconds:
    """Mean seconds of the run's layers."""
    if has_own_block(config):
        each = [_own_layer_seconds(of_kind, plan, system, kernels) for of_kind in config.of_each_kind]
    else:
        each = [LayerWork.of(of_kind, plan, system).seconds(kernels) for of_kind in config.of_each_kind]
    shares = shares_of_kinds(config)
    return jax.tree.map(lambda *seconds: sum(map(operator.mul, seconds, shares)), *each)


def _own_layer_seconds(config: RunConfig, plan: Plan, system: System, kernels: Kernels) -> LayerSeconds:
    """Seconds of a block of one's own: its products as one, and the traffic of what it saves."""
    tokens, m = tokens_per_device(config, plan.layout), config.model
    traced = trace_layer(config, fused=system.fuses_attention(config, plan))
    columns = traced.flops / m.context / (2 * m.width) / plan.layout.model
    product = Product(tokens, m.width, columns)
    bytes_ = (traced.stream_bytes + traced.other_bytes / plan.layout.model) / m.context * tokens
    backward = sum(map(kernels.product, product.of_backward))
    forward, traffic = kernels.product(product), kernels.traffic(2 * bytes_)
    return LayerSeconds(forward + traffic, backward + 2 * traffic, 0.0, 0.0, (0.0, 0.0))


def head_seconds(config: RunConfig, plan: Plan, system: System, kernels: Kernels) -> float:
    """Logits and cross-entropy of one microbatch, forward and backward; 0 for an objective without a vocabulary."""
    if not config.objective.predicts_tokens:
        return 0.0
    tokens, vocab = tokens_per_device(config, plan.layout), padded_vocab(config.model.vocab, plan.layout.model)
    logits = Product(tokens, config.model.width, vocab / plan.layout.model)
    of_input, of_table = logits.of_backward
    products = [logits]
    products += [of_input] * trains_before_logits(plan) + [of_table] * trains_table(config, plan)
    return (
        sum(map(kernels.product, products))
        + kernels.traffic(tokens * logits.columns * system.logit_bytes)
        + HEAD_OPERATIONS * kernels.overhead
    )
