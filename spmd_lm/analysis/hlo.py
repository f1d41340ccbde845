"""The collectives of a compiled program, read from its text: what each sends, to whom, and how often.

Compilers write one thing in many ways.  A TPU's reduce-scatter hides in a fusion called all-reduce-scatter, or in a
ring of permutes beside a matrix product; an asynchronous collective is a pair of instructions; groups of devices are
written out, as a reshaped range, or as axes of a mesh."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

BITS = {"pred": 8, "c64": 64, "c128": 128} | {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}
BITS |= {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of each device's program.

    arrays: operands, each of which is one collective.  full: bytes of its largest side, gathered or unreduced, of all
    operands.  result: bytes of what it leaves.  counts: how often it runs in one step, on each stage of a pipeline.
    groups: the devices that take part, by their place in the mesh; of a permute, its pairs.  conditional: whether it
    stands in a branch.  lowered_as: how the compiler wrote it, if otherwise."""

    kind: str
    dtype: str
    arrays: int
    full: int
    result: int
    counts: tuple[float, ...]
    groups: Groups
    scope: str
    conditional: bool
    lowered_as: str | None = None

    @property
    def count(self) -> float:
        """The mean over the stages."""
        return sum(self.counts) / len(self.counts)

    @functools.cached_property
    def wire(self) -> float:
        """Bytes that a device sends in one run, on a ring."""
        n = len(self.groups[0]) if self.groups else 1
        if self.kind == "collective-permute":
            return self.full
        return self.full * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def scope(self) -> str:
        """Where the program that was compiled says it."""
        named = re.search(r'op_name="([^"]*)"', self.rest)
        return named[1] if named else ""

    def attribute(self, name: str) -> str | None:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class _Path:
    """How one comes to a computation.

    times: how often in a step, on each stage.  conditions: those passed.  fused: the collective that the whole of it
    stands for."""

    times: np.ndarray
    shares: Mapping[str, np.ndarray]
    conditions: tuple[str | None, ...] = ()
    fused: str | None = None

    def through(self, turns: float, fused: str | None) -> "_Path":
        return dataclasses.replace(self, times=self.times * turns, fused=fused or self.fused)

    def under(self, condition: str | None, branch: int) -> "_Path":
        """In a branch of a condition: 0 where it is false."""
        share = self.shares.get(condition or "", None)
        often = 1.0 if share is None else share if branch else 1 - share
        return dataclasses.replace(self, times=self.times * often, conditions=(*self.conditions, condition))


_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")


