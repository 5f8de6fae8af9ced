"""Adjusted p-values of several tests: Holm for the declared primary metric over levels, Benjamini–Hochberg otherwise.

Sources: S. Holm (1979), "A simple sequentially rejective multiple test procedure"; Y. Benjamini and Y. Hochberg (1995).
"""

from __future__ import annotations

from collections.abc import Sequence


def _check(p_values: Sequence[float]) -> None:
    for index, p in enumerate(p_values):
        if not 0 <= p <= 1:
            raise ValueError(f"p-value {index} is {p}; it must be in [0, 1]")


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted so that rejecting those ≤ alpha errs at all with probability ≤ alpha, whatever the dependence."""
    _check(p_values)
    count = len(p_values)
    adjusted = [0.0] * count
    running = 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted so that rejecting those ≤ alpha has a false-discovery rate ≤ alpha, if independent or positively so."""
    _check(p_values)
    count = len(p_values)
    adjusted = [0.0] * count
    running = 1.0
    for rank, index in sorted(enumerate(sorted(range(count), key=lambda i: p_values[i]), 1), reverse=True):
        running = min(running, count / rank * p_values[index])
        adjusted[index] = running
    return adjusted
