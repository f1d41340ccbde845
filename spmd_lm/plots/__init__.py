"""Pictures of layouts, schedules, costs and training runs, for notebooks and reports.

Each function takes plain data, from `spmd_lm.plan`, `spmd_lm.audit` or metrics.jsonl, and returns a `Figure`, which
notebooks display.  None of them starts a device or imports jax.

    plots.mesh(spmd_lm.plan(config))
    plots.curves({"small": read_records(path)}, "loss")"""

from spmd_lm.plots.bars import collectives, compare, goodput, memory
from spmd_lm.plots.experts import expert_load
from spmd_lm.plots.layouts import mesh, sharding, sharding_of
from spmd_lm.plots.lines import curves
from spmd_lm.plots.pipelines import schedule
from spmd_lm.plots.rings import ring
from spmd_lm.plots.scaling import efficiency, scaling_law
from spmd_lm.plots.style import Figure

__all__ = [
    "Figure",
    "collectives",
    "compare",
    "curves",
    "efficiency",
    "expert_load",
    "goodput",
    "memory",
    "mesh",
    "ring",
    "scaling_law",
    "schedule",
    "sharding",
    "sharding_of",
]
