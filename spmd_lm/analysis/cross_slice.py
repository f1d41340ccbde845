"""All-reduces between TPU slices, which the devices' hosts run.

Compiled, each is a send and a receive, and only their attributes say that together they are a collective."""

import copy
import dataclasses
import re

from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.analysis.wire import ALL_REDUCE

Groups = tuple[tuple[int, ...], ...]


def with_collectives_across_slices(module: HloModule, groups: Groups) -> HloModule:
    """`module`, in which the receiving end of each all-reduce between slices is an all-reduce-start of what its sending
    end sends, and what waits for it an all-reduce-done.  groups: devices at the same place of each slice."""
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    read = copy.copy(module)
    read.computations = {name: _read(body, listed) for name, body in module.computations.items()}
    return read


def _read(body: list[Instruction], groups: str) -> list[Instruction]:
    payloads = {_transfer(i): i.operands[0] for i in body if i.opcode == "send" and _transfer(i)}
    started: set[str] = set()

    def read(i: Instruction) -> Instruction:
        if i.opcode == "recv" and _transfer(i) in payloads:
            started.add(i.name)
            attributes = f"%{payloads[_transfer(i)]}), replica_groups={{{groups}}}, {i.attributes}"
            return dataclasses.replace(i, opcode=f"{ALL_REDUCE}-start", attributes=attributes)
        if i.opcode == "recv-done" and i.operands[0] in started:
            return dataclasses.replace(i, opcode=f"{ALL_REDUCE}-done")
        return i

    return [read(i) for i in body]


def _transfer(i: Instruction) -> str:
    """What names both ends of an all-reduce between slices; empty for other instructions."""
    if '_xla_megascale_transfer_type="ALL_REDUCE"' not in i.attributes:
        return ""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]+)"', i.attributes)
    return found[1] if found else ""
