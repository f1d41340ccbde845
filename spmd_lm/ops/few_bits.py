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

Coding = Literal["int8", "nf4", "nf4-double"]
BLOCK_SIZE = 64  # inputs per scale
NESTED_SIZE = 256  # scales per nested scale
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


def encode(kind: Coding, w: Array, transposed: bool) -> dict[str, Array]:
    """Quantizes w [..., width, other] to arrays by name: codes, absmax and, if nf4-double, nested_absmax and offset."""
    w, dim = w.astype(jnp.float32), w.ndim - (1 if transposed else 2)
    if kind == "int8":
        absmax = jnp.abs(w).max(dim)
        codes = jnp.round(w * jnp.expand_dims(127 * _inverse(absmax), dim))
        return {"codes": codes.astype(jnp.int8), "absmax": absmax}
    blocks = _split(w, dim, BLOCK_SIZE)
    absmax = jnp.abs(blocks).max(dim + 1)
    codes = _join(_nearest(blocks * jnp.expand_dims(_inverse(absmax), dim + 1), NF4), dim)
    first, second = (lax.index_in_dim(_split(codes, dim, 2), i, dim + 1, keepdims=False) for i in (0, 1))
    packed = {"codes": first << 4 | second}
    return packed | ({"absmax": absmax} if kind == "nf4" else _encode_scales(absmax, transposed))


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


LARGEST_CODE = {"int8": 127, "int4": 7}


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
    kind: Coding = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})
    columns: Columns | None = dataclasses.field(default=None, metadata={"static": True})

    def select(self, columns: Columns) -> "CodedMatrix":
        """The matrix of some of its columns."""
        return dataclasses.replace(self, columns=columns)

    @property
    def entries(self) -> Array:
        """The decoded matrix, float32."""
        codes, dim = self.stored["codes"], 1 if self.transposed else 0
        if self.kind == "int8":
            w = codes.astype(jnp.float32) * jnp.expand_dims(self.stored["absmax"] / 127, dim)
        else:
            each = _look_up(_join(jnp.stack([codes >> 4, codes & 15], dim + 1), dim), NF4)
            w = _join(_split(each, dim, BLOCK_SIZE) * jnp.expand_dims(self._scales, dim + 1), dim)
        return w if self.columns is None else self.columns(w)

    @property
    def _scales(self) -> Array:
        """Scales of the blocks, float32."""
        absmax = self.stored["absmax"]
        if self.kind == "nf4":
            return absmax
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
