"""Verdict by margin: pays, hurts, equivalent, or undecided. "Not significant" is never "equal".

With the margin m (3% unless set), the point estimate r, its two-sided interval [low, high] at the confidence c (95%),
and the interval [low', high'] at 2c − 1 (90%), which is that of two one-sided tests at 1 − c each:

| verdict    | point estimate            | and                                     |
|------------|---------------------------|-----------------------------------------|
| pays       | r > 1 + m                 | low > 1                                 |
| hurts      | r < 1 / (1 + m)           | high < 1                                |
| equivalent | 1 / (1 + m) ≤ r ≤ 1 + m   | low' ≥ 1 / (1 + m) and high' ≤ 1 + m    |
| undecided  | anything else, and always with one block                            |

The point estimate alone decides which verdict is within reach, so no two can hold at once, and more blocks with the
same estimate lead from "undecided" to that one and to no other: a true effect within the margin ends as "equivalent",
one beyond it as "pays" or "hurts". "Pays" errs with probability (1 − c) / 2 at most when there is no effect;
"equivalent" with 1 − c at most when the effect is at the margin. An effect that is real but within the margin is
"equivalent": the margin says what is too small to matter.

For a quantity that is better when smaller (latency), ratios above 1 hurt.
"""

from __future__ import annotations

import math
from typing import Literal

from breakeven.lab.stats.equivalence import log_margin, tost
from breakeven.lab.stats.power import DEFAULT_POWER, blocks_for_verdict
from breakeven.lab.stats.ratio import RatioEstimate

Verdict = Literal["pays", "hurts", "equivalent", "undecided"]
DEFAULT_MARGIN = 0.03


def verdict(estimate: RatioEstimate, margin: float = DEFAULT_MARGIN, *, higher_is_better: bool = True) -> Verdict:
    """The verdict on arm ÷ baseline. Raises ValueError unless the margin is positive."""
    delta = log_margin(margin)
    if estimate.ci_low is None or estimate.ci_high is None:
        return "undecided"
    if abs(estimate.log_ratio) <= delta:
        return "equivalent" if _shown_equivalent(estimate, margin) else "undecided"
    if estimate.ci_low > 1:
        return "pays" if higher_is_better else "hurts"
    if estimate.ci_high < 1:
        return "hurts" if higher_is_better else "pays"
    return "undecided"


def _shown_equivalent(estimate: RatioEstimate, margin: float) -> bool:
    if not estimate.anytime:
        return tost(estimate, margin).shown(1 - estimate.confidence)
    inner = estimate.interval(max(0.5, 2 * estimate.confidence - 1))
    return inner is not None and inner[0] >= 1 / (1 + margin) and inner[1] <= 1 + margin


def more_blocks(estimate: RatioEstimate, margin: float = DEFAULT_MARGIN, power: float = DEFAULT_POWER) -> int | None:
    """Blocks still missing for a verdict, if the estimate and its spread are the truth; 0 when there is one.

    None: unknown (one block has no spread) or beyond 10,000 (the effect sits at the margin).
    """
    if verdict(estimate, margin) != "undecided":
        return 0
    if estimate.sd_log is None:
        return None
    needed = blocks_for_verdict(estimate.sd_log, estimate.ratio, margin, estimate.confidence, power)
    return None if needed is None else max(needed - estimate.blocks, 1)


def explain(
    estimate: RatioEstimate,
    margin: float = DEFAULT_MARGIN,
    *,
    metric: str = "throughput",
    arm: str = "arm",
    baseline: str = "baseline",
    higher_is_better: bool = True,
    power: float = DEFAULT_POWER,
) -> str:
    """The verdict in one or two sentences of plain words."""
    decided = verdict(estimate, margin, higher_is_better=higher_is_better)
    change = _percent(estimate.ratio)
    if estimate.blocks > 1 and estimate.ci_low is None:
        return (
            f"Undecided: {estimate.blocks} blocks show {metric} of {arm} at {change} against {baseline}; the confidence"
            " sequence, which allows for stopping at any time, has no bounds before the third."
        )
    if estimate.ci_low is None or estimate.ci_high is None:
        return (
            f"Undecided: one block shows {metric} of {arm} at {change} against {baseline}, and one block has no"
            " interval. At least two are needed before anything can be said; three or more are advisable."
        )
    interval = f"{change} [{_percent(estimate.ci_low)}, {_percent(estimate.ci_high)}]"
    facts = f"{metric} of {arm} against {baseline} is {interval} over {estimate.blocks} blocks"
    limit = f"{margin:.3g}" if margin >= 1 else f"{margin * 100:g}%"
    if decided in ("pays", "hurts"):
        return f"{arm} {decided}: {facts}, beyond the margin of {limit}."
    if decided == "equivalent":
        return f"Equivalent: {facts}; any difference is shown to be within the margin of {limit}."
    needed = more_blocks(estimate, margin, power)
    if needed is None:
        outlook = "No reasonable number of blocks would decide it: the effect sits at the margin or drowns in noise."
    else:
        leaning = _leaning(estimate, margin, higher_is_better)
        outlook = (
            f"If that is the truth, about {needed} more block{'s' if needed != 1 else ''} would show that it {leaning}"
            f" (with probability {power:.0%})."
        )
    return f"Undecided: {facts}. {outlook}"


def _leaning(estimate: RatioEstimate, margin: float, higher_is_better: bool) -> str:
    if abs(estimate.log_ratio) <= log_margin(margin):
        return "is equivalent"
    return "pays" if (estimate.log_ratio > 0) == higher_is_better else "hurts"


def _percent(ratio: float) -> str:
    if not math.isfinite(ratio) or ratio >= 11:
        return f"×{ratio:.3g}"
    return f"{(ratio - 1) * 100:+.1f}%"
