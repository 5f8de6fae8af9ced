"""The requests' times of many cells together, for distributions and tails. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.campaign import Campaign
from breakeven.lab.records import CellKey
from breakeven.lab.reduced import ReducedCell
from breakeven.lab.summary import ALL, DistributionSummary, TimeName

TIMES: tuple[TimeName, ...] = ("ttft", "tpot", "latency")
_STEPS = 101  # quantiles kept of a distribution


def members(
    arm: str, condition: str, level: int | None, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[ReducedCell]:
    """The valid cells of an arm at a condition (or all) and a level (None: all)."""
    wanted = set(conditions) if condition == ALL else {condition}
    return [
        cell
        for key, cell in valid.items()
        if key.arm == arm and key.condition in wanted and (level is None or key.level == level)
    ]


def distributions(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[DistributionSummary]:
    """TTFT and latency over the requests of each arm and level, all conditions and blocks together."""
    rows = []
    for metric in ("ttft", "latency"):
        for arm in campaign.arms:
            for level in sorted(campaign.levels):
                cells = members(arm, ALL, level, conditions, valid)
                samples = [cell.ttft_ms if metric == "ttft" else cell.latency_ms for cell in cells]
                data = np.concatenate(samples) if samples else np.empty(0)
                if data.size:
                    rows.append(
                        DistributionSummary(
                            arm=arm,
                            condition=ALL,
                            level=level,
                            metric=metric,
                            unit="ms",
                            count=int(data.size),
                            quantiles=[float(q) for q in np.quantile(data, np.linspace(0, 1, _STEPS))],
                        )
                    )
    return rows


def samples_by_block(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> dict[tuple[str, int, str], dict[int, NDArray[np.float64]]]:
    """The requests' times of each arm, level and time, by block; all conditions, as condition "all" has them."""
    samples: dict[tuple[str, int, str], dict[int, NDArray[np.float64]]] = defaultdict(dict)
    for arm, level in itertools.product(campaign.arms, campaign.levels):
        for block in sorted({key.block for key in valid}):
            cells = [valid.get(CellKey(block, arm, condition, level)) for condition in conditions]
            present = [cell for cell in cells if cell is not None]
            if len(present) < len(conditions):
                continue
            for time in TIMES:
                joined = np.concatenate([getattr(cell, f"{time}_ms") for cell in present])
                if joined.size:
                    samples[arm, level, time][block] = joined
    return samples
