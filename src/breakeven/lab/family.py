"""Several questions at once: adjusted p-values of all comparisons, and what the number of blocks can answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from breakeven.lab.campaign import Campaign
from breakeven.lab.stats.multiplicity import benjamini_hochberg, holm
from breakeven.lab.stats.signflip import blocks_for_holm, max_t, smallest_p
from breakeven.lab.summary import ALL, Comparison, Multiplicity


def is_primary(campaign: Campaign, comparison: Comparison) -> bool:
    """Of the declared family: the primary metric with the conditions pooled, levels × arms, without A/A.

    Nor are arms of synthetic acceptance of it: nothing is asked about those.
    """
    return (
        not comparison.synthetic
        and comparison.metric == campaign.primary_metric
        and comparison.condition == ALL
        and not (campaign.aa and comparison.arm == campaign.aa_arm)
    )


def with_adjusted_p(campaign: Campaign, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Holm over the primary family, and its exact max-T beside it; Benjamini–Hochberg over the rest."""
    adjusted: dict[int, float] = {}
    primary = [is_primary(campaign, c) for c in comparisons]
    for wanted, correct in ((True, holm), (False, benjamini_hochberg)):
        members = [i for i, c in enumerate(comparisons) if primary[i] is wanted and c.p_value is not None]
        corrected = correct([comparisons[i].p_value or 0.0 for i in members])
        adjusted.update(zip(members, corrected, strict=True))
    family = [i for i, is_one in enumerate(primary) if is_one and comparisons[i].ratio is not None]
    exact = dict(zip(family, _max_t([comparisons[i] for i in family], campaign.seed), strict=True))
    return [
        Comparison.model_validate(
            {**c.model_dump(), "p_adjusted": adjusted.get(i), "primary": primary[i], "p_max_t": exact.get(i)}
        )
        for i, c in enumerate(comparisons)
    ]


def _max_t(family: Sequence[Comparison], seed: int) -> Sequence[float | None]:
    """By the blocks that all comparisons share; None for all where there are fewer than two, or some lack one."""
    shared = set.intersection(*(set(c.block_ratios) for c in family)) if family else set()
    if len(shared) < 2 or any(len(c.block_ratios) != len(shared) for c in family):
        return [None] * len(family)
    return max_t([[math.log(c.block_ratios[b]) for c in family] for b in sorted(shared)], seed=seed)


def only_conditions(comparisons: Sequence[Comparison]) -> bool:
    """Every comparison is of synthetic acceptance."""
    return bool(comparisons) and all(c.synthetic for c in comparisons)


def describe_family(campaign: Campaign, comparisons: Sequence[Comparison]) -> Multiplicity:
    """The family in numbers and in a sentence."""
    alpha = 1 - campaign.confidence
    family = [c for c in comparisons if c.primary and c.p_adjusted is not None]
    if not family:
        return Multiplicity(
            primary_metric=campaign.primary_metric, tests=0, significant=0, blocks=0, smallest_sign_flip_p=None,
            blocks_for_max_t=None, blocks_for_holm=None,
            statement="Acceptance is synthetic in every comparison: conditions have no p-values."
            if only_conditions(comparisons)
            else "No comparison has two valid blocks, so there is no p-value to adjust.",
        )  # fmt: skip
    blocks = min(c.blocks for c in family)
    significant = sum((c.p_adjusted or 0.0) <= alpha for c in family)
    for_max_t, for_holm = blocks_for_holm(1, alpha), blocks_for_holm(len(family), alpha)
    floor = smallest_p(blocks)
    many = len(family) > 1
    statement = (
        f"{significant} of {len(family)} comparison{'s' if many else ''} of {campaign.primary_metric} "
        f"{'are' if significant != 1 else 'is'} significant at {alpha:.3g} after Holm's correction."
    )
    if floor > alpha:
        statement += (
            f" Distribution-free tests can show nothing with {blocks} blocks: the smallest p is 2/2^{blocks} ="
            f" {floor:.3g}; the exact max-T can from {for_max_t} blocks on"
            + (f", Holm over {len(family)} sign-flip tests from {for_holm}." if many else ".")
        )
    elif len(family) * floor > alpha:
        statement += (
            f" Of distribution-free tests the exact max-T can reject with {blocks} blocks, Holm over {len(family)}"
            f" sign-flip tests only from {for_holm} on."
        )
    return Multiplicity(
        primary_metric=campaign.primary_metric, tests=len(family), significant=significant, blocks=blocks,
        smallest_sign_flip_p=floor, blocks_for_max_t=for_max_t, blocks_for_holm=for_holm, statement=statement,
    )  # fmt: skip
