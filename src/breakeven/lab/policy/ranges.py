"""Schedules by batch size: which one follows from depths at measured levels. Pure.

A schedule is a row of inclusive ranges (first, last, depth), from 1, without gaps. Depth 0 is off.

Between two measured levels with different depths nothing was measured. The rule is that a depth runs only where both
neighbours speak for it: at a batch size between levels a < b, a depth is *covered* if it was shown at a and at b not to
fall under the baseline by more than the margin (off always is). Where both levels' depths are covered the switch lies
in the geometric middle, because loads act on a log scale and neither side has the better claim; where one is covered it
takes the whole gap; where none is, the gap is off. So a threshold without evidence on both sides falls back to the
lower safe level, and never the other way. A schedule that was itself measured, and is safe at both levels, is such
evidence for the place of its own switch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Range = tuple[int, int, int]  # first and last batch size, inclusive; depth
OPEN_END = 256  # the end of the last range, or twice the highest level: engines carry it forward


def _no_switch(low: int, high: int) -> int | None:
    return None


def schedule(
    levels: Sequence[int],
    depths: Sequence[int],
    safe: Callable[[int, int], bool],
    switch: Callable[[int, int], int | None] = _no_switch,
) -> tuple[Range, ...]:
    """The ranges for `depths` at `levels` (ascending, at least one). `safe(depth, level)`: was this depth shown at this
    level not to fall under the baseline by more than the margin? Asked only of depths above 0. `switch(low, high)`: the
    last batch size, from `low` to below `high`, at which a measured schedule that is safe at both levels has the lower
    one's depth before it takes the higher one's; None without such a schedule.

    Below the lowest level its depth holds; above the highest one nothing is drafted.
    """

    def covered(depth: int, level: int) -> bool:
        return depth == 0 or safe(depth, level)

    rows: list[Range] = []
    first = 1
    for (low, here), (high, there) in itertools.pairwise(zip(levels, depths, strict=True)):
        if here == there:
            continue
        stays, begins = covered(here, high), covered(there, low)
        if stays or begins:
            ends: int | None = math.isqrt(low * high) if stays and begins else high - 1 if stays else low
        else:
            ends = switch(low, high)
        if ends is not None:
            rows.append((first, ends, here))
            first = ends + 1
        else:
            rows.append((first, low, here))
            if low + 1 < high:
                rows.append((low + 1, high - 1, 0))
            first = high
    top = max(OPEN_END, 2 * levels[-1])
    if depths[-1]:
        rows.append((first, levels[-1], depths[-1]))
        first = levels[-1] + 1
    rows.append((first, top, 0))
    return _merged(rows)


def _merged(rows: Sequence[Range]) -> tuple[Range, ...]:
    """Neighbours of the same depth in one."""
    merged: list[Range] = []
    for first, last, depth in rows:
        if merged and merged[-1][2] == depth:
            merged[-1] = (merged[-1][0], last, depth)
        else:
            merged.append((first, last, depth))
    return tuple(merged)


def depth_at(ranges: Sequence[Sequence[int]], size: int) -> int:
    """The depth at a batch size; between ranges and after the last, that of the range before."""
    index = bisect_right([row[0] for row in ranges], size) - 1
    return ranges[max(index, 0)][2]


def single_switch(ranges: Sequence[Sequence[int]], low: int, high: int) -> int | None:
    """The last batch size with the depth of `low`, if from `low` to `high` the depth changes exactly once."""
    depths = [depth_at(ranges, size) for size in range(low, high + 1)]
    changes = [low + i for i, (here, after) in enumerate(itertools.pairwise(depths)) if here != after]
    return changes[0] if len(changes) == 1 else None


def thresholds(ranges: Sequence[Range]) -> tuple[int, ...]:
    """Batch sizes that are the last ones before another depth."""
    return tuple(last for (_, last, depth), (_, _, after) in itertools.pairwise(ranges) if depth != after)


def probes(ranges: Sequence[Range], levels: Sequence[int]) -> tuple[int, ...]:
    """Levels to confirm a schedule at: the measured ones, and the batch sizes on both sides of each threshold."""
    edges = {size for last in thresholds(ranges) for size in (last, last + 1)}
    return tuple(sorted({*levels, *edges}))
