"""The Plan: a layout resolved for one model, immutable.  Everything that depends on how arrays are sharded asks it.

Every parameter has two shapes: canonical, as the model defines it and checkpoints hold it; and padded to what the mesh
divides, with layers in stage order.  `from_canonical` and `canonical` convert between them, exactly."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import AxisRules, is_spec, use_axis_rules
from spmd_lm.axes import (
    DATA,
    MODEL,
    PIPE,
    SEQUENCE,
    SHARDED_DIM,
    TIME,
    TOKEN_AXES,
    DimNames,
    as_tuple,
    is_dim_names,
    mesh_axes_of,
    sharded_names,
)
from spmd_lm.batch import Batch
from spmd_lm.config.adapters import CODED, SUFFIX
from spmd_lm.config.layers import layer_path
from spmd_lm.config.types import Partitioner
from spmd_lm.errors import LayoutError
from spmd_lm.ops.collectives import constrain, manual_region, psum_axes
from spmd_lm.ops.compiler_workarounds import padded_columns
from spmd_lm.ops.dropout import KeyWords, threefry
from spmd_lm.parallel import zero
from spmd_lm.parallel.codecs import Codec
from spmd_lm.parallel.freeze import frozen_mask
from spmd_lm.parallel.mesh import Layout, Rings
from spmd_lm.parallel.padding import pad_or_crop, padded_vocab, padded_width
from spmd_lm.parallel.rules import PARAMETERS, USED_IN_PART, ZERO, Rules, activation_rules, within_hosts_first
from spmd_lm.parallel.trees import Tree, exclude, subset_of
from spmd_lm.parallel.zero import ZeroAxes, ZeroPolicy

_Self = TypeVar("_Self")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
AnyArray = TypeVar("AnyArray", Array, np.ndarray)


def remembered(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> functools.cached_property[Callable[_Arguments, _Result]]:
    """Caches a method's results on each object, such as a plan: planners ask for the same ones thousands of times."""

    def remembering(self: _Self) -> Callable[_Arguments, _Result]:
        return cast(Callable[_Arguments, _Result], functools.cache(functools.partial(method, self)))

    remembering.__doc__ = method.__doc__
    return functools.cached_property(remembering)


def interleave(x: AnyArray, dim: int, first: int, second: int) -> AnyArray:
    """The entries of `dim`, read as [first, second, rest], in the order [second, first, rest]."""
    split = x.reshape(*x.shape[:dim], first, second, -1, *x.shape[dim + 1 :])
    return split.swapaxes(dim, dim + 1).reshape(x.shape)


class Parameter(NamedTuple):
    """One array of the parameters.  path: its keys in the tree.  names: its dimensions'.  sharded_names: those
    under ZeRO, between steps.  shape: padded.  elements, gathered_elements: number on one device between steps, and
    gathered by ZeRO.  trained: whether any layer of it is; else it has no gradient and no moments.  dtype: between
    steps.  coded: whether it is an array of a quantized matrix, which is used in its own dtype."""

    path: tuple[str, ...]
    names: DimNames
    sharded_names: DimNames
    shape: tuple[int, ...]
    elements: int
    gathered_elements: int
    trained: bool = True
    dtype: str = ""
    coded: bool = False

    def is_below(self, path: tuple[str, ...]) -> bool:
        """True if it is in the subtree at `path`; blocks.attention is that of all layers, whatever their kinds."""
        return path in (self.path[: len(path)], layer_path(self.path)[1][: len(path)])


