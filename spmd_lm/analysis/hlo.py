"""The collectives of a compiled program, parsed from its HLO text: what each sends, between which devices, how often.

Compilers write one thing in many ways.  A TPU's reduce-scatter hides in a fusion called all-reduce-scatter, or in a
ring of permutes beside a matrix product; an asynchronous collective is a pair of instructions; replica groups are
listed, or given as a reshaped range, or as axes of a mesh."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from spmd_lm.analysis.ring import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER, wire_bytes

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, "all-to-all", COLLECTIVE_PERMUTE, "collective-broadcast")

BITS = {"pred": 8, "c64": 64, "c128": 128} | {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}
BITS |= {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}

Groups = tuple[tuple[int, ...], ...]


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
    groups: Groups
    scope: str
    conditional: bool
    lowered_as: str | None = None

    @property
    def count(self) -> float:
        """Runs in a step, the mean over the pipeline's stages."""
        return sum(self.stage_counts) / len(self.stage_counts)

    @functools.cached_property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one run, on a ring."""
        return wire_bytes(self.kind, self.full_bytes, len(self.groups[0]) if self.groups else 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.  attributes: the text after its operands' opening parenthesis, operands included."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def scope(self) -> str:
        """The op_name that jax gave it: the functions and named scopes it was traced in."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def attribute(self, name: str) -> str | None:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class _CallPath:
    """The calls, loops and branches that lead from the entry to a computation.

    counts: how often it runs in a step, float [stages].  shares: see HloModule.collectives.  conditions: names of the
    conditions on the path.  fused_kind: the collective that the whole computation stands for."""

    counts: np.ndarray
    shares: Mapping[str, np.ndarray]
    conditions: tuple[str | None, ...] = ()
    fused_kind: str | None = None

    def call(self, times: float, fused_kind: str | None) -> "_CallPath":
        return dataclasses.replace(self, counts=self.counts * times, fused_kind=fused_kind or self.fused_kind)

    def branch(self, condition: str | None, index: int) -> "_CallPath":
        """Into a branch of a conditional: 0 is taken where `condition` is false."""
        share = self.shares.get(condition or "")
        counts = self.counts
        if share is not None:
            counts = counts * (share if index else 1 - share)
        return dataclasses.replace(self, counts=counts, conditions=(*self.conditions, condition))


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


