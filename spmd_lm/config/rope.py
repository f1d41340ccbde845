"""Scalings of rotary positions, `model.rope_scaling`, for rows longer than in pretraining.

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
    factor: Factor  # divisor of all frequencies


class DynamicRope(Section):
    """NTK-aware: theta grows with the row's length, `model.context`, beyond `original_context`."""

    kind: Literal["dynamic"]
    factor: Factor  # how fast theta grows
    original_context: Count  # tokens per row in pretraining

    def grown_theta(self, theta: float, context: int, rotated: int) -> float:
        """Theta for rows of `context` tokens.  rotated: rotated features per head, at least 4."""
        growth = max(1.0, context / self.original_context)
        return theta * (self.factor * growth - (self.factor - 1)) ** (rotated / (rotated - 2))


class YarnRope(Section):
    """YaRN stretches long wavelengths by the factor, short ones not, and scores grow with it (arXiv:2309.00071)."""

    kind: Literal["yarn"]
    factor: Factor  # divisor of low frequencies
    original_context: Count  # tokens per row in pretraining
    beta_fast: Rotations = 32.0  # frequencies of at least this many rotations over original_context are unchanged
    beta_slow: Rotations = 1.0  # those of at most this many are divided by factor; in between, a ramp
    # multiplies cosines and sines; default: 0.1 ln(factor) + 1
    attention_factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    # with mscale_all_dim, if neither is 0: attention_factor defaults to
    # (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
    mscale: Magnitude | None = None
    mscale_all_dim: Magnitude | None = None  # see mscale
    truncate: bool = True  # the ramp begins and ends at whole pairs of features

    @model_validator(mode="after")
    def _ramp_has_a_direction(self) -> "YarnRope":
        if self.beta_fast < self.beta_slow:
            raise PydanticCustomError("rope", "expected beta_fast to be at least beta_slow, as 32 and 1")
        return self


class Llama3Rope(Section):
    """Llama 3.1 stretches long wavelengths by the factor, short ones not (arXiv:2407.21783)."""

    kind: Literal["llama3"]
    factor: Factor  # divisor of low frequencies
    low_freq_factor: Rotations  # frequencies of at most this many rotations over original_context are divided by factor
    high_freq_factor: Rotations  # those of at least this many are unchanged; in between, a ramp
    original_context: Count  # tokens per row in pretraining

    @model_validator(mode="after")
    def _ramp_has_a_direction(self) -> "Llama3Rope":
        if self.high_freq_factor <= self.low_freq_factor:
            raise PydanticCustomError("rope", "expected high_freq_factor to be more than low_freq_factor, as 4 and 1")
        return self


RopeScaling = Annotated[LinearRope | DynamicRope | YarnRope | Llama3Rope, Field(discriminator="kind")]
