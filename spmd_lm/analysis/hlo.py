"""The text of a compiled program, HLO, split into computations and instructions.

Meanings of instructions are in compiled_collectives.py, instruction_costs.py and exposed.py.  A step is megabytes of
text, walked several times: each instruction is parsed once."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple


class HloArray(NamedTuple):
    """One array of a shape.  dtype: HLO's name, such as bf16.  dims: sizes, outermost first."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of HLO.  attributes: the text after its operands' opening parenthesis, operands included."""

    name: str
    shape: str
    opcode: str
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of operands: all that begin with % before the first attribute."""
        return re.findall(r"%([\w.\-]+)", re.split(r"\), [\w\-]+=", self.attributes, maxsplit=1)[0])

    @functools.cached_property
    def arrays(self) -> list[HloArray]:
        """Arrays of the result, tuples flattened."""
        return parse_shape(self.shape)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def elements(self) -> int:
        """Elements of the result."""
        return sum(math.prod(array.dims) for array in self.arrays)

    @property
    def scope(self) -> str:
        """The op_name that jax gave it: the functions and named scopes it was traced in."""
        return self.attributes.partition('op_name="')[2].partition('"')[0]

    @functools.cached_property
    def callee(self) -> str:
        """The computation that a fusion, a call or the start of an asynchronous call runs; empty if there is none."""
        if self.opcode.removesuffix("-start") not in ("fusion", "call", "async"):
            return ""
        return self.attribute("calls") or self.attribute("to_apply") or self.attribute("called_computation")

    @functools.cached_property
    def branches(self) -> list[str]:
        """The computations of a conditional, in order: that of a false flag first."""
        if listed := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            return re.findall(r"[\w.\-]+", listed[1])
        return [self.attribute("false_computation"), self.attribute("true_computation")]

    def attribute(self, name: str) -> str:
        """The name that follows `name=`; empty if there is none."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""


_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_SOURCE_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_SOURCE_ROW = re.compile(r'^(\d+) (".*"|\{.*\})$')
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


class HloModule:
    """An HLO module.

    computations: instructions by computation, in the order of the compiler's schedule, if there is one.
    entry: the computation that a step runs."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        self._sources: dict[str, dict[int, str]] = {}
        for line in text.splitlines():
            if line in _SOURCE_TABLES:
                rows = self._sources.setdefault(line, {})
            elif match := _SOURCE_ROW.match(line):
                rows[int(match[1])] = match[2]
            elif match := _COMPUTATION.match(line):
                current = self.computations.setdefault(match[2], [])
                self.entry = match[2] if match[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                current.append(Instruction(match[2], match[3], match[4], match[5], bool(match[1])))
        self._by_name: dict[str, dict[str, Instruction]] = {}

    def by_name(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation."""
        if computation not in self._by_name:
            self._by_name[computation] = {i.name: i for i in self.computations[computation]}
        return self._by_name[computation]

    def operands(self, computation: str, i: Instruction) -> list[Instruction]:
        """Instructions of `computation` whose results `i` reads, in its order."""
        known = self.by_name(computation)
        return [known[name] for name in i.operands if name in known]

    def source(self, i: Instruction) -> str:
        """FILE:LINE of the innermost frame in which jax traced it; empty if the compiler added it."""
        frame = re.search(r"\bstack_frame_id=(\d+)", i.attributes)
        if not frame or not (location := self._source_row("StackFrames", int(frame[1]), "file_location_id")):
            return ""
        file, line = (self._source_row("FileLocations", location, key) for key in ("file_name_id", "line"))
        return f"{self._sources['FileNames'][file][1:-1]}:{line}"

    def _source_row(self, table: str, number: int, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", self._sources.get(table, {}).get(number, ""))
        return int(found[1]) if found else 0

    def trip_count(self, loop: Instruction) -> int | None:
        """Iterations of a loop; None for at most one: it tests a flag, and does not count up to a number."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known[1])
        condition = self.computations[loop.attribute("condition")]
        if not (compares := [i for i in condition if i.opcode in ("compare", "fusion")]):
            return None
        (compare,) = compares
        constants = {i.name: i.attributes.partition(")")[0] for i in condition if i.opcode == "constant"}
        (limit,) = [int(constants[name]) for name in compare.operands if constants.get(name, "").isdigit()]
        counters = [i.attribute("index") for i in condition if i.opcode == "get-tuple-element"]
        return limit - (self._first_count(loop, int(counters[0])) if len(counters) == 1 else 0)

    def _first_count(self, loop: Instruction, counter: int) -> int:
        """The constant from which a loop counts up, 0 if unknown: a compiler that runs the first iteration apart, as a
        TPU's does before copies to the host, leaves the loop to begin at 1.
        counter: place of the count in the loop's tuple."""
        known = next(self.by_name(name) for name, body in self.computations.items() if loop in body)
        carry = known.get(loop.operands[0])
        count = known.get(carry.operands[counter]) if carry and carry.opcode == "tuple" else None
        while count and count.opcode in ("copy", "bitcast"):
            count = known.get(count.operands[0])
        value = count.attributes.partition(")")[0] if count and count.opcode == "constant" else ""
        return int(value) if value.isdigit() else 0


@functools.lru_cache(maxsize=1 << 16)
def parse_shape(shape: str) -> list[HloArray]:
    """The arrays of a shape, tuples flattened.  The first number in a dtype's name is its bits."""
    arrays = []
    for dtype, bits, sizes in _ARRAY.findall(shape):
        dims = tuple(int(size) for size in sizes.split(",") if size)
        arrays.append(HloArray(dtype, dims, int(bits or 8) * math.prod(dims) // 8))
    return arrays
