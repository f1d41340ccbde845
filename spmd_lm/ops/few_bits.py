"""Matrices in few bits.  Frozen ones (QLoRA, arXiv:2305.14314) are codes and scales, decoded where a matmul needs the
matrix; codes match bitsandbytes.  Trained ones are rounded before each matmul.

Blocks of a matrix [width, other] lie along its inputs: `width`, or `other` where it is
multiplied transposed.  Leading dimensions are those of stacked layers."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spmd_lm.active_rules import num_shards
from spmd_lm.errors import ConfigError
from spmd_lm.ops.collectives import contract, global_indices
from spmd_lm.ops.compiler_workarounds import run_again
from spmd_lm.ops.dense import Columns, dense
from spmd_lm.ops.norm import upcast

BLOCK_SIZE = 64  # inputs per scale, unless a coding says otherwise
NESTED_SIZE = 256  # scales per nested scale
LARGEST_CODE = {"int8": 127, "int4": 7, "int3": 3}
OFFSET = 8  # added to the codes of int4 and int3, of which a byte holds two


@dataclasses.dataclass(frozen=True)
class Coding:
    """How matrices are quantized: int8, int4 and int3 to multiples of a scale, symmetrically; nf4 to NF4 times a scale.
    group: inputs of an output that share a scale; None for all of them.
    double: whether scales are quantized too, in nf4."""

    bits: Literal["int8", "int4", "int3", "nf4"]
    group: int | None = None
    double: bool = False

    @property
    def name(self) -> str:
        return self.bits + "-double" * self.double

    @property
    def packs(self) -> bool:
        """True if a byte holds the codes of two inputs, the first one in its high half."""
        return self.bits != "int8"

    @property
    def whole(self) -> int:
        """Inputs that a shard must not divide."""
        return self.group or (2 if self.packs else 1)


NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The sixteen values of NF4, quantiles of a normal distribution (arXiv:2305.14314, appendix E)."""


