"""The rule tables: which mesh axes hold each name, for activations and for what is kept between steps.

Each kind of parallelism adds rows.  A table lists every name; a name that is not listed is an error, not a whole
dimension."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from spmd_lm.axes import BATCH_AXES, DATA, PIPE, Names
from spmd_lm.errors import LayoutError
from spmd_lm.parallel import sequence, tensor, zero

NAMES = ("layers", "batch", "sequence", "position", "type", "width", "heads", "mlp", "vocab", "feature", "label")
WHOLE: dict[str, tuple[str, ...]] = dict.fromkeys(NAMES, ())


@dataclasses.dataclass(frozen=True)
class Rules:
    """A table from name to mesh axes, outermost first."""

    table: Mapping[str, tuple[str, ...]]

    def axes(self, name: str | None) -> tuple[str, ...]:
        return () if name is None else self.table[name]

    def spec(self, names: Names) -> P:
        """Raises LayoutError where two dimensions of one array land on one mesh axis."""
        used = [axis for name in names for axis in self.axes(name)]
        if len(used) != len(set(used)):
            raise LayoutError(f"the dimensions {names} of one array land on the same mesh axis: {used}")
        return P(*(self.axes(name) or None for name in names))

    def with_rings(self, rings: tuple[str, ...]) -> "Rules":
        """The same table where `data` is several axes of a mesh."""
        split = lambda on: tuple(ring for axis in on for ring in (rings if axis == DATA else (axis,)))  # noqa: E731
        return Rules({name: split(on) for name, on in self.table.items()})


PARAMETERS = Rules(WHOLE | tensor.ROWS | zero.ROWS | {"layers": (PIPE,)})


def activations(sequence_parallel: bool) -> Rules:
    """sequence_parallel: whether activations between the branches are split along the sequence."""
    return Rules(WHOLE | tensor.ROWS | {"batch": BATCH_AXES} | (sequence.ROWS if sequence_parallel else {}))
