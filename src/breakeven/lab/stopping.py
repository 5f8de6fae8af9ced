"""The declared stop: is every comparison of the primary family decided, so that no further block is needed?

Only campaigns with `stop: confidence_sequence` may end early. Their intervals hold at every look, so that looking after
each block costs nothing in errors; how many blocks it took is no secret and no choice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from breakeven.lab.campaign import Campaign
from breakeven.lab.records import RunDirectory
from breakeven.lab.stats.ratio import Estimator, ratio_from_logs, sequence_ratio
from breakeven.lab.summary import Comparison

if TYPE_CHECKING:
    from breakeven.lab.reduced import ReducedCell


def estimator(campaign: Campaign) -> Estimator:
    """A campaign that may stop after any block needs intervals that hold after every block."""
    return sequence_ratio if campaign.stop.rule == "confidence_sequence" else ratio_from_logs


def decided(campaign: Campaign, comparisons: Collection[Comparison], blocks: int) -> bool:
    """May the campaign end after `blocks` finished blocks?"""
    if campaign.stop.rule != "confidence_sequence" or blocks < campaign.stop.min_blocks:
        return False
    primary = [c for c in comparisons if c.primary]
    return bool(primary) and all(c.verdict != "undecided" for c in primary)


class Looks:
    """Looks at a run after its blocks. Each reads the cells that no earlier look has read, and keeps their figures."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._seen: dict[str, ReducedCell] = {}

    def enough(self, blocks: int) -> bool:
        """As `decided`, from the cells on disk of the first `blocks` blocks; what later blocks hold is not looked at.

        Only the primary family is computed. RecordError for a cell whose files are damaged.
        """
        from breakeven.lab.analysis import AnalysisError, primary_comparisons  # which imports this module

        campaign = self._run.campaign
        if campaign.stop.rule != "confidence_sequence" or blocks < campaign.stop.min_blocks:
            return False
        try:
            return decided(campaign, primary_comparisons(campaign, self._cells(blocks)), blocks)
        except AnalysisError:
            return False

    def _cells(self, blocks: int) -> list[ReducedCell]:
        """Those of the first blocks. One that was never measured is read anew, since a resumed run may replace it."""
        from breakeven.lab.reduced import reduce_cell

        found = []
        for name in sorted(self._run.cell_ids()):
            if int(name[1:].partition("-")[0]) >= blocks:
                continue
            cell = self._seen.get(name)
            if cell is None:
                record = self._run.read_cell(name)
                cell = reduce_cell(record, self._run.campaign)
                cell = replace(cell, record=replace(cell.record, requests=()), turns={})  # figures are all it needs
                if record.measured:
                    self._seen[name] = cell
            found.append(cell)
        return found
