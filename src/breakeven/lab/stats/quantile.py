"""Ratios of tail quantiles, refused where there are too few requests to speak of the quantile.

*Interval*: per block the log ratio of the arms' quantiles, then the paired t interval over blocks, as for every other
figure. It needs the quantile to lie inside each block's sample, 1 / (1 − q) requests (100 for p99). With fewer per
block the ratio is that of the pooled requests and the interval the hierarchical bootstrap's, which is up to twice as
wide as it need be: resampling requests inside resampled blocks counts the scatter of requests twice (Davison and
Hinkley, Bootstrap Methods, 1997, 3.8). `breakeven selftest` has the coverage of both.

*Floors* are those of MLPerf LoadGen's early stopping: to claim a quantile q at confidence c although `tolerated`
requests lie beyond it, n must satisfy P(Binomial(n, 1 − q) ≤ tolerated) ≤ 1 − c. At c = 0.99 and one request beyond,
that gives 64 for p90, 662 for p99 and 6,636 for p99.9. They assume independent requests, which requests of one launch
are not: necessary, not sufficient. Source: MLCommons inference, loadgen/early_stopping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from breakeven.lab.stats.bootstrap import expanded_percentiles, resampled_quantile_logs
from breakeven.lab.stats.ratio import Estimator, ratio_from_logs

FLOOR_CONFIDENCE = 0.99
FLOOR_TOLERATED = 1
Method = Literal["blocks", "bootstrap"]


@dataclass(frozen=True, slots=True)
class QuantileRatio:
    """arm ÷ baseline of one quantile. `ratio` None: refused, and `note` says why.

    `method`: whence the ratio and its interval; None where there is no interval. `bootstrap_low`, `bootstrap_high`: the
    hierarchical bootstrap's interval, as a sensitivity check. `requests`: of the arm that has fewer, over all blocks.
    """

    quantile: float
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    blocks: int
    note: str
    method: Method | None = None
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    requests: int = 0
    p_value: float | None = None
    block_logs: tuple[float, ...] = ()


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


def block_floor(quantile: float) -> int:
    """Requests of one block from which the quantile lies inside their range: 1 / (1 − q), 100 for p99; at least 2."""
    return max(2, math.ceil(round(1 / (1 - quantile), 6)))


def quantile_ratio(
    baseline: Sequence[Sequence[float]],
    arm: Sequence[Sequence[float]],
    quantile: float,
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 1000,
    estimate: Estimator = ratio_from_logs,
) -> QuantileRatio:
    """The ratio of the arms' quantiles with its interval and, as a sensitivity check, the bootstrap's.

    `baseline[b]`, `arm[b]`: the requests' values (e.g. latencies in ms) in block b. Refused under `requests_floor`
    requests per arm. `resamples` 0: no bootstrap where it is not needed. Raises ValueError for unpaired or empty
    blocks, values that are not finite, or quantiles that are not positive.
    """
    blocks = len(baseline)
    floor = requests_floor(quantile)
    fewest = min(sum(len(values) for values in values_of) for values_of in (baseline, arm))
    if fewest < floor:
        reason = f"p{quantile * 100:g} needs at least {floor:,} requests per arm; there are {fewest:,}"
        return QuantileRatio(quantile, None, None, None, blocks, reason, requests=fewest)
    in_blocks = min(len(values) for values in (*baseline, *arm)) >= block_floor(quantile)
    low = high = None
    if blocks > 1 and (resamples or not in_blocks):
        logs = resampled_quantile_logs(baseline, arm, quantile, seed=seed, resamples=resamples or 1000)
        low, high = (math.exp(end) for end in expanded_percentiles(logs, blocks, confidence))
    if in_blocks:
        block_logs = [_log(theirs, quantile) - _log(ours, quantile) for ours, theirs in zip(baseline, arm, strict=True)]
        found = estimate(block_logs, confidence)
        return QuantileRatio(
            quantile, found.ratio, found.ci_low, found.ci_high, blocks,
            "one block: no interval" if blocks == 1 else "", "blocks" if blocks > 1 else None, low, high, fewest,
            found.p_value, tuple(block_logs),
        )  # fmt: skip
    point = math.exp(_log(np.concatenate(arm), quantile) - _log(np.concatenate(baseline), quantile))
    note = (
        f"fewer than {block_floor(quantile)} requests in some block: the bootstrap's interval, wider than it need be"
        if blocks > 1
        else "one block: no interval"
    )
    return QuantileRatio(
        quantile, point, low, high, blocks, note, "bootstrap" if blocks > 1 else None, low, high, fewest
    )


def _log(values: Sequence[float] | NDArray[np.float64], quantile: float) -> float:
    """ln of the quantile whose expected coverage is the quantile itself (Weibull's plotting position, n + 1)."""
    found = float(np.quantile(np.asarray(values, dtype=np.float64), quantile, method="weibull"))
    if not (math.isfinite(found) and found > 0):
        raise ValueError(f"a ratio needs a positive finite quantile, but it is {found}")
    return math.log(found)
