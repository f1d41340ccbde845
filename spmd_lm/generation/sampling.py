"""Sampling options, free of jax so that the command line can refuse a bad option before importing it."""

import dataclasses

from spmd_lm.errors import ConfigError

MOST_TOKENS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Checked options of token sampling."""

    tokens: int = 200  # to generate at most; the end of a document ends the text earlier
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    seed: int = 0
    greedy: bool = False  # as temperature 0

    def __post_init__(self):
        problems = []
        if not 1 <= self.tokens <= MOST_TOKENS:
            problems.append(f"tokens={self.tokens}: ask for 1 to {MOST_TOKENS:,}")
        if self.temperature and not 1e-6 <= self.temperature <= 1e6:  # far larger ones have no reciprocal in float32
            problems.append(f"temperature={self.temperature}: use 0 for greedy sampling, or 1e-6 to 1e6")
        if not 0 <= self.top_k < 2**31:
            problems.append(f"top_k={self.top_k}: use the number of tokens to keep, or 0 to keep all")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}: use a probability above 0 and at most 1")
        if not 0 <= self.seed < 2**32:  # one 32-bit word of the random key
            problems.append(f"seed={self.seed}: use an integer from 0 to {2**32 - 1}")
        if problems:
            raise ConfigError(*problems)
