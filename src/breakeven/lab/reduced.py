"""A measured cell, reduced to what a summary is made of: metrics once, chunks let go. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.campaign import SENTINEL, Campaign
from breakeven.lab.metrics import CellMetrics, cell_metrics, is_valid, latency_ms, tpot_ms, ttft_ms, window_named
from breakeven.lab.quantity import Quantity
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.turns import TurnValues, values_by_turn


@dataclass(frozen=True, slots=True)
class ReducedCell:
    """One cell, reduced: `requests` without their chunks; `window_s` of the headline throughput, None without one."""

    record: CellRecord
    metrics: CellMetrics
    window_s: float | None
    ttft_ms: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    stated_length: Quantity | None = None  # an acceptance length without counters: imported files only
    turns: Mapping[int, TurnValues] = field(default_factory=dict)  # of sessions, by number

    @property
    def key(self) -> CellKey:
        return self.record.key

    @property
    def valid(self) -> bool:
        return not self.record.invalid


def reduce_cell(record: CellRecord, campaign: Campaign) -> ReducedCell:
    """One cell, reduced to what `assemble` needs: metrics, computed once; its chunks are let go."""
    key, open_loop = record.key, campaign.open_loop
    metrics = cell_metrics(
        record.requests, record.counters, record.started_ns, record.ended_ns, key.level,
        natural=campaign.setting(key.condition).natural, open_loop=open_loop, planned=_sessions(campaign, key),
    )  # fmt: skip
    window = window_named(metrics.throughput_window, record.requests, key.level, open_loop=open_loop)
    good = [r for r in record.requests if is_valid(r)]
    return ReducedCell(
        record=replace(record, requests=tuple(replace(r, chunks=()) for r in record.requests)),
        metrics=metrics,
        window_s=window.seconds if window is not None else None,
        ttft_ms=np.asarray([ttft for ttft in map(ttft_ms, good) if ttft is not None]),
        latency_ms=np.asarray([latency_ms(r) for r in good]),
        tpot_ms=np.asarray([tpot for tpot in map(tpot_ms, good) if tpot is not None]),
        turns=values_by_turn(record.requests) if campaign.workload.sessions is not None else {},
    )


def _sessions(campaign: Campaign, key: CellKey) -> int | None:
    """Sessions that the campaign plans for the cell; None where it plays none."""
    if campaign.workload.sessions is None:
        return None
    if campaign.sentinel is not None and key.condition == SENTINEL:
        return campaign.sentinel_requests
    return campaign.requests_at(key.level, key.condition)
