"""Sign-flip tests: under "no effect" each block's log ratio is as likely negative as positive.

Distribution-free but for that symmetry (arms of a block are exchangeable in a randomised order); exact over all 2^B
sign patterns up to B = 16, Monte Carlo with a given seed above. The smallest two-sided p is 2 / 2^B.
Source: R. A. Fisher, The Design of Experiments (1935), III; P. Westfall and S. Young, Resampling-Based Multiple Testing
(1993), for the step-down max-T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXACT_MAX_BLOCKS = 16
TIE = 1e-9  # relative: sums that differ by rounding alone count as equal


@dataclass(frozen=True, slots=True)
class SignFlip:
    """`exact` False: `patterns` random sign patterns were drawn, and p = (1 + hits) / (1 + patterns)."""

    p_value: float
    exact: bool
    patterns: int


def smallest_p(blocks: int) -> float:
    """The smallest two-sided p that any data of `blocks` blocks can reach."""
    return min(1.0, 2.0 / 2.0**blocks)


def blocks_for_holm(tests: int, alpha: float = 0.05) -> int:
    """Blocks from which Holm over `tests` sign-flip tests can reject at all: tests · 2 / 2^B ≤ alpha."""
    if tests < 1 or not 0 < alpha < 1:
        raise ValueError(f"needs at least one test and 0 < alpha < 1, not {tests} and {alpha}")
    blocks = 1
    while tests * smallest_p(blocks) > alpha:
        blocks += 1
    return blocks


def _signs(blocks: int, seed: int, patterns: int) -> tuple[NDArray[np.float64], bool]:
    """Sign patterns, shape (patterns, blocks), of ±1; all of them where that is feasible."""
    if blocks <= EXACT_MAX_BLOCKS:
        bits = (np.arange(2**blocks)[:, None] >> np.arange(blocks)) & 1
        return np.asarray(1.0 - 2.0 * bits, dtype=np.float64), True
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, size=(patterns, blocks))
    return np.asarray(1.0 - 2.0 * drawn, dtype=np.float64), False


def sign_flip(logs: Sequence[float], *, seed: int = 0, patterns: int = 100_000) -> SignFlip:
    """Two-sided test of "the log ratios are symmetric about 0" by |sum|. Raises ValueError without blocks."""
    data = _matrix([[value] for value in logs])
    signs, exact = _signs(data.shape[0], seed, patterns)
    observed = abs(float(data.sum()))
    # Rounding scales with the terms, not with their sum, which may cancel to nothing.
    tie = TIE * float(np.abs(data).sum())
    hits = int(np.count_nonzero(np.abs(signs @ data[:, 0]) >= observed - tie))
    if exact:
        return SignFlip(hits / len(signs), True, len(signs))
    return SignFlip((1 + hits) / (1 + len(signs)), False, len(signs))


def max_t(logs: Sequence[Sequence[float]], *, seed: int = 0, patterns: int = 100_000) -> list[float]:
    """Adjusted two-sided p-values over levels: `logs[b][l]`, shape (blocks, levels), complete.

    Step-down max-T. Flipping whole blocks keeps the correlation between levels, so it is never weaker than Bonferroni.
    The statistic |mean| / root mean square is a monotone function of |t| and survives zero variance.
    Raises ValueError for missing values.
    """
    data = _matrix(logs)
    scale = np.sqrt((data**2).mean(axis=0))
    unit = np.divide(data, scale, out=np.zeros_like(data), where=scale > 0)
    signs, exact = _signs(data.shape[0], seed, patterns)
    observed = np.abs(unit.mean(axis=0))
    flipped = np.abs(signs @ unit) / data.shape[0]
    order = np.argsort(-observed, kind="stable")
    adjusted = np.empty(data.shape[1])
    running = 0.0
    for rank, level in enumerate(order):
        largest = flipped[:, order[rank:]].max(axis=1)
        hits = int(np.count_nonzero(largest >= observed[level] - TIE))
        p = hits / len(signs) if exact else (1 + hits) / (1 + len(signs))
        running = max(running, p)
        adjusted[level] = running
    return [float(p) for p in adjusted]


def _matrix(logs: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    data = np.asarray(logs, dtype=np.float64)
    if data.ndim != 2 or 0 in data.shape:
        raise ValueError("a sign-flip test needs at least one block and one level, and the same levels in every block")
    if not all(math.isfinite(value) for value in data.flat):
        raise ValueError("log ratios must be finite; leave incomplete blocks out")
    return data
