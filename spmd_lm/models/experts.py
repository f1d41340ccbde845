"""A mixture of experts in place of an MLP (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961).

The router reads the residual stream, so that its gradients are summed as a norm's are; its probabilities enter the
region between f and g beside the tokens.  Tokens compete for an expert's capacity within a group, which is a row or a
part of it, and losses are means over rows: so neither depends on the layout, or on the number of microbatches."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spmd_lm.axes import SEQUENCE, TIME
from spmd_lm.errors import ConfigError
from spmd_lm.models.context import DROPPED_TOKENS, EXPERT_TOKENS, BlockContext, LossDict
from spmd_lm.models.layers import ParamInit, add_bias, broadcast_over_tokens
from spmd_lm.models.mlp import ACTIVATIONS, MLP
from spmd_lm.ops.collectives import copy_to_region, local_slice, psum, reduce_from_region, shard_index, sum_of_shares
from spmd_lm.ops.experts import (
    GROUPED,
    Routes,
    biases_of_rows,
    combine,
    dispatch,
    from_experts,
    make_routes,
    matmul_of_each,
    router_logits,
    sort_by_expert,
    to_experts,
)
from spmd_lm.ops.norm import upcast
from spmd_lm.ops.sharding_types import is_explicit


class Experts(nnx.Module):
    """MLPs of one shape, stacked along `experts`."""

    def __init__(self, init: ParamInit, experts: int, width: int, out_std: float):
        self.up, self.up_bias = init.matrices(experts, width, "mlp"), init.biases(experts, width, "mlp", "mlp")
        self.down = init.matrices(experts, width, "mlp", out_std)
        self.down_bias = init.biases(experts, init.c.width, "width", "mlp")
        self.gate = init.matrices(experts, width, "mlp") if init.c.gated else None
        self.gate_bias = init.biases(experts, width, "mlp", "mlp") if init.c.gated else None
        self.activation = init.c.activation

    def __call__(self, x: jax.Array, context: BlockContext, sizes: jax.Array | None = None) -> jax.Array:
        """x: [experts, slots, width], or with `sizes`, int32 [experts], rows in the order of their experts, so many of
        each: [slots, width].  Returns this device's addend of the sum over `mlp`, in which the first has the bias."""
        matmul, add_biases = (matmul_of_each, _add_biases) if sizes is None else _of_rows(len(x), sizes, context)
        hidden = [add_biases(matmul(x, self.up[...]), self.up_bias)]
        if self.gate is not None:
            hidden.append(add_biases(matmul(x, self.gate[...]), self.gate_bias))
        h = context.checkpoint(ACTIVATIONS[self.activation])(*hidden)
        y = matmul(h, self.down[...], transpose=True)
        return add_biases(y, None if self.down_bias is None else _on_first_shard(self.down_bias[...]))


def _add_biases(y: jax.Array, biases: nnx.Param | jax.Array | None) -> jax.Array:
    """y [experts, slots, other] plus the bias of each expert, if there are biases [experts, other]."""
    return y if biases is None else y + jax.vmap(broadcast_over_tokens)(biases[...], y)


def _of_rows(rows: int, sizes: jax.Array, context: BlockContext) -> tuple[Callable, Callable]:
    """A product of rows [slots, width] with the matrices of their experts, and the addition of their biases."""
    expert_of = jnp.repeat(jnp.arange(len(sizes), dtype=jnp.int32), sizes, total_repeat_length=rows)

    def add_biases(y: jax.Array, biases: nnx.Param | jax.Array | None) -> jax.Array:
        return y if biases is None else y + biases_of_rows(biases[...], expert_of)

    return functools.partial(GROUPED[context.expert_product].matmul, sizes=sizes), add_biases


def _on_first_shard(x: jax.Array) -> jax.Array:
    """x on the first device along `mlp`, zeros on the others."""
    return jnp.where(shard_index("mlp") == 0, x, 0)


