"""Arms × conditions: does the condition change the effect? Main effects and interactions, paired in blocks, on logs.

With d[b, c] = ln(arm ÷ baseline) of block b under condition c, the interaction of a condition is the contrast
d[b, c] − mean of d[b, other conditions]: one value per block, whatever the number of requests, so the paired t
interval of `ratio` applies as it stands. exp(contrast) is a ratio of ratios: 1.012 means that the arm gains 1.2% more
there than elsewhere. With two conditions their contrasts are opposite, and only the first is given.
The same contrast of the baseline's own log throughput is the main effect of the condition, and the mean over
conditions that of the arm.
Source: D. C. Montgomery, Design and Analysis of Experiments (2017), 5.1 and 3.5 (factorial effects as contrasts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.stats.multiplicity import holm
from breakeven.lab.stats.ratio import Estimator, RatioEstimate, ratio_from_logs


@dataclass(frozen=True, slots=True)
class Contrast:
    """Condition number `condition` against the mean of the others. `p_adjusted`: Holm over the conditions."""

    condition: int
    estimate: RatioEstimate
    p_adjusted: float | None


def contrasts(
    logs: Sequence[Sequence[float]], confidence: float = 0.95, estimate: Estimator = ratio_from_logs
) -> list[Contrast]:
    """Each condition against the mean of the others. `logs[b][c]`: shape (blocks, conditions).

    Blocks with a value missing (nan) are left out. No contrast with fewer than two conditions or without a complete
    block. Raises ValueError for rows of unequal length or infinite values.
    """
    data = _complete(logs)
    blocks, conditions = data.shape
    if blocks == 0 or conditions < 2:
        return []
    others = (data.sum(axis=1, keepdims=True) - data) / (conditions - 1)
    wanted = range(1) if conditions == 2 else range(conditions)
    estimates = [estimate((data - others)[:, c].tolist(), confidence) for c in wanted]
    known = [e.p_value for e in estimates if e.p_value is not None]
    adjusted: Sequence[float | None] = holm(known) if len(known) == len(estimates) else [None] * len(estimates)
    return [Contrast(c, e, p) for c, e, p in zip(wanted, estimates, adjusted, strict=True)]


def main_effect(
    logs: Sequence[Sequence[float]], confidence: float = 0.95, estimate: Estimator = ratio_from_logs
) -> RatioEstimate | None:
    """The mean over conditions, each of the same weight; None without a complete block. Raises ValueError as above."""
    data = _complete(logs)
    return estimate(data.mean(axis=1).tolist(), confidence) if data.size else None


def _complete(logs: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """The rows without a missing value."""
    widths = {len(row) for row in logs}
    if len(widths) > 1:
        raise ValueError(f"every block must have a value (or nan) for every condition, but rows have {sorted(widths)}")
    data = np.asarray(logs, dtype=np.float64).reshape(len(logs), widths.pop() if widths else 0)
    if np.any(np.isinf(data)):
        raise ValueError("log values must be finite, or nan where a cell is invalid")
    return data[np.isfinite(data).all(axis=1)]
