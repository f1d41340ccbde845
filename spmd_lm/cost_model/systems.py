"""How programs run a step: which of their kernels are fused, what they save for backward, and what hides their
communication.  One profile for each system, from systems.yaml; nothing in it depends on a model or a layout."""

import functools
from importlib.resources import files
from typing import Literal, NamedTuple

from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.expected_collectives import ExpectedCollective
from spmd_lm.cost_model.wire import COLLECTIVE_PERMUTE
from spmd_lm.parallel.plan import Plan

Window = Literal["compute", "last_microbatch"]


class System(NamedTuple):
    """systems.yaml says what each figure is."""

    name: str
    source: str
    eager: bool
    attention: Literal["materialized", "fused", "chosen"]
    fuses_elementwise: bool
    logit_bytes: float
    optimizer_bytes: float | None = None
    kernel_overhead: float = 4e-6
    software: float = 1.0
    software_range: tuple[float, float] = (1.0, 1.0)
    hidden_tensor_parallelism: float = 0.0
    beside: dict[str, Window] | Literal["plan"] = {}  # noqa: RUF012 - never changed
    one_adapter: bool = False
    idle_is_free: bool = False
    weight_copies: int = 0

    def hides(self, row: ExpectedCollective, config: RunConfig, plan: Plan) -> Window | None:
        """What hides a collective, if anything."""
        if self.beside != "plan":
            return self.beside.get(row.part)
        depth_first = config.parallel.schedule != "breadth_first"
        hidden = {
            "messages": depth_first,
            "weights": bool(plan.prefetch) or plan.prefetch_chunks,
            "gradients": bool(plan.prefetch) and plan.zero.scatter_per == "layer",
            "blocks": row.kind == COLLECTIVE_PERMUTE,  # products in parts
        }
        return "compute" if hidden.get(row.part) else None

    def fuses_attention(self, config: RunConfig, plan: Plan) -> bool:
        """Whether scores stay on the chip."""
        if self.attention == "chosen":
            return choose_kernel(config, plan.platform, plan.device_kind).kernel != "xla"
        return self.attention == "fused"


@functools.cache
def all_systems() -> dict[str, System]:
    import yaml  # here, as in hardware.py

    rows = yaml.safe_load(files("spmd_lm.cost_model").joinpath("systems.yaml").read_text())
    return {row["name"]: System(**row) for row in rows}


def find_system(name: str) -> System:
    return all_systems()[name]
