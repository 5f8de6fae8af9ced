"""Where an answer falls into a loop, in tokens. Speculation accepts loops far too well, so they are set apart."""

from __future__ import annotations

from collections.abc import Sequence

MIN_REPEATS = 4
MIN_SPAN = 32  # tokens; a shorter repeated tail is a list or a table


def loop_start(tokens: Sequence[int], min_repeats: int = MIN_REPEATS, min_span: int = MIN_SPAN) -> int | None:
    """Index from which the answer only repeats itself to its end; None if it does not.

    A loop is an end made of at least `min_repeats` copies of one unit (the last may be cut) over at least `min_span`
    tokens; the index is behind the loop's first copy, so the unit itself counts as text. Where several units fit, the
    one that covers most of the end is taken.
    """
    size = len(tokens)
    repeats = _prefix_matches(tokens[::-1])
    best: int | None = None
    for period in range(1, size // min_repeats + 1):
        span = repeats[period] + period
        if span >= max(min_repeats * period, min_span):
            start = size - span + period
            best = start if best is None else min(best, start)
    return best


def _prefix_matches(items: Sequence[int]) -> list[int]:
    """At i, the length of the longest common prefix of `items` and `items[i:]` (Gusfield's Z), in linear time."""
    size = len(items)
    matches = [size] + [0] * (size - 1) if size else [0]
    left = right = 0
    for index in range(1, size):
        length = min(right - index, matches[index - left]) if index < right else 0
        while index + length < size and items[length] == items[index + length]:
            length += 1
        matches[index] = length
        if index + length > right:
            left, right = index, index + length
    return matches
