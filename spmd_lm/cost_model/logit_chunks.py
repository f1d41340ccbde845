"""How many logits a GPU's step computes at a time.

Each chunk of them reads and writes the float32 gradient of the table once: at 128 MiB, 656 tokens of GPT-2, that is a
quarter of all that its matrix products move.  So a step takes as many as its memory has room for."""

import math

MOST_LOGIT_BYTES = 2**30
"""Most bytes of logits at a time; with more, products move 2% less."""
SHARE_OF_PEAK = 0.1
"""Largest share that logits may take of what a step holds without them."""
TILE = 128
"""Tokens of which a chunk has a multiple: a GPU's library copies and pads other matrices before it multiplies them."""
MOST_PADDING = 1 / 64
"""Largest share of tokens that the last chunk may be padded with."""


def tokens_per_chunk(tokens: int, logit_bytes: int, peak: float, free: float) -> int | None:
    """Tokens in each chunk, a multiple of TILE; None if no chunk fits.

    logit_bytes: of one token.  peak: bytes that the step holds where it holds most.  free: what its device has left."""
    most = min(MOST_LOGIT_BYTES, SHARE_OF_PEAK * peak, free)
    if most < TILE * logit_bytes:
        return None
    fewest = math.ceil(tokens * logit_bytes / most)
    for chunks in range(fewest, 2 * fewest + 1):
        each = TILE * math.ceil(tokens / chunks / TILE)
        if each * logit_bytes <= most and math.ceil(tokens / each) * each <= (1 + MOST_PADDING) * tokens:
            return each
    return None
