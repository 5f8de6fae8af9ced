"""Ratios of quantiles between arms, refused where there are too few requests to speak of the quantile.

The floors are those of MLPerf LoadGen's early stopping: to claim a quantile q at confidence c although `tolerated`
requests lie beyond it, n must satisfy P(Binomial(n, 1 − q) ≤ tolerated) ≤ 1 − c. At c = 0.99 and one request beyond,
that gives 64 for p90, 662 for p99 and 6,636 for p99.9. They assume independent requests, which requests of one launch
are not: necessary, not sufficient.
Source: MLCommons inference, loadgen/early_stopping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from breakeven.lab.stats.bootstrap import Values, hierarchical_bootstrap

FLOOR_CONFIDENCE = 0.99
FLOOR_TOLERATED = 1


@dataclass(frozen=True, slots=True)
class QuantileRatio:
    """arm ÷ baseline of one quantile. `ratio` None: refused, and `note` says why."""

    quantile: float
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    blocks: int
    note: str


def requests_floor(quantile: float, *, confidence: float = FLOOR_CONFIDENCE, tolerated: int = FLOOR_TOLERATED) -> int:
    """The fewest independent requests from which the quantile can be claimed. Raises ValueError unless 0 < q < 1."""
    if not 0 < quantile < 1:
        raise ValueError(f"a quantile lies between 0 and 1, not at {quantile}")

    def enough(n: int) -> bool:
        return float(special.bdtr(tolerated, n, 1 - quantile)) <= 1 - confidence

    high = tolerated + 1
    while not enough(high):
        high *= 2
    low = tolerated
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def quantile_ratio(
    baseline: Sequence[Sequence[float]],
    arm: Sequence[Sequence[float]],
    quantile: float,
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> QuantileRatio:
    """The ratio of the arms' quantiles over all blocks, with a hierarchical bootstrap interval.

    `baseline[b]`, `arm[b]`: the requests' values (e.g. latencies in ms) in block b. Refused under `requests_floor`
    requests per arm. Raises ValueError for unpaired or empty blocks or non-positive quantiles.
    """
    blocks = len(baseline)
    floor = requests_floor(quantile)
    fewest = min(sum(len(values) for values in values_of) for values_of in (baseline, arm))
    if fewest < floor:
        reason = f"p{quantile * 100:g} needs at least {floor:,} requests per arm; there are {fewest:,}"
        return QuantileRatio(quantile, None, None, None, blocks, reason)

    def statistic(values: Values) -> float:
        return float(np.quantile(values, quantile))

    estimate = hierarchical_bootstrap(baseline, arm, statistic, seed=seed, confidence=confidence, resamples=resamples)
    note = "one block: no interval" if blocks == 1 else ""
    return QuantileRatio(quantile, estimate.ratio, estimate.ci_low, estimate.ci_high, blocks, note)
