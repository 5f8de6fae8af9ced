"""Hierarchical bootstrap: resample blocks, then requests within each. For statistics without a formula, as quantiles.

The interval is the expanded percentile interval: percentiles at Φ(∓√(B / (B − 1)) · t(B − 1)) in place of the plain
ones, which are too narrow for few blocks. Below 10 blocks it is a sensitivity check, not the primary figure: a resample
of few blocks cannot go beyond the most extreme of them.
Sources: A. C. Davison and D. V. Hinkley, Bootstrap Methods (1997), 3.8; T. Hesterberg, "What Teachers Should Know About
the Bootstrap" (2015), 4.1; Kalibera and Jones (2013) for the levels of repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from breakeven.lab.stats.student import check_confidence, normal_tail, t_quantile

Values = NDArray[np.float64]
Statistic = Callable[[Values], float]


@dataclass(frozen=True, slots=True)
class BootstrapEstimate:
    """A ratio arm ÷ baseline of a statistic. With one block the interval is None."""

    ratio: float
    ci_low: float | None
    ci_high: float | None
    blocks: int
    resamples: int


def hierarchical_bootstrap(
    baseline: Sequence[Sequence[float]],
    arm: Sequence[Sequence[float]],
    statistic: Statistic,
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    paired: bool = False,
) -> BootstrapEstimate:
    """The ratio of `statistic` (of the values of all blocks together) between the arms.

    `baseline[b]`, `arm[b]`: the requests' values in block b. `paired`: value i of both answers the same prompt, and
    both are resampled alike. A resample draws the same blocks for both arms, because they share a block's conditions.
    Raises ValueError for unpaired or empty blocks, non-finite values, or a statistic that is not positive.
    """
    check_confidence(confidence)
    ours, theirs = _checked(baseline, arm, paired)
    point = _log_ratio(statistic, ours, theirs)
    blocks = len(ours)
    if blocks == 1:
        return BootstrapEstimate(math.exp(point), None, None, 1, 0)
    generator = np.random.Generator(np.random.PCG64(seed))
    logs = np.empty(resamples)
    for resample in range(resamples):
        drawn_ours, drawn_theirs = [], []
        for block in generator.integers(0, blocks, size=blocks):
            index = generator.integers(0, ours[block].size, size=ours[block].size)
            other = index if paired else generator.integers(0, theirs[block].size, size=theirs[block].size)
            drawn_ours.append(ours[block][index])
            drawn_theirs.append(theirs[block][other])
        logs[resample] = _log_ratio(statistic, drawn_ours, drawn_theirs)
    low, high = expanded_percentiles(logs, blocks, confidence)
    return BootstrapEstimate(math.exp(point), math.exp(low), math.exp(high), blocks, resamples)


def expanded_percentiles(values: Values, blocks: int, confidence: float) -> tuple[float, float]:
    """The interval of resampled values, widened for the number of blocks (at least 2)."""
    tail = normal_tail(math.sqrt(blocks / (blocks - 1)) * t_quantile((1 + confidence) / 2, blocks - 1))
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def expansion_of(confidence: float, blocks: int) -> float:
    """The confidence whose plain percentiles `expanded_percentiles` takes: how much it widens."""
    t = t_quantile((1 + confidence) / 2, blocks - 1)
    return float(2 * special.ndtr(math.sqrt(blocks / (blocks - 1)) * t) - 1)


def _checked(
    baseline: Sequence[Sequence[float]], arm: Sequence[Sequence[float]], paired: bool
) -> tuple[list[Values], list[Values]]:
    if len(baseline) != len(arm) or not baseline:
        raise ValueError(f"needs the same blocks of both arms, at least one, not {len(baseline)} and {len(arm)}")
    ours = [np.asarray(values, dtype=np.float64) for values in baseline]
    theirs = [np.asarray(values, dtype=np.float64) for values in arm]
    for block, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.size == 0 or b.size == 0:
            raise ValueError(f"block {block} has no values of one arm")
        if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
            raise ValueError(f"block {block} has values that are not finite")
        if paired and a.size != b.size:
            raise ValueError(f"block {block} is not paired: {a.size} and {b.size} values")
    return ours, theirs


def _log_ratio(statistic: Statistic, ours: Sequence[Values], theirs: Sequence[Values]) -> float:
    a, b = statistic(np.concatenate(ours)), statistic(np.concatenate(theirs))
    if a <= 0 or b <= 0:
        raise ValueError(f"a ratio needs a positive statistic, but it is {a} and {b}")
    return math.log(b) - math.log(a)
