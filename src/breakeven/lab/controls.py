"""What a campaign checks itself by: A/A blocks (the truth is 1), sentinel cells, and blocks that stand apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from breakeven.lab.campaign import Campaign
from breakeven.lab.stats.equivalence import log_margin
from breakeven.lab.stats.power import noise_floor
from breakeven.lab.stats.robust import outlying
from breakeven.lab.stats.student import t_quantile, t_tail
from breakeven.lab.summary import ALL, AaLevel, AaSummary, Comparison, Lint, SentinelPoint, SentinelSummary

_HOUR_NS = 3.6e12
_FEW_BLOCKS = 10  # below, a state that a fifth of the launches fall into may go unseen


@dataclass(frozen=True, slots=True)
class Visit:
    """One sentinel cell. `at_ns`: its start; `throughput` in tok/s."""

    block: int
    at_ns: int
    started: str
    throughput: float


def aa_summary(campaign: Campaign, comparisons: Sequence[Comparison]) -> AaSummary | None:
    """How often the baseline seems to differ from itself; None without A/A blocks."""
    if not campaign.aa:
        return None
    own = [c for c in comparisons if c.arm == campaign.aa_arm]
    alpha = 1 - campaign.confidence
    p_values = [c.p_value for c in own if c.p_value is not None]
    false = sum(p <= alpha for p in p_values)
    pooled = sorted((c for c in own if (c.metric, c.condition) == ("throughput", ALL)), key=lambda c: c.level)
    levels = [
        AaLevel(
            level=c.level, ratio=c.ratio, ci_low=c.ci_low, ci_high=c.ci_high, verdict=c.verdict,
            noise_floor=noise_floor(c.sd_log, c.blocks, campaign.confidence) if c.sd_log is not None else None,
        )
        for c in pooled
    ]  # fmt: skip
    alarms = [row.level for row in levels if row.verdict in ("pays", "hurts")]
    floors = [row.noise_floor for row in levels if row.noise_floor is not None]
    statement = (
        f"A/A: {campaign.baseline} against itself differs at p ≤ {alpha:.3g} in {false} of {len(p_values)} comparisons"
        f" ({alpha:.0%} are to be expected; they are correlated)"
    )
    statement += f"; noise floor ±{max(floors):.1%}" if floors else ""
    statement += (
        f". False alarm at {', '.join(map(str, alarms))} streams: launches differ by something besides the arms."
        if alarms
        else "."
    )
    return AaSummary(
        arm=campaign.aa_arm, tests=len(p_values), false_positives=false,
        false_positive_rate=false / len(p_values) if p_values else None, levels=levels, statement=statement,
    )  # fmt: skip


def sentinel_summaries(campaign: Campaign, visits: Mapping[str, Sequence[Visit]]) -> list[SentinelSummary]:
    """By arm, for those with a valid sentinel cell: scatter, and the slope of log throughput over time."""
    rows = []
    for arm in campaign.arms:
        seen = sorted(visits.get(arm, ()), key=lambda visit: visit.at_ns)
        if not seen:
            continue
        rates = np.asarray([visit.throughput for visit in seen])
        slope, half, p = _slope(seen, campaign.confidence)
        known = slope is not None and half is not None
        rows.append(
            SentinelSummary(
                arm=arm, level=campaign.sentinel_level,
                points=[SentinelPoint(block=v.block, started=v.started, throughput=v.throughput) for v in seen],
                cv=float(rates.std(ddof=1) / rates.mean()) if len(seen) > 1 else None,
                drift_per_hour=math.expm1(slope) if slope is not None else None,
                drift_low=math.expm1((slope or 0) - (half or 0)) if known else None,
                drift_high=math.expm1((slope or 0) + (half or 0)) if known else None,
                p_value=p,
            )
        )  # fmt: skip
    return rows


def _slope(visits: Sequence[Visit], confidence: float) -> tuple[float | None, float | None, float | None]:
    """Least squares of log throughput on hours: slope, half its t interval, two-sided p. Bounded, lest exp overflow."""
    hours = np.asarray([(visit.at_ns - visits[0].at_ns) / _HOUR_NS for visit in visits])
    logs = np.log([visit.throughput for visit in visits])
    spread = float(((hours - hours.mean()) ** 2).sum())
    count = len(visits)
    if count < 2 or spread == 0:
        return None, None, None
    slope = float(((hours - hours.mean()) * logs).sum() / spread)
    if abs(slope) > 100:  # minutes apart: a rate per hour says nothing
        return None, None, None
    if count < 3:
        return slope, None, None
    rest = logs - logs.mean() - slope * (hours - hours.mean())
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / spread)
    if error == 0:
        return slope, 0.0, float(slope == 0)
    half = t_quantile((1 + confidence) / 2, count - 2) * error
    return slope, half if half < 100 else None, min(1.0, 2 * t_tail(abs(slope) / error, count - 2))


def control_lints(
    campaign: Campaign, comparisons: Sequence[Comparison], sentinels: Sequence[SentinelSummary]
) -> list[Lint]:
    """Few blocks, blocks that do not belong with the others, and a machine that drifted."""
    lints = []
    pooled = [c.blocks for c in comparisons if (c.metric, c.condition) == ("throughput", ALL) and c.blocks > 1]
    if pooled and min(pooled) < _FEW_BLOCKS:
        rare = -math.expm1(math.log(0.05) / min(pooled))
        lints.append(
            Lint(
                message=f"{min(pooled)} blocks: a state that fewer than {rare:.0%} of an arm's launches fall into may"
                " not have shown itself (risk 5%); no interval accounts for what no launch has shown",
                cells=[],
            )
        )
    for c in comparisons:
        if (c.metric, c.condition) != ("throughput", ALL):
            continue
        blocks = sorted(c.block_ratios)
        logs = [math.log(c.block_ratios[b]) for b in blocks]
        for index in outlying(logs):
            rest = float(np.mean(np.delete(logs, index)))
            if abs(logs[index] - rest) <= log_margin(campaign.margin):
                continue
            lints.append(
                Lint(
                    message=f"{c.arm} at level {c.level}: block {blocks[index] + 1} stands apart (ratio"
                    f" {math.exp(logs[index]):.3g}, the others {math.exp(rest):.3g}): a launch was in another state."
                    " If launches fall into it now and then, intervals from so few blocks are too narrow: find the"
                    " cause, or use many more blocks",
                    cells=[],
                )
            )
    lints.extend(
        Lint(
            message=f"the sentinel cell of {row.arm} drifts by {row.drift_per_hour or 0:+.1%} per hour (p ="
            f" {row.p_value:.2g}): the machine changed during the campaign; pairing removes what both arms of a block"
            " share of it",
            cells=[],
        )
        for row in sentinels
        if row.p_value is not None and row.p_value <= 0.01 and row.cv is not None and row.cv > campaign.margin / 2
    )
    return lints
