"""Two one-sided tests (TOST): is the ratio within the margin, both ways?

With delta = ln(1 + margin): reject "mean log ratio ≤ −delta" and "≥ +delta", each by a one-sided t test at alpha. That
is the same as the (1 − 2 alpha) interval of the ratio lying within [1 / (1 + margin), 1 + margin].
Source: D. Schuirmann (1987), "A comparison of the two one-sided tests procedure and the power approach".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from breakeven.lab.stats.ratio import RatioEstimate
from breakeven.lab.stats.student import t_tail


@dataclass(frozen=True, slots=True)
class Equivalence:
    """p-values of the two tests; `p_value` is the larger. All None with one block."""

    p_lower: float | None  # against "the ratio is at most 1 / (1 + margin)"
    p_upper: float | None  # against "the ratio is at least 1 + margin"
    p_value: float | None

    def shown(self, alpha: float) -> bool:
        """Is equivalence shown, each test at `alpha`?"""
        return self.p_value is not None and self.p_value <= alpha


def log_margin(margin: float) -> float:
    """ln(1 + margin). Raises ValueError unless the margin is positive and finite."""
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin must be positive (0.03 means 3%), but is {margin}")
    return math.log1p(margin)


def tost(estimate: RatioEstimate, margin: float) -> Equivalence:
    """Test whether the ratio lies within [1 / (1 + margin), 1 + margin]. Raises ValueError for a bad margin."""
    delta = log_margin(margin)
    error = estimate.standard_error
    if error is None:
        return Equivalence(None, None, None)
    lower, upper = (
        t_tail(distance / error, estimate.blocks - 1) if error > 0 else float(distance <= 0)
        for distance in (estimate.log_ratio + delta, delta - estimate.log_ratio)
    )
    return Equivalence(lower, upper, max(lower, upper))
