"""The collectives of a compiled program, parsed from its HLO text: what each sends, between which devices, how often;
and their sums by mesh axes and part of the step, the counterpart of `expected_collectives`.

Compilers write one thing in many ways.  A TPU's reduce-scatter hides in a fusion called all-reduce-scatter, or in a
ring of permutes beside a matrix product; an asynchronous collective is a pair of instructions; replica groups are
listed, or given as a reshaped range, or as axes of a mesh."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
COLLECTIVE_PERMUTE = "collective-permute"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, "all-to-all", COLLECTIVE_PERMUTE, "collective-broadcast")

PARTS = ("embedding", "blocks", "head", "messages", "weights", "gradients", "scalars")
"""Named scopes of the step, as they appear in the names of compiled operations."""

Shares = Mapping[str, np.ndarray]
"""For each conditional NAME, a branch or a loop of at most one iteration in a scope called when_NAME: the fraction
of its evaluations in which it is true, float [stages]."""


def wire_bytes(kind: str, full_bytes: float, devices: int) -> float:
    """Bytes that each device sends on a ring of `devices`.  full_bytes: of the gathered or unreduced array."""
    if kind == COLLECTIVE_PERMUTE:
        return full_bytes
    return full_bytes * (devices - 1) / devices * (2 if kind == ALL_REDUCE else 1)


@dataclasses.dataclass(frozen=True)
class CollectiveInstruction:
    """One collective instruction of the program that every device runs.

    num_arrays: operands, each of which is one collective.  full_bytes: of the larger side, gathered or unreduced, of
    all operands together.  result_bytes: of the results.  stage_counts: how often it runs in a step, on each pipeline
    stage.  groups: replica groups, devices by their position in the mesh; of a permute, its (source, target) pairs.
    scope: its op_name, which ends in jax's named scopes.  conditional: whether it is in a branch.  lowered_as: how the
    compiler wrote it, where that is not the collective itself."""

    kind: str
    dtype: str
    num_arrays: int
    full_bytes: int
    result_bytes: int
    stage_counts: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]
    scope: str
    conditional: bool
    lowered_as: str | None = None

    @property
    def count(self) -> float:
        """Runs in a step, the mean over the pipeline's stages."""
        return sum(self.stage_counts) / len(self.stage_counts)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one run, on a ring."""
        return wire_bytes(self.kind, self.full_bytes, len(self.groups[0])) if self.groups else 0.0

    @property
    def yields_zeros(self) -> bool:
        """Whether it is a permute without pairs, whose result is zero on every device: XLA has made one of the gather
        and the slice of one array (openxla/xla#45218)."""
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

    @property
    def part(self) -> str:
        """The innermost of PARTS in its scope."""
        return ["other", *re.findall(rf"\b({'|'.join(PARTS)})\b", self.scope)][-1]


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
    count: float
    bytes: float
    result_bytes: float
    stages: tuple[float, ...]


def compiled_collectives(found: list[CollectiveInstruction], sizes: dict[str, int]) -> list[CompiledCollective]:
    """Instructions that send anything, summed where kind, axes, part, dtype and lowering agree; the largest first.

    sizes: of the mesh axes, outermost first."""
    groups: dict[tuple[str, tuple[str, ...], str, str, str | None], list[CollectiveInstruction]] = defaultdict(list)
    for i in found:
        if i.wire_bytes and i.count:
            groups[i.kind, i.axes(sizes), i.part, i.dtype, i.lowered_as].append(i)
    totals = []
    for key, group in groups.items():
        count = sum(i.num_arrays * i.count for i in group)
        sent, result = sum(i.wire_bytes * i.count for i in group), sum(i.result_bytes * i.count for i in group)
        stages = tuple(map(sum, zip(*([i.wire_bytes * n for n in i.stage_counts] for i in group), strict=True)))
        totals.append(CompiledCollective(*key, count, sent, result, stages))
    return sorted(totals, key=lambda c: -c.bytes)


class Instruction(NamedTuple):
    """One line of HLO.  attributes: the text after its operands' opening parenthesis, operands included."""

    name: str
    shape: str
    opcode: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Their names: all that begin with % before the first attribute."""
        return re.findall(r"%([\w.\-]+)", re.split(r"\), [\w\-]+=", self.attributes)[0])

    @property
    def scope(self) -> str:
        """The op_name that jax gave it: the functions and named scopes it was traced in."""
        return self.attributes.partition('op_name="')[2].partition('"')[0]

    def attribute(self, name: str) -> str:
        """The name that follows `name=`; empty if there is none."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""


class _CallPath(NamedTuple):
    """The calls, loops and branches that lead from the entry to a computation.

    counts: how often it runs in a step, float [stages].  conditionals: their names on the path.  fused_kind: the
    collective that the whole computation stands for."""

    counts: np.ndarray
    conditionals: tuple[str, ...] = ()
    fused_kind: str | None = None


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


class HloModule:
    """The text of an HLO module, split into its computations."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations.setdefault(match[2], [])
                self.entry = match[2] if match[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                current.append(Instruction(*match.groups()))

    def collectives(self, devices: int, shares: Shares | None = None) -> list[CollectiveInstruction]:
        """All collectives of one step on this many devices.  A loop's body counts once per iteration, and each branch
        of a conditional without a share as if it were always taken."""
        shares = shares or {}
        stages = max(map(len, shares.values()), default=1)

        def walk(computation: str, path: _CallPath) -> Iterator[CollectiveInstruction]:
            shapes = {i.name: i.shape for i in self.computations[computation]}
            for i in self.computations[computation]:
                if i.opcode.removesuffix("-start") in KINDS:
                    yield _collective(i, shapes, path, devices)
                for callee, callee_path in self._calls(i, path, shares):
                    yield from walk(callee, callee_path)

        return list(walk(self.entry, _CallPath(np.ones(stages))))

    def _calls(self, i: Instruction, path: _CallPath, shares: Shares) -> Iterator[tuple[str, _CallPath]]:
        """The computations that an instruction runs, other than the function of a reduction."""
        if i.opcode in ("fusion", "call", "async-start"):
            if callee := i.attribute("calls") or i.attribute("to_apply"):
                scatters = callee.startswith("all-reduce-scatter")
                yield callee, path._replace(fused_kind=REDUCE_SCATTER if scatters else path.fused_kind)
        elif i.opcode == "while" and (times := self._trip_count(i)) is not None:
            body = i.attribute("body")
            ring = re.search(r"windowed_dot_general_body_(rs|ag)", body)  # of permutes, beside a matrix product
            kind = {"rs": REDUCE_SCATTER, "ag": ALL_GATHER}[ring[1]] if ring else path.fused_kind
            yield body, path._replace(counts=path.counts * times, fused_kind=kind)
        elif i.opcode in ("conditional", "while"):  # this loop has at most one iteration
            branches = [i.attribute("body")]
            if i.opcode == "conditional":
                listed = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
                by_flag = [i.attribute("false_computation"), i.attribute("true_computation")]
                branches = re.findall(r"[\w.\-]+", listed[1]) if listed else by_flag
            name = self._conditional(i, branches, path.conditionals)
            for index, branch in enumerate(branches):
                counts = path.counts
                if name in shares:
                    is_true = index > 0 or i.opcode == "while"
                    counts = counts * (shares[name] if is_true else 1 - shares[name])
                yield branch, _CallPath(counts, (*path.conditionals, name), path.fused_kind)

    def _conditional(self, i: Instruction, branches: list[str], outer: tuple[str, ...]) -> str:
        """NAME of a conditional in a scope called when_NAME, from its own scope; where the compiler dropped that, from
        its branches' instructions; empty if none has one.  outer: the conditionals on the path to it."""
        inner = [each for branch in branches for each in self.computations[branch]]
        for scope in (each.scope for each in (i, *inner)):
            names = [name for name in re.findall(r"\bwhen_(\w+)/(?:cond|while)", scope) if name not in outer]
            if names:
                return names[-1] if scope == i.scope else names[0]
        return ""

    def _trip_count(self, loop: Instruction) -> int | None:
        """None for a loop of at most one iteration: it tests a flag, and does not count up to a number."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known[1])
        condition = self.computations[loop.attribute("condition")]
        if not (compares := [i for i in condition if i.opcode in ("compare", "fusion")]):
            return None
        (compare,) = compares
        constants = {i.name: i.attributes.partition(")")[0] for i in condition if i.opcode == "constant"}
        (limit,) = [int(constants[name]) for name in compare.operands if constants.get(name, "").isdigit()]
        return limit


def _collective(i: Instruction, shapes: dict[str, str], path: _CallPath, devices: int) -> CollectiveInstruction:
    kind, lowered_as = i.opcode.removesuffix("-start"), None
    operands = [array for name in i.operands for array in _arrays(shapes[name])]
    operand_bytes = sum(size for _, size in operands)
    groups = _groups(i.attributes, devices)
    n = len(groups[0]) if groups else 1
    if path.fused_kind == REDUCE_SCATTER and kind == ALL_REDUCE:
        kind, lowered_as = REDUCE_SCATTER, "all-reduce-scatter fusion"
    elif path.fused_kind and kind == COLLECTIVE_PERMUTE:
        lowered_as = f"ring of permutes, a {path.fused_kind}"
    return CollectiveInstruction(
        kind=kind,
        dtype=max(operands, key=lambda array: array[1])[0],
        num_arrays=len(operands),
        full_bytes=operand_bytes * n if kind == ALL_GATHER else operand_bytes,
        result_bytes={ALL_GATHER: operand_bytes * n, REDUCE_SCATTER: operand_bytes // n}.get(kind, operand_bytes),
        stage_counts=tuple(map(float, path.counts)),
        groups=groups,
        scope=i.scope,
        conditional=bool(path.conditionals),
        lowered_as=lowered_as,
    )


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array in a shape, tuples flattened.  The first number in a dtype's name is its bits."""
    found = re.findall(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]", shape)
    sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, _, dims in found]
    return [(dtype, int(bits or 8) * size // 8) for (dtype, bits, _), size in zip(found, sizes, strict=True)]


def _groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """See CollectiveInstruction; all devices in one group where none are listed."""
    if pairs := re.search(r"source_target_pairs=\{([{}\d,]*)\}", text):
        return tuple((int(source), int(target)) for source, target in re.findall(r"(\d+),(\d+)", pairs[1]))
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
