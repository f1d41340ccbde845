"""Adapters: parameters beside the matrices of blocks, trained in their place."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.axes import DimNames
from spmd_lm.config.adapters import CODED, SUFFIX
from spmd_lm.config.types import FakeQuantKind
from spmd_lm.errors import ConfigError
from spmd_lm.models.context import BlockContext
from spmd_lm.models.layers import HasMatrices, ParamInit, ScaledMatrix
from spmd_lm.ops.dense import Matrix
from spmd_lm.ops.eight_bits import EightBits
from spmd_lm.ops.few_bits import BLOCK_SIZE, CodedMatrix, Coding, encode
from spmd_lm.ops.low_rank import InputDropout, LowRankSum

FIRST_SITE = 16  # the first dropout site of adapters; a block's are below


@dataclasses.dataclass(frozen=True)
class LowRank:
    """LoRA of one matrix [width, other].  dropout: rate on its input.  transposed: whether the matrix is multiplied
    transposed, so that its inputs are `other`."""

    rank: int
    scaling: float
    dropout: float = 0.0
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Scaling:
    """IA3's scales of one matrix: of its outputs, or of its inputs where it is multiplied transposed."""

    transposed: bool = False


Adapters = tuple[tuple[str, LowRank | Scaling], ...]
"""Adapters by the paths of their matrices in a block, such as attention.query."""


class LowRankAdapter(nnx.Module):
    """LoRA's factors: a, of a matrix's inputs, drawn as in PEFT from U(±1/√inputs); and b, of its outputs, zeros."""

    def __init__(self, init: ParamInit, adapter: LowRank, matrix: nnx.Param, site: int):
        (width, other), (_, name) = matrix.shape, matrix.get_metadata()["out_sharding"]
        left, right = ((width, adapter.rank), ("width", "rank")), ((adapter.rank, other), ("rank", name))
        (a, names_of_a), (b, names_of_b) = (right, left) if adapter.transposed else (left, right)
        most = 1 / math.sqrt(other if adapter.transposed else width)
        drawn = jax.random.uniform(init.rngs.params(), a, init.dtype, -most, most)
        self.a = nnx.Param(drawn, out_sharding=names_of_a)
        self.b = nnx.Param(jnp.zeros(b, init.dtype), out_sharding=names_of_b)
        self.adapter, self.site, self.name = adapter, site, name

    def __call__(self, matrix: Matrix | CodedMatrix, context: BlockContext) -> LowRankSum:
        key, drop = context.dropout_key, None
        if key is not None and self.adapter.dropout:
            drop = InputDropout(key, self.adapter.dropout, self.site, self.name, context.checkpoint)
        return LowRankSum(matrix, self.a[...], self.b[...], self.adapter.scaling, self.adapter.transposed, drop)

    def of_bias(self, bias: jax.Array) -> jax.Array:
        return bias


class ScalingAdapter(nnx.Module):
    """IA3's scales of the dimension `other` of a matrix [width, other], initially ones."""

    def __init__(self, init: ParamInit, adapter: Scaling, matrix: nnx.Param):
        self.scale = init.vector(1, matrix.shape[1], str(_names(matrix)[1]))
        self.adapter = adapter

    def __call__(self, matrix: Matrix | CodedMatrix, context: BlockContext) -> ScaledMatrix:
        return ScaledMatrix(matrix, self.scale[...])

    def of_bias(self, bias: jax.Array) -> jax.Array:
        """Bias to add to the scaled product: scale x (y + bias), as in PEFT."""
        return bias if self.adapter.transposed else bias * self.scale[...]


class Coded(nnx.Module):
    """Codes and scales in place of a matrix, each of them a parameter."""

    def __init__(self, matrix: nnx.Param, coding: Coding, transposed: bool, path: str, key: str):
        (width, other), (_, name) = matrix.shape, _names(matrix)
        inputs = other if transposed else width
        if inputs % coding.whole:
            problem = f"{key}={coding.name}: {path} has {inputs} inputs, which groups of {coding.whole} do not divide"
            raise ConfigError(
                f"{problem}. Use {key}=int8{' or none' if key == 'adapter.base' else ', or groups that do'}."
            )
        of_output, of_group = ((name,), ("width_blocks", name)) if not transposed else (("width",), ("width", name))
        names: dict[str, DimNames] = {
            "codes": ("width_bytes" if coding.packs and not transposed else "width", name),
            "absmax": of_group if coding.group else of_output,
            "nested_absmax": (None,),
            "offset": (None,),
        }
        for key, value in encode(coding, matrix[...], transposed).items():
            setattr(self, key, nnx.Param(value, out_sharding=names[key]))
        self.coding, self.name, self.transposed = coding, name, transposed

    def __call__(self) -> CodedMatrix:
        stored = {key: value[...] for key in CODED if (value := getattr(self, key, None)) is not None}
        return CodedMatrix(stored, self.coding, self.name, self.transposed)


