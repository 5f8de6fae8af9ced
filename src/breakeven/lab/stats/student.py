"""Student's t, central and noncentral: the few values the other modules need, typed."""

from __future__ import annotations

import math

from scipy import special


def t_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t lies with `probability`."""
    return float(special.stdtrit(degrees, probability))


def t_tail(value: float, degrees: int) -> float:
    """P(T > value)."""
    return float(special.stdtr(degrees, -value))


def noncentral_t_tail(value: float, degrees: int, noncentrality: float) -> float:
    """P(T > value) for the noncentral t: the power of a t test whose critical value is `value`."""
    if noncentrality > 37:  # scipy's series fails there; the tail is 1 for every critical value that matters
        return 1.0 if noncentrality > value else normal_tail(value - noncentrality)
    return float(1 - special.nctdtr(degrees, noncentrality, value))


def normal_tail(value: float) -> float:
    """P(Z > value) for the standard normal."""
    return float(special.ndtr(-value))


def check_confidence(confidence: float) -> None:
    """Raise ValueError unless 0.5 <= confidence < 1."""
    if not (math.isfinite(confidence) and 0.5 <= confidence < 1):
        raise ValueError(f"confidence must be at least 0.5 and below 1, but is {confidence}")