class HloModule:
    """The text of an HLO module, split into its computations."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if line and not line[0].isspace():
                if match := _COMPUTATION.match(line):
                    current = self.computations.setdefault(match[2], [])
                    self.entry = match[2] if match[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                name, shape, opcode, rest = match.groups()
                operands = re.findall(r"%([\w.\-]+)", rest[: _closing_parenthesis(rest)])
                current.append(Instruction(name, shape, opcode, tuple(operands), rest))

    def collectives(self, devices: int, shares: Mapping[str, np.ndarray] | None = None) -> list[CollectiveInstruction]:
        """All collectives of one step on this many devices.

        A loop's body counts once per iteration.  shares: for conditions, and loops of at most one iteration, in a scope
        called when_NAME: the fraction of its evaluations in which NAME is true, float [stages].  In any other
        conditional each branch counts as if it were always taken."""
        shares = shares or {}
        stages = max((len(share) for share in shares.values()), default=1)
        return list(self._walk(self.entry, _CallPath(np.ones(stages), shares), devices))

    def _walk(self, computation: str, path: _CallPath, devices: int) -> Iterator[CollectiveInstruction]:
        shapes = {i.name: i.shape for i in self.computations[computation]}
        for i in self.computations[computation]:
            kind = i.opcode.removesuffix("-start")
            if kind in KINDS:
                yield _collective(i, kind, shapes, path, devices)
            elif i.opcode == "conditional":
                branches = _branches(i)
                condition = self._condition(i, branches, path)
                for index, branch in enumerate(branches):
                    yield from self._walk(branch, path.branch(condition, index), devices)
            elif i.opcode == "while" and self._is_conditional_loop(i):
                body = i.attribute("body") or ""
                yield from self._walk(body, path.branch(self._condition(i, [body], path), 1), devices)
            elif i.opcode == "while":
                body = i.attribute("body") or ""
                yield from self._walk(body, path.call(self._trip_count(i), _ring_of_permutes(body)), devices)
            elif i.opcode in ("fusion", "call", "async-start"):
                callee = i.attribute("calls") or i.attribute("to_apply")
                if callee:
                    fused_kind = REDUCE_SCATTER if callee.startswith("all-reduce-scatter") else None
                    yield from self._walk(callee, path.call(1, fused_kind), devices)

    def _is_conditional_loop(self, loop: Instruction) -> bool:
        """Whether a loop has at most one iteration: it tests a flag, and does not count up to a number."""
        condition = self.computations.get(loop.attribute("condition") or "", [])
        counts = any(i.opcode in ("compare", "fusion") for i in condition)
        return bool(condition) and not counts and "known_trip_count" not in loop.attributes

    def _condition(self, i: Instruction, branches: list[str], path: _CallPath) -> str | None:
        """NAME of a condition in a scope called when_NAME, from its own scope, or where the compiler dropped that, from
        its branches' instructions."""
        inner = [each for name in branches for each in self.computations[name]]
        for scope in (each.scope for each in (i, *inner)):
            names = re.findall(r"\bwhen_(\w+)/(?:cond|while)", scope)
            names = [name for name in names if name not in path.conditions]
            if names:
                return names[-1] if scope == i.scope else names[0]
        return None

    def _trip_count(self, loop: Instruction) -> int:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known[1])
        constants = {}
        condition = self.computations[loop.attribute("condition") or ""]
        for i in condition:
            if i.opcode == "constant" and (value := re.match(r"(\d+)\)", i.attributes)):
                constants[i.name] = int(value[1])
        (compare,) = [i for i in condition if i.opcode in ("compare", "fusion")]
        (limit,) = [constants[name] for name in compare.operands if name in constants]
        return limit


def _branches(conditional: Instruction) -> list[str]:
    """The computations of a conditional's branches; of two, the one for false first."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    names = re.findall(r"%?([\w.\-]+)", listed[1]) if listed else []
    named = map(conditional.attribute, ("false_computation", "true_computation"))
    return names + [name for name in named if name]


def _ring_of_permutes(loop_body: str) -> str | None:
    """The collective that a loop over a matrix product's parts stands for, if it is one."""
    match = re.search(r"windowed_dot_general_body_(rs|ag)", loop_body)
    return {"rs": REDUCE_SCATTER, "ag": ALL_GATHER}[match[1]] if match else None


def _closing_parenthesis(text: str) -> int:
    """Index of the parenthesis that closes the one opened just before `text`."""
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return index
    return len(text)


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array in a shape, tuples flattened."""
    arrays = []
    for dtype, dims in re.findall(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,]*)\]", shape):
        if dtype in BITS or dtype.startswith("f8"):
            elements = math.prod(map(int, filter(None, dims.split(","))))
            arrays.append((dtype, BITS.get(dtype, 8) * elements // 8))
    return arrays


def _collective(
    i: Instruction, kind: str, shapes: dict[str, str], path: _CallPath, devices: int
) -> CollectiveInstruction:
    operands = [array for name in i.operands for array in _arrays(shapes[name])]
    operand_bytes = sum(size for _, size in operands)
    groups = _permute_pairs(i.attributes) if kind == COLLECTIVE_PERMUTE else _replica_groups(i.attributes, devices)
    n = len(groups[0]) if groups else 1
    lowered_as = None
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
        conditional=bool(path.conditions),
        lowered_as=lowered_as,
    )


def _permute_pairs(text: str) -> Groups:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", text + "}")
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{?(\d+),(\d+)\}", pairs[1] + "}")) if pairs else ()


def _replica_groups(text: str, devices: int) -> Groups:
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
    else:
        groups = [list(range(devices))]  # none listed: all devices
    return tuple(sorted(tuple(sorted(group)) for group in groups))
