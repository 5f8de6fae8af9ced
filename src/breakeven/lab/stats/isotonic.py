"""Monotone fits by pooling adjacent violators. Source: Barlow, Bartholomew, Bremner, Brunk (1972)."""

from __future__ import annotations

from collections.abc import Sequence


def non_increasing_fit(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The non-increasing sequence nearest to `values` in weighted least squares. Weights must be positive.

    Raises ValueError for unequal lengths or a weight that is not positive.
    """
    weights = [1.0] * len(values) if weights is None else list(weights)
    if len(weights) != len(values) or any(not weight > 0 for weight in weights):
        raise ValueError("a fit needs one positive weight per value")
    pools: list[tuple[float, float, int]] = []  # (mean, weight, length)
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = float(value), float(weight), 1
        while pools and pools[-1][0] < mean:
            before, its_weight, its_length = pools.pop()
            mean = (mean * total + before * its_weight) / (total + its_weight)
            total, length = total + its_weight, length + its_length
        pools.append((mean, total, length))
    return [mean for mean, _, length in pools for _ in range(length)]
