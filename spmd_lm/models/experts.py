"""A mixture of experts in place of an MLP (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961).

The router reads the residual stream, so that its gradients are summed as a norm's are; its probabilities enter the
region between f and g beside the tokens.  Tokens compete for an expert's capacity within a group, which is a row or a
part of it, and losses are means over rows: so neither depends on the layout, or on the number of microbatches."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spmd_lm.axes import SEQUENCE
from spmd_lm.errors import ConfigError
from spmd_lm.models.context import DROPPED_TOKENS, EXPERT_TOKENS, BlockContext, LossDict
from spmd_lm.models.layers import ParamInit, broadcast_over_tokens
from spmd_lm.models.mlp import ACTIVATIONS, MLP
from spmd_lm.ops.collectives import copy_to_region, reduce_from_region, shard_index, sum_of_shares
from spmd_lm.ops.experts import combine, dispatch, from_experts, make_routes, matmul_of_each, router_logits, to_experts
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

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        """x: [experts, slots, width].  Returns this device's addend of the sum over `mlp`, in which the first has the
        bias."""
        hidden = [_add_biases(matmul_of_each(x, self.up[...]), self.up_bias)]
        if self.gate is not None:
            hidden.append(_add_biases(matmul_of_each(x, self.gate[...]), self.gate_bias))
        h = context.checkpoint(ACTIVATIONS[self.activation])(*hidden)
        y = matmul_of_each(h, self.down[...], transpose=True)
        return _add_biases(y, None if self.down_bias is None else _on_first_shard(self.down_bias[...]))


def _add_biases(y: jax.Array, biases: nnx.Param | jax.Array | None) -> jax.Array:
    """y [experts, slots, other] plus the bias of each expert, if there are biases [experts, other]."""
    return y if biases is None else y + jax.vmap(broadcast_over_tokens)(biases[...], y)


def _on_first_shard(x: jax.Array) -> jax.Array:
    """x on the first device along `mlp`, zeros on the others."""
    return jnp.where(shard_index("mlp") == 0, x, 0)


class MixtureOfExperts(nnx.Module):
    """A router, the experts from which it chooses, and an MLP that all tokens share, if there is one."""

    def __init__(self, init: ParamInit, out_std: float):
        c, moe = init.c, init.c.experts
        assert moe
        self.router = init.router(moe.experts)
        self.experts = Experts(init, moe.experts, moe.width or c.mlp_dim, out_std)
        shared = init._replace(c=c.model_copy(update={"mlp_width": moe.shared}))
        self.shared = MLP(shared, out_std) if moe.shared else None
        self.shared_gate = init.vector(0, c.width, "width") if moe.shared_gate else None
        self.moe, self.layers = moe, c.layers

    def __call__(self, x: jax.Array, context: BlockContext) -> tuple[jax.Array, LossDict]:
        """x: [batch, sequence, width] of the residual stream.  Returns the output, and in training the losses `balance`
        and `router_z`, and STATISTICS."""
        if is_explicit():
            raise ConfigError("model.mlp.kind=moe on a mesh of Explicit axes. Use parallel.partitioner=manual.")
        logits = router_logits(x, self.router[...])
        probabilities = jax.nn.softmax(logits)
        x_region, p = copy_to_region(x, "mlp"), copy_to_region(probabilities, "mlp")  # with the whole row
        gates, chosen = self._choose(p)
        y, dropped = self._run_experts(x_region, gates, chosen, context)
        if self.shared is not None:
            gate = None if self.shared_gate is None else self._shared_gate(x)
            addend = self.shared.addend(x_region, context)
            addend = addend if gate is None else addend * copy_to_region(gate, "mlp").astype(y.dtype)
            y = y + addend
        y = reduce_from_region(y, "mlp")
        if self.shared is not None and self.shared.bias("down") is not None:
            bias = broadcast_over_tokens(self.shared.bias("down"), y)
            y = y + (bias if gate is None else bias * gate.astype(y.dtype))
        if not context.training:
            return y, {}
        counts = jax.nn.one_hot(chosen, self.moe.experts, dtype=p.dtype).sum((1, 2))
        tokens = jnp.zeros((self.layers, self.moe.experts), p.dtype).at[context.layer].set(counts.sum(0))
        statistics = {EXPERT_TOKENS: tokens, DROPPED_TOKENS: dropped.astype(p.dtype)}
        losses = self._losses(logits, probabilities, counts, p.shape[1])
        return y, {name: context.row_weight * loss for name, loss in losses.items()} | statistics

    def _shared_gate(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, 1], float32 or wider."""
        assert self.shared_gate is not None
        return jax.nn.sigmoid(router_logits(x, self.shared_gate[...][:, None]))

    def _choose(self, p: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gates, and the experts that they are of, [batch, time, per token].  p: probabilities [batch, time, experts]
        of which the first is chosen where they are equal."""
        gates, chosen = lax.top_k(p, self.moe.per_token)
        return gates / gates.sum(-1, keepdims=True) if self.moe.renormalize else gates, chosen

    def _run_experts(
        self, x: jax.Array, gates: jax.Array, chosen: jax.Array, context: BlockContext
    ) -> tuple[jax.Array, jax.Array]:
        """This device's addend of the sum over `mlp` of the experts' outputs, and the number of dropped choices."""
        rows, time, width = x.shape
        group = self.moe.group or time if context.training else time
        capacity = self.moe.slots(group) if context.training else group
        tokens, gates, chosen = (each.reshape(rows * time, -1) for each in (x, gates, chosen))
        routes = make_routes(chosen, self.moe.experts, group, capacity)
        buffers = dispatch(tokens, routes).reshape(self.moe.experts, -1, width)
        out = from_experts(self.experts(to_experts(buffers), context))
        return combine(out.reshape(-1, width), gates, routes).reshape(x.shape), routes.dropped

    def _losses(self, logits: jax.Array, p: jax.Array, counts: jax.Array, time: int) -> LossDict:
        """Sums over rows.  logits, p: [batch, sequence, experts].  counts: of the row's choices, [batch, experts].

        Balance (arXiv:2101.03961, equation 4): experts x the sum over experts of the share of choices, which has no
        gradient, times the mean probability; 1 if all are alike.  z (arXiv:2202.08906, equation 5): the mean square of
        the logits' logsumexp."""
        shares = counts / (time * self.moe.per_token)
        balance = self.moe.experts * (shares * p.sum(1)).sum() / time
        z = jnp.square(jax.nn.logsumexp(logits, -1)).sum() / time
        losses = {"balance": self.moe.balance_loss * balance, "router_z": self.moe.z_loss * z}
        return {name: sum_of_shares(loss, SEQUENCE) for name, loss in losses.items()}
