"""What one stage of a pipeline runs: a model as three functions, bound to weights wherever ZeRO's stage has them.

The model comes as plain functions of plain dicts, so that nothing here knows what a layer is.  ZeRO's stage says where
weights become whole and gradients are reduced: around everything, or layer by layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.axes import is_dim_names
from spmd_lm.parallel.layers_loop import pull_layers, run_layers
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import with_gathered_weights

Tree = Any
Losses = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A model as a pipeline runs it.  `part` is one microbatch, whatever it holds.

    embed(params, part) -> x; block(layer_params, x, part, layer) -> (x, losses); head(params, x, part) -> losses,
    by name. They are already divided by the weight of the whole global batch: a sum over microbatches and devices is
    the mean, and the sum of them all is what gradients are of.
    first, last: of a tree of parameters, what embed and head read; a table that is tied is in both.  shared: how many
    layers one layer's weights serve.  group: of how many layers backward finds the first one's input alone."""

    embed: Callable[[Tree, Tree], jax.Array]
    block: Callable[[Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, Losses]]
    head: Callable[[Tree, jax.Array, Tree], Losses]
    first: Callable[[Tree], Tree]
    last: Callable[[Tree], Tree]
    scan: bool = True
    shared: int = 1
    group: int = 1


def _cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def plus(total: Tree, new: Tree) -> Tree:
    """The sum, in the dtypes of `total`."""
    return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, new)


def merged(total: Tree, part: Tree) -> Tree:
    """`total`, a tree of dicts, plus `part`, which has some of its leaves."""
    if not isinstance(total, dict):
        return plus(total, part)
    return {name: merged(each, part[name]) if name in part else each for name, each in total.items()}


