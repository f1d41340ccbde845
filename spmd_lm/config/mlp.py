"""The kinds of MLPs, one section each; a layer kind may have its own."""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field
from pydantic.types import NonNegativeFloat, PositiveFloat

from spmd_lm.config.section import Section
from spmd_lm.config.types import MOST, Count


class DenseMLP(Section):
    """One MLP, model.mlp_width wide, for all tokens."""

    kind: Literal["dense"] = "dense"


class MoE(Section):
    """Experts, of which a router chooses a few for each token (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961)."""

    kind: Literal["moe"]
    experts: Annotated[int, Field(ge=2, le=MOST)]
    per_token: Count = 2  # experts of each token
    width: Count | None = None  # hidden width of each expert; default: mlp_width
    # tokens that an expert takes in training, in multiples of an even share of a group's; none: as many as choose it
    capacity: PositiveFloat | Literal["none"] = 1.25
    group: Count | None = None  # tokens of a row among which capacity is counted; default: all
    renormalize: bool = True  # gates of a token sum to 1; false: they are the router's probabilities
    balance_loss: NonNegativeFloat = 0.01  # coefficient of the load balancing loss (arXiv:2101.03961, section 2.2)
    z_loss: NonNegativeFloat = 0.001  # coefficient of the router's z-loss (arXiv:2202.08906, section 3.3)
    shared: Count | None = None  # hidden width of an MLP for all tokens, beside the experts; default: there is none
    shared_gate: bool = False  # its output is multiplied by a sigmoid of a projection of the token (Qwen2-MoE)

    def slots(self, tokens: int) -> int:
        """Tokens of a group of this size that one expert has room for in training; rounded up, as of decimals."""
        if self.capacity == "none":
            return tokens
        return min(tokens, math.ceil(Fraction(str(self.capacity)) * self.per_token * tokens / self.experts))


MLPKind = Annotated[DenseMLP | MoE, Field(discriminator="kind")]
