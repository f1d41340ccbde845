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
    """In XLA's ways to write them: in full; as a range, reshaped and transposed; as axes of a mesh (jax 0.12)."""
    if full := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        rows = [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", full[1])]
    elif cut := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in cut.groups())
        rows = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    else:
        meshed = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
        assert meshed, text
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", meshed[1])}
        within = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", meshed[2])]
        ids = np.moveaxis(np.arange(math.prod(sizes.values())).reshape(*sizes.values()), within, range(-len(within), 0))
        rows = ids.reshape(-1, math.prod(ids.shape[-len(within) :])).tolist()
    return frozenset(map(frozenset, rows))


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
