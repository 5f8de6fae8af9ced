"""Break-even: the load at which the log ratio of throughput crosses zero, and speculation stops paying.

*Point*: the blocks' mean log ratios, made non-increasing in load (isotonic fit), joined linearly over log load;
break-even is where that crosses 0.

*Interval*: all loads x at which the blocks do not reject "the log ratio at x is 0". Per block the log ratios are joined
over log load; at each x they are one value per block, and a t test asks whether their mean is 0 (Fieller's
construction, solved exactly as a quadratic between levels). Its coverage is the t test's, whatever the slope, so it
holds for few blocks, where resampling three launches does not, and it opens by itself where the data do not bound the
break-even.
`resampled_interval`, which refits the monotone curve to every resample of blocks, is the sensitivity check.

*Monotonicity* is tested: for every pair of levels a one-sided paired t test of "the ratio rises with load", Holm over
the pairs. If it is rejected there is no break-even, and the intervals of load where the arm pays are given instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.stats.bootstrap import expanded_percentiles
from breakeven.lab.stats.isotonic import non_increasing_fit
from breakeven.lab.stats.multiplicity import holm
from breakeven.lab.stats.sequence import critical_t
from breakeven.lab.stats.student import check_confidence, t_quantile, t_tail

MONOTONICITY_ALPHA = 0.05
ENUMERATE_UP_TO = 5000  # resamples of blocks: all of them up to here (5 blocks), else drawn

Logs = NDArray[np.float64]
Critical = Callable[[int], float]  # blocks → the |t| beyond which a mean differs from 0
LoadRange = tuple[float | None, float | None]  # None: open, beyond the levels measured


@dataclass(frozen=True, slots=True)
class BreakEven:
    """`level` None: outside the levels measured, or no single crossing; `note` says which, in words.

    `ci_low`, `ci_high`: None where open (`low_open`, `high_open`), or where there is no interval (neither flag set).
    `surely_pays`, `surely_hurts`: the ranges where the t interval of the mean, at each load by itself, excludes 1.
    `fitted`: the monotone log ratio at each of `levels`. `pays`: the ranges of load where the mean ratio is above 1.
    """

    level: float | None
    ci_low: float | None
    ci_high: float | None
    note: str
    low_open: bool
    high_open: bool
    monotone: bool  # not rejected
    levels: tuple[float, ...]
    fitted: tuple[float, ...]
    pays: tuple[LoadRange, ...]
    blocks: int
    confidence: float
    surely_pays: tuple[LoadRange, ...] = ()
    surely_hurts: tuple[LoadRange, ...] = ()


def break_even(
    levels: Sequence[float],
    log_ratios_by_block: Sequence[Sequence[float]],
    confidence: float = 0.95,
    *,
    anytime: bool = False,
) -> BreakEven:
    """Where does the ratio cross 1? `log_ratios_by_block[b][l]`: shape (blocks, levels); nan where a cell is invalid.

    `anytime`: intervals by the confidence sequence (`sequence`), for campaigns that may stop after any block.

    Raises ValueError without blocks or levels, for equal or non-positive levels, or a level without any valid cell.
    """
    check_confidence(confidence)
    critical = partial(critical_t, confidence=confidence) if anytime else partial(_student, confidence)
    loads, logs = _checked(levels, log_ratios_by_block)
    counts = np.isfinite(logs).sum(axis=0)
    means = np.nanmean(logs, axis=0)
    fit = np.asarray(non_increasing_fit(list(means), list(counts.astype(float))))
    monotone = not rises_with_load(logs)
    level = _crossing(loads, fit)
    blocks = int(logs.shape[0])
    low = high = None
    low_open = high_open = False
    if not monotone:
        level, pays = None, _positive_ranges(loads, means)
        note = f"the ratio does not fall steadily with load; it pays {describe_ranges(pays, loads)}"
    else:
        pays = _positive_ranges(loads, fit)
        note = "" if level is not None else _outside(loads, fit)
        if blocks == 1:
            note = "; ".join(part for part in (note, "one block: no interval") if part)
        else:
            low, high, low_open, high_open = _fieller(loads, logs, critical, level)
            note = "; ".join(part for part in (note, _open_note(loads, low_open, high_open, level)) if part)
    return BreakEven(
        level=level, ci_low=low, ci_high=high, note=note, low_open=low_open, high_open=high_open, monotone=monotone,
        levels=tuple(float(x) for x in loads), fitted=tuple(float(v) for v in fit), pays=pays, blocks=blocks,
        confidence=confidence,
        surely_pays=_sure_ranges(loads, logs, critical, 1) if blocks > 1 else (),
        surely_hurts=_sure_ranges(loads, logs, critical, -1) if blocks > 1 else (),
    )  # fmt: skip


def describe_ranges(ranges: Sequence[LoadRange], levels: Sequence[float] | Logs) -> str:
    """Ranges of load in words; an open end is named by the outermost level measured."""
    if not ranges:
        return "nowhere"
    words = []
    for low, high in ranges:
        start = f"{levels[0]:g} and below" if low is None else f"{low:.3g}"
        end = f"{levels[-1]:g} and above" if high is None else f"{high:.3g}"
        words.append("at every level" if low is None and high is None else f"from {start} to {end}")
    return " and ".join(words)


def rises_with_load(logs: Logs, alpha: float = MONOTONICITY_ALPHA) -> bool:
    """Do the blocks reject "the log ratio does not rise with load"? `logs`: shape (blocks, levels), by rising load."""
    p_values = []
    for i, j in itertools.combinations(range(logs.shape[1]), 2):
        rise = logs[:, j] - logs[:, i]
        rise = rise[np.isfinite(rise)]
        if rise.size < 2:
            continue
        error = float(rise.std(ddof=1)) / math.sqrt(rise.size)
        mean = float(rise.mean())
        p_values.append(t_tail(mean / error, rise.size - 1) if error > 0 else float(mean <= 0))
    return any(p <= alpha for p in holm(p_values))


def resampled_interval(
    levels: Sequence[float],
    log_ratios_by_block: Sequence[Sequence[float]],
    *,
    seed: int,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> LoadRange | None:
    """Expanded percentile interval of the break-even, the monotone curve refitted to each resample of whole blocks.

    All B^B resamples are used where they are at most 5,000. An end is None where the percentile lies outside the
    levels. None with one block. Raises ValueError as `break_even`.
    """
    loads, logs = _checked(levels, log_ratios_by_block)
    blocks = int(logs.shape[0])
    if blocks == 1:
        return None
    if blocks**blocks <= ENUMERATE_UP_TO:
        draws = np.asarray(list(itertools.product(range(blocks), repeat=blocks)))
    else:
        draws = np.random.Generator(np.random.PCG64(seed)).integers(0, blocks, size=(resamples, blocks))
    span = math.log(float(loads[-1])) - math.log(float(loads[0])) + 1.0
    below, above = math.log(float(loads[0])) - span, math.log(float(loads[-1])) + span
    positions = []
    for draw in draws:
        sample = logs[draw]
        present = np.isfinite(sample).any(axis=0)
        if not present.any():
            continue
        sample, at = sample[:, present], loads[present]
        fit = np.asarray(non_increasing_fit(list(np.nanmean(sample, axis=0)), list(np.isfinite(sample).sum(axis=0))))
        crossing = _crossing(at, fit)
        positions.append(math.log(crossing) if crossing is not None else above if fit[-1] > 0 else below)
    low, high = expanded_percentiles(np.asarray(positions), blocks, confidence)
    inside = (math.log(float(loads[0])), math.log(float(loads[-1])))
    return (
        math.exp(low) if inside[0] <= low <= inside[1] else None,
        math.exp(high) if inside[0] <= high <= inside[1] else None,
    )


def _checked(levels: Sequence[float], by_block: Sequence[Sequence[float]]) -> tuple[Logs, Logs]:
    """Levels and log ratios sorted by load."""
    loads = np.asarray(levels, dtype=np.float64)
    logs = np.asarray(by_block, dtype=np.float64)
    if loads.ndim != 1 or loads.size == 0 or not np.all(np.isfinite(loads)) or np.any(loads <= 0):
        raise ValueError(f"levels must be positive and at least one, but are {list(levels)}")
    if len(set(loads.tolist())) != loads.size:
        raise ValueError(f"levels must be distinct, but are {list(levels)}")
    if logs.ndim != 2 or logs.shape[0] == 0 or logs.shape[1] != loads.size:
        raise ValueError(f"log ratios must have one row per block and one column per level, but are {logs.shape}")
    if np.any(np.isinf(logs)):
        raise ValueError("log ratios must be finite, or nan where a cell is invalid")
    empty = loads[~np.isfinite(logs).any(axis=0)]
    if empty.size:
        raise ValueError(f"no valid block at level {empty[0]:g}; leave the level out")
    order = np.argsort(loads)
    return loads[order], logs[:, order]


def _between(low: float, high: float, share: float) -> float:
    """The load at `share` of the way from `low` to `high` on the log scale."""
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _crossing(loads: Logs, curve: Logs) -> float | None:
    """Where the non-increasing curve comes down to 0; None if it is above 0 throughout or below it from the start."""
    if curve[0] < 0 or curve[-1] > 0:
        return None
    if curve[0] == 0:
        return float(loads[0])
    right = int(np.argmax(curve <= 0))
    left = right - 1
    share = float(curve[left] / (curve[left] - curve[right]))
    return _between(float(loads[left]), float(loads[right]), share)


def _positive_ranges(loads: Logs, curve: Logs) -> tuple[LoadRange, ...]:
    """The ranges of load where the curve, linear between levels, is above 0."""
    ranges: list[LoadRange] = []
    inside = bool(curve[0] > 0)
    start: float | None = None
    for i in range(1, len(loads)):
        now = bool(curve[i] > 0)
        if now != inside:
            share = float(curve[i - 1] / (curve[i - 1] - curve[i]))
            at = _between(float(loads[i - 1]), float(loads[i]), share)
            if inside:
                ranges.append((start, at))
            start, inside = at, now
    if inside:
        ranges.append((start, None))
    return tuple(ranges)


def _outside(loads: Logs, fit: Logs) -> str:
    return f"above {loads[-1]:g}" if fit[-1] > 0 else f"below {loads[0]:g}"


def _open_note(loads: Logs, low_open: bool, high_open: bool, level: float | None) -> str:
    if low_open and high_open:
        return "the interval is open at both ends: the data do not bound the break-even"
    if level is None:
        return ""  # "above 250" or "below 1" says it
    if low_open:
        return f"the interval is open below {loads[0]:g}"
    return f"the interval is open above {loads[-1]:g}" if high_open else ""


def _student(confidence: float, blocks: int) -> float:
    """The |t| beyond which a mean of `blocks` values differs from 0."""
    return t_quantile((1 + confidence) / 2, blocks - 1)


def _fieller(
    loads: Logs, logs: Logs, critical: Critical, level: float | None
) -> tuple[float | None, float | None, bool, bool]:
    """(low, high, low_open, high_open): the hull of the loads at which "log ratio 0" is not rejected."""
    found: list[float] = [] if level is None else [level]
    for i in range(len(loads) - 1):
        shares = _not_rejected(logs[:, i], logs[:, i + 1], critical)
        found += [_between(float(loads[i]), float(loads[i + 1]), share) for share in shares]
    first, last = (_sign(logs[:, column], critical) for column in (0, -1))
    # At its first level the curve is significantly above 0, or break-even may lie below; likewise at the last.
    low_open, high_open = first <= 0, last >= 0
    if not found:  # one sign throughout
        if last > 0:
            return float(loads[-1]), None, False, True
        if first < 0:
            return None, float(loads[0]), True, False
    low = None if low_open else min(found, default=None)
    high = None if high_open else max(found, default=None)
    return low, high, low_open, high_open


def _sign(values: Logs, critical: Critical) -> int:
    """1 or −1 if the mean of a level's log ratios is significantly so, else 0."""
    values = values[np.isfinite(values)]
    if values.size < 2:
        return 0
    mean = float(values.mean())
    half = critical(values.size) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return 0 if not math.isfinite(half) or abs(mean) <= half else int(math.copysign(1, mean))


