"""Sequence parallelism (arXiv:2205.05198, section 4.2.2) as one row of the rule table.

Between the branches the residual stream is split along the sequence, over the axis that splits the branches.
`axes.enter` then gathers where a branch begins and `axes.leave` reduce-scatters where it ends, in place of one
all-reduce: the same bytes, and norms, dropout and saved activations split too."""

from spmd_lm.axes import MODEL

ROWS: dict[str, tuple[str, ...]] = {"sequence": (MODEL,)}
