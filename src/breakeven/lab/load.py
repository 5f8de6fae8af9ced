"""What load a cell really had: rates offered and achieved, streams in flight, chunk events for the client. Pure.

A closed loop offers what the server takes; an open loop offers its schedule, and falls short where the client is late
or the server refuses. Both are shown, because a rate that fell short in silence is a common fault of load generators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from breakeven.lab.client.types import RequestResult
from breakeven.lab.gates import failed
from breakeven.lab.window import Window

OPEN_RAMP_UP_SHARE = 0.2  # of the planned arrivals' time, during which the streams in flight build up


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One cell's load. Rates are per second; None: no time passed, or fewer than two requests.

    `offered_per_s`: between the first and last *intended* send; `sent_per_s`: between the first and last actual one;
    `completed_per_s`: requests that ended properly, over first intended send to last end. Streams in flight count a
    request from its send to its end.
    """

    offered_per_s: float | None
    sent_per_s: float | None
    completed_per_s: float | None
    in_flight_mean: float | None
    in_flight_max: int
    events: int
    events_per_s: float  # in the busiest second


def load_figures(requests: Sequence[RequestResult]) -> LoadFigures:
    """The load of a cell, failed requests included where they were sent."""
    if not requests:
        return LoadFigures(None, None, None, None, 0, 0, 0.0)
    sends = [r.send_ns for r in requests]
    ends = [max(r.end_ns, r.send_ns) for r in requests]
    intended = [r.intended_send_ns for r in requests]
    completed = sum(not failed(r) for r in requests)
    whole_s = (max(ends) - min(intended)) / 1e9
    busy_ns = sum(end - send for send, end in zip(sends, ends, strict=True))
    span_ns = max(ends) - min(sends)
    arrivals = [c.arrival_ns for r in requests for c in r.chunks]
    return LoadFigures(
        offered_per_s=_rate(intended),
        sent_per_s=_rate(sends),
        completed_per_s=completed / whole_s if whole_s > 0 else None,
        in_flight_mean=busy_ns / span_ns if span_ns > 0 else None,
        in_flight_max=_most_at_once(sends, ends),
        events=len(arrivals),
        events_per_s=busiest_second(arrivals),
    )


def _rate(times_ns: Sequence[int]) -> float | None:
    span = max(times_ns) - min(times_ns)
    return (len(times_ns) - 1) * 1e9 / span if span > 0 else None


def _most_at_once(sends: Sequence[int], ends: Sequence[int]) -> int:
    """At equal times an end comes before a send: a stream's next request begins when its last has ended."""
    edges = sorted([(t, 1) for t in sends] + [(t, 0) for t in ends])
    running = most = 0
    for _, begins in edges:
        running += 1 if begins else -1
        most = max(most, running)
    return most


def open_window(requests: Sequence[RequestResult]) -> Window | None:
    """The steady window of an open loop, by the plan alone: the last 80% of the time in which arrivals are planned.

    It leaves out the build-up of streams in flight and the drain after the last planned send. None with fewer than two
    planned moments.
    """
    if not requests:
        return None
    first = min(r.intended_send_ns for r in requests)
    last = max(r.intended_send_ns for r in requests)
    start = first + round(OPEN_RAMP_UP_SHARE * (last - first))
    return Window("steady", start, last) if last > start else None


def busiest_second(arrivals_ns: ArrayLike) -> float:
    """The most events within any one second (half-open), from their times in ns, shape (n,); 0 without events."""
    times = np.sort(np.asarray(arrivals_ns, dtype=np.int64).reshape(-1))
    if not times.size:
        return 0.0
    ends = np.searchsorted(times, times + 1_000_000_000, side="left")
    return float((ends - np.arange(times.size)).max())