class Program:
    """An HLO module, as text, taken apart into its computations."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if line and not line[0].isspace():
                if head := _HEAD.match(line):
                    current = self.computations.setdefault(head[2], [])
                    self.entry = head[2] if head[1] else self.entry
            elif match := _LINE.match(line):
                name, shape, opcode, rest = match.groups()
                inside = rest[: _closing(rest)]
                current.append(Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", inside)), rest))

    def collectives(self, devices: int, shares: Mapping[str, np.ndarray] | None = None) -> list[Collective]:
        """Of one step of a program for so many devices.

        Loops count as often as they turn.  shares: for conditions, and loops of one turn or none, in a scope called
        when_NAME how often NAME is true of the times that it is asked, on each stage of a pipeline.  Of other
        conditionals each branch counts as often as the whole."""
        shares = shares or {}
        stages = max((len(share) for share in shares.values()), default=1)
        return list(self._walk(self.entry, _Path(np.ones(stages), shares), devices))

    def _walk(self, computation: str, path: "_Path", devices: int) -> Iterator[Collective]:
        shapes = {i.name: i.shape for i in self.computations[computation]}
        for i in self.computations[computation]:
            kind = i.opcode.removesuffix("-start")
            if kind in KINDS:
                yield _collective(i, kind, shapes, path, devices)
            if i.opcode == "conditional":
                yield from self._branches(i, path, devices)
            if i.opcode == "while" and self._is_condition(i):
                body = i.attribute("body") or ""
                yield from self._walk(body, path.under(self._condition(i, [body], path), 1), devices)
                continue
            for called, turns, inside in self._calls(i):
                yield from self._walk(called, path.through(turns, inside), devices)

    def _branches(self, i: Instruction, path: "_Path", devices: int) -> Iterator[Collective]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
        names = re.findall(r"%?([\w.\-]+)", listed[1]) if listed else []
        names += [n for n in map(i.attribute, ("false_computation", "true_computation")) if n]
        condition = self._condition(i, names, path)
        for branch, name in enumerate(names):
            yield from self._walk(name, path.under(condition, branch), devices)

    def _is_condition(self, loop: Instruction) -> bool:
        """Whether it turns once or not at all: as long as something is true, and not up to a number."""
        condition = self.computations.get(loop.attribute("condition") or "", [])
        counts = any(i.opcode in ("compare", "fusion") for i in condition)
        return bool(condition) and not counts and "known_trip_count" not in loop.rest

    def _condition(self, i: Instruction, branches: list[str], path: "_Path") -> str | None:
        """What a conditional is called: by itself, or, where a compiler has forgotten that, in its branches."""
        within = [each for name in branches for each in self.computations[name]]
        for scope in (each.scope for each in (i, *within)):
            fresh = [name for name in re.findall(r"\bwhen_(\w+)/(?:cond|while)", scope) if name not in path.conditions]
            if fresh:
                return fresh[-1] if scope == i.scope else fresh[0]
        return None

    def _calls(self, i: Instruction) -> Iterator[tuple[str, float, str | None]]:
        """(computation, how often, what it stands for) of those that `i` runs."""
        if i.opcode == "while":
            body, condition = i.attribute("body"), i.attribute("condition")
            assert body and condition, i
            ring = re.search(r"windowed_dot_general_body_(rs|ag)", body)
            inside = {"rs": "reduce-scatter", "ag": "all-gather"}[ring[1]] if ring else None
            yield body, self._turns(i, condition), inside
        elif i.opcode in ("fusion", "call", "async-start") and (
            called := i.attribute("calls") or i.attribute("to_apply")
        ):
            yield called, 1, "reduce-scatter" if called.startswith("all-reduce-scatter") else None

    def _turns(self, loop: Instruction, condition: str) -> int:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(known[1])
        body = self.computations[condition]
        constants = {i.name: int(n[1]) for i in body if i.opcode == "constant" and (n := re.match(r"(\d+)\)", i.rest))}
        (compare,) = [i for i in body if i.opcode in ("compare", "fusion")]
        (limit,) = [constants[name] for name in compare.operands if name in constants]
        return limit


def _closing(text: str) -> int:
    """Where the parenthesis that is open at the start of `text` is closed."""
    depth = 1
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at
    return len(text)


def _arrays(shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each array in a shape, tuples flattened."""
    found = re.findall(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,]*)\]", shape)
    size = lambda dtype, dims: BITS.get(dtype, 8) * math.prod(map(int, filter(None, dims.split(",")))) // 8  # noqa: E731
    return [(dtype, size(dtype, dims)) for dtype, dims in found if dtype in BITS or dtype.startswith("f8")]


def _collective(i: Instruction, kind: str, shapes: dict[str, str], path: _Path, devices: int) -> Collective:
    operands = [array for name in i.operands for array in _arrays(shapes[name])]
    sent = sum(size for _, size in operands)
    groups = _pairs(i.rest) if kind == "collective-permute" else _groups(i.rest, devices)
    n = len(groups[0]) if groups else 1
    full = sent * n if kind == "all-gather" else sent
    result = {"all-gather": sent * n, "reduce-scatter": sent // n}.get(kind, sent)
    lowered_as = None
    fused = path.fused
    if fused == "reduce-scatter" and kind == "all-reduce":
        kind, result, lowered_as = fused, sent // n, "all-reduce-scatter fusion"
    elif fused and kind == "collective-permute":
        lowered_as = f"ring of permutes, a {fused}"
    dtype = max(operands, key=lambda array: array[1])[0]
    counts, conditional = tuple(map(float, path.times)), bool(path.conditions)
    return Collective(
        kind, dtype, len(operands), full, result, counts, groups, i.scope, conditional, lowered_as=lowered_as
    )


def _pairs(text: str) -> Groups:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", text + "}")
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{?(\d+),(\d+)\}", pairs[1] + "}")) if pairs else ()


def _groups(text: str, devices: int) -> Groups:
    if full := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        rows = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", full[1])]
    elif cut := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in cut.groups())
        rows = np.arange(devices).reshape(dims).transpose(order).reshape(shape).tolist()
    elif meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([\w.]+)'=(\d+)", meshed[1])}
        within = [list(sizes).index(axis) for axis in re.findall(r"'([\w.]+)'", meshed[2])]
        ids = np.moveaxis(np.arange(devices).reshape(*sizes.values()), within, range(-len(within), 0))
        rows = ids.reshape(-1, math.prod(ids.shape[-len(within) :])).tolist()
    else:
        rows = [list(range(devices))]  # none are named: all
    return tuple(sorted(tuple(sorted(row)) for row in rows))
