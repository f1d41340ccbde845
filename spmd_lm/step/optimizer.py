"""The optimizer: global scalars (gradient norm, learning rate), and an elementwise optax rule for any leaves, so that
no update depends on how its leaf is sharded."""

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import unflatten_dict

from spmd_lm.axes import is_dim_names, is_matrix
from spmd_lm.config.schema import AdamW, CustomOptimizer, Lion, OptimizerConfig
from spmd_lm.ops.collectives import partial_sum, psum_axes
from spmd_lm.ops.norm import upcast
from spmd_lm.own_optimizer import own_rule
from spmd_lm.parallel.groups import offloaded_parameters
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree, leaves_by_path, merge, subset_of
from spmd_lm.step.state import TrainState, scalars_of, trees_of, with_trees


def schedule_keys(optim: OptimizerConfig, steps: int) -> dict[str, Any]:
    """Settings of `optim` that determine the learning rate, by key, without those of no effect."""
    keys = {"lr": optim.lr, "warmup": optim.warmup, "decay": optim.decay}
    if optim.decay == "constant":
        return keys
    start = None if optim.decay_start == optim.warmup else optim.decay_start
    return keys | {"min_lr": optim.min_lr, "decay_start": start, "decay_steps": optim.decay_steps or steps}


def lr_schedule(optim: OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate by the number of updates so far: a linear warm-up that reaches lr at its end, lr until decay_start,
    then decay to min_lr."""
    start = optim.warmup if optim.decay_start is None else optim.decay_start
    decay_steps = max(1, (optim.decay_steps or steps) - start)
    decay = {
        "cosine": optax.cosine_decay_schedule(optim.lr, decay_steps, alpha=optim.min_lr / optim.lr),
        "linear": optax.linear_schedule(optim.lr, optim.min_lr, decay_steps),
        "sqrt": functools.partial(_sqrt_decay, optim, decay_steps),
        "constant": optax.constant_schedule(optim.lr),
    }[optim.decay]
    if start > optim.warmup:
        decay = optax.join_schedules([optax.constant_schedule(optim.lr), decay], [start - optim.warmup])
    if not optim.warmup:
        return decay
    first = optim.lr / optim.warmup  # not zero: a step at rate zero is a step lost
    warmup = optax.linear_schedule(first, optim.lr, optim.warmup - 1 or 1)
    return optax.join_schedules([warmup, decay], [optim.warmup])


def _sqrt_decay(optim: OptimizerConfig, decay_steps: int, step: jax.Array) -> jax.Array:
    """Decays from lr to min_lr as 1 - sqrt (arXiv:2405.18392, section 4)."""
    return optim.lr - (optim.lr - optim.min_lr) * jnp.sqrt(jnp.clip(step / decay_steps, 0, 1))


def decay_mask(names: Tree) -> Tree:
    """Mask of weight decay: true for matrices and tables, false for biases and norms."""
    return jax.tree.map(is_matrix, names, is_leaf=is_dim_names)


def _rule(config: OptimizerConfig) -> optax.GradientTransformation:
    match config:
        case AdamW(b1=b1, b2=b2, eps=eps):
            return optax.scale_by_adam(b1, b2, eps)
        case Lion(b1=b1, b2=b2):
            return optax.scale_by_lion(b1, b2)
        case CustomOptimizer(module=module):
            return own_rule(module)
    raise AssertionError(config)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax rule, with decoupled weight decay (arXiv:1711.05101) and clipping by the global norm of the gradients.

    steps: the run's, for the learning rate."""

    config: OptimizerConfig
    steps: int

    rule: optax.GradientTransformation = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "rule", _rule(self.config))

    def offloaded_paths(self, plan: Plan) -> Tree:
        """Parameters whose state is offloaded, as nested dicts for `subset_of`; {} for none."""
        parameters = () if self.config.offload == "none" else offloaded_parameters(plan)
        return unflatten_dict({each.path: each.names for each in parameters})

    def scalars(self, state: TrainState, norm: jax.Array, is_applied: jax.Array) -> "UpdateScalars":
        """Scalars of an update.  norm: the gradients'.  is_applied: see UpdateScalars."""
        # As a float: optax divides an integer step in float32, which a float64 run would see in its tenth digit.
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(state.params))
        lr = jnp.asarray(lr_schedule(self.config, self.steps)(state.updates.astype(dtype)), dtype)
        shrink = None
        if self.config.clip:
            shrink = jnp.minimum(1, self.config.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        if not isinstance(self.config, AdamW):
            return UpdateScalars(lr, shrink, is_applied)
        count = jnp.where(is_applied, optax.safe_increment(state.updates), state.updates)
        first, second = (1 / (1 - decay**count) for decay in (self.config.b1, self.config.b2))
        return UpdateScalars(lr, shrink, is_applied, (first, second))

    def update(
        self, names: Tree, masks: Tree, scalars: "UpdateScalars", params: Tree, opt_state: Any, grads: Tree
    ) -> tuple[Tree, Any]:
        """(params, opt_state) after the update of any of the trained parameters, or of any shards of them.

        Elementwise: leaves are independent.  names: the plan's.  masks: see `trained_layers`.  opt_state: optax's, for
        these parameters.  grads: theirs."""
        if (shrink := scalars.shrink) is not None:
            grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)

        # A select, which fuses with the update's arithmetic; a conditional would copy the state on a GPU.  It leaves
        # frozen layers out too: if they were multiplied by zero, XLA could round the others differently.
        def if_applied(new: Any, old: Any) -> Any:
            return jnp.where(scalars.is_applied, new, old)

        def if_trained(new: Tree, old: Tree) -> Tree:
            stacks = subset_of(masks, old)
            selected = jax.tree.map(jnp.where, stacks, subset_of(new, stacks), subset_of(old, stacks))
            return jax.tree.map(if_applied, merge(new, selected), old)

        updates, new_state = self.rule.update(grads, opt_state, params)
        moments = map(if_trained, trees_of(new_state, names), trees_of(opt_state, names))
        counts = jax.tree.map(if_applied, scalars_of(new_state, names), scalars_of(opt_state, names))
        opt_state = with_trees(counts, names, [*moments])
        if isinstance(self.config, AdamW):
            updates = _adam_updates(self.config, scalars, opt_state)
        decay = optax.add_decayed_weights(self.config.weight_decay, decay_mask(subset_of(names, params)))
        updates, _ = decay.update(updates, decay.init(params), params)
        updated = jax.tree.map(lambda p, u: p - scalars.lr.astype(p.dtype) * u, params, updates)
        return if_trained(updated, params), opt_state