def matrices_of(block: nnx.Module) -> Iterator[tuple[str, HasMatrices, str]]:
    """(path, module, name in it) of each matrix that a block multiplies with, sorted."""
    for keys, module in sorted(nnx.iter_modules(block), key=lambda found: found[0]):
        if isinstance(module, HasMatrices):
            for name, value in sorted(vars(module).items()):
                if isinstance(value, nnx.Param) and len(_names(value)) == 2:
                    yield ".".join((*map(str, keys), name)), module, name


def _names(param: nnx.Param) -> tuple:
    return param.get_metadata().get("out_sharding") or ()


def add_adapters(block: nnx.Module, adapters: Adapters, init: ParamInit) -> nnx.Module:
    """Adds these adapters to a block.  Its own parameters are drawn first, the same as without adapters."""
    wanted = dict(adapters)
    for i, (path, module, name) in enumerate([*matrices_of(block)]):
        if path in wanted:
            adapter, matrix = wanted[path], getattr(module, name)
            if isinstance(adapter, LowRank):
                made: nnx.Module = LowRankAdapter(init, adapter, matrix, FIRST_SITE + i)
            else:
                made = ScalingAdapter(init, adapter, matrix)
            setattr(module, name + SUFFIX, made)
    return block


def require_used(block: nnx.Module) -> None:
    """Raises ConfigError if a block has run without asking for a matrix that has an adapter, is rounded, multiplies in
    eight bits, or is to show its inputs."""
    for keys, module in nnx.iter_modules(block):
        if not isinstance(module, HasMatrices):
            continue
        needed = [name.removesuffix(SUFFIX) for name in vars(module) if name.endswith(SUFFIX)]
        what, way = "has an adapter", "leave it out of adapter.targets"
        if module.fake_quant != "none" or module.show or module.eight_bits:
            needed = [name for path, _, name in matrices_of(module) if path == name]
            what, way = "is rounded", "use precision.fake_quant=none"
            if module.eight_bits:
                what, way = "multiplies in eight bits", "use precision.matmul=none"
            if module.show:
                what, way = "is calibrated", "use --method rtn"
        for name in needed:
            if name not in module.used:
                path = ".".join(map(str, (*keys, name)))
                raise ConfigError(
                    f"{type(block).__name__} does not ask for its matrix '{path}', which {what}. Write "
                    f"self.matrix('{name}', context), or {way}."
                )


def show_inputs(block: nnx.Module, show: Callable[[str, jax.Array], None]) -> None:
    """Has all matrices of a block call show(path, x) with what they multiply."""
    for keys, module in nnx.iter_modules(block):
        if isinstance(module, HasMatrices):
            module.show = functools.partial(_show_at, show, "".join(f"{key}." for key in keys))


def _show_at(show: Callable[[str, jax.Array], None], prefix: str, name: str, x: jax.Array) -> None:
    show(prefix + name, x)


def fake_quantize(block: nnx.Module, kind: FakeQuantKind) -> nnx.Module:
    """Has all matrices of a block rounded when they multiply.  Raises ConfigError for some that cannot be."""
    if kind == "none":
        return block
    chosen, way = f"precision.fake_quant={kind}:", "Use precision.fake_quant=none"
    for path, owner, name in matrices_of(block):
        inputs = getattr(owner, name).shape[name in owner.row_parallel]
        if inputs % BLOCK_SIZE:
            problem = f"{path} has {inputs} inputs, which groups of {BLOCK_SIZE} do not divide"
            raise ConfigError(f"{chosen} {problem}. {way}.")
        owner.fake_quant = kind
    _require_matrices(block, chosen, "are rounded", way)
    return block


def multiply_in_eight_bits(block: nnx.Module, eight_bits: EightBits) -> None:
    """Has all matrices of a block multiply so.  Raises ConfigError for some that cannot."""
    for _, owner, _ in matrices_of(block):
        owner.eight_bits = eight_bits
    chosen, way = f"precision.matmul={eight_bits.kind}:", "Use precision.matmul=none"
    _require_matrices(block, chosen, "multiply in eight bits", way)


def _require_matrices(block: nnx.Module, chosen: str, do: str, way: str) -> None:
    """Raises ConfigError if a block has matrices that are none of a HasMatrices."""
    for keys, module in nnx.iter_modules(block):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param) and len(_names(value)) == 2 and not isinstance(module, HasMatrices):
                path = ".".join(map(str, (*keys, name)))
                problem = f"the module with the parameter {path} is no HasMatrices, whose matrices {do}"
                raise ConfigError(f"{chosen} {problem}. {way}, or see docs/own-model.md.")


def code_matrices(block: nnx.Module, coding: Coding | None, key: str) -> nnx.Module:
    """Quantizes all matrices of a block.  key: the setting that asks for it."""
    if coding is not None:
        for path, module, name in [*matrices_of(block)]:
            setattr(module, name, Coded(getattr(module, name), coding, name in module.row_parallel, path, key))
    return block
