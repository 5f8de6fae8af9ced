"""Tails of TTFT, TPOT and latency, arm against baseline: ratios of quantiles, refused under LoadGen's floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from numpy import float64
from numpy.typing import NDArray

from breakeven.lab.campaign import Campaign
from breakeven.lab.known_traps import unjudged_arms
from breakeven.lab.stats.multiplicity import benjamini_hochberg
from breakeven.lab.stats.quantile import QuantileRatio, quantile_ratio
from breakeven.lab.stopping import estimator
from breakeven.lab.summary import ALL, TailComparison, TimeName
from breakeven.lab.verdict import Verdict, verdict

QUANTILES = (0.9, 0.99, 0.999)
_RESAMPLES = 500

# (arm, level, time) → block → the requests' values in milliseconds, all conditions
Samples = Mapping[tuple[str, int, str], Mapping[int, NDArray[float64]]]


def tail_comparisons(campaign: Campaign, times: Sequence[TimeName], samples: Samples) -> list[TailComparison]:
    """A row for each arm, time, level and quantile for which any block has values; a refused one says why.

    Arms of synthetic acceptance have none.
    """
    rows: list[TailComparison] = []
    passed_over = {campaign.baseline, *unjudged_arms(campaign)}
    for arm in campaign.arms:
        for time in times if arm not in passed_over else ():
            for level in sorted(campaign.levels):
                ours, theirs = samples.get((arm, level, time), {}), samples.get((campaign.baseline, level, time), {})
                blocks = sorted(ours.keys() & theirs.keys())
                if blocks:
                    pairs = [theirs[b] for b in blocks], [ours[b] for b in blocks]
                    rows += [_row(campaign, arm, level, time, quantile, *pairs) for quantile in QUANTILES]
    known = [(index, row.p_value) for index, row in enumerate(rows) if row.p_value is not None]
    adjusted = benjamini_hochberg([p for _, p in known])
    for (index, _), p in zip(known, adjusted, strict=True):
        rows[index] = TailComparison.model_validate({**rows[index].model_dump(), "p_adjusted": p})
    return rows


def _row(
    campaign: Campaign,
    arm: str,
    level: int,
    time: TimeName,
    quantile: float,
    baseline: Sequence[NDArray[float64]],
    values: Sequence[NDArray[float64]],
) -> TailComparison:
    try:
        found = quantile_ratio(
            baseline,  # type: ignore[arg-type]
            values,  # type: ignore[arg-type]
            quantile,
            seed=campaign.seed,
            confidence=campaign.confidence,
            resamples=_RESAMPLES,
            estimate=estimator(campaign),
        )
    except ValueError as problem:  # times of 0 ms have no ratio
        found = QuantileRatio(quantile, None, None, None, len(baseline), str(problem))
    if found.method == "bootstrap" and campaign.stop.rule == "confidence_sequence":
        found = replace(found, note=f"{found.note}; no verdict, as it holds for a number of blocks fixed beforehand")
    return TailComparison(
        arm=arm, condition=ALL, level=level, metric=time, quantile=quantile, ratio=found.ratio, ci_low=found.ci_low,
        ci_high=found.ci_high, bootstrap_low=found.bootstrap_low, bootstrap_high=found.bootstrap_high,
        method=found.method, blocks=found.blocks, requests=found.requests, verdict=_verdict(campaign, found),
        p_value=found.p_value, p_adjusted=None, note=found.note,
    )  # fmt: skip


def _verdict(campaign: Campaign, found: QuantileRatio) -> Verdict:
    """By the blocks' figures; by the bootstrap's interval, which knows no equivalence, only pays and hurts.

    And where the campaign may stop early the bootstrap's decides nothing: it is no confidence sequence.
    """
    if found.ratio is None or found.ci_low is None or found.ci_high is None:
        return "undecided"
    if found.method == "blocks":
        return verdict(
            estimator(campaign)(found.block_logs, campaign.confidence), campaign.margin, higher_is_better=False
        )
    if campaign.stop.rule == "confidence_sequence":
        return "undecided"
    if found.ratio > 1 + campaign.margin and found.ci_low > 1:
        return "hurts"
    return "pays" if found.ratio < 1 / (1 + campaign.margin) and found.ci_high < 1 else "undecided"
