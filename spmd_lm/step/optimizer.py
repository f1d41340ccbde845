"""The optimizer: global scalars (gradient norm, learning rate) and an elementwise optax rule per leaf, so that no leaf
depends on how it is sharded; and the parameters that it leaves as they are."""

import dataclasses
import functools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase, translate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_lm.axes import DimNames, is_dim_names
from spmd_lm.config.schema import AdamW, Lion, OptimizerConfig
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError
from spmd_lm.ops.collectives import partial_sum, psum_axes
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.state import TrainState


def schedule_keys(optim: OptimizerConfig, steps: int) -> dict[str, Any]:
    """What the learning rate of every step follows from, by key of `optim`; equal where the schedules are."""
    keys = {"lr": optim.lr, "warmup": optim.warmup, "decay": optim.decay}
    return (
        keys
        if optim.decay == "constant"
        else keys | {"min_lr": optim.min_lr, "decay_steps": optim.decay_steps or steps}
    )


def lr_schedule(optim: OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate after `step` updates: a linear warm-up that reaches lr at its end, then decay to min_lr."""
    decay_steps = max(1, (optim.decay_steps or steps) - optim.warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(optim.lr, decay_steps, alpha=optim.min_lr / optim.lr),
        "linear": optax.linear_schedule(optim.lr, optim.min_lr, decay_steps),
        "constant": optax.constant_schedule(optim.lr),
    }[optim.decay]
    if not optim.warmup:
        return decay
    first = optim.lr / optim.warmup  # not zero: a step at rate zero is a step lost
    warmup = optax.linear_schedule(first, optim.lr, optim.warmup - 1 or 1)
    return optax.join_schedules([warmup, decay], [optim.warmup])


def decay_mask(names: Tree) -> Tree:
    """Whether weight decay applies to a leaf: to matrices and tables, but to no biases and norms."""
    return jax.tree.map(lambda n: len([d for d in n if d != "layers"]) > 1, names, is_leaf=is_dim_names)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """optax's rule, with decoupled weight decay (arXiv:1711.05101) and clipping by the global norm of the gradients.

    steps: of the run, for the learning rate.  frozen: a `frozen_mask`, of parameters that are not updated and do not
    count in the norm; None for none."""

    config: OptimizerConfig
    steps: int
    frozen: Tree = None

    @property
    def rule(self) -> optax.GradientTransformation:
        match self.config:
            case AdamW(b1=b1, b2=b2, eps=eps):
                return optax.scale_by_adam(b1, b2, eps)
            case Lion(b1=b1, b2=b2):
                return optax.scale_by_lion(b1, b2)
        raise AssertionError(self.config)

    def trained_gradients(self, plan: Plan, params: Tree, grads: Tree) -> Tree:
        """In the parameters' dtypes, and zero where these are frozen.  grads: sharded like params."""
        return self._without_frozen(plan, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params))

    def update(
        self, plan: Plan, state: TrainState, grads: Tree, norm: jax.Array, is_applied: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """The state one step later, inside `plan.partition`, and the learning rate.

        grads: `trained_gradients`, of this norm.  is_applied: bool, whether anything but the step's number changes."""
        params, decay = state.params, optax.add_decayed_weights(self.config.weight_decay, decay_mask(plan.names))
        # As a float: optax divides an integer step in float32, which a float64 run would see in its tenth digit.
        wide = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
        lr = jnp.asarray(lr_schedule(self.config, self.steps)(state.updates.astype(wide)), wide)
        if self.config.clip:
            shrink = jnp.minimum(1, self.config.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
            grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)

        # A select, which fuses with the update's arithmetic; a conditional would copy the state on a GPU.
        def if_applied(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(lambda new, old: jnp.where(is_applied, new, old), new, old)

        updates, opt_state = self.rule.update(grads, state.opt_state, params)
        opt_state = if_applied(opt_state, state.opt_state)
        if isinstance(self.config, AdamW):
            updates = _adam_updates(self.config, opt_state)
        updates, _ = decay.update(updates, decay.init(params), params)
        updates = self._without_frozen(plan, updates)
        updated = jax.tree.map(lambda p, u: p - lr.astype(p.dtype) * u, params, updates)
        params = if_applied(updated, params)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), lr

    def _without_frozen(self, plan: Plan, tree: Tree) -> Tree:
        """A tree like the parameters, zero where they are frozen."""

        def zero_frozen(frozen: np.ndarray, x: jax.Array) -> jax.Array:
            keep = jnp.asarray(~frozen, x.dtype)
            if keep.ndim:  # one entry per layer
                keep = plan.local_layers(keep).reshape(-1, *(1,) * (x.ndim - 1))
            return x * keep

        return tree if self.frozen is None else jax.tree.map(zero_frozen, self.frozen, tree)


def _adam_updates(config: AdamW, state: optax.ScaleByAdamState) -> Tree:
    """optax.scale_by_adam's updates, computed from the moments in its state after the select.

    Its own come from the moments before the select.  For those XLA would compute the new moments twice, and copy the
    old ones: on a CPU 3% of a step of GPT-2 124M."""
    mean, mean_square = (
        optax.tree_utils.tree_bias_correction(moment, decay, state.count)
        for moment, decay in ((state.mu, config.b1), (state.nu, config.b2))
    )
    return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.eps), mean, mean_square)


