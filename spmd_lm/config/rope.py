"""Rotary scalings, `model.rope_scaling`, for rows longer than those of pretraining.

The formulas are in ops/rotary.py; a new kind is a section here and a function there."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from spmd_lm.config.section import Section
from spmd_lm.config.types import Count

Factor = Annotated[float, Field(ge=1, le=1e6)]
Rotations = Annotated[float, Field(ge=1e-6, le=1e6)]
Magnitude = Annotated[float, Field(ge=0, le=1e6)]


class LinearRope(Section):
    """Position interpolation: divides all positions by the factor (arXiv:2306.15595)."""

    kind: Literal["linear"]
    factor: Factor  # by which frequencies are divided


class DynamicRope(Section):
    """NTK-aware: theta grows with the row's length, `model.context`, where that is above `original_context`."""

    kind: Literal["dynamic"]
    factor: Factor  # of the growth of theta
    original_context: Count  # tokens per row of pretraining

    def grown_theta(self, theta: float, context: int, rotated: int) -> float:
        """Theta for rows of `context` tokens.  rotated: rotated features per head, at least 4."""
        growth = max(1.0, context / self.original_context)
        return theta * (self.factor * growth - (self.factor - 1)) ** (rotated / (rotated - 2))


class YarnRope(Section):
    """Long wavelengths are stretched by the factor, short ones are not; scores grow with it (arXiv:2309.00071)."""

    kind: Literal["yarn"]
    factor: Factor  # by which low frequencies are divided
    original_context: Count  # tokens per row of pretraining
    beta_fast: Rotations = 32.0  # rotations over original_context from which a frequency is unchanged
    beta_slow: Rotations = 1.0  # rotations up to which a frequency is divided by the factor; a ramp between them
    attention_factor: Annotated[float, Field(gt=0, le=1e6)] | None = (
        None  # of cosines and sines; default: 0.1 ln(factor) + 1
    )
    # with mscale_all_dim, neither 0: attention_factor is by default the ratio of 0.1 mscale ln(factor) + 1 to the same
    # of mscale_all_dim
    mscale: Magnitude | None = None
    mscale_all_dim: Magnitude | None = None  # see mscale
    truncate: bool = True  # the ramp begins and ends at whole pairs of features

    @model_validator(mode="after")
    def _ramp_has_a_direction(self) -> "YarnRope":
        if self.beta_fast < self.beta_slow:
            raise PydanticCustomError("rope", "expected beta_fast to be at least beta_slow, as 32 and 1")
        return self


class Llama3Rope(Section):
    """Long wavelengths are stretched by the factor, short ones are not: Llama 3.1's (arXiv:2407.21783)."""

    kind: Literal["llama3"]
    factor: Factor  # by which low frequencies are divided
    low_freq_factor: Rotations  # rotations over original_context up to which a frequency is divided by the factor
    high_freq_factor: Rotations  # rotations from which a frequency is unchanged; smooth between them
    original_context: Count  # tokens per row of pretraining

    @model_validator(mode="after")
    def _ramp_has_a_direction(self) -> "Llama3Rope":
        if self.high_freq_factor <= self.low_freq_factor:
            raise PydanticCustomError("rope", "expected high_freq_factor to be more than low_freq_factor, as 4 and 1")
        return self


RopeScaling = Annotated[LinearRope | DynamicRope | YarnRope | Llama3Rope, Field(discriminator="kind")]
