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
    """Condition number `condition` against the mean of the others. `p_adjusted`: Holm over the conditions.

    Of `crossed_contrasts` the number of a pair, counted by rows.
    """

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
    return _estimated(_against_others(data, 1), _asked(conditions), confidence, estimate)


def crossed_contrasts(
    logs: Sequence[Sequence[Sequence[float]]], confidence: float = 0.95, estimate: Estimator = ratio_from_logs
) -> list[tuple[int, int, Contrast]]:
    """Two factors: does the one change the other's effect? `logs[b][i][j]`: shape (blocks, values, values).

    Of each pair (i, j), the contrast of i against the other values of its factor, at j against the same at the other
    values of j's: exp of it is a ratio of ratios. Where a factor has two values only its first is given. Holm over
    all. Blocks with a value missing (nan) are left out; empty as in `contrasts`. Raises ValueError likewise.
    """
    shapes = {(len(block), *sorted({len(row) for row in block})) for block in logs}
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError(f"every block must have the same table of values, but they have the shapes {sorted(shapes)}")
    rows, columns = shapes.pop() if shapes else (0, 0)
    data = _complete([[value for row in block for value in row] for block in logs])
    if data.shape[0] == 0 or rows < 2 or columns < 2:
        return []
    both = _against_others(_against_others(data.reshape(-1, rows, columns), 1), 2).reshape(-1, rows * columns)
    wanted = [i * columns + j for i in _asked(rows) for j in _asked(columns)]
    found = _estimated(both, wanted, confidence, estimate)
    return [(*divmod(contrast.condition, columns), contrast) for contrast in found]


def _against_others(data: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Each value minus the mean of the others along an axis."""
    others = (data.sum(axis=axis, keepdims=True) - data) / (data.shape[axis] - 1)
    return np.asarray(data - others)


def _asked(values: int) -> range:
    """Of two values the contrasts are opposite, so the first is asked alone."""
    return range(1) if values == 2 else range(values)


def _estimated(
    data: NDArray[np.float64], wanted: Sequence[int], confidence: float, estimate: Estimator
) -> list[Contrast]:
    """The columns' estimates, with Holm over them."""
    estimates = [estimate(data[:, c].tolist(), confidence) for c in wanted]
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
