"""What checks are written with: their messages, and the numbers that would do near one that does not."""

import math
from collections.abc import Iterable, Iterator

Messages = Iterator[str]


def divisors(n: int) -> list[int]:
    """In order; all of them up to n = 2**32.  Beyond, where no run is, not those between 65,536 and n / 65,536: looking
    for them would take minutes."""
    small = [d for d in range(1, min(math.isqrt(n), 2**16) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def multiples(n: int, step: int) -> list[int]:
    """The multiples of `step` on either side of `n`."""
    return [m for m in (n // step * step, n // step * step + step) if m]


def nearest(key: str, value: int, choices: Iterable[int]) -> str:
    """The two choices nearest to `value`, as in 'parallel.model=4 or 6'; nothing if there are none."""
    nearest = sorted(sorted(choices, key=lambda n: (abs(n - value), n))[:2])
    return f"{key}={' or '.join(map(str, nearest))}" if nearest else ""
