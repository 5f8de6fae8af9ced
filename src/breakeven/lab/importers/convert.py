"""From imported runs to the cells that the analysis takes. Pure.

With every request's send time, latency and token count, a cell is analysed as a measured one: steady window, TPOT,
distributions. With requests but without send times, their times are recomputed and throughput is as stated. With a
summary alone everything is as stated, and estimated, since nobody can check it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from breakeven.lab.campaign import Campaign
from breakeven.lab.client.types import Chunk, RequestResult
from breakeven.lab.importers.model import ImportedRequest, ImportedRun, Stated
from breakeven.lab.quantity import Distribution, Provenance, Quantity, describe
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.reduced import ReducedCell, reduce_cell
from breakeven.lab.window import whole_window

_MS = 1_000_000  # nanoseconds
_MAX_PLACED = 64  # chunks that stand for a request whose own are not in the file
_STATED = "as the file states it"


def cell(run: ImportedRun, key: CellKey, campaign: Campaign) -> ReducedCell:
    """The cell of a run. Its throughput has no value if neither the file nor its requests give one."""
    timed = is_timed(run)
    results = _results(run, key, timed)
    invalid = _invalid(run, len(results), campaign)
    ends = [r.end_ns for r in results]
    start = round((run.started_s or 0.0) * 1e9)
    record = CellRecord(
        key=key,
        started_ns=start,
        ended_ns=max(ends, default=start + round((run.duration_s or 0.0) * 1e9)),
        requests=results,
        invalid=invalid,
        counters=run.counters,
    )
    reduced = reduce_cell(record, campaign)
    metrics = reduced.metrics
    unknown = describe([], "ms", Provenance.MEASURED, absent="not in an imported file")
    gaps_known = bool(results) and all(r.gaps_ms is not None for r in run.requests if r.error is None)
    metrics = replace(
        metrics,
        send_lag=unknown,
        inter_chunk=metrics.inter_chunk if gaps_known else _stated(run.stated.get("inter_chunk", Stated()), 1),
        looping_share=metrics.looping_share
        if any(r.text for r in run.requests)
        else Quantity(None, "1", Provenance.DERIVED, "no texts in the file"),
        notes=(*run.notes, *(note for note in metrics.notes if "requests failed" not in note)),
    )
    if timed and metrics.throughput_tok_s.value is None:  # the stated streams were never all busy at once
        metrics = replace(metrics, throughput_tok_s=metrics.throughput_whole_tok_s, throughput_window="whole")
        whole = whole_window(results)
        reduced = replace(reduced, window_s=whole.seconds if whole else None)
    if not timed:
        rate = run.throughput_tok_s
        quantity = Quantity(rate, "tok/s", Provenance.ESTIMATED, _STATED if rate else "not in the file")
        metrics = replace(
            metrics,
            throughput_tok_s=quantity,
            throughput_whole_tok_s=quantity,
            throughput_steady_tok_s=Quantity(None, "tok/s", Provenance.DERIVED, "send times are not in the file"),
            throughput_window="whole",
            steady_share=Quantity(None, "1", Provenance.DERIVED, "send times are not in the file"),
            duration_s=Quantity(run.duration_s, "s", Provenance.ESTIMATED, _STATED),
            requests_per_s=Quantity(None, "1/s", Provenance.DERIVED, "send times are not in the file"),
            requests=(run.completed or 0) + run.failed,
            failed=run.failed,
        )
    if not results:
        count = run.completed or 1
        mean = run.output_tokens / run.completed if run.output_tokens and run.completed else None
        metrics = replace(
            metrics,
            ttft=_stated(run.stated.get("ttft", Stated()), count),
            tpot=_stated(run.stated.get("tpot", Stated()), count),
            latency=_stated(run.stated.get("latency", Stated()), count),
            completion_tokens=Quantity(run.output_tokens, "tokens", Provenance.ESTIMATED, _STATED),
            output_tokens=_distribution(mean, None, None, None, "tokens", count),
        )
    length = None
    if run.acceptance_length is not None:
        length = Quantity(run.acceptance_length, "tokens", Provenance.SERVER_REPORTED, _STATED)
        if metrics.acceptance_length.value is None:
            metrics = replace(metrics, acceptance_length=length)
    return replace(
        reduced,
        record=replace(reduced.record, requests=reduced.record.requests if results else ()),
        metrics=metrics,
        window_s=reduced.window_s if timed else _window(run),
        ttft_ms=reduced.ttft_ms if results else np.empty(0),
        latency_ms=reduced.latency_ms if results else np.empty(0),
        stated_length=length,
    )


def is_timed(run: ImportedRun) -> bool:
    """Has every request what a measured one has: when it was sent, when it ended, and its tokens?"""
    good = [r for r in run.requests if r.error is None]
    return bool(good) and all(
        r.start_s is not None and r.latency_ms is not None and r.output_tokens is not None for r in good
    )


def _window(run: ImportedRun) -> float | None:
    """The weight of a run where domains are pooled: its duration, else as if all domains had equally many tokens."""
    if run.duration_s:
        return run.duration_s
    return 1.0 / run.throughput_tok_s if run.throughput_tok_s else None


def _invalid(run: ImportedRun, requests: int, campaign: Campaign) -> tuple[str, ...]:
    total = requests or (run.completed or 0) + run.failed
    reasons = []
    if run.failed and run.failed > campaign.gates.max_failed_share * total:
        reasons.append(f"{run.failed} of {total} requests failed")
    if run.completed == 0:
        reasons.append("no request was completed")
    return tuple(reasons)


def _results(run: ImportedRun, key: CellKey, timed: bool) -> tuple[RequestResult, ...]:
    usable = [r for r in run.requests if r.error is not None or (r.latency_ms is not None and r.output_tokens)]
    if not usable:
        return ()
    base = round((run.started_s or 0.0) * 1e9)
    first = min((r.start_s for r in usable if r.start_s is not None), default=0.0)
    streams = _streams(usable) if timed else [0] * len(usable)
    return tuple(
        _result(r, key, index, stream, base + round(((r.start_s or first) - first) * 1e9) if timed else base)
        for index, (r, stream) in enumerate(zip(usable, streams, strict=True))
    )


def _result(r: ImportedRequest, key: CellKey, index: int, stream: int, start: int) -> RequestResult:
    end = start + round((r.latency_ms or 0.0) * _MS)
    chunks: tuple[Chunk, ...] = ()
    if r.error is None and r.ttft_ms is not None:
        chunks = _chunks(r, start, end)
        end = max(end, chunks[-1].arrival_ns)
    return RequestResult(
        request_id=f"{key.id}-{index:05d}",
        prompt_id=str(index),
        stream=stream,
        intended_send_ns=start,
        send_ns=start,
        first_byte_ns=chunks[0].arrival_ns if chunks else None,
        end_ns=end,
        http_status=None,
        chunks=chunks,
        text=r.text,
        finish_reason=None,
        prompt_tokens=r.input_tokens,
        completion_tokens=r.output_tokens if r.error is None else None,
        cached_tokens=None,
        error=r.error,
    )


def _chunks(r: ImportedRequest, start: int, end: int) -> tuple[Chunk, ...]:
    """As recorded; where the file has no gaps, spread evenly so that TPOT is as stated."""
    first = start + round((r.ttft_ms or 0.0) * _MS)
    if r.gaps_ms is not None:
        times = first + np.rint(np.cumsum([0.0, *r.gaps_ms]) * _MS).astype(np.int64)
        return tuple(Chunk(int(at), None, 1) for at in times)
    tokens = r.output_tokens or 1
    if tokens < 2:
        return (Chunk(first, None, 1),)
    last = end if r.tpot_ms is None else first + round(r.tpot_ms * (tokens - 1) * _MS)
    return tuple(Chunk(int(at), None, 1) for at in np.linspace(first, max(last, first), min(tokens, _MAX_PLACED)))


def _streams(requests: Sequence[ImportedRequest]) -> list[int]:
    """Which stream each request could have been: the free one with the lowest number at its send."""
    order = sorted(range(len(requests)), key=lambda i: (requests[i].start_s or 0.0, i))
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    used = 0
    found = [0] * len(requests)
    for index in order:
        start = requests[index].start_s or 0.0
        while busy and busy[0][0] <= start + 1e-9:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            stream = heapq.heappop(free)
        else:
            stream, used = used, used + 1
        found[index] = stream
        heapq.heappush(busy, (start + (requests[index].latency_ms or 0.0) / 1000, stream))
    return found


def _stated(times: Stated, count: int) -> Distribution:
    return _distribution(times.mean, times.p50, times.p90, times.p99, "ms", count)


def _distribution(
    mean: float | None, p50: float | None, p90: float | None, p99: float | None, unit: str, count: int
) -> Distribution:
    def quantity(value: float | None) -> Quantity:
        return Quantity(value, unit, Provenance.ESTIMATED, _STATED if value is not None else "not in the file")

    return Distribution(
        quantity(mean), quantity(p50), quantity(p90), quantity(None), quantity(p99), quantity(None), count
    )
