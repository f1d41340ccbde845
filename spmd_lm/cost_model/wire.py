"""Kinds of collectives, and the bytes that each sends on a ring."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
COLLECTIVE_PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, COLLECTIVE_PERMUTE, "collective-broadcast")


def wire_bytes(kind: str, full_bytes: float, devices: int) -> float:
    """Bytes that each device sends on a ring of `devices`.  full_bytes: bytes of the gathered or unreduced array."""
    if kind == COLLECTIVE_PERMUTE:
        return full_bytes
    return full_bytes * (devices - 1) / devices * (2 if kind == ALL_REDUCE else 1)
