"""What a campaign can show and costs, from a pilot run's summary or a stated scatter between launches. Pure.

The pilot's standard deviation of a block's log ratio is taken as it is. It rests on few blocks, so its upper end stands
beside it: the value that the true one exceeds with probability 10%, by the chi-square of the pilot's variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import special

from breakeven.lab.campaign import Campaign
from breakeven.lab.plan import Forecast, Schedule
from breakeven.lab.records import CellKey
from breakeven.lab.stats.power import blocks_needed, noise_floor, smallest_detectable
from breakeven.lab.summary import ALL, Summary

_UPPER = 0.10  # probability that the true scatter is larger than the upper one


@dataclass(frozen=True, slots=True)
class LevelOutlook:
    """One arm at one level. Effects and half-widths are shares (0.03: ±3%); `blocks_needed` None: more than 10,000.

    `pilot_blocks` 0: the scatter is a stated one. `half_width`: of the interval after the planned blocks;
    `half_width_upper`: if the scatter is at its upper end; None where they cannot be known.
    """

    arm: str
    level: int
    scatter: float
    pilot_blocks: int
    half_width: float | None
    half_width_upper: float | None
    detectable: float | None
    blocks_needed: int | None


def upper_scatter(sd_log: float, blocks: int) -> float:
    """The upper end of a standard deviation that was estimated from `blocks` (at least 2) values."""
    degrees = blocks - 1
    return sd_log * math.sqrt(degrees / float(special.chdtri(degrees, 1 - _UPPER)))


def outlook(campaign: Campaign, effect: float, pilot: Summary | None = None) -> list[LevelOutlook]:
    """A row for each arm and level whose scatter is known: from the pilot, else the campaign's `launch_scatter`.

    `effect`: a share (0.05: +5%) for which the blocks are asked. Levels that the pilot did not measure take the scatter
    of its nearest level (on the log scale) of the same arm.
    """
    rows = []
    for arm in campaign.arms:
        if arm == campaign.baseline:
            continue
        known = _scatter(pilot, arm)
        for level in sorted(campaign.levels):
            if known:
                nearest = min(known, key=lambda other: (abs(math.log(other / level)), other))
                scatter, blocks = known[nearest]
            elif campaign.assumptions.launch_scatter is not None:
                scatter, blocks = campaign.assumptions.launch_scatter, 0
            else:
                continue
            upper = upper_scatter(scatter, blocks) if blocks else scatter
            rows.append(
                LevelOutlook(
                    arm, level, scatter, blocks,
                    noise_floor(scatter, campaign.blocks, campaign.confidence),
                    noise_floor(upper, campaign.blocks, campaign.confidence),
                    smallest_detectable(scatter, campaign.blocks, campaign.confidence),
                    blocks_needed(scatter, effect, campaign.confidence),
                )
            )  # fmt: skip
    return rows


def _scatter(pilot: Summary | None, arm: str) -> dict[int, tuple[float, int]]:
    """Level → (standard deviation, blocks), of the arm in the pilot; of any other of its arms if it lacks this one."""
    rows = [n for n in pilot.noise if n.condition == ALL and n.sd_log is not None] if pilot is not None else []
    found: dict[int, tuple[float, int]] = {}
    for n in [n for n in rows if n.arm == arm] or rows:
        if n.sd_log is not None and n.sd_log > found.get(n.level, (-1.0, 0))[0]:
            found[n.level] = (n.sd_log, n.blocks)
    return found


def duration_s(campaign: Campaign, schedule: Schedule, pilot: Summary | None = None) -> float:
    """Expected seconds of the whole campaign: by the pilot's cells where it has the like, else by the assumptions."""
    forecast = Forecast(campaign)
    for cell in pilot.cells if pilot is not None else ():
        took = cell.metrics["duration"].value
        if took and cell.valid and cell.requests:
            key = CellKey(cell.block, cell.arm, cell.condition, cell.level)
            played = campaign.workload.sessions is not None  # then a cell counts turns, and the campaign sessions
            wanted = cell.requests if played else campaign.requests_at(cell.level, cell.condition)
            forecast.cell_took(key, took * wanted / cell.requests)  # the pilot's cells may have been shorter
    return forecast.remaining_s((cell.key for cell in schedule.cells()), len(schedule.launches))


def gpu_hours(seconds: float, gpus: int) -> float:
    """The GPUs are held for the whole campaign, between launches too."""
    return seconds / 3600 * gpus
