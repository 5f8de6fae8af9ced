"""Which acceptance length a drafter needs at a load to break even, from arms whose acceptance was set.

An arm of synthetic acceptance length a pays for its drafts, its verification and everything around them, and gets a
tokens out of each round whatever it drafts. Its throughput is a ÷ (time of a round), so at one load the log ratio to
the baseline is log a − log c, with c the cost of a round in rounds of the baseline: a straight line in log a where c
does not change with a, and c is the acceptance length that breaks even. Nothing is made of that but the scale on which
to interpolate: between the lengths that were measured the log ratio is taken as linear in log a, after a non-decreasing
fit, and beyond them nothing is said.

This is `break_even` over load, turned about: the ratio falls steadily with 1 ÷ a, on a log scale. So the point, the
intervals by inverting a paired t test (Fieller) and by resampling whole blocks, and the check that the data do not
contradict a steady rise are the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from breakeven.lab.stats.breakeven import BreakEven, break_even, resampled_interval

MAX_DIGITS = 12


@dataclass(frozen=True, slots=True)
class NeededAcceptance:
    """`length`: tokens a round, bonus token included; None outside the lengths measured, or where the data contradict
    a steady rise, and `note` says which. `ci_low`, `ci_high`: by the paired t test over blocks, None where open
    (`low_open`, `high_open`) or unknown (neither flag). `bootstrap_low`, `bootstrap_high`: by resampling whole blocks,
    None where open or unknown (as the t interval is). `lengths`, `fitted`: the lengths measured, ascending, and the
    fitted log ratio at each.
    """

    length: float | None
    ci_low: float | None
    ci_high: float | None
    low_open: bool
    high_open: bool
    bootstrap_low: float | None
    bootstrap_high: float | None
    note: str
    lengths: tuple[float, ...]
    fitted: tuple[float, ...]
    blocks: int


def needed_acceptance(
    lengths: Sequence[float],
    log_ratios_by_block: Sequence[Sequence[float]],
    confidence: float = 0.95,
    *,
    seed: int = 0,
    resamples: int = 2000,
    anytime: bool = False,
) -> NeededAcceptance:
    """Where the ratio comes up to 1. `log_ratios_by_block[b][i]`: of the arm with `lengths[i]`, nan where a cell is
    invalid; shape (blocks, lengths).

    `resamples` 0: without the bootstrap, which holds the truth less often than it says with few blocks (4 blocks: 87%
    for 95%, tests/lab/test_needed.py), so that it is a check beside the t interval, as for the break-even over load.
    `anytime`: the t interval is replaced by the confidence sequence's. Raises ValueError for lengths below 1, equal
    ones, none, or one without a valid cell.
    """
    if any(not math.isfinite(length) or length < 1 for length in lengths):
        raise ValueError(f"acceptance lengths count the bonus token, so they are at least 1, but are {list(lengths)}")
    loads = [1 / length for length in lengths]
    found = break_even(loads, log_ratios_by_block, confidence, anytime=anytime)
    resampled = None
    if resamples and found.monotone:
        resampled = resampled_interval(
            loads, log_ratios_by_block, seed=seed, confidence=confidence, resamples=resamples
        )  # fmt: skip
    bootstrap_high, bootstrap_low = resampled if resampled is not None else (None, None)  # turned about
    ascending = sorted(lengths)
    return NeededAcceptance(
        length=_turned(found.level),
        ci_low=_turned(found.ci_high),
        ci_high=_turned(found.ci_low),
        low_open=found.high_open,
        high_open=found.low_open,
        bootstrap_low=_turned(bootstrap_low),
        bootstrap_high=_turned(bootstrap_high),
        note=_note(ascending, found),
        lengths=tuple(ascending),
        fitted=tuple(reversed(found.fitted)),
        blocks=found.blocks,
    )


def _turned(load: float | None) -> float | None:
    return None if load is None else float(f"{1 / load:.{MAX_DIGITS}g}")


def _note(lengths: Sequence[float], found: BreakEven) -> str:
    """Only an interval beyond the lengths measured says that the shortest pays, or that not even the longest does."""
    if not found.monotone:
        return "the ratio does not rise steadily with the acceptance length: the arms differ in something else"
    parts = []
    if found.level is None:
        parts.append(_beyond(lengths, found, below=found.fitted[-1] > 0))  # it runs from the longest to the shortest
    if found.blocks == 1:
        parts.append("one block: no interval")
    return "; ".join(parts)


def _beyond(lengths: Sequence[float], found: BreakEven, *, below: bool) -> str:
    """An estimate beyond the lengths measured, and what its interval says of that; without a bound it is not told."""
    length, bound = (lengths[0], _turned(found.ci_low)) if below else (lengths[-1], _turned(found.ci_high))
    end = "only one" if len(lengths) == 1 else "shortest" if below else "longest"
    where = f"{'below' if below else 'above'} {length:g}, the {end} measured"
    if found.blocks == 1:
        return where
    if bound is None:
        return f"not told (by the estimate {where})"
    if bound <= length if below else bound >= length:
        return f"{where} ({'it pays there already' if below else 'not even that pays'})"
    return f"{where} (or {'up' if below else 'down'} to {bound:.2f})"
