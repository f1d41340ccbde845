"""Start of each asynchronous operation that an instruction waits for, through tuples and iterations of loops."""

import re
from collections.abc import Iterator

from spmd_lm.analysis.hlo import HloModule, Instruction


class Starts:
    """Starts of the asynchronous instructions of a module."""

    def __init__(self, module: HloModule):
        self.module = module
        self._loops = {  # by their bodies
            i.attribute("body"): (computation, i)
            for computation, body in module.computations.items()
            for i in body
            if i.opcode == "while"
        }
        self._found: dict[tuple[str, str], list[str]] = {}

    def of(self, computation: str, done: Instruction) -> list[str]:
        """Names of starts that `done`, in `computation`, may wait for: in a loop, one before the loop and one in the
        previous iteration."""
        if (key := (computation, done.name)) not in self._found:
            self._found[key] = list(dict.fromkeys(self._trace(computation, done.operands[0], None, set())))
        return self._found[key]

    def _trace(self, computation: str, name: str, element: int | None, seen: set[tuple]) -> Iterator[str]:
        """Starts that a value, or an element of a tuple, comes from."""
        i = self.module.by_name(computation).get(name)
        if not i or (computation, name, element) in seen:
            return
        seen.add((computation, name, element))
        if i.opcode == "get-tuple-element":
            found = re.search(r"\bindex=(\d+)", i.attributes)
            yield from self._trace(computation, i.operands[0], int(found[1]) if found else 0, seen)
        elif i.opcode == "tuple" and element is not None:
            yield from self._trace(computation, i.operands[element], None, seen)
        elif i.opcode == "while" or (i.opcode == "parameter" and computation in self._loops):
            outer, loop = (computation, i) if i.opcode == "while" else self._loops[computation]
            body = loop.attribute("body")
            (root,) = (each for each in self.module.computations[body] if each.is_root)
            yield from self._trace(body, root.name, element, seen)
            yield from self._trace(outer, loop.operands[0], element, seen)
        elif i.opcode in ("bitcast", "copy", "opt-barrier") or i.opcode.endswith("-update"):
            yield from self._trace(computation, i.operands[0], element, seen)
        elif i.opcode.endswith("-start"):
            yield name
