"""Arms × conditions in the summary's terms: how the condition changes the arm's effect, with intervals.

Where a campaign crosses factors, each has effects of its own: a value's figure is the mean of the logs over all
conditions with that value. The crossing is complete, so every mean holds the same values of all other factors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from breakeven.lab.campaign import DOMAIN, JOIN, Campaign
from breakeven.lab.known_traps import unjudged_arms
from breakeven.lab.stats.factorial import contrasts, crossed_contrasts, main_effect
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
    factors = _factors(campaign, conditions)
    unjudged = unjudged_arms(campaign)
    for metric in metrics:
        for level in (None, *levels):
            within = levels if level is None else [level]
            baseline = _logs(campaign.baseline, conditions, within, metric, figures)
            main += _rows(campaign, CONDITION, campaign.baseline, conditions, metric, level, baseline)
            for factor in factors:
                means = factor.means(baseline)
                main += _rows(campaign, factor.name, campaign.baseline, factor.values, metric, level, means)
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
                for factor in factors:
                    name, means = f"{ARM} × {factor.name}", factor.means(ratios)
                    interactions += _rows(campaign, name, arm, factor.values, metric, level, means)
                for one, other in itertools.combinations(factors, 2):
                    interactions += _crossed_rows(campaign, one, other, arm, metric, level, ratios)
    return main, interactions


def crossed(campaign: Campaign, conditions: Sequence[str]) -> dict[str, list[str]]:
    """Every factor's values, the domain's first, as they stand in the conditions' names."""
    domains = list(dict.fromkeys(condition.split(JOIN)[0] for condition in conditions))
    return {DOMAIN: domains, **{name: list(values) for name, values in campaign.factors.items()}}


@dataclass(frozen=True, slots=True)
class _Factor:
    """One factor of a complete crossing. `members`: for each value, the places of the conditions that have it."""

    name: str
    values: Sequence[str]
    members: Sequence[Sequence[int]]

    def means(self, by_block: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """By block: the mean over the conditions that have each value; nan where one of them is missing."""
        return {b: [sum(row[i] for i in own) / len(own) for own in self.members] for b, row in by_block.items()}


def _factors(campaign: Campaign, conditions: Sequence[str]) -> list[_Factor]:
    """The factors that can have an effect; empty where the domain is the only one."""
    if not campaign.factors:
        return []
    parts = [condition.split(JOIN) for condition in conditions]
    return [
        _Factor(name, values, [[i for i, row in enumerate(parts) if row[place] == value] for value in values])
        for place, (name, values) in enumerate(crossed(campaign, conditions).items())
        if len(values) > 1
    ]


def _crossed_rows(
    campaign: Campaign, one: _Factor, other: _Factor, arm: str, metric: MetricName, level: int | None,
    ratios: Mapping[int, Sequence[float]],
) -> list[FactorEffect]:  # fmt: skip
    """Does one factor change how the other changes the arm's ratio?"""
    both = [[sorted(set(a) & set(b)) for b in other.members] for a in one.members]
    tables = [[[sum(ratios[b][i] for i in own) / len(own) for own in row] for row in both] for b in sorted(ratios)]
    rows = []
    for row, column, found in crossed_contrasts(tables, campaign.confidence, estimator(campaign)):
        against = (
            f"{one.values[1]} and {other.values[1]}"
            if len(one.values) == len(other.values) == 2
            else "the others of both"
        )
        rows.append(
            _row(
                campaign, f"{ARM} × {one.name} × {other.name}", arm, f"{one.values[row]} and {other.values[column]}",
                against, metric, level, found.estimate, found.p_adjusted,
            )
        )  # fmt: skip
    return rows


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
