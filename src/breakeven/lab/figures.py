"""One figure for each block, arm, condition and level: what goes into the statistics. Pure.

Requests are never n: those of a cell, and the cells of pooled conditions, become one figure here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from breakeven.lab.campaign import Campaign
from breakeven.lab.quantity import Distribution, Provenance
from breakeven.lab.records import CellKey
from breakeven.lab.reduced import ReducedCell
from breakeven.lab.summary import ALL, Better, MetricName

METRICS: tuple[tuple[MetricName, str, Better], ...] = (
    ("throughput", "tok/s", "higher"),
    ("ttft", "ms", "lower"),
    ("tpot", "ms", "lower"),
    ("latency", "ms", "lower"),
)
EVERY_METRIC: tuple[MetricName, ...] = tuple(row[0] for row in METRICS)
# From firm to weak
_STRENGTH = (Provenance.MEASURED, Provenance.SERVER_REPORTED, Provenance.DERIVED, Provenance.ESTIMATED)


@dataclass(frozen=True, slots=True)
class Value:
    """One figure of one arm in one block, at one condition (or all) and level."""

    value: float
    provenance: Provenance


# (arm, condition, level, metric) → block → figure
Values = Mapping[tuple[str, str, int, str], Mapping[int, Value]]


def block_values(
    campaign: Campaign,
    conditions: Sequence[str],
    valid: Mapping[CellKey, ReducedCell],
    *,
    sparse: bool = False,
    metrics: Sequence[MetricName] = EVERY_METRIC,
    by_condition: bool = True,
) -> Values:
    """The figures of every arm, condition (and all pooled), level and metric, in the blocks that have them.

    `valid`: the valid cells. Pooled, a block needs a cell of every condition; `sparse`: of those that any block has at
    that level. `by_condition` False: only pooled.
    """
    values: dict[tuple[str, str, int, str], dict[int, Value]] = defaultdict(dict)
    blocks = sorted({key.block for key in valid})
    at_level = {level: {key.condition for key in valid if key.level == level} for level in campaign.levels}
    for arm in campaign.arms:
        for level in campaign.levels:
            pooled = [c for c in conditions if c in at_level[level]] if sparse else conditions
            for condition in (ALL, *(conditions if by_condition else ())):
                members = pooled if condition == ALL else [condition]
                for block in blocks:
                    cells = [valid.get(CellKey(block, arm, member, level)) for member in members]
                    present = [cell for cell in cells if cell is not None]
                    if len(present) < len(members) or not present:
                        continue
                    for metric in metrics:
                        value = _throughput(present) if metric == "throughput" else _mean_time(present, metric)
                        if value is not None and value.value > 0 and math.isfinite(value.value):
                            values[arm, condition, level, metric][block] = value
    return values


def _throughput(cells: Sequence[ReducedCell]) -> Value | None:
    """Tokens within the cells' windows, divided by the windows' time."""
    tokens = seconds = 0.0
    for cell in cells:
        rate = cell.metrics.throughput_tok_s.value
        if rate is None or cell.window_s is None:
            return None
        tokens += rate * cell.window_s
        seconds += cell.window_s
    return Value(tokens / seconds, weakest(cell.metrics.throughput_tok_s.provenance for cell in cells))


def _mean_time(cells: Sequence[ReducedCell], metric: str) -> Value | None:
    """The mean over the requests of all cells, in milliseconds."""
    total, count = 0.0, 0
    parts: list[Distribution] = [getattr(cell.metrics, metric) for cell in cells]
    for part in parts:
        if part.mean.value is None:
            return None
        total += part.mean.value * part.count
        count += part.count
    return Value(total / count, weakest(part.mean.provenance for part in parts))


def weakest(provenances: Iterable[Provenance]) -> Provenance:
    """What is computed from several figures is as weak as the weakest; derived, if there are none."""
    return max(provenances, key=_STRENGTH.index, default=Provenance.DERIVED)
