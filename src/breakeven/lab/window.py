"""The window over which a cell's throughput is taken, and the tokens that fall into it. Pure.

Two windows are always computed, and the rule that picks the headline was fixed beforehand and looks at the plan's
numbers alone (requests, or sessions where these are played, and streams), never at a result:

- *whole*: from the first intended send to the last end. It counts everything, and it includes the drain, in which
  fewer streams than the level are busy: the fewer the requests per stream, the more it mixes in lower loads, where
  speculation usually does better.
- *steady*: from the moment all streams are busy (the latest first send) until the first stream finds no further
  request (the earliest last end). Every stream is busy throughout, so the load is the level it is named after. What
  it costs: the requests cut by its end have their whole prefill counted and a part of their output.

Headline: steady from `STEADY_MIN_REQUESTS_PER_STREAM` (2) requests per stream on, else whole. With n requests per
stream from a shared queue, the steady window holds roughly the first n − 1/2 of each stream, so at 2 it still holds
most of the work, while the drain would be a quarter of the whole window. At one stream the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from breakeven.lab.client.types import RequestResult

STEADY_MIN_REQUESTS_PER_STREAM = 2


@dataclass(frozen=True, slots=True)
class Window:
    """A span of wall-clock time in nanoseconds, `end_ns > start_ns`."""

    name: Literal["whole", "steady"]
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def uses_steady_window(requests: int, level: int) -> bool:
    """The rule: does the headline throughput of a cell of this plan use the steady window?"""
    return requests >= STEADY_MIN_REQUESTS_PER_STREAM * level


def whole_window(requests: Sequence[RequestResult]) -> Window | None:
    """First intended send to last end, failed requests included; None without requests or time."""
    if not requests:
        return None
    start = min(r.intended_send_ns for r in requests)
    end = max(r.end_ns for r in requests)
    return Window("whole", start, end) if end > start else None


def steady_window(requests: Sequence[RequestResult], level: int) -> Window | None:
    """All streams busy; None if fewer than `level` streams had requests or they never were busy together."""
    first_send: dict[int, int] = {}
    last_end: dict[int, int] = {}
    for r in requests:
        first_send[r.stream] = min(r.send_ns, first_send.get(r.stream, r.send_ns))
        last_end[r.stream] = max(r.end_ns, last_end.get(r.stream, r.end_ns))
    if len(first_send) < max(level, 1):
        return None
    start, end = max(first_send.values()), min(last_end.values())
    return Window("steady", start, end) if end > start else None


def tokens_within(request: RequestResult, window: Window) -> float:
    """Completion tokens of one request that were produced in the window.

    The cumulative count is taken as linear between chunk arrivals (from the send to the first one, too), and tokens
    without a chunk of their own (an EOS) come at the end. Where the server does not count per chunk, its total is
    spread over the chunks by their characters. Zero where the request has no token count.
    """
    total = request.completion_tokens
    if not total:
        return 0.0
    chunks = request.chunks
    counted = [chunk.tokens for chunk in chunks if chunk.tokens is not None]
    if len(counted) == len(chunks):
        weights = np.asarray(counted, dtype=np.float64)
        scale = min(1.0, total / weights.sum()) if weights.sum() > 0 else 0.0
    else:
        weights = np.asarray([max(chunk.characters, 0) for chunk in chunks], dtype=np.float64)
        scale = total / weights.sum() if weights.sum() > 0 else 0.0
    times = np.asarray([request.send_ns, *(chunk.arrival_ns for chunk in chunks), request.end_ns], dtype=np.int64)
    cumulative = np.concatenate(([0.0], np.cumsum(weights) * scale, [float(total)]))
    offsets = np.maximum.accumulate(times - times[0]).astype(np.float64)
    edges = np.asarray([window.start_ns - request.send_ns, window.end_ns - request.send_ns], dtype=np.float64)
    low, high = np.interp(edges, offsets, cumulative, left=0.0, right=float(total))
    return float(high - low)
