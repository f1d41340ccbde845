"""Costs of an instruction of a compiled program: FLOPs of its matmuls, and bytes to and from memory.

FLOPs are 2 per multiply-add.  On a TPU a matmul is a convolution, whose windows may reach into padding: only positions
inside of its operand count.  A grouped product counts what its kernel says of itself.  Other kernels that are not HLO,
such as cuDNN's attention, count no FLOPs."""

import functools
import math
import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.cost_model.wire import KINDS

_NO_MEMORY = {
    # names or arranges values, or happens once, or is walked by itself
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "iota", "add-dependency", "domain", "while", "conditional"),
}
_ALLOCATION = 'custom_call_target="AllocateBuffer"'
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that replaces, or is added to, a slice of the first
_WHOLE = {
    # an element of the result may need all of the operands
    *("dot", "convolution", "custom-call", "fusion", "reduce", "reduce-window", "select-and-scatter", "sort", "map"),
    *("call", "while", "conditional", "fft", "cholesky", "triangular-solve", "rng-bit-generator", *_UPDATES, "gather"),
    *(kind + end for kind in KINDS for end in ("", "-start")),
    "copy-start",
}
_OF_WORKSPACE = ("s8", "u8")
_MOVES = {"dynamic-update-slice", "dynamic-slice", "copy", "copy-start", "transpose"}
_ARRANGES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
_FEW_BYTES = 64  # at most, for indices, which any fusion may compute
_MOST_POSITIONS = 1 << 22

PRODUCTS, ATTENTION, OTHERS, COPIES, FILLS = "products", "attention", "other kernels", "copies", "fills"
COLLECTIVE_KERNELS = "collectives"


class Traffic(NamedTuple):
    """Bytes that a kernel reads from and writes to device memory."""

    read: float
    written: float


class InstructionCosts:
    """FLOPs and traffic of a module's instructions; each computation is read once."""

    def __init__(self, module: HloModule):
        self.module = module
        self._flops: dict[str, float] = {}
        self._fused_traffic: dict[str, tuple[dict[int, float], float]] = {}

    def flops(self, computation: str, i: Instruction) -> float:
        """FLOPs of an instruction of `computation` and of its callees, except loops and conditionals."""
        if i.callee:
            return self._flops_within(i.callee)
        if i.opcode in ("dot", "convolution") or (_is_gemm(i)):
            left, right, *_ = (operand.arrays[0].dims for operand in self.module.operands(computation, i))
            count = _convolved if i.opcode == "convolution" else _contracted
            return 2.0 * math.prod(i.arrays[0].dims) * count(i, left, right)
        return float(found[1]) if i.opcode == "custom-call" and (found := _GROUPED.search(i.attributes)) else 0.0

    def _flops_within(self, computation: str) -> float:
        if computation not in self._flops:
            self._flops[computation] = sum(self.flops(computation, i) for i in self.module.computations[computation])
        return self._flops[computation]

    def traffic(self, computation: str, i: Instruction) -> Traffic:
        """Bytes that an instruction of `computation` reads and writes; none for the end of an asynchronous one, or for
        one that names or arranges values.  Arrays that it slices, gathers from or updates in place count their slices
        alone."""
        if i.opcode in _NO_MEMORY or i.opcode.endswith(("-update", "-done")) or _ALLOCATION in i.attributes:
            return Traffic(0.0, 0.0)
        if i.opcode.removesuffix("-start") == "fusion":
            operands = self.module.operands(computation, i)
            of_parameters, written = self._fused(i.callee)
            return Traffic(sum(min(of_parameters.get(n, 0.0), each.bytes) for n, each in enumerate(operands)), written)
        if i.callee:
            body = [self.traffic(i.callee, each) for each in self.module.computations[i.callee]]
            return Traffic(*(sum(amounts) for amounts in zip(*body, strict=True)))
        operands = self.module.operands(computation, i)
        elements, written = float(i.elements), float(_moved(i))
        if i.opcode.endswith("-start") and len(i.arrays) > len(operands):  # a tuple of operands, results and contexts
            written -= sum(operand.bytes for operand in operands)
        if i.opcode in _UPDATES:
            elements, written = _updated(i, operands)
        return Traffic(sum(_needed(i, n, each, elements) * _itemsize(each) for n, each in enumerate(operands)), written)

    def kind(self, computation: str, i: Instruction) -> str:
        """Kind, one of those above, of an instruction of `computation` that has traffic."""
        within = self.within(i.callee) if i.callee else [i]
        if any(each.opcode.removesuffix("-start") in KINDS for each in within):
            return COLLECTIVE_KERNELS
        if any("__cudnn$fmha" in each.attributes for each in within):
            return ATTENTION
        if self.flops(computation, i) or any(_is_gemm(each) for each in within):
            return PRODUCTS
        work = {
            each.opcode
            for each in within
            if each.opcode not in _ARRANGES and (each.bytes > _FEW_BYTES or each.opcode == "reduce")
        }
        if work <= _MOVES:
            return COPIES
        return FILLS if work <= {"broadcast"} else OTHERS

    def within(self, computation: str) -> list[Instruction]:
        """Instructions of a computation and of its callees."""
        body = self.module.computations[computation]
        return [each for i in body for each in (self.within(i.callee) if i.callee else [i])]

    def attention_flops(self, computation: str, i: Instruction) -> float:
        """FLOPs of a call of cuDNN's attention, which is not HLO: half if causal; backward has 5 matmuls, forward 2."""
        (call,) = self.within(i.callee) if i.callee else [i]
        scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^]]*)\]', call.attributes)
        assert scores, call.attributes
        size = math.prod(map(int, re.findall(r"\d+", scores[1]))) * call.arrays[0].dims[-1]
        causal = 0.5 if re.search(r'"mask_type":\s*"CAUSAL"', call.attributes) else 1.0
        return 4.0 * size * causal * (2.5 if "Backward" in call.attributes else 1.0)

    def _fused(self, computation: str) -> tuple[dict[int, float], float]:
        """Bytes that a fused computation reads of each parameter, and bytes that it writes.

        A kernel computes what its results need, element by element: a walk from last to first."""
        if computation not in self._fused_traffic:
            body = self.module.computations[computation]
            needed, in_place, reads, written = defaultdict[str, float](float), dict[str, float](), {}, 0.0
            (root,) = (i for i in body if i.is_root)
            for result in self.module.operands(computation, root) if root.opcode == "tuple" else [root]:
                if update := self._in_place(computation, result):
                    in_place[update.name], of_update = _updated(update, self.module.operands(computation, update))
                    written += of_update
                else:
                    needed[result.name] = float(result.elements)
                    written += self._fused(result.callee)[1] if result.opcode == "fusion" else _moved(result)
            for i in reversed(body):
                elements = in_place.get(i.name, min(needed[i.name], i.elements))
                if i.opcode == "parameter":
                    reads[int(i.attributes.partition(")")[0])] = elements * _itemsize(i)
                elif elements or i.name in in_place:
                    within = self._fused(i.callee)[0] if i.opcode == "fusion" else {}
                    for n, operand in enumerate(self.module.operands(computation, i)):
                        of_operand = within[n] / _itemsize(operand) if n in within else _needed(i, n, operand, elements)
                        needed[operand.name] += of_operand
            self._fused_traffic[computation] = reads, written
        return self._fused_traffic[computation]

    def _in_place(self, computation: str, result: Instruction) -> Instruction | None:
        """The update in place that makes a result from a parameter's memory; None for other results."""
        while result.opcode == "bitcast":
            (result,) = self.module.operands(computation, result)
        if result.opcode not in _UPDATES:
            return None
        base = self.module.operands(computation, result)[0]
        while base.opcode == "bitcast":
            (base,) = self.module.operands(computation, base)
        return result if base.opcode == "parameter" else None