@jax.named_scope("scalars")
def global_norm(plan: Plan, grads: Tree) -> jax.Array:
    """The 2-norm of all gradients, each entry counted once, with one sum per set of mesh axes."""
    squares: dict[tuple[str, ...], list[jax.Array]] = defaultdict(list)
    for g, names in zip(jax.tree.leaves(grads), jax.tree.leaves(plan.sharded_names, is_leaf=is_dim_names), strict=True):
        axes = plan.axes_over(names)
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        squares[axes].append(partial_sum(jnp.square(wide)))
    return jnp.sqrt(sum(psum_axes(functools.reduce(operator.add, terms), axes) for axes, terms in squares.items()))


MAX_UNMATCHED = 3
"""Patterns that match nothing which get a sentence: looking for the nearest of 60,000 names takes a second."""


def frozen_mask(patterns: Sequence[str], names: Tree, shapes: Tree) -> Tree:
    """Whether training leaves each parameter as it is, bool; for a stack, bool [layers].

    patterns: shell globs of paths in the tree of parameters, in which a layer has its index: embedding.tokens,
    blocks.[0-5].*, *bias.  names, shapes: trees of the parameters' dimension names and canonical shapes.  Raises
    ConfigError for a pattern that matches nothing, and if every parameter would be frozen."""
    known: list[str] = []
    any_pattern = re.compile("|".join(map(translate, patterns)) if patterns else r"(?!)")

    def is_frozen(*path: str) -> bool:
        known.append(".".join(path))
        return any_pattern.match(known[-1]) is not None

    def leaf_mask(path: tuple, dim_names: DimNames, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        first, *rest = (key.key for key in path)
        if "layers" not in dim_names or not patterns:
            return np.array(is_frozen(first, *rest))
        return np.array([is_frozen(first, str(layer), *rest) for layer in range(leaf.shape[0])])

    mask = jax.tree_util.tree_map_with_path(leaf_mask, names, shapes, is_leaf=is_dim_names)
    problems: list[str] = []
    for pattern in sorted(set(patterns)):
        if len(problems) < MAX_UNMATCHED and not any(fnmatchcase(name, pattern) for name in known):
            near = did_you_mean(pattern, known)
            hint = f"Did you mean {near}?" if near else f"Names are like {known[0]} and {known[-1]}."
            problems.append(f"optim.freeze: {pattern} matches no parameter. {hint}")
    if not problems and all(leaf.all() for leaf in jax.tree.leaves(mask)):
        problems.append(f"optim.freeze={' '.join(patterns)} freezes every parameter. Leave some out.")
    if problems:
        raise ConfigError(*problems)
    return mask


def trained_count(mask: Tree, shapes: Tree) -> int:
    """Number of parameters that are not frozen."""
    pairs = zip(jax.tree.leaves(mask), jax.tree.leaves(shapes), strict=True)
    return sum(int((~frozen).sum()) * leaf.size // frozen.size for frozen, leaf in pairs)
