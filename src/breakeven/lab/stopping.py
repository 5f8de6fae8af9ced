"""The declared stop: is every comparison of the primary family decided, so that no further block is needed?

Only campaigns with `stop: confidence_sequence` may end early. Their intervals hold at every look, so that looking after
each block costs nothing in errors; how many blocks it took is no secret and no choice.
"""

from __future__ import annotations

from collections.abc import Collection

from breakeven.lab.campaign import Campaign
from breakeven.lab.records import RunDirectory
from breakeven.lab.stats.ratio import Estimator, ratio_from_logs, sequence_ratio
from breakeven.lab.summary import Comparison


def estimator(campaign: Campaign) -> Estimator:
    """A campaign that may stop after any block needs intervals that hold after every block."""
    return sequence_ratio if campaign.stop.rule == "confidence_sequence" else ratio_from_logs


def decided(campaign: Campaign, comparisons: Collection[Comparison], blocks: int) -> bool:
    """May the campaign end after `blocks` finished blocks?"""
    if campaign.stop.rule != "confidence_sequence" or blocks < campaign.stop.min_blocks:
        return False
    primary = [c for c in comparisons if c.primary]
    return bool(primary) and all(c.verdict != "undecided" for c in primary)


def stop_after(run: RunDirectory, blocks: int) -> bool:
    """As `decided`, from the cells on disk of the first `blocks` blocks; what later blocks hold is not looked at."""
    from breakeven.lab.analysis import AnalysisError, summarise  # which imports this module

    campaign = run.campaign
    if campaign.stop.rule != "confidence_sequence" or blocks < campaign.stop.min_blocks:
        return False
    try:  # one cell is held at a time
        summary = summarise(campaign, {}, (record for record in run.read_cells() if record.key.block < blocks))
    except AnalysisError:
        return False
    return decided(campaign, summary.comparisons, blocks)
