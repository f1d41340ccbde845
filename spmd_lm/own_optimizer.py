"""The user's own optax rule: the direction in which parameters move, as from optax.scale_by_adam.

A device updates its own shards, so a rule may read only the entry that it updates, and its state may hold only values
per entry and scalars.  A trial checks this."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_lm.config.own_modules import ModuleRef
from spmd_lm.config.schema import CustomOptimizer, OptimizerConfig
from spmd_lm.errors import ConfigError
from spmd_lm.own_module import load_object

TRIAL_SHAPES = {"vector": (7,), "table": (3, 5), "matrices": (2, 4, 6)}  # like biases and norms, tables, stacked layers
TRIAL_STEPS = 3


class CountedState(NamedTuple):
    count: Any  # int32, updates so far
    inner: dict[str, Any] | None  # leaves of the rule's own state by number: checkpoints hold no tuples


@functools.lru_cache(maxsize=8)
def own_rule(module: str) -> optax.GradientTransformation:
    """The rule that a user's function returns, with a count of its updates.  Raises ConfigError for one that cannot be
    computed shard by shard, or that contains a learning rate."""
    ref = ModuleRef.parse(module)
    where = f"optim.module={ref.path}:{ref.name}"
    rule = load_object(module)
    if not isinstance(rule, optax.GradientTransformation):
        rule = rule() if callable(rule) else rule
    if not isinstance(rule, optax.GradientTransformation):
        raise ConfigError(f"{where} gives {rule!r:.80}. Name a function that returns an optax.GradientTransformation.")
    with jax.ensure_compile_time_eval():
        if problem := next(_problems(rule), None):
            raise ConfigError(f"{where}: {problem}")

    def numbered(state: Any) -> dict[str, Any] | None:
        """None, not an empty dict, which would count as a tree of parameters."""
        return {str(i): part for i, part in enumerate(jax.tree.leaves(state, is_leaf=_is_dict))} or None

    def init(params: Any) -> CountedState:
        return CountedState(jnp.zeros((), jnp.int32), numbered(rule.init(params)))

    def update(grads: Any, state: CountedState, params: Any = None) -> tuple[Any, CountedState]:
        structure = jax.tree.structure(jax.eval_shape(rule.init, params), is_leaf=_is_dict)
        numbers = state.inner or {}
        inner = jax.tree.unflatten(structure, [numbers[str(i)] for i in range(len(numbers))])
        updates, inner = rule.update(grads, inner, params)
        return updates, CountedState(state.count + 1, numbered(inner))

    return optax.GradientTransformation(init, update)


def bytes_of_moments(optim: OptimizerConfig, dtype: str) -> int:
    """Bytes of the optimizer's state per parameter of this dtype."""
    if not isinstance(optim, CustomOptimizer):
        return optim.num_moments * jnp.dtype(dtype).itemsize
    state = jax.eval_shape(own_rule(optim.module).init, {"embedding": {"tokens": jnp.zeros((3, 5), dtype)}})
    return sum(leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)


def _problems(rule: optax.GradientTransformation) -> Iterator[str]:
    rng = np.random.default_rng(0)
    params, random = (
        {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in TRIAL_SHAPES.items()}
        for _ in range(2)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(rule.init, params)):
        name = next((key.key for key in path if getattr(key, "key", None) in TRIAL_SHAPES), None)
        shape, where = TRIAL_SHAPES.get(name or "", ()), jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            yield f"its state {where} is a random key: each device would draw for its own shard. Use another rule."
        elif leaf.shape != shape:
            yield (
                f"its state {where} has the shape {leaf.shape} for a parameter {shape}. It may have one value for each "
                "entry, or be a scalar of all parameters."
            )

    @jax.jit
    def updates_of(grads: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
        state, made = rule.init(params), []
        for _ in range(TRIAL_STEPS):
            updates, state = rule.update(grads, state, params)
            made.append(updates)
        return made

    for size in (1e-3, 1.0, 1e3):  # on both sides of any threshold, as for clipping
        grads = {name: size * g for name, g in random.items()}
        once = updates_of(grads)
        for name, g in grads.items():
            first = (0,) * g.ndim
            again = updates_of(grads | {name: g.at[first].multiply(-2)})
            for a, b in zip(once, again, strict=True):
                same = {each: a[each] == b[each] for each in a}
                same[name] = same[name].at[first].set(True)
                if not all(bool(each.all()) for each in same.values()):
                    yield (
                        "its update reads other entries than the one that it changes, which other devices may have. "
                        "Use a rule that is elementwise; optim.clip clips by the norm of all gradients."
                    )
                    return
    if any(bool((u < 0).any()) for step in updates_of(jax.tree.map(jnp.ones_like, random)) for u in step.values()):
        yield (
            "its update points against the gradient, as with a learning rate, which optim.lr is. Return a direction, "
            "as optax.scale_by_adam() does."
        )


def _is_dict(x: Any) -> bool:
    return isinstance(x, dict)
