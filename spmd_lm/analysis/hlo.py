"""The collectives of a compiled program, read from its text: what each sends, to whom, and how often.

Compilers write one thing in many ways.  A TPU's reduce-scatter hides in a fusion called all-reduce-scatter, or in a
ring of permutes beside a matrix product; an asynchronous collective is a pair of instructions; groups of devices are
written out, as a reshaped range, or as axes of a mesh."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

BITS = {"pred": 8, "c64": 64, "c128": 128} | {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}
BITS |= {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of each device's program.

    arrays: operands, each of which is one collective.  full: bytes of its largest side, gathered or unreduced, of all
    operands.  result: bytes of what it leaves.  count: how often it runs in one step.  groups: the devices that take
    part, by their place in the mesh; of a permute, its pairs.  lowered_as: how the compiler wrote it, if otherwise."""

    kind: str
    dtype: str
    arrays: int
    full: int
    result: int
    count: float
    groups: Groups
    scope: str
    lowered_as: str | None = None

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

    def attribute(self, name: str) -> str | None:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None


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

    def collectives(self, devices: int) -> list[Collective]:
        """Of one step of a program for so many devices.  Loops count as often as they turn; of the branches of a
        conditional, each as often as the whole."""
        return list(self._walk(self.entry, 1.0, devices, None))

    def _walk(self, computation: str, times: float, devices: int, fused: str | None) -> Iterator[Collective]:
        shapes = {i.name: i.shape for i in self.computations[computation]}
        for i in self.computations[computation]:
            kind = i.opcode.removesuffix("-start")
            if kind in KINDS:
                yield _collective(i, kind, shapes, times, devices, fused)
            for called, turns, inside in self._calls(i):
                yield from self._walk(called, times * turns, devices, inside or fused)

    def _calls(self, i: Instruction) -> Iterator[tuple[str, float, str | None]]:
        """(computation, how often, what it stands for) of those that `i` runs."""
        if i.opcode == "while":
            body, condition = i.attribute("body"), i.attribute("condition")
            assert body and condition, i
            ring = re.search(r"windowed_dot_general_body_(rs|ag)", body)
            inside = {"rs": "reduce-scatter", "ag": "all-gather"}[ring[1]] if ring else None
            yield body, self._turns(i, condition), inside
        elif i.opcode in ("fusion", "call", "async-start"):
            if called := i.attribute("calls") or i.attribute("to_apply"):
                scatter = "reduce-scatter" if called.startswith("all-reduce-scatter") else None
                yield called, 1, scatter
        elif i.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
            names = re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
            names += [n for n in map(i.attribute, ("true_computation", "false_computation")) if n]
            for name in names:
                yield name, 1, None

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


def _collective(
    i: Instruction, kind: str, shapes: dict[str, str], times: float, devices: int, fused: str | None
) -> Collective:
    operands = [array for name in i.operands for array in _arrays(shapes[name])]
    sent = sum(size for _, size in operands)
    groups = _pairs(i.rest) if kind == "collective-permute" else _groups(i.rest, devices)
    n = len(groups[0]) if groups else 1
    full = sent * n if kind == "all-gather" else sent
    result = {"all-gather": sent * n, "reduce-scatter": sent // n}.get(kind, sent)
    lowered_as = None
    if fused == "reduce-scatter" and kind == "all-reduce":
        kind, result, lowered_as = fused, sent // n, "all-reduce-scatter fusion"
    elif fused and kind == "collective-permute":
        lowered_as = f"ring of permutes, a {fused}"
    scope = re.search(r'op_name="([^"]*)"', i.rest)
    dtype = max(operands, key=lambda array: array[1])[0]
    return Collective(kind, dtype, len(operands), full, result, times, groups, scope[1] if scope else "", lowered_as)


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
