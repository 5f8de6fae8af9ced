"""The primary effect: the geometric-mean ratio over blocks with a paired t interval on logs.

The unit of replication is a block (one launch of every arm); requests within a launch are correlated and never n.
With d_b = ln(arm_b / baseline_b): ratio = exp(mean d), interval = exp(mean d ± t(B − 1) · sd(d) / √B), and the p-value
is the paired t test's against a ratio of 1, two-sided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from breakeven.lab.stats.sequence import critical_t, log_e_value
from breakeven.lab.stats.student import check_confidence, t_quantile, t_tail

# From one log ratio per block and a confidence to the estimate: `ratio_from_logs` or `sequence_ratio`.
Estimator = Callable[[Sequence[float], float], "RatioEstimate"]


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """arm ÷ baseline. With one block there is a ratio and nothing else: `ci_*`, `p_value` and `sd_log` are None."""

    ratio: float
    ci_low: float | None
    ci_high: float | None
    blocks: int
    p_value: float | None
    sd_log: float | None  # standard deviation of the blocks' log ratios
    confidence: float = 0.95  # of the interval
    anytime: bool = False  # the interval is a confidence sequence's (`sequence`), valid wherever one stops

    @property
    def log_ratio(self) -> float:
        return math.log(self.ratio)

    @property
    def standard_error(self) -> float | None:
        """Of the mean log ratio; None with one block."""
        return None if self.sd_log is None else self.sd_log / math.sqrt(self.blocks)

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """The two-sided interval of the ratio at another confidence; None with one block, or where it is unbounded."""
        check_confidence(confidence)
        if self.standard_error is None:
            return None
        degrees = self.blocks - 1
        critical = critical_t(self.blocks, confidence) if self.anytime else t_quantile((1 + confidence) / 2, degrees)
        half = critical * self.standard_error
        if not math.isfinite(half):
            return None
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)


def log_ratios(baseline: Sequence[float], arm: Sequence[float]) -> list[float]:
    """ln(arm / baseline), block by block. Raises ValueError for unpaired, non-positive or non-finite values."""
    if len(baseline) != len(arm):
        raise ValueError(f"values must be paired by block, but there are {len(baseline)} and {len(arm)}")
    for name, values in (("baseline", baseline), ("arm", arm)):
        for block, value in enumerate(values):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of block {block} is {value}; a ratio needs positive finite values")
    return [math.log(a) - math.log(b) for b, a in zip(baseline, arm, strict=True)]


def paired_ratio(baseline: Sequence[float], arm: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """The geometric-mean ratio arm ÷ baseline over blocks; `baseline[b]` and `arm[b]` are of the same block.

    Raises ValueError without blocks, or for unpaired, non-positive or non-finite values.
    """
    return ratio_from_logs(log_ratios(baseline, arm), confidence)


def ratio_from_logs(logs: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """As `paired_ratio`, from one log ratio per block."""
    check_confidence(confidence)
    data = np.asarray(logs, dtype=np.float64)
    if data.ndim != 1 or data.size == 0:
        raise ValueError("a ratio needs at least one block")
    if not np.all(np.isfinite(data)):
        raise ValueError("log ratios must be finite; leave invalid blocks out")
    mean, blocks = float(data.mean()), int(data.size)
    if blocks == 1:
        return RatioEstimate(math.exp(mean), None, None, 1, None, None, confidence)
    sd = float(data.std(ddof=1))
    error = sd / math.sqrt(blocks)
    half = t_quantile((1 + confidence) / 2, blocks - 1) * error
    p = float(mean == 0)  # without any spread
    if error > 0:
        p = min(1.0, 2 * t_tail(abs(mean) / error, blocks - 1))
    return RatioEstimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), blocks, p, sd, confidence)


def sequence_ratio(logs: Sequence[float], confidence: float = 0.95) -> RatioEstimate:
    """As `ratio_from_logs`, with the confidence sequence's interval and p = 1 / E (valid at any time of stopping).

    No interval (None) while the sequence is still unbounded. Raises ValueError as `ratio_from_logs`.
    """
    plain = ratio_from_logs(logs, confidence)
    error = plain.standard_error
    if error is None:
        return replace(plain, anytime=True)
    p = float(plain.log_ratio == 0)
    if error > 0:
        p = min(1.0, math.exp(min(0.0, -log_e_value(plain.log_ratio / error, plain.blocks))))
    widened = replace(plain, anytime=True, p_value=p)
    ends = widened.interval(confidence)
    return replace(widened, ci_low=ends[0] if ends else None, ci_high=ends[1] if ends else None)
