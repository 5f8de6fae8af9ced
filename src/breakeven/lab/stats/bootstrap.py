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

_ELEMENTS = 2_000_000  # of an array of resampled counts: keeps the memory of large campaigns at some tens of megabytes

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


def resampled_quantile_logs(
    baseline: Sequence[Sequence[float]],
    arm: Sequence[Sequence[float]],
    quantile: float,
    *,
    seed: int,
    resamples: int = 1000,
) -> Values:
    """Log ratios of a quantile of all blocks together, arm ÷ baseline, over hierarchical resamples: shape (resamples,).

    As `hierarchical_bootstrap`, unpaired, but in arrays: each resample is a row of counts over the sorted values, and
    its quantile is the first value at which the counts reach the share. Blocks are drawn alike for both arms.
    Raises ValueError as `hierarchical_bootstrap`.
    """
    ours, theirs = _checked(baseline, arm, paired=False)
    blocks = len(ours)
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.integers(0, blocks, size=(resamples, blocks))
    logs = [np.log(_resampled_quantiles(side, drawn, quantile, generator)) for side in (ours, theirs)]
    if not np.all(np.isfinite(logs[0]) & np.isfinite(logs[1])):
        raise ValueError("a ratio needs a positive statistic, but some resamples have none")
    return np.asarray(logs[1] - logs[0])


def _resampled_quantiles(
    values: Sequence[Values], drawn: NDArray[np.int64], quantile: float, generator: np.random.Generator
) -> Values:
    """The quantile in each resample. `drawn`: the blocks of each resample, shape (resamples, blocks)."""
    everything = np.concatenate(values)
    sizes = np.asarray([part.size for part in values])
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    order = np.argsort(everything, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    ordered = everything[order]
    resamples = drawn.shape[0]
    found = np.empty(resamples)
    step = max(1, _ELEMENTS // everything.size)
    for first in range(0, resamples, step):
        rows = drawn[first : first + step]
        counts = np.zeros(rows.shape[0] * order.size, dtype=np.int64)
        for column in range(rows.shape[1]):
            size = sizes[rows[:, column]]
            widest = int(size.max())
            at = (generator.random((rows.shape[0], widest)) * size[:, None]).astype(np.int64)
            places = rank[np.minimum(starts[rows[:, column]][:, None] + at, order.size - 1)]
            places += np.arange(rows.shape[0])[:, None] * order.size
            counts += np.bincount(places[np.arange(widest) < size[:, None]], minlength=counts.size)
        cumulative = np.cumsum(counts.reshape(rows.shape[0], order.size), axis=1)
        found[first : first + step] = ordered[(cumulative >= quantile * cumulative[:, -1:]).argmax(axis=1)]
    return found


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
