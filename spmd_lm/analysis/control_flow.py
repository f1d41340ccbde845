"""Execution counts of a compiled program's computations, through calls, loops and conditionals.

Pipeline stages take different branches; jax's named scopes name the condition of each."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.cost_model.wire import ALL_GATHER, REDUCE_SCATTER

Shares = Mapping[str, np.ndarray]
"""Fractions of evaluations in which each conditional NAME, a branch or a loop of at most one iteration in a scope
called when_NAME, is true: float [stages]."""


class CallPath(NamedTuple):
    """The calls, loops and branches that lead from the entry to a computation.

    counts: how often it runs in a step, float [stages].  conditionals: their names on the path.  fused_kind: the
    collective that the whole computation stands for."""

    counts: np.ndarray
    conditionals: tuple[str, ...] = ()
    fused_kind: str | None = None


def path_to_entry(shares: Shares) -> CallPath:
    """The path to the entry, which every stage runs once."""
    return CallPath(np.ones(max(map(len, shares.values()), default=1)))


def calls(module: HloModule, i: Instruction, path: CallPath, shares: Shares) -> Iterator[tuple[str, CallPath]]:
    """The computations that an instruction on `path` runs, other than the function of a reduction.

    A loop's body counts once per iteration, and each branch of a conditional without a share as always taken."""
    if callee := i.callee:
        scatters = callee.startswith("all-reduce-scatter")
        yield callee, path._replace(fused_kind=REDUCE_SCATTER if scatters else path.fused_kind)
    elif i.opcode == "while" and (times := module.trip_count(i)) is not None:
        body = i.attribute("body")
        ring = re.search(r"windowed_dot_general_body_(rs|ag)", body)  # a ring of permutes, beside a matmul
        kind = {"rs": REDUCE_SCATTER, "ag": ALL_GATHER}[ring[1]] if ring else path.fused_kind
        yield body, path._replace(counts=path.counts * times, fused_kind=kind)
    elif i.opcode in ("conditional", "while"):  # this loop has at most one iteration
        branches = i.branches if i.opcode == "conditional" else [i.attribute("body")]
        name = _conditional(module, i, branches, path.conditionals)
        for index, branch in enumerate(branches):
            counts = path.counts
            if name in shares:
                is_true = index > 0 or i.opcode == "while"
                counts = counts * (shares[name] if is_true else 1 - shares[name])
            yield branch, CallPath(counts, (*path.conditionals, name), path.fused_kind)


def kernels(module: HloModule, shares: Shares) -> Iterator[tuple[str, Instruction, np.ndarray]]:
    """Instructions of a step except calls, loops and conditionals, whose callees are walked: (computation,
    instruction, its runs in a step, float [stages]).  A branch without a share counts as if it were always taken."""

    def walk(computation: str, path: CallPath) -> Iterator[tuple[str, Instruction, np.ndarray]]:
        for i in module.computations[computation]:
            if i.opcode in ("while", "conditional", "call"):
                for callee in calls(module, i, path, shares):
                    yield from walk(*callee)
            else:
                yield computation, i, path.counts

    return walk(module.entry, path_to_entry(shares))


def _conditional(module: HloModule, i: Instruction, branches: list[str], outer: tuple[str, ...]) -> str:
    """NAME of a conditional in a scope called when_NAME, from its own scope; where the compiler dropped that, from its
    branches' instructions; empty if none has one.  outer: the conditionals on the path to it."""
    inner = [each for branch in branches for each in module.computations[branch]]
    for scope in (each.scope for each in (i, *inner)):
        names = [name for name in re.findall(r"\bwhen_(\w+)/(?:cond|while)", scope) if name not in outer]
        if names:
            return names[-1] if scope == i.scope else names[0]
    return ""
