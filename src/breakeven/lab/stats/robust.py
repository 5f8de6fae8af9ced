"""Hodges–Lehmann: the median of all pairwise means, with the exact signed-rank interval. One outlying launch cannot
move it far. Assumes that block log ratios are symmetric; source: Hollander, Wolfe, Chicken, Nonparametric Statistical
Methods (2014), 3.2–3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.stats.student import check_confidence, t_tail


@dataclass(frozen=True, slots=True)
class RobustEstimate:
    """A ratio. Signed ranks take few values: `achieved_confidence` is what the interval has, at least what was asked;
    with too few blocks (5 or fewer at 95%) there is none."""

    ratio: float
    ci_low: float | None
    ci_high: float | None
    blocks: int
    achieved_confidence: float | None


def signed_rank_distribution(blocks: int) -> NDArray[np.float64]:
    """P(W = w) of Wilcoxon's signed-rank sum under symmetry; shape (blocks · (blocks + 1) / 2 + 1,)."""
    distribution = np.zeros(blocks * (blocks + 1) // 2 + 1)
    distribution[0] = 1.0
    for rank in range(1, blocks + 1):
        shifted = np.zeros_like(distribution)
        shifted[rank:] = distribution[:-rank]
        distribution = (distribution + shifted) / 2
    return distribution


def hodges_lehmann(logs: Sequence[float], confidence: float = 0.95) -> RobustEstimate:
    """The Hodges–Lehmann ratio of one log ratio per block. Raises ValueError without blocks or for non-finite ones."""
    check_confidence(confidence)
    data = np.asarray(logs, dtype=np.float64)
    if data.ndim != 1 or data.size == 0 or not np.all(np.isfinite(data)):
        raise ValueError("Hodges–Lehmann needs at least one block and finite log ratios")
    blocks = int(data.size)
    rows, columns = np.triu_indices(blocks)
    walsh = np.sort((data[rows] + data[columns]) / 2)
    ratio = math.exp(float(np.median(walsh)))
    cumulative = np.cumsum(signed_rank_distribution(blocks))
    # The interval between the (c+1)-th smallest and largest mean misses with probability 2 P(W <= c).
    below = int(np.count_nonzero(2 * cumulative <= (1 - confidence) * (1 + 1e-12)))
    if below == 0:
        return RobustEstimate(ratio, None, None, blocks, None)
    low, high = walsh[below - 1], walsh[len(walsh) - below]
    return RobustEstimate(ratio, math.exp(low), math.exp(high), blocks, float(1 - 2 * cumulative[below - 1]))


def outlying(logs: Sequence[float], alpha: float = 0.01) -> list[int]:
    """Positions of values that do not belong with the others: each against the rest by its deleted t, Bonferroni.

    For normal values the chance of naming any is at most `alpha`. None under 4 values. Source: F. E. Grubbs,
    "Procedures for detecting outlying observations in samples" (1969), whose statistic is a function of this one.
    """
    data = np.asarray(logs, dtype=np.float64)
    count = int(data.size)
    found = []
    for index in range(count if count >= 4 else 0):
        rest = np.delete(data, index)
        error = float(rest.std(ddof=1)) * math.sqrt(1 + 1 / (count - 1))
        distance = abs(float(data[index] - rest.mean()))
        if error > 0 and 2 * count * t_tail(distance / error, count - 2) <= alpha:
            found.append(index)
    return found
