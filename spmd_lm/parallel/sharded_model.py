"""A model's functions, bound to one step's weights, sharded or gathered.

The model comes as plain functions of plain dicts, so that nothing here knows what a layer is.  `Plan.zero` says when
weights are gathered and gradients scattered: once per step, chunk by chunk, or layer by layer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.axes import is_dim_names
from spmd_lm.ops.dropout import KeyWords
from spmd_lm.parallel.layers_loop import LayersLoop, Losses, Stacks, stack_matrices, unstack_matrices
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.prefetch import PrefetchedLayers
from spmd_lm.parallel.trees import Tree, cast, exclude, merge, subset_of
from spmd_lm.parallel.zero import with_gathered_weights
from spmd_lm.period import BlockFn, Period, sum_by_name


@dataclasses.dataclass(frozen=True)
class ModelFns:
    """A model as a step runs it.  `microbatch` may hold anything.

    embed(params, microbatch) -> x.
    blocks: for each layer of a period block(layer_params, x, microbatch, index of the period) -> (x, losses).
    last_blocks: for a truncated last period, outside of a loop.
    head(params, x, microbatch) -> losses by name, in training each already divided by the total loss weight of the
    global batch: they and gradients are summed over microbatches and TOKEN_AXES, never averaged;
    in evaluation see make_eval_step.
    embed_params, head_params: take the subtrees that embed and head read from a tree of (some) parameters; a tied table
    is in both.
    loop: how layers run."""

    embed: Callable[[Tree, Tree], Array]
    blocks: tuple[BlockFn, ...]
    head: Callable[[Tree, Array, Tree], Losses]
    embed_params: Callable[[Tree], Tree]
    head_params: Callable[[Tree], Tree]
    loop: LayersLoop = LayersLoop()  # noqa: RUF009 - frozen
    period: Period = Period()  # noqa: RUF009 - frozen
    last_blocks: tuple[BlockFn, ...] = ()


class SplitParams(NamedTuple):
    """A tree of parameters in two: the stack of blocks, and the rest, embedding and head."""

    blocks: Tree
    rest: Tree


def split_params(params: Tree) -> SplitParams:
    return SplitParams(params["blocks"], {name: x for name, x in params.items() if name != "blocks"})


def join_params(params: SplitParams) -> Tree:
    return params.rest | {"blocks": params.blocks}


def _unstacked(fns: ModelFns, plan: Plan, weights: SplitParams) -> SplitParams:
    """Unstacks the matrices of unrolled layers, except in pipelines, whose stages index stacks.  Otherwise a GPU would,
    for every microbatch, copy each out of its stack, and add the stack's gradient apart from the matmul."""
    unstacks = fns.loop.unstacks and plan.layout.pipe == 1
    return weights._replace(blocks=unstack_matrices(weights.blocks)) if unstacks else weights


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """grad_argument: the differentiated argument, without frozen weights: the gathered weights; or, where backward
    scatters, the `grad_dummies` of with_gathered_weights.
    shards: parameters between steps (ZeRO-0: as `gathered`); of layers their secondary copy, if there is one.
    gathered: weights in the compute dtype; blocks are None where layers are gathered on use.  scatters_in_backward:
    ZeroPolicy's.  rounding_key: of gradients that are rounded at random."""

    fns: ModelFns
    plan: Plan
    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    grad_argument: SplitParams
    shards: SplitParams
    gathered: SplitParams
    scatters_in_backward: bool
    rounding_key: KeyWords | None = None

    @classmethod
    def from_params(
        cls,
        fns: ModelFns,
        plan: Plan,
        params: Tree,
        compute_dtype: jnp.dtype,
        reduce_dtype: jnp.dtype,
        rounding_key: KeyWords | None = None,
    ) -> Self:
        """Casts and gathers what the policy gathers once per step; casts all under ZeRO-0."""
        compute_params, names = split_params(cast(params, compute_dtype)), split_params(plan.sharded_names)
        dtypes = compute_dtype, reduce_dtype

        def trained(weights: SplitParams) -> SplitParams:
            return split_params(plan.trained(join_params(weights)))

        if plan.zero.stage == 0:
            weights = _unstacked(fns, plan, split_params(plan.as_weights(join_params(compute_params), plan.names)))
            return cls(fns, plan, *dtypes, trained(weights), weights, weights, scatters_in_backward=False)
        blocks = None if plan.zero.gathers_on_use else plan.gather(compute_params.blocks, names.blocks)
        gathered = SplitParams(blocks, plan.gather(compute_params.rest, names.rest))
        dummy_dtype = jnp.promote_types(compute_dtype, reduce_dtype)
        grad_dummies = jax.tree.map(lambda p: jnp.zeros(p.shape, dummy_dtype), plan.trained(params))
        grad_dummies = plan.as_weights(grad_dummies, plan.sharded_names)
        in_backward = plan.zero.scatters_in_backward
        gathered = gathered if blocks is None else _unstacked(fns, plan, gathered)
        grad_argument = split_params(grad_dummies) if in_backward else trained(gathered)
        shards = split_params(params)
        if plan.secondary:
            shards = shards._replace(blocks=plan.gather_secondary(compute_params.blocks, names.blocks))
        return cls(fns, plan, *dtypes, grad_argument, shards, gathered, in_backward, rounding_key)

    def with_grad_argument(self, grad_argument: SplitParams) -> Self:
        return dataclasses.replace(self, grad_argument=grad_argument)

    def chunk(self, first: Array, layers: int) -> Self:
        """Restricts the model to `layers` entries of its stack, layers or periods, from `first` on."""

        def slice_blocks(params: SplitParams) -> SplitParams:
            chunk = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, layers, 0), params.blocks)
            return params._replace(blocks=chunk)

        grad_argument, shards, gathered = map(slice_blocks, (self.grad_argument, self.shards, self.gathered))
        return dataclasses.replace(self, grad_argument=grad_argument, shards=shards, gathered=gathered)

    def gather_blocks(self) -> Tree:
        """The layers' weights, gathered, in the compute dtype."""
        blocks = self.gathered.blocks
        return self.gather(self.shards.blocks, self.sharded_names.blocks) if blocks is None else blocks

    def with_gathered_blocks(self) -> Self:
        """Gathers the layers of the model; their gradients are scattered as before."""
        return dataclasses.replace(self, gathered=self.gathered._replace(blocks=self.gather_blocks()))

    def with_unsharded_gradients(self, blocks: Tree) -> Self:
        """Replaces the layers by these gathered ones, whose gradients the caller scatters."""
        gathered = self.gathered._replace(blocks=blocks)
        grad_argument = self.grad_argument._replace(blocks=self.trained_blocks(blocks))
        return dataclasses.replace(self, grad_argument=grad_argument, gathered=gathered, scatters_in_backward=False)

    def trained_blocks(self, blocks: Tree) -> Tree:
        """The trained leaves of a tree like the stack of blocks, or like one of them."""
        return subset_of(blocks, self.grad_argument.blocks)

    def embed(self, microbatch: Tree) -> Array:
        embed, select = self.fns.embed, self.fns.embed_params
        return self._run_embedding_or_head(
            lambda params, _, microbatch: embed(params, microbatch), select, None, microbatch
        )

    @property
    def layers(self) -> Callable[..., tuple[Array, Losses]]:
        """layers(x, microbatch, first_layer): see LayersLoop.run."""
        period, stacks = self.fns.period, self._stacks()
        full = tuple(map(period.full, stacks))
        if self.plan.prefetch:
            run = functools.partial(self._prefetched_layers().differentiable(), self.rounding_key, *full[:2])
        else:
            run = functools.partial(self.fns.loop.run, self._block(), full)
        if not period.rest:
            return run
        last = functools.partial(self._block(cut_short=True), *map(period.last, stacks))

        def run_all(x: Array, microbatch: Tree, first_layer: Array | int) -> tuple[Array, Losses]:
            x, losses = run(x, microbatch, first_layer)
            x, of_last = last(x, microbatch, jnp.int32(period.count))
            return x, sum_by_name(losses, of_last)

        return run_all

    @property
    def vjp_layers(self) -> Callable[..., tuple[Array, Losses, Callable]]:
        """LayersLoop.vjp of `layers`; accumulate_grads adds up gradients of grad_argument.blocks."""
        if self.plan.prefetch:
            layers = self._prefetched_layers()
            layers = dataclasses.replace(layers, scatter=functools.partial(layers.scatter, key=self.rounding_key))
            return functools.partial(layers.vjp, self.shards.blocks)
        return functools.partial(self.fns.loop.vjp, self._block(), self._stacks())

    def head(self, x: Array, microbatch: Tree) -> Losses:
        return self._run_embedding_or_head(self.fns.head, self.fns.head_params, x, microbatch)

    def forward(self, microbatch: Tree) -> Losses:
        """Losses of one microbatch, where one stage has all layers."""
        x, losses = self.layers(self.embed(microbatch), microbatch, 0)
        return sum_by_name(losses, self.head(x, microbatch))

    def zero_losses(self, batch: Tree) -> Losses:
        """Zeros like the losses of one microbatch of `batch`."""

        def first_losses(batch: Tree) -> Losses:
            return self.forward(jax.tree.map(lambda x: x[0], batch))

        return jax.tree.map(jnp.zeros_like, jax.eval_shape(first_losses, batch))

    # ---- gathering and scattering.  names: dimension names of the shards, or of a tree with more leaves

    @property
    def sharded_names(self) -> SplitParams:
        return split_params(self.plan.sharded_names)

    @property
    def layer_names(self) -> Tree:
        """Dimension names of one layer's shards."""
        return jax.tree.map(lambda names: names[1:], self.sharded_names.blocks, is_leaf=is_dim_names)

    def gather(self, shards: Tree, names: Tree) -> Tree:
        """Gathered weights of layers, in the compute dtype."""
        return self.plan.gather_on_use(cast(shards, self.compute_dtype), names)

    def scatter(self, grads: Tree, names: Tree) -> Tree:
        """Plan.scatter in the reduce dtype."""
        return self.plan.scatter(grads, names, self.reduce_dtype, self.rounding_key)

    def _stacks(self) -> Stacks:
        """Stacks from which `_block` takes one entry each, a layer or a period; the first one is differentiated."""
        if self.scatters_in_backward:
            return self.grad_argument.blocks, self.shards.blocks, self.gathered.blocks
        trained, frozen = self.grad_argument.blocks, exclude(self.gathered.blocks, self.grad_argument.blocks)
        return (trained, frozen) if jax.tree.leaves(frozen) else (trained,)

    def _block(self, *, cut_short: bool = False) -> BlockFn:
        """A layer, or the layers of a period; where backward scatters, each scatters its own gradients, and gathers
        weights that are not gathered yet.  cut_short: those of the truncated last period."""
        fns, in_loop = self.fns, self.fns.loop.scan and not cut_short

        def with_weights(block: BlockFn, names: Tree) -> BlockFn:
            if self.scatters_in_backward:
                return self._with_gathered_weights(block, names, prevent_cse=not in_loop)
            if len(self._stacks()) == 1:
                return block
            return lambda trained, frozen, *inputs: block(merge(frozen, trained), *inputs)

        period, blocks = (fns.period.cut_short, fns.last_blocks) if cut_short else (fns.period, fns.blocks)
        return period.in_order(tuple(map(with_weights, blocks, period.trees(self.layer_names))))

    def _run_embedding_or_head(self, f: Callable, select: Callable[[Tree], Tree], x: Array | None, microbatch: Tree):
        """f(params, x, microbatch) with the parameters that `select` takes from the embedding's and the head's."""
        if not self.scatters_in_backward:
            return f(select(merge(self.gathered.rest, self.grad_argument.rest)), x, microbatch)
        names, below = select(self.sharded_names.rest), self.plan.trains_below_head
        run = self._with_gathered_weights(f, names, scatter_first=True, differentiate_x=below)
        return run(*map(select, (self.grad_argument.rest, self.shards.rest, self.gathered.rest)), x, microbatch)

    def _with_gathered_weights(self, f: Callable, names: Tree, **how: bool) -> Callable:
        gather, scatter = (functools.partial(each, names=names) for each in (self.gather, self._scatter_to_dummies))
        return functools.partial(with_gathered_weights(f, gather, scatter, **how), key=self.rounding_key)

    def _prefetched_layers(self) -> PrefetchedLayers:
        gather, scatter = (
            functools.partial(each, names=self.layer_names) for each in (self.gather, self._scatter_to_dummies)
        )
        keys, allocated = self.plan.prefetch, self.fns.loop.allocated
        block = self.fns.period.in_order(self.fns.blocks)
        return PrefetchedLayers(block, gather, scatter, self.trained_blocks, keys, allocated)

    def _scatter_to_dummies(self, grads: Tree, names: Tree, key: KeyWords | None = None) -> Tree:
        """Scatters gradients in the dtype of `grad_dummies`.  key: rounding_key, as an argument."""
        scattered = self.plan.scatter(grads, names, self.reduce_dtype, key)
        return cast(scattered, jnp.promote_types(self.compute_dtype, self.reduce_dtype))

    def reduce_gradients(self, grads: SplitParams) -> Tree:
        """Completes the sums of the gradients of `grad_argument`, sharded like the parameters."""
        grads, names = join_params(grads._replace(blocks=stack_matrices(grads.blocks))), self.plan.sharded_names
        scatters = self.plan.zero.stage and not self.scatters_in_backward
        reduced = self.scatter(grads, names) if scatters else cast(grads, self.reduce_dtype)
        return self.plan.psum_gradients(reduced, names)

    def inference_params(self) -> tuple[Tree, Callable[[Tree], Tree]]:
        """(parameters with the layers of all stages, gather); gather: a layer or period of the stack -> its weights."""
        on_use = self.gathered.blocks is None
        blocks = self.plan.gather_layers(self.shards.blocks if on_use else self.gathered.blocks)
        gather = functools.partial(self.gather, names=self.layer_names) if on_use else lambda layer: layer
        return join_params(SplitParams(blocks, self.gathered.rest)), gather
