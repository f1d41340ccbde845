"""Tensor parallelism (Megatron-LM, arXiv:1909.08053) as rows of the rule table.

Splitting `heads`, `mlp` and `vocab` over `model` makes the first matrix of each branch column-parallel and the second
row-parallel.  XLA then inserts the paper's f and g: one all-reduce per branch forward and one backward."""

from spmd_lm.axes import MODEL

ROWS: dict[str, tuple[str, ...]] = {"heads": (MODEL,), "mlp": (MODEL,), "vocab": (MODEL,)}
