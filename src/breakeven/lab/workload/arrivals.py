"""When requests of an open loop are sent: offsets from the start, drawn from a seed. Pure.

Every process is one construction: n + 1 gaps are drawn, and their running sums are scaled so that the n arrivals and
the end fill exactly n ÷ rate seconds. With exponential gaps that is a Poisson process given its number of arrivals
(the arrivals are then n sorted uniform draws; Daley & Vere-Jones, "An Introduction to the Theory of Point Processes",
2003, section 2.1). So the offered rate of a cell is the level asked for, and not off by 1/√n as a free process's is.

Draws come through SHA-256 (`design.stable_hash`), so the same seed gives the same schedule on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

from breakeven.lab.design import stable_hash

Process = Literal["poisson", "gamma", "constant", "trace"]
Offsets = tuple[float, ...]


def uniforms(count: int, *parts: object) -> NDArray[np.float64]:
    """`count` draws from (0, 1), shape (count,), each a function of `parts` and its number alone."""
    return np.asarray([(stable_hash("uniform", *parts, i) % 2**53 + 0.5) / 2**53 for i in range(count)])


def gamma_gaps(count: int, cv: float, *parts: object) -> NDArray[np.float64]:
    """Gaps of mean 1 and coefficient of variation `cv`, gamma-distributed with shape 1/cv² (1: exponential).

    Above 1 arrivals come in bursts, below 1 they are more even than Poisson's. ValueError for cv ≤ 0.
    """
    if not 0 < cv < math.inf:
        raise ValueError(f"the coefficient of variation must be positive, not {cv}")
    shape = 1.0 / cv**2
    return np.asarray(gammaincinv(shape, uniforms(count, *parts)) / shape, dtype=np.float64)


def trace_gaps(times_s: Sequence[float], count: int, start: int) -> NDArray[np.float64]:
    """`count` gaps of a recorded trace from its arrival number `start` on, wrapping round at its end.

    `times_s`: arrival times in seconds, in order, at least two of them and not all equal.
    """
    gaps = np.diff(np.asarray(times_s, dtype=np.float64))
    if gaps.size < 1 or (gaps < 0).any() or not gaps.any():
        raise ValueError("a trace needs at least two arrivals, in order, and not all at the same time")
    return np.asarray(gaps[(start + np.arange(count)) % gaps.size], dtype=np.float64)


def schedule(
    rate: float,
    count: int,
    seed: int,
    *,
    process: Process = "poisson",
    cv: float = 1.0,
    trace: Sequence[float] | None = None,
    ramp: tuple[float, float] = (1.0, 1.0),
) -> Offsets:
    """The send times of `count` requests at a mean of `rate` requests/s: seconds from the start, in order, from 0 on.

    `process`: poisson; gamma with `cv`; constant (evenly, the first at 0); or trace, which takes the gaps of a stretch
    of `trace` (arrival times in seconds) that begins where the seed says, and scales them to the rate: the recorded
    shape at the rate asked for. `ramp`: the rate rises or falls linearly over the cell, from the first number to the
    second in multiples of its mean; they are scaled so that they average 1.

    All offsets lie within [0, count / rate). Raises ValueError for arguments that give no schedule.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"the rate must be positive, not {rate}")
    if count < 0:
        raise ValueError(f"the number of requests must not be negative, and is {count}")
    if min(ramp) < 0 or not 0 < sum(ramp) < math.inf:
        raise ValueError(f"a ramp needs two rates that are not negative, and one that is positive: not {ramp}")
    if count == 0:
        return ()
    if process == "constant":
        positions = np.arange(count, dtype=np.float64)
    else:
        if process == "trace":
            if trace is None:
                raise ValueError("the process trace needs a trace")
            gaps = trace_gaps(trace, count + 1, stable_hash("trace", seed) % max(1, len(trace) - 1))
            if not gaps.any():  # a stretch in which everything came at once
                gaps = np.append(gaps[:-1], 1.0)
        else:
            gaps = gamma_gaps(count + 1, cv if process == "gamma" else 1.0, seed)
        sums = np.cumsum(gaps)
        positions = count * sums[:-1] / sums[-1]
    times = _ramped(np.clip(positions, 0.0, np.nextafter(float(count), 0.0)), count, rate, ramp)
    return tuple(float(t) for t in np.minimum(times, np.nextafter(count / rate, 0.0)))


def _ramped(positions: NDArray[np.float64], count: int, rate: float, ramp: tuple[float, float]) -> NDArray[np.float64]:
    """Positions in [0, count) of a process of rate 1 → times, by the inverse of the cumulative rate.

    Over T = count / rate the rate goes from a to b (a + b = 2 rate), so Λ(t) = a t + (b − a) t² / 2T, which is solved
    for t in the form that loses no digits where b is near a.
    """
    duration = count / rate
    a, b = (2 * rate * value / sum(ramp) for value in ramp)
    curvature = (b - a) / (2 * duration)
    root = np.sqrt(np.maximum(a * a + 4 * curvature * positions, 0.0))
    denominator = a + root
    return np.divide(2 * positions, denominator, out=np.zeros_like(positions), where=denominator > 0)


def offered_rate(offsets: Sequence[float]) -> float | None:
    """Arrivals per second between the first and the last; None with fewer than two, or no time between them."""
    if len(offsets) < 2 or offsets[-1] <= offsets[0]:
        return None
    return (len(offsets) - 1) / (offsets[-1] - offsets[0])


def coefficient_of_variation(offsets: Sequence[float]) -> float | None:
    """Of the gaps between arrivals: 0 for constant, about 1 for Poisson, above for bursts; None with too few."""
    gaps = np.asarray([b - a for a, b in pairwise(offsets)])
    if gaps.size < 2 or not gaps.mean():
        return None
    return float(gaps.std(ddof=1) / gaps.mean())
