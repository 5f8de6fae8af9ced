"""Who sends what: the shares of several workers that have no queue in common, and the nodes they run on. Pure.

Workers on different machines cannot ask one counter for each request: the question would take a round trip at the very
moment a stream should send. So the requests are dealt out beforehand, like cards. The deal depends on the campaign
alone (requests, streams, workers) and never on the nodes: the same prompts go to the same worker in the same order,
whether the workers live on one machine or on eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of a closed loop: numbers of requests, in the order of sending, and numbers of streams."""

    requests: range
    streams: range


def closed_shares(requests: int, streams: int, workers: int) -> tuple[Share, ...]:
    """A closed loop's shares, one for each worker that has work: at most `workers`, and never more than streams.

    Worker w of n has the streams w, w + n, … and the queue of requests w, w + n, …; its streams take from that queue as
    they become free. So stream s begins with request s, as with one queue for all, and a long answer holds up only the
    stream that waits for it. ValueError for numbers below 1 (`requests`: below 0).
    """
    if requests < 0 or streams < 1 or workers < 1:
        raise ValueError(f"{requests} requests over {streams} streams and {workers} workers cannot be dealt out")
    busy = min(requests, streams)  # a stream without a first request would have none at all
    used = min(workers, busy)
    return tuple(Share(range(worker, requests, used), range(worker, busy, used)) for worker in range(used))


def open_shares(requests: int, workers: int) -> tuple[range, ...]:
    """An open loop's shares: worker w of n sends the requests w, w + n, …, each at its own moment."""
    if requests < 0 or workers < 1:
        raise ValueError(f"{requests} requests over {workers} workers cannot be dealt out")
    used = min(workers, requests)
    return tuple(range(worker, requests, used) for worker in range(used))


def place(workers: int, slots: Sequence[int]) -> tuple[int, ...]:
    """The node of each worker: in turn over the nodes, passing over those that are full. `slots`: workers a node takes.

    ValueError if the nodes together take fewer.
    """
    if workers > sum(slots):
        raise ValueError(f"{workers} workers need a processor core each, and the nodes have {sum(slots)} together")
    left = list(slots)
    placed: list[int] = []
    while len(placed) < workers:
        for node, free in enumerate(left):
            if free > 0 and len(placed) < workers:
                left[node] -= 1
                placed.append(node)
    return tuple(placed)