def _not_rejected(left: Logs, right: Logs, critical: Critical) -> list[float]:
    """Shares u in [0, 1] that span all those at which mean² ≤ t² · variance / n for (1 − u) left + u right.

    Blocks that lack a side are left out; with fewer than two blocks nothing can be rejected.
    """
    both = np.isfinite(left) & np.isfinite(right)
    a, slope = left[both], right[both] - left[both]
    n = int(a.size)
    factor = critical(n) ** 2 / n if n > 1 else math.inf
    if math.isinf(factor):
        return [0.0, 1.0]
    covariance = np.cov(np.vstack((a, slope)), ddof=1)
    constant = float(a.mean() ** 2 - factor * covariance[0, 0])
    linear = 2 * float(a.mean() * slope.mean() - factor * covariance[0, 1])
    quadratic = float(slope.mean() ** 2 - factor * covariance[1, 1])
    candidates = [0.0] if constant <= 0 else []
    if constant + linear + quadratic <= 0:
        candidates.append(1.0)
    candidates += [root for root in _roots(quadratic, linear, constant) if 0 < root < 1]
    if slope.mean() != 0:  # where the mean is 0 nothing is rejected; keeps it when rounding hides a double root
        zero = -float(a.mean() / slope.mean())
        candidates += [zero] if 0 <= zero <= 1 else []
    return candidates


