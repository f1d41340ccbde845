"""Size of a GPU's chunks of logits.

Each chunk reads and writes the table's float32 gradient once: at 128 MiB, 656 tokens, a quarter of what all of GPT-2's
matmuls move.  So chunks are as large as the limits below allow."""

import math

MOST_LOGIT_BYTES = 2**30
"""Most bytes of logits at a time; with more, matmuls move only 2% fewer bytes."""
SHARE_OF_PEAK = 0.1
"""Largest ratio of a chunk's logits to the step's peak."""
TILE = 128
"""Divisor of a chunk's tokens: a GPU's library copies and pads other matrices before it multiplies them."""
MOST_PADDING = 1 / 64
"""Largest share of padding in the last chunk, of all tokens."""


def tokens_per_chunk(tokens: int, logit_bytes: int, peak: float, free: float) -> int | None:
    """Tokens in each chunk, a multiple of TILE; None if no size will do.

    logit_bytes: bytes of one token's logits.
    peak: peak bytes of the step.
    free: most bytes of a chunk that fit."""
    most = min(MOST_LOGIT_BYTES, SHARE_OF_PEAK * peak, free)
    if most < TILE * logit_bytes:
        return None
    fewest = math.ceil(tokens * logit_bytes / most)
    for chunks in range(fewest, 2 * fewest + 1):
        each = TILE * math.ceil(tokens / chunks / TILE)
        if each * logit_bytes <= most and math.ceil(tokens / each) * each <= (1 + MOST_PADDING) * tokens:
            return each
    return None
