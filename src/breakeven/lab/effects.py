"""Arms × conditions in the summary's terms: how the condition changes the arm's effect, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from breakeven.lab.campaign import Campaign
from breakeven.lab.known_traps import unjudged_arms
from breakeven.lab.stats.factorial import contrasts, main_effect
from breakeven.lab.stats.ratio import RatioEstimate
from breakeven.lab.stopping import estimator
from breakeven.lab.summary import FactorEffect, FactorVerdict, MetricName
from breakeven.lab.verdict import verdict

# (arm, condition, level, metric) → block → figure
Figures = Mapping[tuple[str, str, int, str], Mapping[int, float]]

ARM, CONDITION, INTERACTION = "arm", "condition", "arm × condition"


def factor_effects(
    campaign: Campaign, conditions: Sequence[str], metrics: Sequence[MetricName], figures: Figures
) -> tuple[list[FactorEffect], list[FactorEffect]]:
    """(main effects, interactions), at each level and over all of them (level None). Empty with one condition.

    Over all levels a block's value is the mean of the logs at its levels, and the block must have all of them. Arms of
    synthetic acceptance have no rows.
    """
    if len(conditions) < 2:
        return [], []
    main: list[FactorEffect] = []
    interactions: list[FactorEffect] = []
    levels = sorted(campaign.levels)
    unjudged = unjudged_arms(campaign)
    for metric in metrics:
        for level in (None, *levels):
            within = levels if level is None else [level]
            baseline = _logs(campaign.baseline, conditions, within, metric, figures)
            main += _rows(campaign, CONDITION, campaign.baseline, conditions, metric, level, baseline)
            for arm in campaign.arms:
                if arm == campaign.baseline or arm in unjudged:
                    continue
                ours = _logs(arm, conditions, within, metric, figures)
                ratios = {
                    b: [a - t for a, t in zip(ours[b], baseline[b], strict=True)] for b in ours.keys() & baseline.keys()
                }
                estimate = main_effect([ratios[b] for b in sorted(ratios)], campaign.confidence, estimator(campaign))
                if estimate is not None:
                    main.append(
                        _row(campaign, ARM, arm, "", campaign.baseline, metric, level, estimate, estimate.p_value)
                    )
                interactions += _rows(campaign, INTERACTION, arm, conditions, metric, level, ratios)
    return main, interactions


def _logs(
    arm: str, conditions: Sequence[str], levels: Sequence[int], metric: str, figures: Figures
) -> dict[int, list[float]]:
    """By block: the mean log over the levels in each condition; nan where a cell is missing."""
    columns = {(c, level): figures.get((arm, c, level, metric), {}) for c in conditions for level in levels}
    blocks = sorted({block for column in columns.values() for block in column})
    return {
        block: [
            sum(math.log(columns[c, level][block]) if block in columns[c, level] else math.nan for level in levels)
            / len(levels)
            for c in conditions
        ]
        for block in blocks
    }


def _rows(
    campaign: Campaign, factor: str, arm: str, conditions: Sequence[str], metric: MetricName, level: int | None,
    by_block: Mapping[int, Sequence[float]],
) -> list[FactorEffect]:  # fmt: skip
    rows = []
    for found in contrasts([by_block[b] for b in sorted(by_block)], campaign.confidence, estimator(campaign)):
        against = conditions[1] if len(conditions) == 2 else "the others"
        condition = conditions[found.condition]
        rows.append(_row(campaign, factor, arm, condition, against, metric, level, found.estimate, found.p_adjusted))
    return rows


def _row(
    campaign: Campaign, factor: str, arm: str, condition: str, against: str, metric: MetricName, level: int | None,
    estimate: RatioEstimate, p_adjusted: float | None,
) -> FactorEffect:  # fmt: skip
    decided = verdict(estimate, campaign.margin)
    judged: FactorVerdict = "differs" if decided in ("pays", "hurts") else decided  # type: ignore[assignment]
    return FactorEffect(
        factor=factor, arm=arm, condition=condition, against=against, metric=metric, level=level, ratio=estimate.ratio,
        ci_low=estimate.ci_low, ci_high=estimate.ci_high, blocks=estimate.blocks, p_value=estimate.p_value,
        p_adjusted=p_adjusted, verdict=judged,
    )  # fmt: skip