@dataclasses.dataclass(frozen=True)
class Plan:
    """names, shapes: trees of the parameters' dimension names and canonical shapes.
    mesh: abstract until devices bind.
    sequence: whether the residual stream is sharded along the sequence.
    ring, zigzag: those of AxisRules: how devices along `context` attend, and which tokens of a row they have.
    chunks: number of chunks of layers per pipeline stage; layer l lies in chunk l // (pipe x n) of stage l // n % pipe,
      with n layers per chunk.
    partitioner: who inserts a step's collectives: XLA, from sharding types, or the step itself.
    run_idle_stages: whether idle pipeline stages compute too, and discard the result.
    host_rings: whether `data` is two axes, data0 across hosts and data1 within one.
    secondary: whether layers are gathered across hosts once per step, and then within a host alone.
    gather_codec, scatter_codec: codes in which matrices' weights are gathered, and their gradients scattered.
    prefetch: keys of a layer's modules, or a period's layers, whose weights ZeRO gathers while the one before it runs.
    prefetch_chunks: whether a breadth-first pipeline gathers a chunk while the one before it runs.
    collective_matmul: keys of the branches of a layer whose linears overlap with their collectives.
    scan: whether layers run in a scan, in training.
    device_kind: jax's, where it is known.
    freeze, trainable: patterns of frozen parameters, and paths of those that training may change: see `frozen_mask`.
    own_rules: mesh axes of dimension names that parallel/rules.py does not list.
    replicated: dimensions that this layout cannot divide: `kv_heads`, if fewer than devices along `model`."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    platform: str
    names: Tree
    shapes: Tree
    zero: ZeroPolicy = ZeroPolicy()  # noqa: RUF009 - frozen
    partitioner: Partitioner = "manual"
    sequence: bool = False
    ring: bool = False
    zigzag: bool = False
    chunks: int = 1
    run_idle_stages: bool = False
    host_rings: bool = False
    secondary: bool = False
    gather_codec: Codec | None = None
    scatter_codec: Codec | None = None
    prefetch: tuple[str, ...] = ()
    prefetch_chunks: bool = False
    collective_matmul: tuple[str, ...] = ()
    scan: bool = True
    device_kind: str = ""
    freeze: tuple[str, ...] = ()
    trainable: frozenset[str] | None = None
    own_rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    replicated: tuple[str, ...] = ()

    def __post_init__(self):
        self._require_rules()
        problems = []
        for parameter in self.parameters:
            for name, size in zip(parameter.sharded_names, parameter.shape, strict=True):
                chunks = self.chunks if name == "layers" else 1
                if size % (parts := self._shards[name] * chunks):
                    where, axes = ".".join(parameter.path), self.param_rules.axes(name)
                    on = " x ".join(axes) + " x chunks" * (chunks > 1)
                    problems.append(f"{where}: dimension '{name}' of size {size} is not divisible by {on} = {parts}")
        if problems:
            raise LayoutError(*problems)

    def _require_rules(self) -> None:
        """Raises LayoutError for dimension names that no rule places, and if `width` has several sizes."""
        table = self.param_rules.table
        problems, widths = dict[str, str](), dict[int, str]()
        leaves = jax.tree_util.tree_leaves_with_path(self.names, is_leaf=is_dim_names)
        for (keys, names), leaf in zip(leaves, jax.tree.leaves(self.shapes), strict=True):
            path = ".".join(key.key for key in keys)
            for name, size in zip(names, leaf.shape, strict=True):
                if name not in table and name is not None:
                    rule = f"rules = {{'{name}': 'model'}}, or None for a dimension that is not sharded"
                    problems[name] = f"{path}: no rule places the dimension '{name}'. Give its module {rule}."
                elif name == SHARDED_DIM:
                    widths.setdefault(size, path)
        if len(widths) > 1:
            sizes = ", ".join(f"{size} in {path}" for size, path in widths.items())
            problems[SHARDED_DIM] = f"the dimension 'width' is of the residual stream, and has sizes {sizes}."
        if problems:
            raise LayoutError(*problems.values())

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh; `data` and `model` may be several axes."""
        return dict(self.mesh.shape)

    @functools.cached_property
    def param_rules(self) -> Rules:
        rules = PARAMETERS.with_own(self.own_rules).replicating(self.replicated).on_mesh(self.mesh.axis_names)
        return within_hosts_first(rules) if self.host_rings else rules

    @remembered
    def active_axes(self, *names: str) -> tuple[str, ...]:
        """The given mesh axes of several devices, in the mesh's order.  A name of MESH_AXES stands for all its axes."""
        chosen = {axis for name in names for axis in (name, *mesh_axes_of(name, self.sizes))}
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis in chosen)

    # ---- names, shapes and specs of the parameters, and so of gradients and optimizer state

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters in the order of their tree."""
        leaves = jax.tree_util.tree_leaves_with_path(self.names, is_leaf=is_dim_names)
        parameters = []
        for (keys, names), leaf, frozen in zip(
            leaves, jax.tree.leaves(self.shapes), jax.tree.leaves(self.frozen), strict=True
        ):
            sharded = sharded_names(names) if self.zero.stage else names
            shape = tuple(map(self._padded_size, sharded, leaf.shape))
            elements, gathered = (
                math.prod(shape) // math.prod([self._shards[name] for name in by]) for by in (sharded, names)
            )
            path = tuple(key.key for key in keys)
            stored = str(leaf.dtype), path[-1] in CODED
            parameters.append(Parameter(path, names, sharded, shape, elements, gathered, not frozen.all(), *stored))
        return tuple(parameters)

    @functools.cached_property
    def trained_parameters(self) -> tuple[Parameter, ...]:
        return tuple(each for each in self.parameters if each.trained)

    @remembered
    def elements_per_device(self, *path: str, gathered: bool = False, trained: bool = False) -> int:
        """Elements on a device of (trained) parameters below `path`, as ZeRO shards them or gathered."""
        chosen = self.trained_parameters if trained else self.parameters
        below = [each for each in chosen if each.is_below(path)]
        return sum([each.gathered_elements if gathered else each.elements for each in below])

    @remembered
    def bytes_per_device(self, dtype: str | None, *path: str, gathered: bool = False, trained: bool = False) -> int:
        """Bytes of `elements_per_device` in this dtype; in their own if it is None, and for quantized matrices."""
        chosen = self.trained_parameters if trained else self.parameters
        below = [each for each in chosen if each.is_below(path)]
        return sum(
            (each.gathered_elements if gathered else each.elements)
            * jnp.dtype(each.dtype if each.coded or dtype is None else dtype).itemsize
            for each in below
        )

    @remembered
    def trains(self, *path: str) -> bool:
        """True if anything below `path` is trained."""
        return any(each.is_below(path) for each in self.trained_parameters)

    def reads_input(self, *path: str) -> bool:
        """True if backward reads the input of the matrix at `path`: for its gradient, or for its adapter's."""
        return self.trains(*path) or self.trains(*path[:-1], path[-1] + SUFFIX)

    @functools.cached_property
    def trains_below_head(self) -> bool:
        """True if backward continues below the head."""
        return self.trains("embedding") or self.trains("blocks")

    @functools.cached_property
    def frozen(self) -> Tree:
        """A `frozen_mask` of the parameters."""
        return frozen_mask(self.freeze, self.names, self.shapes, self.trainable)

    @functools.cached_property
    def _trained_names(self) -> Tree:
        def below(names: Tree, frozen: Tree) -> Tree:
            return {
                key: below(value, frozen[key]) if isinstance(value, dict) else value
                for key, value in names.items()
                if isinstance(value, dict) or not frozen[key].all()
            }

        return below(self.names, self.frozen)

    def trained(self, tree: Tree) -> Tree:
        """The trained parameters' leaves of a tree like the parameters."""
        return subset_of(tree, self._trained_names)

    def with_frozen(self, dtype: str) -> "Plan":
        """The plan with untrained parameters in this dtype between steps, except for quantized ones."""

        def retyped(path: tuple, frozen: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return leaf.update(dtype=jnp.dtype(dtype)) if frozen.all() and path[-1].key not in CODED else leaf

        shapes = jax.tree_util.tree_map_with_path(retyped, self.frozen, self.shapes)
        return dataclasses.replace(self, shapes=shapes)

    def untrained(self, tree: Tree) -> Tree:
        """The untrained parameters' leaves of a tree like the parameters."""
        return exclude(tree, self._trained_names)

    @functools.cached_property
    def gradient_axes(self) -> tuple[tuple[str, ...], ...]:
        """Distinct sets of mesh axes over which reduced gradients are sharded, without axes of one device."""
        return tuple(sorted({self.param_axes(each.sharded_names) for each in self.trained_parameters}))

    @functools.cached_property
    def summed_gradients(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Elements on one device of each gradient that `psum_gradients` sums, including shards of scattered ones, by
        the axes over which they are summed."""
        reduce_axes = {each.path: self.grad_reduce_axes(each.sharded_names) for each in self.trained_parameters}
        return {
            axes: tuple(each.elements for each in self.trained_parameters if reduce_axes[each.path] == axes)
            for axes in dict.fromkeys(reduce_axes.values())
            if axes
        }

    @functools.cached_property
    def sharded_names(self) -> Tree:
        """Dimension names of the parameters as ZeRO shards them between steps."""
        return jax.tree.map(sharded_names, self.names, is_leaf=is_dim_names) if self.zero.stage else self.names

    @functools.cached_property
    def param_specs(self) -> Tree:
        """PartitionSpecs of the parameters between steps."""
        return jax.tree.map(self.param_rules.spec, self.sharded_names, is_leaf=is_dim_names)

    @functools.cached_property
    def canonical_specs(self) -> Tree:
        """PartitionSpecs of the unpadded parameters: `param_specs` without axes that do not divide a canonical size."""

        def spec(names: DimNames, leaf: jax.ShapeDtypeStruct) -> P:
            sizes = zip(names, leaf.shape, strict=True)
            return self.param_rules.spec(tuple(None if size % self._shards[name] else name for name, size in sizes))

        return jax.tree.map(spec, self.sharded_names, self.shapes, is_leaf=is_dim_names)

    @functools.cached_property
    def padded_shapes(self) -> Tree:
        """Shapes and dtypes of the parameters as devices hold them."""

        def padded(names: DimNames, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(tuple(map(self._padded_size, names, leaf.shape)), leaf.dtype)

        return jax.tree.map(padded, self.sharded_names, self.shapes, is_leaf=is_dim_names)

    @functools.cached_property
    def _shards(self) -> dict[str | None, int]:
        """Number of shards by dimension name."""
        sizes, table = self.sizes, self.param_rules.table
        return {None: 1} | {name: math.prod(sizes[axis] for axis in axes) for name, axes in table.items()}

    def _padded_size(self, name: str | None, size: int) -> int:
        if name == "vocab":
            return padded_vocab(size, self.layout.model)
        return padded_width(size, self._shards[name]) if name in ZERO else size

    @functools.cached_property
    def row_spec(self) -> P:
        """PartitionSpec of an array [microbatches, rows, ...] that is sharded along rows alone."""
        return P(None, self.axis_rules.axes("batch"))

    @functools.cached_property
    def batch_specs(self) -> Batch:
        """PartitionSpecs of a batch's fields; fields that a batch lacks have one too, which jax ignores.

        Devices along `context` have whole rows, and each takes its own tokens: models/context.py, `local_batch`."""
        return Batch(**{each.name: self.row_spec for each in dataclasses.fields(Batch)})

    def sharding(self, specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    # ---- between canonical and padded parameters, or some of them

    def to_stage_order(self, params: Tree) -> Tree:
        """Parameters with their layers in the order in which stages hold them, chunk by chunk."""
        return self._interleave_layers(params, self.chunks, self.layout.pipe)

    def to_model_order(self, params: Tree) -> Tree:
        """The inverse of `to_stage_order`."""
        return self._interleave_layers(params, self.layout.pipe, self.chunks)

    def _interleave_layers(self, params: Tree, first: int, second: int) -> Tree:
        if self.chunks == 1:
            return params

        def interleave_leaf(names: DimNames, x: Array) -> Array:
            return interleave(x, names.index("layers"), first, second) if "layers" in names else x

        return jax.tree.map(interleave_leaf, subset_of(self.names, params), params, is_leaf=is_dim_names)

    def from_canonical(self, params: Tree) -> Tree:
        """Canonical parameters, padded with zeros to the padded shapes, in stage order."""
        shapes = subset_of(self.padded_shapes, params)

        def fit(x: Array, to: jax.ShapeDtypeStruct) -> Array:
            return pad_or_crop(x, to.shape).astype(to.dtype)

        return self.to_stage_order(jax.tree.map(fit, params, shapes))

    def canonical(self, params: Tree) -> Tree:
        """The inverse of `from_canonical`."""
        shapes = subset_of(self.shapes, params)
        return jax.tree.map(lambda x, to: pad_or_crop(x, to.shape), self.to_model_order(params), shapes)

    @functools.cached_property
    def axis_rules(self) -> AxisRules:
        """Rules of activations inside the step; parameters have `param_rules`."""
        return self._axis_rules()

    def _axis_rules(self, *, whole_rows: bool = False) -> AxisRules:
        """whole_rows: every device has all tokens of its rows."""
        replicated = (*self.replicated, *((SEQUENCE, TIME) if whole_rows else ()))
        rules = activation_rules(self.sequence).with_own(self.own_rules).replicating(replicated)
        return AxisRules(rules.on_mesh(self.mesh.axis_names).table, self.sizes, self.ring, self.zigzag)

    def shard_map(self, body: Callable, in_specs: Tree, out_specs: Tree, *, whole_rows: bool = False) -> Callable:
        """`body` as a function of global arrays; every device runs it on its own shards, and it issues all collectives
        itself.  in_specs, out_specs: trees of PartitionSpecs.  whole_rows: for rows too short to shard."""

        def body_under_rules(*args):
            with use_axis_rules(self._axis_rules(whole_rows=True) if whole_rows else self.axis_rules):
                return body(*args)

        return jax.shard_map(body_under_rules, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def partition(self, body: Callable, in_specs: Tree, out_specs: Tree) -> Callable:
        """`body` as a function of global arrays: under `shard_map`; or, where XLA is to insert the collectives, traced
        on global arrays whose types hold their sharding (ops/sharding_types.py)."""
        if self.partitioner == "manual":
            return self.shard_map(body, in_specs, out_specs)
        mesh = self.mesh.abstract_mesh
        explicit = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Explicit))
        in_types, out_types = (
            jax.tree.map(self._without_trivial_axes, specs, is_leaf=is_spec) for specs in (in_specs, out_specs)
        )

        def typed_body(*args):
            with use_abstract_mesh(explicit), use_axis_rules(self.axis_rules):
                return reshard(body(*reshard(args, in_types)), out_types)

        return typed_body

    # ---- collectives, inside `partition`.  A named_scope says what each is for: audit counts by it (PARTS in
    # analysis/compiled_collectives.py)

    @jax.named_scope("scalars")
    def psum_batch(self, x: Tree) -> Tree:
        """The sum over the axes that divide the batch."""
        return psum_axes(x, self.active_axes(*TOKEN_AXES))

    @jax.named_scope("scalars")
    def psum_stages(self, x: Tree) -> Tree:
        """The sum over the stages of the pipeline."""
        return psum_axes(x, self.active_axes(PIPE))

    @functools.cached_property
    def _zero_sizes(self) -> dict[str, int]:
        """Unpadded sizes of the dimensions that ZeRO shards, by sharded name."""
        leaves = zip(jax.tree.leaves(self.names, is_leaf=is_dim_names), jax.tree.leaves(self.shapes), strict=True)
        each = (zip(sharded_names(names), leaf.shape, strict=True) for names, leaf in leaves)
        return {str(name): size for dims in each for name, size in dims if name in ZERO}

    # `names` below are the sharded names of a tree, or of one that has more leaves.

    def gather(self, tree: Tree, names: Tree) -> Tree:
        """All-gathers parameters over ZeRO's axes."""
        return self._gather(tree, names, self.zero_axes)

    def gather_on_use(self, tree: Tree, names: Tree) -> Tree:
        """All-gathers layers' weights, or, within a host, their secondary copy."""
        return self._gather(tree, names, self._axes_on_use)

    def gather_secondary(self, tree: Tree, names: Tree) -> Tree:
        """All-gathers parameters across hosts: the shards of a host's devices are then all of them."""
        return zero.gather(tree, names, self._axes_across_hosts, {}, codec=self.gather_codec)

    def _gather(self, tree: Tree, names: Tree, zero_axes: ZeroAxes) -> Tree:
        names = subset_of(names, tree)
        gathered_names = jax.tree.map(zero.gathered_names, names, is_leaf=is_dim_names)
        # Lays out stacks that loops read: 48 layers of 2048 on h100:4x8 take 13.9 GiB, not 17.1.
        stacks = self.platform == "gpu" and self.zero.gather_per == "step"
        gather = functools.partial(
            zero.gather,
            names=names,
            zero_axes=zero_axes,
            sizes=self._zero_sizes,
            codec=self.gather_codec,
            row_major_stacks=stacks,
        )
        out_specs = jax.tree.map(self._weight_spec, gathered_names, is_leaf=is_dim_names)
        return manual_region(gather, out_specs)(tree)

    def scatter(self, grads: Tree, names: Tree, dtype: jnp.dtype, key: KeyWords | None = None) -> Tree:
        """Reduce-scatters, in `dtype` or as codes, the gradients of what ZeRO shards; those of vectors are not summed.
        key: of the codes' stochastic rounding, the same on all devices."""
        names, in_order = subset_of(names, grads), self.platform == "cpu"
        scatter = functools.partial(zero.scatter, names=names, zero_axes=self.zero_axes, dtype=dtype, in_order=in_order)
        if key is not None:
            key = threefry(key, self._addend_index(), jnp.uint32(0))
        scatter = functools.partial(scatter, codec=self.scatter_codec, key=key)
        scatter = functools.partial(scatter, padded_shape=self._scattered_shape)
        return manual_region(scatter, jax.tree.map(self._gradient_spec, names, is_leaf=is_dim_names))(grads)

    def _addend_index(self) -> Array:
        """Index of this device, uint32, along the axes over which gradients are summed: devices along them round apart,
        or their errors would add up.  Those along `model` round alike: some have copies of one gradient."""
        axes = self.active_axes(PIPE, *TOKEN_AXES)
        return lax.axis_index(axes).astype(jnp.uint32) if axes else jnp.uint32(0)

    @remembered
    def _scattered_shape(self, names: DimNames, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape to which a gradient [width, ...] is padded before it is scattered; width to what ZeRO's axes
        divide, whatever shape[0] is.  names: its sharded names, without `layers` or with.

        Inside the conditionals of a TPU pipeline the last dimension is padded too: XLA would otherwise add permutes
        that other stages wait for."""
        dim = zero.zero_dim(names)
        assert dim is not None, names
        width = str(names[dim])
        shape = (self._padded_size(width, self._zero_sizes[width]), *shape[1:])
        diverge = self.layout.pipe > 1 and self.zero.scatters_in_backward and not self.run_idle_stages
        if self.platform != "tpu" or not diverge or self.scatter_codec:
            return shape
        return *shape[:-1], padded_columns(shape, [self.sizes[axis] for axis in self.zero_axes(names)])

    def gathered_arrays(self, parameter: Parameter, compute: str) -> dict[str, int]:
        """Elements, by dtype, of what a device has received when this matrix is gathered.  compute: the compute
        dtype."""
        if self.gather_codec is None or parameter.coded:
            return {parameter.dtype if parameter.coded else compute: parameter.gathered_elements}
        return self._coded_arrays(parameter, parameter.gathered_elements, self.gather_codec)

    def scattered_arrays(self, parameter: Parameter, reduce: str) -> dict[str, int]:
        """Elements, by dtype, of what a device puts into the scatter of this matrix's gradient, padding included.
        reduce: the reduce dtype."""
        elements = self.scattered_elements(parameter)
        if self.scatter_codec is None:
            return {reduce: elements}
        return self._coded_arrays(parameter, elements, self.scatter_codec)

    def _coded_arrays(self, parameter: Parameter, elements: int, codec: Codec) -> dict[str, int]:
        dim = zero.block_dim(parameter.sharded_names)
        row = parameter.shape[dim] // self._shards[parameter.names[dim]]
        return {dtype: elements // row * size for dtype, size in codec.sizes(row).items()}

    def scattered_elements(self, parameter: Parameter) -> int:
        """Elements of this matrix's gradient that a device puts into the scatter, padding included."""
        names = parameter.names
        sizes = [size // self._shards[name] for name, size in zip(names, parameter.shape, strict=True)]
        layers = sizes[0] if names[0] == "layers" else 1
        others = [size for name, size in zip(names, sizes, strict=True) if name not in ("layers", SHARDED_DIM)]
        shape = sizes[names.index(SHARDED_DIM)], *others
        return layers * math.prod(self._scattered_shape(parameter.sharded_names, shape))

    def as_weights(self, tree: Tree, names: Tree) -> Tree:
        """Parameters whose gradients stay partial sums until `scatter` and `psum_gradients`."""
        return constrain(tree, jax.tree.map(self._weight_spec, subset_of(names, tree), is_leaf=is_dim_names))

    def _weight_spec(self, names: DimNames) -> P:
        spec = self._without_trivial_axes(self.param_rules.spec(names))
        return spec.update(reduced=set(self.grad_reduce_axes(names)))

    def _gradient_spec(self, names: DimNames) -> P:
        spec = self._without_trivial_axes(self.param_rules.spec(names))
        return spec.update(unreduced=set(self.grad_reduce_axes(names)))

    def _without_trivial_axes(self, spec: P) -> P:
        """Removes axes of one device, so that one layout has one type."""
        return P(*(tuple(axis for axis in as_tuple(part) if self.sizes[axis] > 1) for part in spec))

    def gather_layers(self, stack: Tree) -> Tree:
        """All-gathers a tree of stacks: the layers of all stages, in model order."""
        if (pipe := self.layout.pipe) == 1:
            return stack
        stack = jax.tree.map(lambda x: lax.all_gather(x, PIPE, axis=0, tiled=True), stack)
        return jax.tree.map(lambda x: interleave(x, 0, pipe, self.chunks), stack)

    def local_layers(self, per_layer: Array) -> Array:
        """The entries of `per_layer` ([layers], in model order) for this stage's layers, in stage order."""
        per_layer, size = interleave(per_layer, 0, self.chunks, self.layout.pipe), per_layer.size // self.layout.pipe
        if self.layout.pipe == 1:
            return per_layer
        return lax.dynamic_slice_in_dim(per_layer, lax.axis_index(PIPE) * size, size)

    @remembered
    def param_axes(self, names: DimNames) -> tuple[str, ...]:
        """The mesh axes of more than one device over which a parameter of these dimensions is sharded."""
        return self.active_axes(*(axis for name in names for axis in self.param_rules.axes(name)))

    @remembered
    def zero_axes(self, names: DimNames) -> tuple[str, ...]:
        """The mesh axes of more than one device over which ZeRO shards a parameter of these sharded names, outermost
        first."""
        axes = [axis for name in names if name in ZERO for axis in self.param_rules.axes(name)]
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    @property
    def rounds_at_random(self) -> bool:
        """True if gradients are rounded stochastically: to the nearest of 15 values most would be zero."""
        return self.scatter_codec is not None and self.scatter_codec.bits == 4

    @property
    def rings(self) -> Rings | None:
        """The rings into which `data` is split at the border of hosts, or None."""
        axes = mesh_axes_of(DATA, self.sizes)
        return Rings(*(self.sizes[axis] for axis in axes)) if self.host_rings else None

    @functools.cached_property
    def ring_of_hosts(self) -> str | None:
        """The mesh axis over which a step gathers layers once: that across hosts, if there is a secondary copy."""
        return mesh_axes_of(DATA, self.mesh.axis_names)[0] if self.secondary else None

    def _axes_across_hosts(self, names: DimNames) -> tuple[str, ...]:
        return tuple(axis for axis in self.zero_axes(names) if axis == self.ring_of_hosts)

    def _axes_on_use(self, names: DimNames) -> tuple[str, ...]:
        return tuple(axis for axis in self.zero_axes(names) if axis != self.ring_of_hosts)

    @remembered
    def grad_reduce_axes(self, names: DimNames) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is still to be summed after the scatter: those along which devices
        have seen different tokens or layers, except those that shard the parameter.

        Only the first stage uses the embedding, and only the last the head.  A device along `model` has seen only its
        shard of a sharded sequence; and it has used parameters that heads share, and the unsharded factor of a low-rank
        matrix, for its own shards alone."""
        seen_in_part = self.sequence or not set(USED_IN_PART).isdisjoint(names)
        partial_over = self.active_axes(PIPE, *TOKEN_AXES, *((MODEL,) if seen_in_part else ()))
        return tuple(axis for axis in partial_over if axis not in self.param_axes(names))

    @jax.named_scope("gradients")
    def psum_gradients(self, grads: Tree, names: Tree) -> Tree:
        """Sums gradients over their `grad_reduce_axes`: one psum for each set of axes."""
        leaves, treedef = jax.tree.flatten(grads)
        leaf_names = jax.tree.leaves(subset_of(names, grads), is_leaf=is_dim_names)
        reduce_axes = [self.grad_reduce_axes(leaf) for leaf in leaf_names]
        for axes in filter(None, dict.fromkeys(reduce_axes)):  # in one order: all processes trace the same program
            chosen = [i for i, leaf_axes in enumerate(reduce_axes) if leaf_axes == axes]
            for i, g in zip(chosen, psum_axes([leaves[i] for i in chosen], axes), strict=True):
                leaves[i] = g
        return jax.tree.unflatten(treedef, leaves)
