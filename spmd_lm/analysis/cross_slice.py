"""All-reduces between TPU slices, which the devices' hosts run.

Compiled, each is a send and a receive; only their attributes tell that they are a collective."""

import dataclasses
import re
from collections.abc import Iterator

from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.cost_model.wire import ALL_REDUCE

Groups = tuple[tuple[int, ...], ...]


def read_collectives_across_slices(module: HloModule, groups: Groups) -> list[str]:
    """Replaces the receive of each all-reduce between slices by an all-reduce-start of its send's operand, in a
    `module` that nothing has read yet.  Returns XLA's names of other transfers between slices.

    groups: devices at the same place in each slice."""
    listed, others = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups), []
    for name, body in module.computations.items():
        others += [kind for i in body if i.opcode == "send" and (kind := _kind(i)) not in ("", "ALL_REDUCE")]
        module.computations[name] = list(_read(body, listed))
    return sorted(set(others))


def _read(body: list[Instruction], groups: str) -> Iterator[Instruction]:
    """Places a start where the later of send and receive was: its operand exists there."""
    ends = [i for i in body if i.opcode in ("send", "recv") and _kind(i) == "ALL_REDUCE"]
    of_transfer: dict[str, dict[str, Instruction]] = {}
    for i in ends:
        of_transfer.setdefault(_attribute(i, "_xla_host_transfer_rendezvous"), {})[i.opcode] = i
    for i in body:
        if i not in ends:
            yield i
            continue
        pair = of_transfer[_attribute(i, "_xla_host_transfer_rendezvous")]
        if len(pair) == 2 and i is list(pair.values())[1]:
            send, receive = pair["send"], pair["recv"]
            attributes = f"%{send.operands[0]}), replica_groups={{{groups}}}, {receive.attributes}"
            yield dataclasses.replace(receive, opcode=f"{ALL_REDUCE}-start", attributes=attributes)


def _kind(i: Instruction) -> str:
    return _attribute(i, "_xla_megascale_transfer_type")


def _attribute(i: Instruction, name: str) -> str:
    found = re.search(rf'{name}="([^"]*)"', i.attributes)
    return found[1] if found else ""