class MixtureOfExperts(nnx.Module):
    """A router, the experts from which it chooses, and an MLP that all tokens share, if there is one."""

    def __init__(self, init: ParamInit, out_std: float):
        c, moe = init.c, init.c.moe
        assert moe
        self.router = init.router(moe.experts)
        self.experts = Experts(init, moe.experts, moe.width or c.mlp_dim, out_std)
        shared = init._replace(c=c.model_copy(update={"mlp_width": moe.shared}))
        self.shared = MLP(shared, out_std) if moe.shared else None
        self.shared_gate = init.vector(0, c.width, "width") if moe.shared_gate else None
        self.moe, self.layers = moe, c.layers

    def __call__(self, x: jax.Array, context: BlockContext) -> tuple[jax.Array, LossDict]:
        """x: [batch, sequence, width], laid out as the residual stream.  Returns the output, and in training the losses
        `balance` and `router_z`, and STATISTICS.  Padding, of segment 0, goes to no expert and has no losses."""
        if is_explicit():
            raise ConfigError("model.mlp.kind=moe: arrays are global, and no sharding types describe what it sends.")
        segments = None if context.batch is None else context.batch.segments
        is_token = None if segments is None else segments != 0
        logits = router_logits(x, self.router[...])
        probabilities = jax.nn.softmax(logits)
        x_region, p = copy_to_region(x, "mlp"), copy_to_region(probabilities, "mlp")  # with the whole row
        gates, chosen = self._choose(p, is_token)
        y, routes = self._run_experts(x_region, gates, chosen, context)
        y = reduce_from_region(y, "mlp") if self.shared is None else self._add_shared(y, x, x_region, context)
        if routes is None:
            return y, {}
        counts = routes.counts.reshape(len(x), -1, self.moe.experts).sum(1).astype(p.dtype)
        tokens = jnp.zeros((self.layers, self.moe.experts), p.dtype).at[context.layer].set(counts.sum(0))
        statistics = {EXPERT_TOKENS: tokens, DROPPED_TOKENS: routes.dropped.astype(p.dtype)}
        losses = self._losses(logits, probabilities, psum(counts, TIME), is_token)
        return y, {name: context.row_weight * loss for name, loss in losses.items()} | statistics

    def _choose(self, p: jax.Array, is_token: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Gates, and the experts that they are of, [batch, time, per token]; no expert for padding.  p: probabilities
        [batch, time, experts], of which the first is chosen where they are equal."""
        gates, chosen = lax.top_k(p, self.moe.per_token)
        chosen = chosen if is_token is None else jnp.where(is_token[..., None], chosen, self.moe.experts)
        return gates / gates.sum(-1, keepdims=True) if self.moe.renormalize else gates, chosen

    def _run_experts(
        self, x: jax.Array, gates: jax.Array, chosen: jax.Array, context: BlockContext
    ) -> tuple[jax.Array, Routes | None]:
        """This device's addend of the sum over `mlp` of the experts' outputs, and in training the routes.  Otherwise
        experts have room for all tokens, and rows go one by one where buffers are large."""

        def run(x: jax.Array, gates: jax.Array, chosen: jax.Array, group: int, capacity: int) -> tuple:
            rows, chosen = (each.reshape(-1, each.shape[-1]) for each in (x, chosen))
            routes = make_routes(chosen, self.moe.experts, group, capacity)
            buffers = dispatch(rows, routes).reshape(self.moe.experts, -1, x.shape[-1])
            out = from_experts(self.experts(to_experts(buffers), context)).reshape(-1, x.shape[-1])
            return combine(out, gates.reshape(-1, gates.shape[-1]), routes).reshape(x.shape), routes

        rows, time, _ = x.shape
        group = self.moe.group or time
        if context.expert_product in GROUPED:
            y, routes = self._run_grouped(x, gates, chosen, group, context)
            return y, routes if context.training else None
        if context.training:
            return run(x, gates, chosen, group, self.moe.slots(group))
        if time == 1:
            return run(x, gates, chosen, rows, rows)[0], None
        return lax.map(lambda row: run(row[0], row[1], row[2], time, time)[0], (x, gates, chosen)), None

    def _run_grouped(
        self, x: jax.Array, gates: jax.Array, chosen: jax.Array, group: int, context: BlockContext
    ) -> tuple[jax.Array, Routes]:
        rows, chosen, gates = (each.reshape(-1, each.shape[-1]) for each in (x, chosen, gates))
        tile = GROUPED[context.expert_product].row_tile(chosen.size, self.moe.experts)
        routes, sizes = sort_by_expert(chosen, self.moe.experts, group, tile)
        out = self.experts(dispatch(rows, routes), context, sizes)
        return combine(out, gates, routes).reshape(x.shape), routes

    def _add_shared(self, y: jax.Array, x: jax.Array, x_region: jax.Array, context: BlockContext) -> jax.Array:
        """The sum over `mlp` of the addends y and those of the shared MLP."""
        assert self.shared is not None
        addend, bias = self.shared.addend(x_region, context), self.shared.bias("down")
        if self.shared_gate is None:
            y = reduce_from_region(y + addend, "mlp")
            return add_bias(y, bias)
        gate = jax.nn.sigmoid(router_logits(x, self.shared_gate[...][:, None]))
        scale = context.checkpoint(_scale_tokens)  # saves no float32 array of the stream's size
        y = reduce_from_region(y + scale(addend, copy_to_region(gate, "mlp")), "mlp")
        return y if bias is None else y + scale(broadcast_over_tokens(bias, y), gate)

    def _losses(self, logits: jax.Array, p: jax.Array, counts: jax.Array, is_token: jax.Array | None) -> LossDict:
        """Sums over rows of means over their tokens, of this device's tokens.  logits, p: [batch, sequence, experts].
        counts: of the whole row's choices, [batch, experts].

        Balance (arXiv:2101.03961, equation 4): experts x the sum over experts of the share of choices, which has no
        gradient, times the mean probability; 1 if all are alike.  z (arXiv:2202.08906, equation 5): the mean square of
        the logits' logsumexp."""
        choices = jnp.maximum(counts.sum(1, keepdims=True), 1)
        weight = self.moe.per_token / choices  # of a token in its row
        if is_token is not None:
            weight = weight * local_slice(is_token, SEQUENCE, 1)
        balance = self.moe.experts * (counts / choices * (p * weight[..., None]).sum(1)).sum()
        z = (jnp.square(jax.nn.logsumexp(logits, -1)) * weight).sum()
        losses = {"balance": self.moe.balance_loss * balance, "router_z": self.moe.z_loss * z}
        return {name: sum_of_shares(loss, SEQUENCE) for name, loss in losses.items()}


def _scale_tokens(y: jax.Array, gate: jax.Array) -> jax.Array:
    """y [batch, time, width] times gate [batch, time, 1], whose gradient is summed in float32 or wider."""
    return (upcast(y) * gate).astype(y.dtype)