def _updated(i: Instruction, operands: list[Instruction]) -> tuple[float, float]:
    """Traffic of an update in place: elements read of its base, bytes written."""
    update, base = operands[_UPDATES[i.opcode]], operands[0]
    return (update.elements if i.opcode == "scatter" else 0.0), float(min(update.bytes, base.bytes))


def _needed(i: Instruction, position: int, operand: Instruction, elements: float) -> float:
    """Elements that an instruction reads of its operand at `position`, for `elements` of its result."""
    if position == 0 and i.opcode in (*_UPDATES, "gather"):
        return min(operand.elements, elements)
    if i.opcode in ("dynamic-slice", "dynamic-update-slice") and position > 1:
        return 0.0
    return operand.elements if i.opcode in _WHOLE else min(operand.elements, elements)


def _moved(i: Instruction) -> int:
    """Bytes of a result, without the workspace of a library call."""
    arrays = i.arrays
    if i.opcode in ("custom-call", "get-tuple-element"):
        arrays = [each for each in arrays if not (each.dtype in _OF_WORKSPACE and len(each.dims) == 1)]
    return sum(array.bytes for array in arrays)


def _itemsize(i: Instruction) -> float:
    return i.bytes / max(1, i.elements)


def _is_gemm(i: Instruction) -> bool:
    return i.opcode == "custom-call" and bool(_GEMM.search(i.attributes))


_GEMM = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas)')
_GROUPED = re.compile(r'op_name="[^"]*\bt?gmm\b.*"cost_estimate":\{"flops":"(\d+)"')


def _contracted(i: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Multiply-adds for each element of a dot's result, whose left operand has these dimensions."""
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)', i.attributes)
    return math.prod(left[int(dim)] for dim in re.findall(r"\d+", found[1])) if found else 1


def _convolved(i: Instruction, data: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    """Multiply-adds for each element of a convolution's result.  dim_labels=bf0_io0->bf0 names the dimensions of data,
    kernel and result."""
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
    """Positions of a kernel inside of the data along one dimension, the mean over positions of the result.

    A batch dimension written as a window has just one."""
    if kernel * result > _MOST_POSITIONS:
        return kernel
    step, padding, data_dilation, kernel_dilation = window
    at = np.arange(result)[:, None] * step - padding + np.arange(kernel) * kernel_dilation
    inside = (at >= 0) & (at % data_dilation == 0) & (at // data_dilation < data)
    return float(inside.sum()) / result
