"""The modules that a model is made of.  Each may be a user's own; docs/own-model.md has their arguments."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.axes import MODEL, is_dim_names
from spmd_lm.batch import Batch
from spmd_lm.config.schema import Model, Objective
from spmd_lm.errors import ConfigError
from spmd_lm.models.context import STATISTICS, LossDict
from spmd_lm.models.heads import Head, loss_weights, make_head
from spmd_lm.models.layers import ParamInit
from spmd_lm.models.transformer import Block, Embedding
from spmd_lm.ops.cross_entropy import LogitsPolicy
from spmd_lm.own_module import load_object


class ModelModules(NamedTuple):
    """embedding: called with a ParamInit.
    block: called with a ParamInit whose Model has layers of one kind.
    head: called with a ParamInit and a LogitsPolicy; None for the objective's."""

    embedding: Callable[[ParamInit], nnx.Module] = Embedding
    block: Callable[[ParamInit], nnx.Module] = Block
    head: Callable[[ParamInit, LogitsPolicy], Head] | None = None

    @property
    def own_block(self) -> bool:
        return self.block is not Block

    @property
    def own(self) -> bool:
        """True if any of them is a user's own."""
        return self != ModelModules()

    @property
    def prefetched(self) -> tuple[str, ...]:
        """The parts of a block, by their keys, whose weights parallel.prefetch gathers a layer ahead; () for all."""
        return getattr(self.block, "prefetched", ())

    @property
    def has_kv_cache(self) -> bool:
        """True if a block's tokens interact only in its context's attention, whose keys and values generation caches.
        A user's block declares it with `has_kv_cache = True`."""
        return getattr(self.block, "has_kv_cache", not self.own_block)

    @property
    def has_eval_sums(self) -> bool:
        """True if the head defines `eval_sums`, from which metrics are computed."""
        return getattr(self.head, "eval_sums", None) is not Head.eval_sums

    @property
    def has_logits(self) -> bool:
        """True if the head defines `logits`."""
        return getattr(self.head, "logits", None) is not Head.logits

    def make_head(self, init: ParamInit, objective: Objective, policy: LogitsPolicy) -> Head:
        return make_head(init, objective, policy) if self.head is None else self.head(init, policy)

    def loss_weights(self, objective: Objective, batch: Batch) -> LossDict:
        """The weights of the tokens or rows that each loss is a mean over."""
        own = getattr(self.head, "loss_weights", None)
        if own is None:
            return loss_weights(objective, batch)
        if not isinstance(inspect.getattr_static(self.head, "loss_weights"), staticmethod):
            raise ConfigError(f"{_name(self.head)}.loss_weights: make it a @staticmethod. It is called without a head.")
        return own(batch)

    @property
    def rules(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Mesh axes of users' own dimension names.  Raises ConfigError for an axis that they may not name, and for two
        rules of a name."""
        table: dict[str, tuple[str, ...]] = {}
        for module in filter(None, self):
            for name, axes in _rules(module):
                if table.setdefault(name, axes) != axes:
                    problem = f"'{name}' has another rule in another module of this model"
                    raise ConfigError(f"{_name(module)}.rules: {problem}. Give it one.")
        return tuple(table.items())


def _name(module: Any) -> str:
    return getattr(module, "__name__", str(module))


def _rules(module: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    rules: Mapping[str, str | None] = getattr(module, "rules", {})
    if not isinstance(rules, Mapping):
        raise ConfigError(f"{_name(module)}.rules is {rules!r:.60}. Write rules = {{'state': 'model'}}.")
    for name, axis in rules.items():
        if axis not in (MODEL, None):
            raise ConfigError(
                f"{_name(module)}.rules: '{name}' names the mesh axis {axis!r}. A dimension of one's own is sharded "
                f"over '{MODEL}', or over nothing: None. ZeRO shards the dimension 'width'."
            )
        yield name, (axis,) if axis else ()


def as_modules(given: Any, where: str) -> ModelModules:
    """ModelModules from what a user gives: those, a block, or a head.  Raises ConfigError for anything else."""
    if isinstance(given, ModelModules):
        return given
    if isinstance(given, type) and issubclass(given, nnx.Module):
        return ModelModules(head=given) if issubclass(given, Head) else ModelModules(block=given)
    raise ConfigError(
        f"{where} is {given!r:.80}. It has to be a subclass of flax.nnx.Module, a block; of spmd_lm.models.heads.Head; "
        "or a spmd_lm.ModelModules of several."
    )


def modules_of_model(c: Model, objective: Objective, given: Any = None) -> ModelModules:
    """The modules of a model, its user's or this package's.  given: the user's, where c.module names none.  Raises
    ConfigError for anything but a module, and for one that is given twice."""
    if c.module and given is not None:
        raise ConfigError(f"model={_name(given)} was given, and model.module={c.module} too. Give one of them.")
    where = f"model.module={c.module}" if c.module else "Program(model=...)"
    given = load_object(c.module) if c.module else given
    modules = ModelModules() if given is None else as_modules(given, where)
    if not objective.module:
        return modules
    head = as_modules(load_object(objective.module), f"objective.module={objective.module}").head
    if modules.head or not head:
        what = "but model.module has a head too" if modules.head else "which is no head"
        raise ConfigError(
            f"objective.module={objective.module}, {what}. Name one subclass of spmd_lm.models.heads.Head."
        )
    return modules._replace(head=head)


def checked_block(result: Any, x: jax.Array, name: str) -> tuple[jax.Array, LossDict]:
    """Checks a user's block's result.  Raises ConfigError unless it is x, with its shape and dtype, and scalar losses
    by name."""
    expected = f"x as it came, {_shown(x)}, and auxiliary losses, scalars by name, or {{}}"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ConfigError(f"{name} returned {_shown(result)}. Return {expected}.")
    losses = [loss for name, loss in result[1].items() if name not in STATISTICS]
    if _shown(result[0]) != _shown(x) or any(map(jnp.ndim, losses)):
        raise ConfigError(f"{name} returned {_shown(result)}. Return {expected}; is a sum or a gather missing?")
    return result


def checked_losses(losses: Any, weights: LossDict, name: str) -> LossDict:
    """Checks what a user's head returns.  Raises ConfigError unless it is a scalar for each loss that has weights."""
    if not isinstance(losses, dict) or losses.keys() != weights.keys() or any(map(jnp.ndim, losses.values())):
        what = f"{name}.losses returned {_shown(losses)}, and loss_weights names {', '.join(weights)}"
        raise ConfigError(f"{what}. Return a scalar for each of these names.")
    return losses


def _shown(tree: Any) -> str:
    """Dtypes and shapes of arrays."""

    def shown(x: Any) -> Any:
        return f"{x.dtype}{[*x.shape]}" if hasattr(x, "shape") else x

    return str(jax.tree.map(shown, tree)).replace("'", "")


def require_names(names: Any, shapes: Any) -> None:
    """Raises ConfigError for a parameter with a dimension that has no name."""
    problems = []
    paths = jax.tree_util.tree_leaves_with_path(names, is_leaf=lambda x: x is None or is_dim_names(x))
    for (path, dim_names), leaf in zip(paths, jax.tree.leaves(shapes), strict=True):
        if dim_names is None or len(dim_names) != len(leaf.shape):
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            problems.append(
                f"{where} has the shape {leaf.shape} and the dimension names {dim_names}. Name each dimension, as in "
                "nnx.Param(array, out_sharding=('width', 'mlp'))."
            )
    if problems:
        raise ConfigError(*problems)
