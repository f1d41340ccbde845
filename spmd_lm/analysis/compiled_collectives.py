"""Collectives of a compiled program: bytes, groups of devices and counts; and their sums by mesh axes and part of the
step, the counterpart of `expected_collectives`.

Compilers write one thing in many ways.  A TPU's reduce-scatter hides in a fusion called all-reduce-scatter, or in a
ring of permutes beside a matmul; an asynchronous collective is a pair of instructions, or a call that the SparseCore
runs, or a chain of fusions that repeat the collective once for each step of it; replica groups are listed, or given as
a reshaped range, or as axes of a mesh."""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from spmd_lm.analysis.control_flow import CallPath, Shares, calls, path_to_entry
from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, KINDS, REDUCE_SCATTER, wire_bytes

PARTS = ("embedding", "blocks", "head", "messages", "weights", "gradients", "scalars")
"""Named scopes of the step, as they appear in the names of compiled operations."""


@dataclasses.dataclass(frozen=True)
class CollectiveInstruction:
    """One collective instruction of the program that every device runs.

    dtype: that of its largest operand.
    operands: dtype and bytes of each operand, each one collective.
    full_bytes: bytes of the larger side, gathered or unreduced, of all operands.
    result_bytes: bytes of the results.
    stage_counts: runs in a step, of each pipeline stage.
    groups: replica groups, devices by their position in the mesh; of a permute, its (source, target) pairs.
    scope: its op_name, which ends in jax's named scopes.
    conditional: true in a branch.
    lowered_as: the compiler's form of it, if not the collective itself.
    chain: name of the fusions in which a TPU runs it step by step: the first starts it, others run a matmul beside it,
    the last waits for it; empty for others."""

    kind: str
    dtype: str
    operands: tuple[tuple[str, int], ...]
    full_bytes: int
    result_bytes: int
    stage_counts: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]
    scope: str
    conditional: bool
    lowered_as: str | None = None
    chain: str = ""

    @property
    def num_arrays(self) -> int:
        return len(self.operands)

    @property
    def count(self) -> float:
        """Runs in a step, the mean over the pipeline's stages."""
        return sum(self.stage_counts) / len(self.stage_counts)

    def by_dtype(self) -> Iterator["CollectiveInstruction"]:
        """Splits it by the dtypes of its operands: compilers merge gathers of several."""
        total = sum(size for _, size in self.operands)
        for dtype in dict.fromkeys(dtype for dtype, _ in self.operands):
            operands = tuple(each for each in self.operands if each[0] == dtype)
            size = sum(size for _, size in operands)
            full, result = (bytes_ * size // (total or 1) for bytes_ in (self.full_bytes, self.result_bytes))
            yield dataclasses.replace(self, dtype=dtype, operands=operands, full_bytes=full, result_bytes=result)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one run, on a ring."""
        return wire_bytes(self.kind, self.full_bytes, len(self.groups[0])) if self.groups else 0.0

    @property
    def yields_zeros(self) -> bool:
        """True for a permute without pairs, whose result is zero on every device: XLA makes one of a gather and a slice
        of the same array (openxla/xla#45218)."""
        return self.kind == COLLECTIVE_PERMUTE and not self.groups

    def spanned_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes along which the devices of one group, or of one pair, differ.  sizes: outermost axis first."""
        coordinates = np.array(np.unravel_index(np.array(self.groups), tuple(sizes.values())))
        differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))  # coordinates: [axis, group, member]
        return tuple(axis for axis, differs in zip(sizes, differ, strict=True) if differs)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes that it runs over; ('?',) for groups that are not all devices along some axes."""
        axes = self.spanned_axes(sizes)
        complete = math.prod(sizes[axis] for axis in axes) == len(self.groups[0])
        return axes if complete or self.kind == COLLECTIVE_PERMUTE else ("?",)

    def way(self, sizes: Mapping[str, int]) -> int:
        """Direction of a permute, 1 or -1: the shorter one for most pairs on the ring of devices along its axes."""
        axes = [list(sizes).index(axis) for axis in self.spanned_axes(sizes)]
        devices = [size for n, size in enumerate(sizes.values()) if n in axes]
        coordinates = np.array(np.unravel_index(np.array(self.groups), tuple(sizes.values())))[axes]
        source, target = np.moveaxis(np.ravel_multi_index(tuple(coordinates), devices), -1, 0)
        ahead = (target - source) % math.prod(devices)
        return 1 if 2 * np.median(ahead) <= math.prod(devices) else -1

    @property
    def part(self) -> str:
        """The innermost of PARTS in its scope."""
        return ["other", *re.findall(rf"\b({'|'.join(PARTS)})\b", self.scope)][-1]


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """Collectives of one kind, axes, part and dtype in one step of one device, the mean over pipeline stages.

    count: collectives, one per array.
    bytes: bytes on the wire.
    result_bytes: bytes of their results.
    stages: bytes on the wire of each stage."""

    kind: str
    axes: tuple[str, ...]
    part: str
    dtype: str
    lowered_as: str | None
    count: float
    bytes: float
    result_bytes: float
    stages: tuple[float, ...]


def compiled_collectives(found: list[CollectiveInstruction], sizes: dict[str, int]) -> list[CompiledCollective]:
    """Instructions that send anything, summed where kind, axes, part, dtype and lowering agree; the largest first.

    sizes: those of the mesh axes, outermost first."""
    groups: dict[tuple[str, tuple[str, ...], str, str, str | None], list[CollectiveInstruction]] = defaultdict(list)
    for i in (each for instruction in found for each in instruction.by_dtype()):
        if i.wire_bytes and i.count:
            groups[i.kind, i.axes(sizes), i.part, i.dtype, i.lowered_as].append(i)
    totals = []
    for key, group in groups.items():
        count = sum(i.num_arrays * i.count for i in group)
        sent, result = sum(i.wire_bytes * i.count for i in group), sum(i.result_bytes * i.count for i in group)
        stages = tuple(map(sum, zip(*([i.wire_bytes * n for n in i.stage_counts] for i in group), strict=True)))
        totals.append(CompiledCollective(*key, count, sent, result, stages))
    return sorted(totals, key=lambda c: -c.bytes)


def collective_instructions(
    module: HloModule, devices: int, shares: Shares | None = None
) -> list[CollectiveInstruction]:
    """Collectives of one step on `devices` devices."""
    shares = shares or {}
    return list(collectives_within(module, module.entry, path_to_entry(shares), devices, shares))


def collectives_within(
    module: HloModule, computation: str, path: CallPath, devices: int, shares: Shares
) -> Iterator[CollectiveInstruction]:
    """Collectives of a computation on `path`, and of its callees, in order."""

    def walk(computation: str, path: CallPath, started: set[str]) -> Iterator[CollectiveInstruction]:
        """started: chains with an earlier step."""
        for i in module.computations[computation]:
            if is_collective(i):
                found = read_collective(module, computation, i, path, devices)
                if found.chain not in started:
                    yield found
                started |= {found.chain} - {""}
            for callee, callee_path in calls(module, i, path, shares):
                yield from walk(callee, callee_path, started if i.opcode == "fusion" else set())

    return walk(computation, path, set())


def is_collective(i: Instruction) -> bool:
    """True for an instruction that sends; of an asynchronous pair, the start."""
    return i.opcode.removesuffix("-start") in KINDS


def _chain_of(i: Instruction) -> str:
    """Name of an instruction's chain.  Each step of one repeats the collective with its whole operand."""
    found = re.search(r'\bchain_id="?(\w+)', i.attributes)
    return f"{found[1]} {i.attribute('channel_id')}" if found else ""


def read_collective(
    module: HloModule, computation: str, i: Instruction, path: CallPath, devices: int
) -> CollectiveInstruction:
    """The collective of an instruction of `computation`, on `path`.

    An all-reduce has the dtype of its results: a TPU's may upcast its operands."""
    kind, lowered_as = i.opcode.removesuffix("-start"), None
    operands = [array for operand in module.operands(computation, i) for array in operand.arrays]
    if kind == ALL_REDUCE and len(operands) == len(i.arrays):
        operands = i.arrays
    operand_bytes = sum(array.bytes for array in operands)
    groups = _groups(i.attributes, devices)
    n = len(groups[0]) if groups else 1
    if path.fused_kind == REDUCE_SCATTER and kind == ALL_REDUCE:
        kind, lowered_as = REDUCE_SCATTER, "all-reduce-scatter fusion"
    elif path.fused_kind and kind == COLLECTIVE_PERMUTE:
        lowered_as = f"ring of permutes, a {path.fused_kind}"
    return CollectiveInstruction(
        kind=kind,
        dtype=max(operands, key=lambda array: array.bytes).dtype,
        operands=tuple((array.dtype, array.bytes) for array in operands),
        full_bytes=operand_bytes * n if kind == ALL_GATHER else operand_bytes,
        result_bytes={ALL_GATHER: operand_bytes * n, REDUCE_SCATTER: operand_bytes // n}.get(kind, operand_bytes),
        stage_counts=tuple(map(float, path.counts)),
        groups=groups,
        scope=i.scope,
        conditional=bool(path.conditionals),
        lowered_as=lowered_as,
        chain=_chain_of(i),
    )


def _groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Replica groups, or pairs; one group of all devices where none are listed."""
    written = re.search(r"\b(?:replica_groups|source_target_pairs)=.*?(?=, \w+=|$)", attributes)
    return _parse_groups(written[0] if written else "", devices)


@functools.lru_cache(maxsize=1024)  # a program has few distinct ones, of thousands of pairs
def _parse_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    if text.startswith("source_target_pairs"):
        return tuple((int(source), int(target)) for source, target in re.findall(r"(\d+),(\d+)", text))
    groups = [list(range(devices))]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        groups = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif reshaped := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in reshaped.groups())
        groups = np.arange(devices).reshape(dims).transpose(order).reshape(shape).tolist()
    elif mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([\w.]+)'=(\d+)", mesh[1])}
        reduced = [list(sizes).index(axis) for axis in re.findall(r"'([\w.]+)'", mesh[2])]
        ids = np.moveaxis(np.arange(devices).reshape(*sizes.values()), reduced, range(-len(reduced), 0))
        groups = ids.reshape(-1, math.prod(ids.shape[-len(reduced) :])).tolist()
    return tuple(sorted(tuple(sorted(group)) for group in groups))
