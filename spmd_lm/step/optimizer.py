"""AdamW as global scalars (norm, learning rate, step) and an elementwise rule per leaf, so that no leaf cares how it is
split."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from spmd_lm.axes import is_dim_names
from spmd_lm.config.schema import AdamW
from spmd_lm.parallel.plan import Plan, Tree
from spmd_lm.step.state import TrainState


def schedule(optim: AdamW, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate of the update after `step` updates: a linear warm-up that reaches lr at its end, then decay to
    min_lr."""
    decay_steps = max(1, (optim.decay_steps or steps) - optim.warmup)
    after = {
        "cosine": optax.cosine_decay_schedule(optim.lr, decay_steps, alpha=optim.min_lr / optim.lr),
        "linear": optax.linear_schedule(optim.lr, optim.min_lr, decay_steps),
        "constant": optax.constant_schedule(optim.lr),
    }[optim.decay]
    if not optim.warmup:
        return after
    first = optim.lr / optim.warmup  # not zero: a step at rate zero is a step lost
    return optax.join_schedules([optax.linear_schedule(first, optim.lr, optim.warmup - 1 or 1), after], [optim.warmup])


def decayed(names: Tree) -> Tree:
    """Whether weight decay reaches a leaf: matrices and tables, but no biases and no norms."""
    return jax.tree.map(lambda n: len([d for d in n if d != "layers"]) > 1, names, is_leaf=is_dim_names)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Decoupled weight decay (arXiv:1711.05101) with clipping by the global norm of the gradients.

    frozen: of freeze.frozen, parameters that neither move nor count in the norm; None: there are none."""

    config: AdamW
    steps: int
    frozen: Tree = None

    @jax.named_scope("scalars")
    def update(self, plan: Plan, state: TrainState, grads: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update, inside `plan.shard_map`.  grads: laid out as the parameters.  Also grad_norm, before
        clipping, and lr."""
        # As a float: optax divides an integer step in float32, which a float64 run would see in its tenth digit.
        wide = jnp.result_type(jnp.float32, *jax.tree.leaves(state.params))
        lr = jnp.asarray(schedule(self.config, self.steps)(state.updates.astype(wide)), wide)
        decay = optax.add_decayed_weights(self.config.weight_decay, decayed(plan.names))
        adam = optax.scale_by_adam(self.config.b1, self.config.b2, self.config.eps)

        params, mu, nu = state.params, state.mu, state.nu
        grads = self._trained(plan, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params))
        norm = _global_norm(plan, grads)
        if self.config.clip:
            shrink = jnp.minimum(1, self.config.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
            grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)
        moves, adam_state = adam.update(grads, optax.ScaleByAdamState(state.updates, mu, nu), params)
        moves, _ = decay.update(moves, decay.init(params), params)
        moves = self._trained(plan, moves)
        params = jax.tree.map(lambda p, m: p - lr.astype(p.dtype) * m, params, moves)
        after = dataclasses.replace(state, step=state.step + 1, params=params, mu=adam_state.mu, nu=adam_state.nu)
        return after, {"grad_norm": norm, "lr": lr}

    def _trained(self, plan: Plan, tree: Tree) -> Tree:
        """A tree like the parameters, zero where they are frozen."""

        def of(frozen: np.ndarray, x: jax.Array) -> jax.Array:
            kept = jnp.asarray(~frozen, x.dtype)
            return x * (kept if kept.ndim == 0 else plan.local_layers(kept).reshape(-1, *(1,) * (x.ndim - 1)))

        return tree if self.frozen is None else jax.tree.map(of, self.frozen, tree)


def _global_norm(plan: Plan, grads: Tree) -> jax.Array:
    """The 2-norm of all gradients, each entry counted once, with one sum per set of mesh axes."""
    squares: dict[tuple[str, ...], jax.Array] = {}
    for g, names in zip(jax.tree.leaves(grads), jax.tree.leaves(plan.sharded_names, is_leaf=is_dim_names), strict=True):
        split = plan.nontrivial_axes(*(axis for name in names for axis in plan.param_rules.axes(name)))
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        squares[split] = squares.get(split, 0) + jnp.sum(jnp.square(wide))
    return jnp.sqrt(sum(lax.psum(s, split) if split else s for split, s in squares.items()))