def _sure_ranges(loads: Logs, logs: Logs, critical: Critical, sign: int) -> tuple[LoadRange, ...]:
    """The ranges of load where the interpolated mean is significantly positive (`sign` 1) or negative (−1).

    Between two levels the loads not rejected are bounded by the roots of a quadratic, so it is enough to ask in the
    middle of each piece between roots.
    """
    edges: list[tuple[float, float, bool]] = []  # pieces by load, and whether they are sure
    for i in range(len(loads) - 1):
        left, right = float(loads[i]), float(loads[i + 1])
        cuts = sorted({0.0, 1.0, *_not_rejected(logs[:, i], logs[:, i + 1], critical)})
        for start, end in itertools.pairwise(cuts):
            middle = (start + end) / 2
            sure = _sign((1 - middle) * logs[:, i] + middle * logs[:, i + 1], critical) == sign
            edges.append((_between(left, right, start), _between(left, right, end), sure))
    if not edges:  # a single level
        return ((None, None),) if _sign(logs[:, 0], critical) == sign else ()
    ranges: list[LoadRange] = []
    for sure, pieces in itertools.groupby(edges, key=lambda piece: piece[2]):
        if sure:
            held = list(pieces)
            first, last = held[0][0], held[-1][1]
            ranges.append((None if first <= loads[0] else first, None if last >= loads[-1] else last))
    return tuple(ranges)


def _roots(a: float, b: float, c: float) -> list[float]:
    """Real roots of a u² + b u + c."""
    if a == 0:
        return [] if b == 0 else [-c / b]
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return []
    q = -(b + math.copysign(math.sqrt(discriminant), b)) / 2
    return [q / a] if q == 0 else [q / a, c / q]
