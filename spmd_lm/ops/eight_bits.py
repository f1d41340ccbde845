"""Matmuls of eight-bit operands: fp8 (arXiv:2209.05433) or int8, with scales that multiply the result.

The operands of lax.dot_general are the codes themselves: a GPU's compiler drops a cast that is converted back before
the product (docs/adr/0042).  A scale is that of the array at hand, one device's shard: nothing is kept or sent."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

Dot = Callable[[Array, Array, lax.DotDimensionNumbers], Array]
"""lax.dot_general, or in its place a product of the same arrays in few bits."""

SCOPE = "eight_bits"
"""The named scope of these matmuls in a compiled step."""
LEAST_ABSMAX = 1e-30
"""Smaller arrays are scaled as if this were their largest magnitude: their scale is no zero."""
CODES: dict[tuple[str, bool], jnp.dtype] = {
    ("fp8", False): jnp.dtype(jnp.float8_e4m3fn),
    ("fp8", True): jnp.dtype(jnp.float8_e5m2),
    ("int8", False): jnp.dtype(jnp.int8),
    ("int8", True): jnp.dtype(jnp.int8),
}
"""Dtype by the kind of matmul, and whether the operand is a gradient, which fp8 gives more range and fewer digits."""


@dataclasses.dataclass(frozen=True)
class EightBits:
    """fp8: one scale for an operand, whose largest magnitude becomes the largest code.
    int8: one for each of its rows along the contracted dimension."""

    kind: Literal["fp8", "int8"]

    def dot_general(
        self, x: Array, y: Array, dims: lax.DotDimensionNumbers, gradients: tuple[bool, bool] = (False, False)
    ) -> Array:
        """x times y [., .] over one dimension of each, summed in float32 or int32; in x's dtype.
        gradients: which of them are gradients.  Then fp8's precision is HIGHEST, without which a Hopper's tensor cores
        sum it in fewer bits.

        Whatever is not finite in x or y makes entries of the result that are not."""
        ((x_dim,), (y_dim,)), batch = dims
        assert y.ndim == 2 and not any(batch), (y.shape, dims)
        with jax.named_scope(SCOPE):
            x_codes, x_scale = self._encode(x, x_dim, gradients[0])
            y_codes, y_scale = self._encode(y, y_dim, gradients[1])
            sums = jnp.float32 if self.kind == "fp8" else jnp.int32
            precision = lax.Precision.HIGHEST if self.kind == "fp8" and any(gradients) else None
            product = lax.dot_general(x_codes, y_codes, dims, precision, preferred_element_type=sums)
        rows, columns = x_scale[..., None], y_scale.reshape((1,) * (product.ndim - 1) + (-1,))
        return (product.astype(jnp.float32) * rows * columns).astype(x.dtype)

    def _encode(self, x: Array, dim: int, is_gradient: bool) -> tuple[Array, Array]:
        """Codes and scales of x, float32: without `dim`, which is contracted, and for fp8 with dimensions of size 1."""
        dtype = CODES[self.kind, is_gradient]
        most = _largest_code(dtype, x.shape[dim])
        x = x.astype(jnp.float32)
        absmax = jnp.abs(x).max(dim if self.kind == "int8" else None, keepdims=True)
        absmax = jnp.maximum(absmax, LEAST_ABSMAX)
        return saturating_cast(x * (most / absmax), dtype, most), lax.squeeze(absmax / most, (dim,))


def dot_of(eight_bits: EightBits | None, *, left: bool = False, right: bool = False) -> Dot:
    """The product in eight bits, or in the operands' dtype.  left, right: whether that operand is a gradient."""
    return lax.dot_general if eight_bits is None else functools.partial(eight_bits.dot_general, gradients=(left, right))


def saturating_cast(x: Array, dtype: jnp.dtype, most: float) -> Array:
    """x as the nearest codes between -most and most.  A cast alone makes NaN or infinity of what is above."""
    x = jnp.round(x) if dtype == jnp.int8 else x
    return jnp.clip(x, -most, most).astype(dtype)


def _largest_code(dtype: jnp.dtype, terms: int) -> float:
    """The largest magnitude of codes: the dtype's, or less if int32 could not hold a sum of so many products."""
    if dtype != jnp.int8:
        return float(jnp.finfo(dtype).max)
    return float(min(127, math.isqrt((2**31 - 1) // terms)))
