"""Seconds of one kernel on one device: a matmul, fused attention, or an elementwise operation.

A matmul takes as long as its FLOPs or its memory traffic need, whichever is more (the roofline of Williams, Waterman
and Patterson, 2009), fused attention as long as its FLOPs, others as long as their traffic; each kernel adds a fixed
overhead."""

import functools
from typing import NamedTuple

from spmd_lm.cost_model.hardware import Hardware, Products
from spmd_lm.cost_model.sizes import dtype_bytes
from spmd_lm.errors import ConfigError


class Product(NamedTuple):
    """Matmuls [rows, inner] by [inner, columns], one for each of a batch.  Sizes on one device.

    rate: the peak of hardware.yaml at which they run; '' for that of the compute dtype."""

    rows: float
    inner: float
    columns: float
    batch: float = 1
    rate: str = ""

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.batch

    @property
    def elements(self) -> float:
        """Number of elements read and written."""
        return self.batch * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)

    @property
    def of_backward(self) -> "tuple[Product, Product]":
        """Matmuls of backward: gradients of the left operand and of the right one."""
        left = Product(self.rows, self.columns, self.inner, self.batch)
        return left, Product(self.inner, self.rows, self.columns, self.batch)


class Kernels(NamedTuple):
    """Kernels of one software stack on one device.

    dtype: dtype of operands.
    software: share of the hardware's matmul rate that the software reaches.
    overhead: seconds of each kernel besides its work."""

    hardware: Hardware
    dtype: str
    software: float
    overhead: float

    @functools.cache  # noqa: B019 - by values; a search has hundreds
    def product(self, p: Product) -> float:
        share = self._curve.share(p.rows, p.inner, p.columns, p.batch)
        faster = self.hardware.rate(p.rate, self.dtype)
        return max(self._flops(p.flops, share * faster), self.traffic(p.elements * self.size)) + self.overhead

    def attention(self, flops: float) -> float:
        """Seconds of fused attention, which keeps the scores on the chip."""
        return self._flops(flops, self._curve.attention) + self.overhead

    def traffic(self, bytes_: float) -> float:
        """Seconds to read and write HBM, without overhead."""
        memory = self.hardware.memory
        assert memory
        return bytes_ / (memory.bandwidth * memory.share)

    def _flops(self, flops: float, share: float) -> float:
        peak = self.hardware.peak(self.dtype)
        if not peak:
            problem = f"precision.compute={self.dtype}: nobody has published its rate on {self.hardware.device_kind}"
            raise ConfigError(f"{problem}. Use a dtype whose rate is known: {', '.join(self.hardware.peaks)}.")
        return flops / (peak * share * self.software)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return dtype_bytes(self.dtype)

    @property
    def _curve(self) -> Products:
        assert self.hardware.products
        return self.hardware.products
