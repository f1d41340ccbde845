"""Size of a GPU's chunks of logits.

Each chunk reads and writes the float32 gradient of the table once: at 128 MiB, 656 tokens of GPT-2, that is a quarter
of its matmuls' traffic.  So chunks are as large as memory allows."""

import math

MOST_LOGIT_BYTES = 2**30
"""Most bytes of logits at a time; with more, matmuls move only 2% fewer bytes."""
SHARE_OF_PEAK = 0.1
"""Largest ratio of logits to all else that a step holds."""
TILE = 128
"""Divisor of a chunk's tokens: a GPU's library copies and pads other matrices before it multiplies them."""
MOST_PADDING = 1 / 64
"""Largest share of padding in the last chunk, of all tokens."""


def tokens_per_chunk(tokens: int, logit_bytes: int, peak: float, free: float) -> int | None:
    """Tokens in each chunk, a multiple of TILE; None if no chunk fits.

    logit_bytes: bytes of one token's logits.
    peak: peak bytes of the step.
    free: bytes left on its device."""
    most = min(MOST_LOGIT_BYTES, SHARE_OF_PEAK * peak, free)
    if most < TILE * logit_bytes:
        return None
    fewest = math.ceil(tokens * logit_bytes / most)
    for chunks in range(fewest, 2 * fewest + 1):
        each = TILE * math.ceil(tokens / chunks / TILE)
        if each * logit_bytes <= most and math.ceil(tokens / each) * each <= (1 + MOST_PADDING) * tokens:
            return each
    return None
