"""A blend of corpora by weight: which corpus each sample of a run comes from, a pure function of its index.

After n samples, corpus i has contributed n w_i to within 1 - 1/(2k - 2) < 1, for k corpora with weights w summing to 1
(Tijdeman, "The chairman assignment problem", 1980).  Always taking the corpus that is furthest behind drifts further.

The order has a period: the sum of the weights as integers.  Decimal weights are scaled exactly, unless the period would
exceed MAX_PERIOD; then they are rounded by less than one, or up to one, and the largest makes the sum MAX_PERIOD."""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

MAX_PERIOD = 2**20  # samples: half a second to order them


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest integers proportional to these positive decimals; if rounded, they sum to MAX_PERIOD."""
    exact = [Fraction(str(weight)) for weight in weights]
    ratio = [int(weight * math.lcm(*(each.denominator for each in exact))) for weight in exact]
    ratio = [weight // math.gcd(*ratio) for weight in ratio]
    if (total := sum(ratio)) <= MAX_PERIOD:
        return ratio
    rounded = [max(1, weight * MAX_PERIOD // total) for weight in ratio]
    largest_remainders = sorted(range(len(ratio)), key=lambda i: rounded[i] * total - ratio[i] * MAX_PERIOD)
    for i in largest_remainders[: max(0, MAX_PERIOD - sum(rounded))]:
        rounded[i] += 1
    rounded[rounded.index(max(rounded))] -= max(0, sum(rounded) - MAX_PERIOD)  # makes up for raises to 1
    return rounded


def order(weights: Sequence[int]) -> np.ndarray:
    """One period of the order: the corpus of each sample, uint16 [sum of weights].  Tijdeman's rule: sample j >= 0 of
    corpus i is released once (n + 1) w_i >= j + d, and due by (n + 1) w_i = j + 1 - d, with d = 1/(2k - 2); of the
    released samples, the one due first comes next."""
    k, period = len(weights), sum(weights)
    if k == 1:
        return np.zeros(period, np.uint16)
    corpus = np.repeat(np.arange(k), weights)
    nth = np.concatenate([np.arange(weight) for weight in weights])
    # Multiplied by the period and s = 2k - 2, everything is an integer: j + d becomes s j + 1.
    scale, weight = 2 * k - 2, np.array(weights, np.int64)[corpus]
    release = -(-(scale * nth + 1) * period // (scale * weight))  # the first n + 1 at which it is released
    deadline = (scale * (nth + 1) - 1) * period / (scale * weight)
    urgency = np.lexsort((corpus, deadline))  # the job of each rank
    rank_of_job = np.empty(period, np.int64)
    rank_of_job[urgency] = np.arange(period)
    by_release = np.argsort(release, kind="stable")
    arriving = rank_of_job[by_release].tolist()
    arrived_by = np.searchsorted(release[by_release], np.arange(1, period + 1), side="right").tolist()
    waiting: list[int] = []
    chosen, arrived = [], 0
    for end in arrived_by:
        for rank in arriving[arrived:end]:
            heapq.heappush(waiting, rank)
        arrived = end
        chosen.append(heapq.heappop(waiting))
    return corpus[urgency[chosen]].astype(np.uint16)


class Blend:
    """weights: positive, one for each corpus.
    counts: samples of each corpus in one period [corpora]."""

    def __init__(self, weights: Sequence[float]):
        self.counts = np.array(whole_weights(weights), np.int64)
        self.corpus = order(self.counts.tolist())
        self.period = len(self.corpus)
        self.nth = np.empty(self.period, np.int64)  # number of each sample of a period within its corpus
        for i, count in enumerate(self.counts):
            self.nth[self.corpus == i] = np.arange(count)

    def locate(self, index_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each sample of the run [R], and the sample's number within that corpus [R]."""
        period_R, place_R = np.divmod(index_R, self.period)
        corpus_R = self.corpus[place_R]
        return corpus_R, period_R * self.counts[corpus_R] + self.nth[place_R]

    def counts_before(self, index: int) -> np.ndarray:
        """Samples of each corpus among the first `index` of the run [corpora]."""
        periods, rest = divmod(index, self.period)
        return periods * self.counts + np.bincount(self.corpus[:rest], minlength=len(self.counts))

    def index_of(self, corpus: int, nth: int) -> int:
        """The index in the run of a corpus's nth sample."""
        period, rest = divmod(nth, int(self.counts[corpus]))
        return period * self.period + int(np.flatnonzero(self.corpus == corpus)[rest])
