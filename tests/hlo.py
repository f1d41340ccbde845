"""What a compiled program sends, read from its text."""

import dataclasses
import math
import re

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
COLLECTIVE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{KINDS})(?:-start)?\((?P<rest>.*)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """elements: of all results together.  groups: of device numbers.  looped: runs once per turn of a loop."""

    kind: str
    elements: int
    groups: frozenset[frozenset[int]]
    looped: bool


def _groups(text: str) -> frozenset[frozenset[int]]:
    """From {{0,1},{2,3}}, or from [groups,size]<=[dims]T(order), short for a reshaped and transposed range."""
    if written := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return frozenset(frozenset(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", written[1]))
    short = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert short, text
    shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in short.groups())
    rows = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)
    return frozenset(frozenset(row) for row in rows.tolist())


def collectives(text: str) -> list[Collective]:
    found, entry = [], False
    for line in text.splitlines():
        if line.endswith("{") and "->" in line:
            entry = line.startswith("ENTRY")
        elif match := COLLECTIVE.search(line):
            sizes = re.findall(r"[a-z]+\d*\[([\d,]*)\]", match["shape"])
            elements = sum(math.prod(map(int, filter(None, size.split(",")))) for size in sizes)
            found.append(Collective(match["kind"], elements, _groups(match["rest"]), not entry))
    return found
