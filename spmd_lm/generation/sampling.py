"""How the next token is chosen.  Apart from `sample.py`, which does it: a wrong choice is refused without jax."""

import dataclasses
import math

from spmd_lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """tokens: how many to add.  temperature 0, or greedy, takes the likeliest.  top_k 0 and top_p 1 keep every
    token."""

    tokens: int = 200
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    greedy: bool = False

    def __post_init__(self):
        problems = []
        if self.tokens < 1:
            problems.append(f"tokens={self.tokens}: ask for at least one")
        if self.temperature and not 1e-6 <= self.temperature < math.inf:  # far less is 0 in float32
            problems.append(
                f"temperature={self.temperature}: use 0 for the likeliest token, or 1e-6 and more for variety"
            )
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k}: use 0 to keep every token, or how many to keep")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: use a share of the probability in (0, 1]")
        if not 0 <= self.seed < 2**32:  # one word of the generator's key
            problems.append(f"seed={self.seed}: use a whole number from 0 to {2**32 - 1}")
        if problems:
            raise ConfigError(*problems)