def _parted(tree: Tree) -> dict[str, Tree]:
    """Parameters as the layers' and the rest, which no loop runs over."""
    return {"blocks": tree["blocks"], "ends": {name: part for name, part in tree.items() if name != "blocks"}}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A model's functions, and the weights of one stage in them.

    layers: (x, part, the first one's number) -> (x, their losses, summed by name).  pulled: the same, and pull_layers'
    pull for the layers of the weights' source."""

    embed: Callable[[Tree], jax.Array]
    layers: Callable[[jax.Array, Tree, jax.Array | int], tuple[jax.Array, Losses]]
    pulled: Callable[[jax.Array, Tree, jax.Array | int], tuple[jax.Array, Losses, Callable]]
    head: Callable[[jax.Array, Tree], Losses]

    def losses(self, part: Tree) -> Losses:
        """Of one microbatch, where one stage has all layers."""
        x, losses = self.layers(self.embed(part), part, 0)
        return losses | self.head(x, part)

    def none(self, batch: Tree) -> Losses:
        """Zeros like the losses of a microbatch of `batch`."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
        return jax.tree.map(lambda loss: jnp.zeros(loss.shape, loss.dtype), jax.eval_shape(self.losses, one))


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters as a step uses them, each tree parted into `blocks` and `ends`.

    source: what gradients are taken for.  shards: as they are kept.  held: whole weights in the compute dtype; None for
    layers that are gathered one by one.  early: gradients are scattered as they are made, and the source is empty slots
    for them; otherwise it is `held`."""

    plan: Plan
    compute: jnp.dtype
    reduce: jnp.dtype
    source: dict[str, Tree]
    shards: dict[str, Tree]
    held: dict[str, Tree]
    early: bool

    @classmethod
    def of(cls, plan: Plan, params: Tree, compute: jnp.dtype, reduce: jnp.dtype) -> "Weights":
        low, kept = _parted(_cast(params, compute)), _parted(plan.sharded_names)
        if plan.zero.stage == 0:
            return cls(plan, compute, reduce, low, low, low, early=False)
        held: dict[str, Tree] = {"ends": plan.gather(low["ends"], kept["ends"]), "blocks": None}
        if not plan.zero.gathers_in_loop:
            held["blocks"] = plan.gather(low["blocks"], kept["blocks"])
        early = plan.zero.scatters_in_loop
        slots = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(compute, reduce)), params)
        source = _parted(slots) if early else held
        return cls(plan, compute, reduce, source, _parted(params), held, early)

    def chunk(self, first: jax.Array, layers: int) -> "Weights":
        """The same with those of `layers` layers alone, from the one at `first` on."""
        cut = lambda x: lax.dynamic_slice_in_dim(x, first, layers, 0)  # noqa: E731
        of = lambda tree: tree | {"blocks": jax.tree.map(cut, tree["blocks"])}  # noqa: E731
        return dataclasses.replace(self, source=of(self.source), shards=of(self.shards), held=of(self.held))

    def whole_blocks(self) -> Tree:
        """The layers' weights, whole, in the compute dtype."""
        if self.held["blocks"] is not None:
            return self.held["blocks"]
        return self.plan.gather(_cast(self.shards["blocks"], self.compute), self.kept("blocks"))

    def fetched(self) -> "Weights":
        """The same with its layers whole; their gradients are scattered as before."""
        return dataclasses.replace(self, held=self.held | {"blocks": self.whole_blocks()})

    def holding(self, blocks: Tree) -> "Weights":
        """The same with these layers, whole; their gradients are left to who takes them."""
        return dataclasses.replace(self, source=self.source | {"blocks": blocks}, early=False)

    def kept(self, part: str) -> Tree:
        """The names of `blocks` or `ends`, as they are kept between steps."""
        return _parted(self.plan.sharded_names)[part]

    def scattered(self, grads: Tree, kept: Tree) -> Tree:
        """Gradients of whole weights, summed over data onto the shards that are kept.  kept: their names."""
        return self.plan.scatter(_cast(grads, self.reduce), kept)

    def stage(self, pieces: Pieces, source: dict[str, Tree]) -> Stage:
        """`pieces` with these weights, differentiable for `source`."""
        ends, block = source["ends"], lambda layer, x, part, i: pieces.block(layer[0], x, part, i)
        rest: tuple[Tree, ...] = ()
        embed = lambda part: pieces.embed(pieces.first(ends), part)  # noqa: E731
        head = lambda x, part: pieces.head(pieces.last(ends), x, part)  # noqa: E731
        if self.early:
            kept = _parted(self.plan.sharded_names)
            of_ends = ends, self.shards["ends"], self.held["ends"]
            lookup = lambda weights, _, part: pieces.embed(weights, part)  # noqa: E731
            first = self._fetching(lookup, pieces.first(kept["ends"]), scatter_first=True)
            embed = lambda part: first(*map(pieces.first, of_ends), None, (part,))  # noqa: E731
            last = self._fetching(pieces.head, pieces.last(kept["ends"]), scatter_first=True)
            head = lambda x, part: last(*map(pieces.last, of_ends), x, (part,))  # noqa: E731
            of_layer = jax.tree.map(lambda names: names[1:], kept["blocks"], is_leaf=is_dim_names)
            fetched = self._fetching(pieces.block, of_layer, prevent_cse=not pieces.scan)
            rest = self.shards["blocks"], self.held["blocks"]
            block = lambda layer, x, part, i: fetched(layer[0], *layer[1], x, (part, i))  # noqa: E731

        each = lambda part, first: lambda layer, x, i: block(layer, x, part, first + i)  # noqa: E731

        def layers(x, part, first):
            stack = source["blocks"], rest
            return run_layers(each(part, first), stack, x, pieces.scan, shared=pieces.shared, group=pieces.group)

        def pulled(x, part, first):
            return pull_layers(each(part, first), source["blocks"], rest, x, pieces.scan, group=pieces.group)

        return Stage(embed, layers, pulled, head)

    def _fetching(self, f: Callable, kept: Tree, **barriers: bool) -> Callable:
        gather = lambda shards: self.plan.gather(_cast(shards, self.compute), kept)  # noqa: E731
        wide = jnp.promote_types(self.compute, self.reduce)
        scatter = lambda grads: _cast(self.plan.scatter(_cast(grads, self.reduce), kept), wide)  # noqa: E731
        return with_gathered_weights(f, gather, scatter, **barriers)

    def to_read(self) -> tuple[Tree, Callable[[Tree], Tree]]:
        """(parameters, fetch) for who needs no gradients: `fetch` makes one layer of the stack whole."""
        of_layer = jax.tree.map(lambda names: names[1:], self.plan.sharded_names["blocks"], is_leaf=is_dim_names)
        stack, ends = self.held["blocks"], self.held["ends"]
        if stack is not None:
            return {**ends, "blocks": self.plan.gather_layers(stack)}, lambda layer: layer
        fetch = lambda layer: self.plan.gather(_cast(layer, self.compute), of_layer)  # noqa: E731
        return {**ends, "blocks": self.plan.gather_layers(self.shards["blocks"])}, fetch

    def reduced(self, grads: dict[str, Tree]) -> Tree:
        """Gradients of the source, summed over the batch axes and laid out as the parameters are kept."""
        grads, kept = _cast(grads["ends"] | {"blocks": grads["blocks"]}, self.reduce), self.plan.sharded_names
        if self.plan.zero.stage and not self.early:
            grads = self.plan.scatter(grads, kept)
        return self.plan.psum_gradients(grads, kept)
