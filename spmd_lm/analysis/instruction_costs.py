"""What an instruction of a compiled program costs: FLOPs of the matrix products in it, and bytes to and from memory.

FLOPs are 2 per multiply-add.  On a TPU a matrix product is a convolution, whose windows may reach into its padding:
only positions inside of its operand count.  Kernels that are not HLO, such as cuDNN's attention, count no FLOPs."""

import functools
import math
import re
from collections import defaultdict

import numpy as np

from spmd_lm.analysis.hlo import HloModule, Instruction

_NO_MEMORY = {
    # what only names or arranges values, or happens once
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "iota", "add-dependency", "domain"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_MOST_POSITIONS = 1 << 22


class InstructionCosts:
    """Of the instructions of a module.  Those of a computation are read once."""

    def __init__(self, module: HloModule):
        self.module = module
        self._flops: dict[str, float] = {}
        self._reads: dict[str, dict[int, float | None]] = {}

    def flops(self, computation: str, i: Instruction) -> float:
        """Of an instruction of `computation`, and of all that it calls, other than loops and conditionals."""
        if i.callee:
            return self._flops_within(i.callee)
        if i.opcode in ("dot", "convolution") or (i.opcode == "custom-call" and _GEMM.search(i.attributes)):
            left, right, *_ = (operand.arrays[0].dims for operand in self.module.operands(computation, i))
            count = _convolved if i.opcode == "convolution" else _contracted
            return 2.0 * math.prod(i.arrays[0].dims) * count(i, left, right)
        return 0.0

    def _flops_within(self, computation: str) -> float:
        if computation not in self._flops:
            self._flops[computation] = sum(self.flops(computation, i) for i in self.module.computations[computation])
        return self._flops[computation]

    def bytes(self, computation: str, i: Instruction) -> float:
        """Read from and written to memory by an instruction of `computation`; none by one that others wait for, or that
        goes on beside others.

        Of an array that it only slices or updates in place, the slices."""
        if i.opcode in _NO_MEMORY or i.opcode.endswith(("-start", "-update", "-done")):
            return 0.0
        operands = self.module.operands(computation, i)
        if i.opcode in _SLICES:
            return 2.0 * i.bytes
        if i.opcode == "dynamic-update-slice":
            return 2.0 * operands[1].bytes
        if i.opcode != "fusion":
            return float(i.bytes + sum(operand.bytes for operand in operands))
        sliced = self._sliced(i.callee)
        reads = (operand.bytes if (n := sliced.get(k)) is None else n for k, operand in enumerate(operands))
        return self._written(i.callee) + sum(reads)

    def _sliced(self, computation: str) -> dict[int, float | None]:
        """Bytes that a fused computation reads of each parameter; None for all of it."""
        if computation not in self._reads:
            body = self.module.computations[computation]
            numbers = {i.name: int(i.attributes.partition(")")[0]) for i in body if i.opcode == "parameter"}
            reads = defaultdict[int, list[float | None]](list)
            for i in body:
                within = self._sliced(i.callee) if i.opcode == "fusion" else {}
                for position, name in enumerate(i.operands):
                    if name in numbers:
                        reads[numbers[name]].append(_read_by(i, position, within))
            self._reads[computation] = {
                number: None if None in of_uses else sum(filter(None, of_uses)) for number, of_uses in reads.items()
            }
        return self._reads[computation]

    def _written(self, computation: str) -> float:
        """Bytes that a fused computation writes."""
        (root,) = (i for i in self.module.computations[computation] if i.is_root)
        results = self.module.operands(computation, root) if root.opcode == "tuple" else [root]
        return float(sum(self._written_of(computation, result) for result in results))

    def _written_of(self, computation: str, result: Instruction) -> float:
        operands = self.module.operands(computation, result)
        if result.opcode == "dynamic-update-slice":
            return operands[1].bytes
        if result.opcode == "bitcast":
            return self._written_of(computation, operands[0])
        return self._written(result.callee) if result.opcode == "fusion" else result.bytes


def _read_by(i: Instruction, position: int, within: dict[int, float | None]) -> float | None:
    """Bytes of its operand at `position` that an instruction of a fused computation reads; None for all of it.

    within: of a nested fusion, what it reads of its own operands."""
    if i.opcode == "fusion":
        return within.get(position)
    if i.opcode in _SLICES:
        return float(i.bytes) if position == 0 else 0.0
    return 0.0 if i.opcode == "dynamic-update-slice" and position == 0 else None


_GEMM = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas)')


def _contracted(i: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Multiply-adds for each element of a dot's result, whose left operand has these dimensions."""
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)', i.attributes)
    return math.prod(left[int(dim)] for dim in re.findall(r"\d+", found[1])) if found else 1


def _convolved(i: Instruction, data: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    """The same for a convolution; dim_labels=bf0_io0->bf0 names the dimensions of data, kernel and result."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    assert labels, i.attributes
    of_data, of_kernel, of_result = labels.groups()
    count = float(kernel[of_kernel.index("i")])
    window = re.search(r"\bwindow=\{([^}]*)\}", i.attributes)
    for n in (int(label) for label in of_kernel if label.isdigit()):
        sizes = (each[labels.index(str(n))] for each, labels in ((data, of_data), (kernel, of_kernel)))
        length = i.arrays[0].dims[of_result.index(str(n))]
        count *= _positions(*sizes, length, *_window(window[1] if window else "", n))
    return count


def _window(text: str, dim: int) -> tuple[int, int, int, int]:
    """(step, padding below, dilation of data, dilation of kernel) of a dimension: 'size=4x1 pad=3_3x0_0'."""
    fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", text))
    step, pad, of_data, of_kernel = (
        fields[name].split("x")[dim] if name in fields else default
        for name, default in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))
    )
    return int(step), int(pad.split("_")[0]), int(of_data), int(of_kernel)


@functools.cache
def _positions(data: int, kernel: int, result: int, *window: int) -> float:
    """Along one dimension, positions of a kernel inside of the data, the mean over positions of the result.

    A dimension of a batch may be written as a window: then there is just one."""
    if kernel * result > _MOST_POSITIONS:
        return kernel
    step, padding, data_dilation, kernel_dilation = window
    at = np.arange(result)[:, None] * step - padding + np.arange(kernel) * kernel_dilation
    inside = (at >= 0) & (at % data_dilation == 0) & (at // data_dilation < data)
    return float(inside.sum()) / result
