"""Before and after a run: how small an effect can B blocks see, and how many would it take?

Powers are those of the paired t test on logs (noncentral t), given the standard deviation of the blocks' log ratios:
from a pilot, from A/A blocks, or stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from breakeven.lab.stats.equivalence import log_margin
from breakeven.lab.stats.student import check_confidence, noncentral_t_tail, normal_tail, t_quantile

MAX_BLOCKS = 10_000
DEFAULT_POWER = 0.8


def _check(sd_log: float, power: float) -> None:
    if not (math.isfinite(sd_log) and sd_log >= 0):
        raise ValueError(f"the standard deviation of log ratios must be non-negative and finite, but is {sd_log}")
    if not 0 < power < 1:
        raise ValueError(f"power must lie between 0 and 1, but is {power}")


def noise_floor(sd_log: float, blocks: int, confidence: float = 0.95) -> float | None:
    """Half the width of the ratio's interval, as a share (0.03: ±3%); None with one block.

    A ratio nearer to 1 than this cannot be told from 1.
    """
    _check(sd_log, DEFAULT_POWER)
    check_confidence(confidence)
    if blocks < 2:
        return None
    return math.expm1(t_quantile((1 + confidence) / 2, blocks - 1) * sd_log / math.sqrt(blocks))


def superiority_power(effect: float, sd_log: float, blocks: int, confidence: float = 0.95) -> float:
    """P(the interval excludes 1 on the side of the effect). `effect`: true log ratio; its sign does not matter."""
    if blocks < 2:
        return 0.0
    if sd_log == 0:
        return 1.0 if effect else 0.0
    critical = t_quantile((1 + confidence) / 2, blocks - 1)
    return noncentral_t_tail(critical, blocks - 1, abs(effect) * math.sqrt(blocks) / sd_log)


def equivalence_power(effect: float, sd_log: float, blocks: int, margin: float, confidence: float = 0.95) -> float:
    """P(both one-sided tests at 1 − confidence reject), from below (Bonferroni's bound on the two misses)."""
    delta = log_margin(margin)
    if blocks < 2:
        return 0.0
    if sd_log == 0:
        return 1.0 if abs(effect) < delta else 0.0
    critical = t_quantile(confidence, blocks - 1)
    root = math.sqrt(blocks) / sd_log
    each = (noncentral_t_tail(critical, blocks - 1, distance * root) for distance in (delta - effect, delta + effect))
    return max(0.0, sum(each) - 1)


def verdict_power(effect: float, sd_log: float, blocks: int, margin: float, confidence: float = 0.95) -> float:
    """P(the verdict that is right for this true log ratio): pays or hurts beyond the margin, equivalent within.

    Beyond the margin two things must happen, and the rarer bounds both: the interval excludes 1, and the estimate
    lies beyond the margin.
    """
    beyond = abs(effect) - log_margin(margin)
    if beyond <= 0:
        return equivalence_power(effect, sd_log, blocks, margin, confidence)
    if sd_log == 0:
        return superiority_power(effect, sd_log, blocks, confidence)
    outside = normal_tail(-beyond * math.sqrt(blocks) / sd_log)
    return min(superiority_power(effect, sd_log, blocks, confidence), outside)


def smallest_detectable(
    sd_log: float, blocks: int, confidence: float = 0.95, power: float = DEFAULT_POWER
) -> float | None:
    """The smallest effect, as a share (0.05: +5%), that `blocks` blocks show to differ from 1 with this power.

    None with fewer than 2 blocks. Raises ValueError for a bad standard deviation, confidence or power.
    """
    _check(sd_log, power)
    check_confidence(confidence)
    if blocks < 2:
        return None
    if sd_log == 0:
        return 0.0
    low, high = 0.0, sd_log
    while superiority_power(high, sd_log, blocks, confidence) < power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if superiority_power(middle, sd_log, blocks, confidence) < power:
            low = middle
        else:
            high = middle
    return math.expm1(high)


def blocks_needed(sd_log: float, effect: float, confidence: float = 0.95, power: float = DEFAULT_POWER) -> int | None:
    """Blocks with which an effect of this size (a share: 0.05 is +5%) is shown to differ from 1 with this power.

    None: more than 10,000, or the effect is 0. Raises ValueError for an effect of −100% or less.
    """
    _check(sd_log, power)
    check_confidence(confidence)
    if not (math.isfinite(effect) and effect > -1):
        raise ValueError(f"an effect is a share above -1 (0.05 means +5%), but is {effect}")
    log_effect = math.log1p(effect)
    return _fewest(lambda blocks: superiority_power(log_effect, sd_log, blocks, confidence) >= power)


def blocks_for_verdict(
    sd_log: float, ratio: float, margin: float, confidence: float = 0.95, power: float = DEFAULT_POWER
) -> int | None:
    """Blocks with which a verdict other than "undecided" is reached with this power, if `ratio` is the truth.

    None: more than 10,000, as at the margin itself, where no number suffices.
    """
    _check(sd_log, power)
    check_confidence(confidence)
    if not (math.isfinite(ratio) and ratio > 0):
        raise ValueError(f"a ratio is positive and finite, but is {ratio}")
    effect = math.log(ratio)
    return _fewest(lambda blocks: verdict_power(effect, sd_log, blocks, margin, confidence) >= power)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The fewest blocks, from 2 to MAX_BLOCKS, that are enough; power is taken as rising with blocks."""
    high = 2
    while not enough(high):
        high *= 2
        if high > MAX_BLOCKS:
            if not enough(MAX_BLOCKS):
                return None
            high = MAX_BLOCKS
            break
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