@functools.cache
def dynamic_codebook() -> np.ndarray:
    """The 256 values of dynamic quantization (arXiv:2110.02861, section 1.3), float32: in each decade the midpoints
    between 1 + 2^k evenly spaced numbers, rounded as torch.linspace does."""
    first, values = np.float32(0.1), [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for exponent in range(7):
        count = 2**exponent
        steps, step = np.arange(count + 1), float((1 - first) / np.float32(count))
        exact = np.where(steps <= count // 2, float(first) + step * steps, 1.0 - step * (count - steps))
        numbers = exact.astype(np.float32)
        means = np.float32(10.0 ** (exponent - 6)) * ((numbers[:-1] + numbers[1:]) / np.float32(2))
        values += [means, -means]
    return np.sort(np.concatenate(values))


def _nearest(x: Array, codebook: np.ndarray) -> Array:
    """Index of the nearest value, uint8; the lower of two equally near.  A sum of comparisons: no loop."""
    borders = ((codebook[1:].astype(np.float64) + codebook[:-1]) / 2).astype(np.float32)
    return sum((x > border).astype(jnp.uint8) for border in borders)


def _look_up(codes: Array, codebook: np.ndarray) -> Array:
    """codebook[codes] for a small codebook: by selects where a gather of scalars is slow, as on a TPU.  A GPU's
    compiler splits the selects into several kernels, but gathers in one."""
    return lax.platform_dependent(
        codes, cuda=functools.partial(_gather, codebook), default=functools.partial(_select, codebook)
    )


def _gather(codebook: np.ndarray, codes: Array) -> Array:
    return jnp.asarray(codebook).at[codes].get(mode="promise_in_bounds")


def _select(codebook: np.ndarray, codes: Array) -> Array:
    values: list[Array | np.float32] = list(codebook)
    bit = 0
    while len(values) > 1:
        odd = (codes >> bit) & 1 == 1
        values = [jnp.where(odd, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
        bit += 1
    return jnp.asarray(values[0])


def _inverse(absmax: Array) -> Array:
    return 1 / jnp.where(absmax == 0, 1, absmax)


def _split(x: Array, dim: int, size: int) -> Array:
    """x with `dim` split into two: [blocks, size]."""
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def _join(x: Array, dim: int) -> Array:
    """The inverse of `_split`."""
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def encode(coding: Coding, w: Array, transposed: bool) -> dict[str, Array]:
    """Quantizes w [..., width, other] to arrays by name: codes, absmax and, if scales are quantized too, nested_absmax
    and offset."""
    w, dim = w.astype(jnp.float32), w.ndim - (1 if transposed else 2)
    blocks = _split(w, dim, coding.group or w.shape[dim])
    absmax = jnp.abs(blocks).max(dim + 1)
    if coding.bits == "nf4":
        codes = _nearest(blocks * jnp.expand_dims(_inverse(absmax), dim + 1), NF4)
    else:
        codes = jnp.round(blocks * jnp.expand_dims(LARGEST_CODE[coding.bits] * _inverse(absmax), dim + 1))
    return store(coding, _join(codes, dim), absmax, transposed)


def store(coding: Coding, codes: Array, absmax: Array, transposed: bool) -> dict[str, Array]:
    """The arrays of `encode`, of these codes.
    codes: [..., width, other], multiples of scales, or indices in NF4.
    absmax: the same with one entry for each group of inputs, float32."""
    dim = codes.ndim - (1 if transposed else 2)
    if coding.packs:
        codes = _split((codes if coding.bits == "nf4" else codes + OFFSET).astype(jnp.uint8), dim, 2)
        first, second = (lax.index_in_dim(codes, i, dim + 1, keepdims=False) for i in (0, 1))
        codes = first << 4 | second
    else:
        codes = codes.astype(jnp.int8)
    if coding.group is None:
        absmax = jnp.squeeze(absmax, dim)
    return {"codes": codes} | (_encode_scales(absmax, transposed) if coding.double else {"absmax": absmax})


def _encode_scales(absmax: Array, transposed: bool) -> dict[str, Array]:
    """Double quantization.  Scales are numbered as in bitsandbytes: row by row of torch's matrix [outputs, inputs]."""
    rows = absmax if transposed else absmax.swapaxes(-1, -2)
    flat = rows.reshape(*rows.shape[:-2], -1)
    offset = _mean(flat)[..., None]
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % NESTED_SIZE)]
    blocks = _split(jnp.pad(flat - offset, padding), flat.ndim - 1, NESTED_SIZE)
    nested = jnp.abs(blocks).max(-1)
    codes = _join(_nearest(blocks * _inverse(nested)[..., None], dynamic_codebook()), flat.ndim - 1)
    codes = codes[..., : flat.shape[-1]].reshape(rows.shape)
    return {"absmax": codes if transposed else codes.swapaxes(-1, -2), "nested_absmax": nested, "offset": offset}


def _mean(x: Array) -> Array:
    """The mean over the last dimension of x >= 0, float32, with the same bits in any order of summation.  Exact to
    2^-18 of the largest: it sums integers, their three 6-bit digits separately."""
    most = x.max(-1)
    scaled = jnp.round(x * (_inverse(most) * 2**18)[..., None]).astype(jnp.int32)
    digits = scaled >> 12, scaled >> 6 & 63, scaled & 63
    high, middle, low = (each.sum(-1).astype(jnp.float32) for each in digits)
    return (high * 4096 + (middle * 64 + low)) * (most / 2**18 / x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fake_quant(w: Array, kind: str, dim: int) -> Array:
    """w with each entry rounded to the nearest integer multiple of a scale: the largest magnitude of BLOCK_SIZE entries
    along `dim`, over LARGEST_CODE.

    The gradient passes as if nothing were rounded (straight-through, arXiv:1308.3432)."""
    blocks = _split(upcast(w), dim, BLOCK_SIZE)
    absmax = jnp.abs(blocks).max(dim + 1, keepdims=True)
    codes = jnp.round(blocks * (LARGEST_CODE[kind] * _inverse(absmax)))
    return _join(codes * (absmax / LARGEST_CODE[kind]), dim).astype(w.dtype)


def _fake_quant_again(w, kind, dim):
    return fake_quant(*run_again(w), kind, dim), None


fake_quant.defvjp(_fake_quant_again, lambda kind, dim, saved, g: (g,))


@dataclasses.dataclass(frozen=True)
class FakeQuant:
    """Rounds matrices [..., width, other] along their inputs.
    transposed: whether they are multiplied transposed.
    columns: those that are then selected."""

    kind: str
    transposed: bool
    columns: Columns | None = None

    def __call__(self, w: Array) -> Array:
        w = fake_quant(w, self.kind, w.ndim - (1 if self.transposed else 2))
        return w if self.columns is None else self.columns(w)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeQuantMatrix:
    """A matrix in quantization-aware training (arXiv:1712.05877): it is multiplied rounded, and trained as it is."""

    stored: Array
    view: FakeQuant = dataclasses.field(metadata={"static": True})

    @property
    def entries(self) -> Array:
        return self.view(self.stored)

    def select(self, columns: Columns) -> "FakeQuantMatrix":
        """The matrix of some of its columns."""
        return FakeQuantMatrix(self.stored, dataclasses.replace(self.view, columns=columns))

    def multiply(self, x: Array, *, transpose: bool = False) -> Array:
        """See Matrix.multiply.  Raises ConfigError if a user's module does not multiply as its row_parallel says."""
        if transpose != self.view.transposed:
            how = "transposed" if transpose else "as it is"
            raise ConfigError(f"a rounded matrix is multiplied {how}. List it in row_parallel if it is transposed.")
        return dense(x, self.stored, transpose, self.view)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedMatrix:
    """A quantized matrix of one layer: the arrays that `encode` makes, or one device's shards of them.

    name: the dimension other than `width`.  transposed: whether it is multiplied transposed."""

    stored: dict[str, Array]
    coding: Coding = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})
    columns: Columns | None = dataclasses.field(default=None, metadata={"static": True})

    def select(self, columns: Columns) -> "CodedMatrix":
        """The matrix of some of its columns."""
        return dataclasses.replace(self, columns=columns)

    @property
    def entries(self) -> Array:
        """The decoded matrix, float32."""
        dim, scales = self._dim, self.scales
        if self.coding.bits == "nf4":
            values = _look_up(self.codes, NF4)
        else:
            values, scales = self.codes.astype(jnp.float32), scales / LARGEST_CODE[self.coding.bits]
        w = _join(_split(values, dim, self.coding.group or values.shape[dim]) * jnp.expand_dims(scales, dim + 1), dim)
        return w if self.columns is None else self.columns(w)

    @property
    def codes(self) -> Array:
        """[width, other]: multiples of scales, int8; or indices in NF4, uint8."""
        codes = self.stored["codes"]
        if self.coding.packs:
            codes = _join(jnp.stack([codes >> 4, codes & 15], self._dim + 1), self._dim)
        return codes.astype(jnp.int8) - OFFSET if self.coding.bits in ("int4", "int3") else codes

    @property
    def _dim(self) -> int:
        """The dimension of the inputs."""
        return 1 if self.transposed else 0

    @property
    def scales(self) -> Array:
        """The largest magnitude of each group, float32: [groups, other], or [width, groups] if transposed."""
        absmax = self.stored["absmax"]
        if not self.coding.double:
            return absmax if self.coding.group else jnp.expand_dims(absmax, self._dim)
        width, other = jnp.arange(absmax.shape[0]), global_indices(self.name, absmax.shape[1])
        if self.transposed:
            count = width[:, None] * absmax.shape[1] * num_shards(self.name) + other
        else:
            count = other * absmax.shape[0] + width[:, None]
        nested = self.stored["nested_absmax"][count // NESTED_SIZE]
        # Selects among 256 values would take as long to compile as the rest of a layer.
        return _gather(dynamic_codebook(), absmax) * nested + self.stored["offset"]

    def multiply(self, x: Array, *, transpose: bool = False) -> Array:
        """See Matrix.multiply."""
        return _matmul(self, x, transpose)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(matrix: CodedMatrix, x: Array, transpose: bool) -> Array:
    """See dense.  Only the stored arrays are saved: backward decodes again."""
    return contract(x, matrix.entries.astype(x.dtype), (x.ndim - 1,), (int(transpose),))


def _matmul_forward(matrix, x, transpose):
    return _matmul(matrix, x, transpose), matrix


def _matmul_backward(transpose, matrix, g):
    matrix, g = run_again(matrix, g)
    return None, contract(g, matrix.entries.astype(g.dtype), (g.ndim - 1,), (int(not transpose),))


_matmul.defvjp(_matmul_forward, _matmul_backward)
