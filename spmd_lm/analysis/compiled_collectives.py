"""The collectives of a compiled train step, by mesh axes and part of the step: the counterpart of
`expected_collectives`."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from spmd_lm.analysis.hlo import CollectiveInstruction
from spmd_lm.analysis.ring import COLLECTIVE_PERMUTE

PARTS = ("embedding", "blocks", "head", "messages", "weights", "gradients", "scalars")
"""Named scopes of the step, as they appear in the names of compiled operations."""


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """Collectives of one kind, axes, part and dtype in one step of one device, the mean over a pipeline's stages.

    count: collectives, one per array.  bytes: on the wire.  result_bytes: of their results.  stages: bytes of each
    stage."""

    kind: str
    axes: tuple[str, ...]
    part: str
    dtype: str
    lowered_as: str | None
    count: float = 0
    bytes: float = 0
    result_bytes: float = 0
    stages: tuple[float, ...] = ()


def compiled_collectives(
    instructions: Iterable[CollectiveInstruction], sizes: Mapping[str, int]
) -> list[CompiledCollective]:
    """Instructions that send anything, summed where kind, axes, part, dtype and lowering agree; the largest first.

    sizes: of the mesh axes, outermost first."""
    groups: dict[tuple, list[CompiledCollective]] = defaultdict(list)
    for i in instructions:
        if i.wire_bytes and i.count:
            key = i.kind, axes_of(i, sizes), part_of(i.scope), i.dtype, i.lowered_as
            count, bytes_, result = (n * i.count for n in (i.num_arrays, i.wire_bytes, i.result_bytes))
            stages = tuple(i.wire_bytes * count for count in i.stage_counts)
            groups[key].append(CompiledCollective(*key, count, bytes_, result, stages))
    totals = []
    for key, group in groups.items():
        count, bytes_, result = (sum(getattr(c, field) for c in group) for field in ("count", "bytes", "result_bytes"))
        totals.append(CompiledCollective(*key, count, bytes_, result, bytes_by_stage(group)))
    return sorted(totals, key=lambda c: -c.bytes)


def bytes_by_stage(collectives: Iterable[CompiledCollective]) -> tuple[float, ...]:
    """Bytes that each stage sends."""
    return tuple(map(sum, zip(*(c.stages for c in collectives), strict=True)))


def spanned_axes(instruction: CollectiveInstruction, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of one group, or of one pair, differ."""
    coordinates = np.array(np.unravel_index(np.array(instruction.groups), tuple(sizes.values())))
    differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))  # coordinates: [axis, group, member]
    return tuple(axis for axis, differs in zip(sizes, differ, strict=True) if differs)


def axes_of(instruction: CollectiveInstruction, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that an instruction runs over; ('?',) for groups that are not all devices along some axes."""
    axes = spanned_axes(instruction, sizes)
    complete = np.prod([sizes[axis] for axis in axes]) == len(instruction.groups[0])
    return axes if complete or instruction.kind == COLLECTIVE_PERMUTE else ("?",)


def part_of(scope: str) -> str:
    """The innermost of PARTS in a scope."""
    parts = re.findall(rf"\b({'|'.join(PARTS)})\b", scope)
    return parts[-1] if parts else "other"
