"""The rule tables: which mesh axes shard each named dimension, of activations and of the state kept between steps.

Each kind of parallelism is a few rows.  PARAMETERS and activation_rules list every name; another name is an error, not
an unsharded dimension."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec as P

from spmd_lm.axes import (
    BATCH_AXES,
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_ZERO_DIMS,
    EXPERTS,
    MODEL,
    PIPE,
    SEQUENCE,
    TIME,
    ZERO_AXES,
    ZERO_DIMS,
    DimNames,
    mesh_axes_of,
)
from spmd_lm.errors import LayoutError

Table = Mapping[str, tuple[str, ...]]
"""Mesh axes by dimension name, outermost first."""

PARAMETER_NAMES = (
    *("layers", "position", "type", *ZERO_DIMS, "heads", "kv_heads", "head_width", "rank"),
    *("mlp", "vocab", "feature", "label", EXPERTS),
)
NAMES = ("batch", TIME, SEQUENCE, *ZERO_DIMS.values(), *EXPERT_ZERO_DIMS.values(), *PARAMETER_NAMES)
REPLICATED: Table = dict.fromkeys(NAMES, ())

TENSOR: Table = {"heads": (MODEL,), "kv_heads": (MODEL,), "mlp": (MODEL,), "vocab": (MODEL,)}
"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): matrices that begin a branch become column-parallel, the one that
ends it row-parallel.  The paper's f and g are `copy_to_region` and `reduce_from_region` of ops/collectives.py: one
all-reduce per branch forward, one backward."""

SEQUENCE_PARALLEL: Table = {SEQUENCE: (MODEL,)}
"""Sequence parallelism (arXiv:2205.05198, section 4.2.2): between the branches the residual stream is sharded along the
sequence.  f then all-gathers and g reduce-scatters, in place of one all-reduce: the same bytes.  Norms, dropout and
saved activations are sharded too; what is saved as shards is gathered once more in backward."""

EXPERT_PARALLEL: Table = {EXPERTS: (EXPERT,)}
"""Expert parallelism (GShard, arXiv:2006.16668): devices along `expert` have different experts, and send each other the
tokens for them."""

CONTEXT_PARALLEL: Table = {TIME: (CONTEXT,)}
"""Context parallelism: devices along `context` have different tokens of the same rows, and only attention needs those
of the others (ops/shared_rows.py).  `sequence` is then a device's shard of its own tokens, so that f and g, the
embedding and the losses are what they are without it."""

USED_IN_PART = ("kv_heads", "head_width", "rank", EXPERTS)
"""Dimensions of parameters that a device uses for its own shards alone, even where it holds all of them: those that
heads share, the unsharded factor of a low-rank matrix, and biases that experts add to a sum over `model` once."""

ZERO: Table = dict.fromkeys(ZERO_DIMS.values(), ZERO_AXES) | dict.fromkeys(EXPERT_ZERO_DIMS.values(), (DATA, CONTEXT))
"""ZeRO (arXiv:1910.02054): the names that `sharded_names` gives to one dimension of every matrix."""

PIPELINE: Table = {"layers": (PIPE,)}


@dataclasses.dataclass(frozen=True)
class Rules:
    table: Table

    def axes(self, name: str | None) -> tuple[str, ...]:
        return () if name is None else self.table[name]

    def spec(self, names: DimNames) -> P:
        """PartitionSpec of an array.  Raises LayoutError if two of its dimensions land on one mesh axis."""
        used = [axis for name in names for axis in self.axes(name)]
        if len(used) != len(set(used)):
            raise LayoutError(f"the dimensions {names} of one array land on the same mesh axis: {used}")
        return P(*(self.axes(name) or None for name in names))

    def with_own(self, rules: Iterable[tuple[str, tuple[str, ...]]]) -> "Rules":
        """Adds rows for a user's own names.  Raises LayoutError for a name that has another row already."""
        if taken := [name for name, axes in rules if name in self.table and self.table[name] != axes]:
            raise LayoutError(f"the dimension '{taken[0]}' has a rule of its own here. Choose another name.")
        return Rules({**self.table, **dict(rules)})

    def replicating(self, names: Iterable[str]) -> "Rules":
        """Replicates these dimensions on every device."""
        return Rules({**self.table, **dict.fromkeys(names, ())})

    def on_mesh(self, mesh_axes: Sequence[str]) -> "Rules":
        """Adapts the table to a mesh where several axes may make up `data`, or `model`."""
        return Rules(
            {name: tuple(a for axis in on for a in mesh_axes_of(axis, mesh_axes)) for name, on in self.table.items()}
        )


def within_hosts_first(rules: Rules) -> Rules:
    """`rules` on a mesh whose `data` is two rings: ZeRO scatters over that within a host first, and gathers over it
    last, so that what a host's devices share crosses the network once."""
    return Rules({name: axes[::-1] if name in ZERO else axes for name, axes in rules.table.items()})


PARAMETERS = Rules({**REPLICATED, **TENSOR, **EXPERT_PARALLEL, **ZERO, **PIPELINE})
"""Rules of parameters, gradients and optimizer state between steps."""


def activation_rules(sequence_parallel: bool) -> Rules:
    """Rules of activations.  sequence_parallel: whether the residual stream is sharded along the sequence."""
    of_stream = SEQUENCE_PARALLEL if sequence_parallel else {}
    return Rules({**REPLICATED, **TENSOR, **EXPERT_PARALLEL, **CONTEXT_PARALLEL, "batch": BATCH_AXES, **of_stream})
