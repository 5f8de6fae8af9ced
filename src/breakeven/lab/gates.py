"""The gates of a cell: rules fixed in the campaign beforehand that make it invalid. Pure.

An invalid cell is reported with its reasons and takes no part in any comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from breakeven.lab.campaign import Cache, Gates
from breakeven.lab.client.parse import says_overlong
from breakeven.lab.client.types import RequestResult, WorkerClock

CLOCK_STEP_MS = 20.0  # a wall clock that gains this on the steady one within a cell, …
CLOCK_SLEW = 1e-3  # …and more than this share of its time (NTP slews by half of that at most), was set
_WORDS = 300  # of an error message that is quoted


def send_lag_p99_ms(requests: Sequence[RequestResult]) -> float:
    """The 99th percentile of actual minus intended send, in milliseconds; 0 without requests."""
    if not requests:
        return 0.0
    return float(np.percentile([(r.send_ns - r.intended_send_ns) / 1e6 for r in requests], 99))


def failed(request: RequestResult) -> bool:
    """Whether a request did not end as it should."""
    return request.error is not None or (request.http_status is not None and not 200 <= request.http_status < 300)


def clock_step(wall_ns: int, steady_ns: int) -> str:
    """A sentence if the wall clock was set during a cell; empty if not.

    `wall_ns`, `steady_ns`: how long the cell took by the clock that requests are timed with, and by one that never
    jumps.
    """
    step = (wall_ns - steady_ns) / 1e6
    if abs(step) <= max(CLOCK_STEP_MS, CLOCK_SLEW * steady_ns / 1e6):
        return ""
    return (
        f"the machine's clock was set by {step:+.0f} ms during the cell, and its times are taken from it: let one time "
        f"service slew it, and do not suspend the machine"
    )


def node_clocks(clocks: Sequence[WorkerClock], seconds: float) -> tuple[str, ...]:
    """A sentence for each other machine whose clock was set, by the same limits, during a cell of so many seconds."""
    allowed_ms = max(CLOCK_STEP_MS, CLOCK_SLEW * seconds * 1e3)
    moved: dict[str, float] = {}
    for clock in clocks:
        # What the round trips cannot tell apart from a clock that stood still is no evidence against it.
        if abs(clock.drift_ms) > allowed_ms + 2 * (clock.bound_ms - abs(clock.drift_ms)):
            moved.setdefault(clock.node, clock.drift_ms)
    return tuple(
        f"the clock of {node} moved by {drift:+.0f} ms against this machine's during the cell, and times of requests "
        f"are taken from it: let one time service slew both"
        for node, drift in moved.items()
    )


def cached_share(requests: Sequence[RequestResult]) -> float | None:
    """The share of prompt tokens that the server found in its prefix cache; None if it does not report them."""
    known = [r for r in requests if not failed(r) and r.cached_tokens is not None and r.prompt_tokens]
    if not known:
        return None
    return sum(r.cached_tokens or 0 for r in known) / sum(r.prompt_tokens or 0 for r in known)


def check_cell(
    requests: Sequence[RequestResult],
    gates: Gates,
    *,
    planned: int,
    max_tokens: int,
    start_ns: int,
    end_ns: int,
    client_cpu_s: float,
    cache: Cache = "cold",
    fresh: Sequence[RequestResult] | None = None,
) -> tuple[str, ...]:
    """The reasons why a cell is invalid, in plain words; empty for a valid one. `planned`: requests it should have.

    `cache`: what the campaign declares of the prefix cache. A cold one must not be warm, and a warm one not cold.
    `fresh`: the requests whose prompts a cold cache must not hold; None: all. Of sessions these are the first turns,
    since a later one finds its own history there.
    """
    return tuple(
        reason
        for reason in (
            _failures(requests, gates, planned),
            _usage(requests, gates),
            _clock(requests, start_ns, end_ns),
            _send_lag(requests, gates),
            _lengths(requests, max_tokens),
            _cache(requests if fresh is None else fresh, gates) if cache == "cold" else _cold_cache(requests, gates),
            _client(gates, start_ns, end_ns, client_cpu_s),
        )
        if reason
    )


def _failures(requests: Sequence[RequestResult], gates: Gates, planned: int) -> str:
    bad = [r for r in requests if failed(r)]
    unsent = planned - len(requests)
    share = (len(bad) + unsent) / planned if planned else 0.0
    if share <= gates.max_failed_share:
        return ""
    parts = [f"{len(bad)} of {planned} requests failed"] if bad else []
    parts += [f"{unsent} of {planned} requests were not sent"] if unsent else []
    words = f"{' and '.join(parts)} (allowed: {gates.max_failed_share:.0%})"
    if bad:
        first = bad[0]
        words += f"; the first of them, {first.request_id}: {(first.error or f'HTTP {first.http_status}')[:_WORDS]}"
    overlong = sum(says_overlong(r.error or "") for r in bad)
    if overlong:
        words += (
            f". {overlong} prompts do not fit the server's context: raise its limit, lower max_tokens, or leave those "
            f"prompts out"
        )
    return words


def _usage(requests: Sequence[RequestResult], gates: Gates) -> str:
    good = [r for r in requests if not failed(r)]
    uncounted = sum(r.completion_tokens is None for r in good)
    if uncounted and gates.require_usage:
        return (
            f"{uncounted} of {len(good)} answers came without usage, so their tokens are not known: let the server "
            f"report it (stream_options.include_usage)"
        )
    if good and not uncounted and not any(r.completion_tokens for r in good):
        return "the server generated no token for any request"
    fewer = [r for r in good if r.completion_tokens is not None and len(r.chunks) > r.completion_tokens + 1]
    if fewer:
        return (
            f"{len(fewer)} answers have more chunks than tokens ({fewer[0].request_id}: {len(fewer[0].chunks)} chunks, "
            f"{fewer[0].completion_tokens} tokens by usage): the server counts wrongly"
        )
    return ""


def _clock(requests: Sequence[RequestResult], start_ns: int, end_ns: int) -> str:
    backwards = sum(r.end_ns < r.send_ns or r.send_ns < r.intended_send_ns for r in requests)
    if backwards or end_ns < start_ns:
        return f"time ran backwards in {backwards} requests: the machine's clock was set during the cell"
    return ""


def _send_lag(requests: Sequence[RequestResult], gates: Gates) -> str:
    lag = send_lag_p99_ms(requests)
    if lag <= gates.max_send_lag_ms:
        return ""
    return (
        f"the client sent late: p99 of its lag is {lag:.1f} ms (allowed: {gates.max_send_lag_ms:g} ms); leave it a "
        f"processor core of its own, or measure from another machine"
    )


def _lengths(requests: Sequence[RequestResult], max_tokens: int) -> str:
    longer = [r for r in requests if (r.completion_tokens or 0) > max_tokens]
    if not longer:
        return ""
    worst = max(longer, key=lambda r: r.completion_tokens or 0)
    return (
        f"{len(longer)} answers are longer than max_tokens ({worst.request_id}: {worst.completion_tokens} against "
        f"{max_tokens}): the server ignores the limit or counts wrongly"
    )


def _cache(requests: Sequence[RequestResult], gates: Gates) -> str:
    share = cached_share(requests)
    if share is None or share <= gates.max_cached_share:
        return ""
    return (
        f"{share:.0%} of the prompt tokens were in the server's prefix cache (allowed: {gates.max_cached_share:.0%}): "
        f"it was not empty, or the prompts share that much"
    )


def _cold_cache(requests: Sequence[RequestResult], gates: Gates) -> str:
    """A cache declared warm that was not. Where hits are not reported it cannot be told, and a lint says so."""
    share = cached_share(requests)
    if share is None or share >= gates.min_warm_share:
        return ""
    return (
        f"the cache is declared warm, and only {share:.0%} of the prompt tokens were in it (asked for: "
        f"{gates.min_warm_share:.0%}): prefix caching is off, the cache is too small for the cell's prompts, or these "
        f"are shorter than one of its pages"
    )


def _client(gates: Gates, start_ns: int, end_ns: int, client_cpu_s: float) -> str:
    seconds = (end_ns - start_ns) / 1e9
    if seconds <= 0 or client_cpu_s / seconds <= gates.max_client_cpu_share:
        return ""
    return (
        f"the client was busy {client_cpu_s / seconds:.0%} of the time (allowed: {gates.max_client_cpu_share:.0%}), so "
        f"it may have been the bottleneck"
    )
