"""Metrics that are ratios of sums over items, with bootstrap confidence intervals.

Items are resampled RESAMPLES times with replacement, always with the same seed: equal figures give equal intervals (B.
Efron, Ann. Statist. 7, 1979: the percentile interval)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

RESAMPLES, SEED = 1000, 0
MOST_DRAWS = 2**20  # at a time: 8 MiB of indices


class Metric(NamedTuple):
    """transform(sum of values / sum of weights) over N items, with an increasing transform."""

    values: np.ndarray  # [N]
    weights: np.ndarray  # [N]
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray

    def of(self, ratio: np.ndarray) -> np.ndarray:
        """The metric for a ratio of sums."""
        with np.errstate(over="ignore"):  # a confidently wrong model's perplexity is infinite
            return self.transform(ratio)


def estimate(metrics: Mapping[str, Metric]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics and their 95% intervals, [low, high]; the same N items are resampled for all."""
    columns = np.stack([column for metric in metrics.values() for column in (metric.values, metric.weights)], axis=1)
    values, intervals = {}, {}
    resampled = _resampled_sums(columns.astype(np.float64))
    for i, (name, metric) in enumerate(metrics.items()):
        value, weight = columns[:, 2 * i : 2 * i + 2].sum(0, dtype=np.float64)
        values[name] = float(metric.of(value / weight))
        drawn = resampled[:, 2 * i] / resampled[:, 2 * i + 1]  # transformed last: quantiles may overflow
        intervals[name] = metric.of(np.quantile(drawn, [0.025, 0.975], method="linear")).tolist()
    return values, intervals


def _resampled_sums(columns: np.ndarray) -> np.ndarray:
    """Sums of columns [N, C] over the items of each resample, [RESAMPLES, C]."""
    items, draw = len(columns), np.random.default_rng(SEED)
    at_a_time = max(1, MOST_DRAWS // items)
    sizes = [min(at_a_time, RESAMPLES - done) for done in range(0, RESAMPLES, at_a_time)]
    return np.concatenate([columns[draw.integers(items, size=(size, items))].sum(axis=1) for size in sizes])
