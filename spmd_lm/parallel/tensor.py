"""Tensor parallelism (Megatron-LM, arXiv:1909.08053) as rows of the rule table.

Splitting `heads`, `mlp` and `vocab` over `model` makes the first matrix of each branch column-parallel and the second
row-parallel.  The paper's f and g are `axes.enter` and `axes.leave`: one all-reduce a branch forward, one backward."""

from spmd_lm.axes import MODEL

ROWS: dict[str, tuple[str, ...]] = {"heads": (MODEL,), "mlp": (MODEL,), "vocab": (MODEL,)}