class UpdateScalars(NamedTuple):
    """Scalars that all leaves of an update share.
    lr: the learning rate.
    shrink: factor of gradients that clips their norm; None where nothing clips.
    is_applied: bool, whether parameters and moments change.
    corrections: factors that correct the bias of Adam's first and second moments, 1 / (1 - decay**count); () for other
      rules.  A product rounds alike in every program; a division by a scalar does not: XLA may rewrite it."""

    lr: jax.Array
    shrink: jax.Array | None
    is_applied: jax.Array
    corrections: tuple[jax.Array, ...] = ()


class Shared(NamedTuple):
    """Arguments that the updates of all offloaded parameters share.
    opt_scalars: `scalars_of` the optimizer's state before the step."""

    scalars: UpdateScalars
    opt_scalars: Any


class PendingUpdate(NamedTuple):
    """The update of parameters whose optimizer state is offloaded, which programs of their own make after the step's.
    grads: sharded like the parameters, in the dtype in which they are summed."""

    grads: Tree
    shared: Shared


def trained_layers(plan: Plan, params: Tree) -> Tree:
    """Masks of the trained layers, bool [layers of this stage, 1, ...], for stacks of `params` that are frozen in part;
    inside `plan.partition`."""
    frozen = leaves_by_path(subset_of(plan.frozen, params))
    ndim = {path: leaf.ndim for path, leaf in leaves_by_path(params).items()}
    masks = {
        path: plan.local_layers(jnp.asarray(~each)).reshape(-1, *(1,) * (ndim[path] - 1))
        for path, each in frozen.items()
        if each.any()
    }
    return unflatten_dict(masks, sep=".")


def without_frozen_layers(masks: Tree, tree: Tree) -> Tree:
    """Zeroes the frozen layers of stacks.  masks: `trained_layers` of the tree."""
    return merge(tree, jax.tree.map(lambda mask, x: jnp.where(mask, x, 0), masks, subset_of(tree, masks)))


def _adam_updates(config: AdamW, scalars: UpdateScalars, state: optax.ScaleByAdamState) -> Tree:
    """optax.scale_by_adam's updates, computed from the moments in its state after the select.

    optax computes them from the moments before the select: then XLA would compute the new moments twice and copy the
    old ones, on a CPU 3% of a step of GPT-2 124M."""
    first, second = scalars.corrections

    def direction(m: jax.Array, v: jax.Array) -> jax.Array:
        return m * first.astype(m.dtype) / (jnp.sqrt(v * second.astype(v.dtype)) + config.eps)

    return jax.tree.map(direction, state.mu, state.nu)


@jax.named_scope("scalars")
def global_norm(plan: Plan, grads: Tree) -> jax.Array:
    """The 2-norm of all gradients, each entry counted once, with one sum per set of mesh axes."""
    squares: dict[tuple[str, ...], list[jax.Array]] = defaultdict(list)
    leaf_names = jax.tree.leaves(subset_of(plan.sharded_names, grads), is_leaf=is_dim_names)
    for g, names in zip(jax.tree.leaves(grads), leaf_names, strict=True):
        axes = plan.param_axes(names)
        squares[axes].append(partial_sum(jnp.square(upcast(g))))
    return jnp.sqrt(sum(psum_axes(functools.reduce(operator.add, terms), axes) for axes, terms in squares.items()))
