"""Events → named quantities with provenance. Pure; `docs/statistics.md` holds the definitions.

Three quantities, never a bare "ITL", because one streamed chunk may carry several tokens:

- TPOT = (last chunk − first chunk) / (n − n_first), a mean per request;
- inter-chunk latency = gap between successive content chunks, the stall a reader sees;
- token-weighted gap = gap ÷ tokens in the chunk, one value per token, or unavailable.

Times count from the *intended* send; what the client was late by is the send lag.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.acceptance import Acceptance, acceptance
from breakeven.lab.client.types import RequestResult
from breakeven.lab.gates import failed
from breakeven.lab.load import open_window
from breakeven.lab.quantity import Distribution, Provenance, Quantity, describe
from breakeven.lab.texts import Agreement, agreement, is_looping
from breakeven.lab.window import Window, steady_window, tokens_within, uses_steady_window, whole_window

__all__ = [
    "Acceptance", "Agreement", "CellMetrics", "Distribution", "Provenance", "Quantity", "RequestMetrics", "acceptance",
    "agreement", "cell_metrics", "is_looping", "is_valid", "request_metrics",
]  # fmt: skip

MILLISECOND = 1e6  # nanoseconds


@dataclass(frozen=True, slots=True, eq=False)
class RequestMetrics:
    """One request. Milliseconds, from the intended send; None: undefined for this request.

    `inter_chunk_ms`: shape (chunks − 1,). `token_gap_ms`: one value per token after the first chunk's, None where the
    server does not say how many tokens a chunk holds. `tpot_provenance` is ESTIMATED where the first chunk's token
    count is unknown and taken as 1.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    tpot_provenance: Provenance
    latency_ms: float
    send_lag_ms: float
    inter_chunk_ms: NDArray[np.float64]
    token_gap_ms: NDArray[np.float64] | None
    completion_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    looping: bool


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """One cell. Every figure is a `Quantity` or a `Distribution` of them; `notes` are warnings in plain words.

    `throughput_tok_s` is the headline: the steady window's or the whole one's, by the rule in `window`.
    """

    throughput_tok_s: Quantity
    throughput_whole_tok_s: Quantity
    throughput_steady_tok_s: Quantity
    throughput_window: Literal["whole", "steady"]
    steady_share: Quantity  # of the tokens, those within the steady window
    requests_per_s: Quantity
    completion_tokens: Quantity
    prompt_tokens: Quantity
    ttft: Distribution
    tpot: Distribution
    latency: Distribution
    inter_chunk: Distribution
    token_gap: Distribution
    send_lag: Distribution
    output_tokens: Distribution  # completion tokens per request
    acceptance_length: Quantity
    acceptance_per_position: tuple[Quantity, ...]
    acceptance: Acceptance
    looping_share: Quantity
    cached_share: Quantity  # of the prompt tokens, those found in the server's prefix cache
    requests: int
    failed: int
    uncounted: int  # ended properly, but without a token count
    duration_s: Quantity
    notes: tuple[str, ...]


def is_valid(request: RequestResult) -> bool:
    """Ended properly and has a token count from the server."""
    return not failed(request) and request.completion_tokens is not None


def request_metrics(r: RequestResult) -> RequestMetrics:
    """The quantities of one request; those of a failed one are computed as far as it got."""
    arrivals = np.asarray([chunk.arrival_ns for chunk in r.chunks], dtype=np.int64)
    gaps = np.diff(arrivals) / MILLISECOND
    tpot, provenance = _tpot(r)
    return RequestMetrics(
        ttft_ms=ttft_ms(r),
        tpot_ms=tpot,
        tpot_provenance=provenance,
        latency_ms=latency_ms(r),
        send_lag_ms=(r.send_ns - r.intended_send_ns) / MILLISECOND,
        inter_chunk_ms=gaps,
        token_gap_ms=_token_gaps(r, gaps),
        completion_tokens=r.completion_tokens,
        prompt_tokens=r.prompt_tokens,
        cached_tokens=r.cached_tokens,
        looping=is_looping(r.text),
    )


def ttft_ms(r: RequestResult) -> float | None:
    """Intended send to first chunk in milliseconds; None without a chunk."""
    return (r.chunks[0].arrival_ns - r.intended_send_ns) / MILLISECOND if r.chunks else None


def latency_ms(r: RequestResult) -> float:
    """Intended send to end in milliseconds."""
    return (r.end_ns - r.intended_send_ns) / MILLISECOND


def tpot_ms(r: RequestResult) -> float | None:
    """TPOT of a request in milliseconds; None where it is undefined."""
    return _tpot(r)[0]


def _tpot(r: RequestResult) -> tuple[float | None, Provenance]:
    """(last chunk − first chunk) / (n − n_first); None with fewer than two chunks or no tokens after the first."""
    if len(r.chunks) < 2 or r.completion_tokens is None:
        return None, Provenance.DERIVED
    reported = r.chunks[0].tokens
    provenance = Provenance.DERIVED if reported is not None else Provenance.ESTIMATED
    remaining = r.completion_tokens - (reported if reported is not None else 1)
    if remaining <= 0:
        return None, provenance
    return (r.chunks[-1].arrival_ns - r.chunks[0].arrival_ns) / MILLISECOND / remaining, provenance


def _token_gaps(r: RequestResult, gaps: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Each gap divided by its chunk's tokens, once per token. A chunk without a token lends its gap to the next."""
    counts = [chunk.tokens for chunk in r.chunks if chunk.tokens is not None]
    if len(counts) != len(r.chunks) or not r.chunks:
        return None
    waited, per_token, repeats = 0.0, [], []
    for gap, tokens in zip(gaps, counts[1:], strict=True):
        waited += float(gap)
        if tokens > 0:
            per_token.append(waited / tokens)
            repeats.append(tokens)
            waited = 0.0
    return np.repeat(np.asarray(per_token, dtype=np.float64), repeats)


def cell_metrics(
    requests: Sequence[RequestResult],
    counters: Mapping[str, float],
    start_ns: int,
    end_ns: int,
    level: int,
    *,
    natural: bool = True,
    open_loop: bool = False,
    planned: int | None = None,
) -> CellMetrics:
    """The quantities of one cell: in closed loop at `level` streams, or of an open loop (`load.open_window`).

    `counters`: deltas over the cell (see `acceptance`); empty if the server has none. `start_ns`, `end_ns`: the load
    generator's run. `natural`: real text with EOS respected, without which acceptance means nothing. Distributions
    are over the valid requests; throughput has no value if a request that ended properly has no token count.
    `planned`: what the streams take from one queue, which picks the headline's window: sessions where `requests` are
    their turns; None: the requests.
    """
    finished = [r for r in requests if not failed(r)]
    valid = [r for r in finished if r.completion_tokens is not None]
    failures, uncounted = len(requests) - len(finished), len(finished) - len(valid)
    each = [request_metrics(r) for r in valid]
    looping = sum(m.looping for m in each) / len(each) if each else None
    accepted = acceptance(counters, requests, natural=natural, looping_share=looping)
    tokens = sum(r.completion_tokens or 0 for r in valid)
    whole = window_named("whole", requests, level, open_loop=open_loop)
    steady = window_named("steady", requests, level, open_loop=open_loop)
    missing = _why_no_throughput(len(valid), uncounted)
    in_whole, in_steady = _tokens_within(valid, whole), _tokens_within(valid, steady)
    whole_rate = _throughput(valid, whole, in_whole, missing, "no time passed")
    never = "too few planned arrivals" if open_loop else f"the {level} streams were never all busy at once"
    steady_rate = _throughput(valid, steady, in_steady, missing, never)
    use_steady = open_loop or uses_steady_window(len(requests) if planned is None else planned, level)
    tpot_estimated = any(m.tpot_provenance is Provenance.ESTIMATED for m in each)
    token_gaps = [m.token_gap_ms for m in each if m.token_gap_ms is not None]
    gaps_known = bool(each) and len(token_gaps) == len([r for r in valid if r.chunks])
    share = in_steady / tokens if steady and tokens else None
    return CellMetrics(
        throughput_tok_s=steady_rate if use_steady else whole_rate,
        throughput_whole_tok_s=whole_rate,
        throughput_steady_tok_s=steady_rate,
        throughput_window="steady" if use_steady else "whole",
        steady_share=Quantity(share, "1", Provenance.DERIVED, "" if share is not None else "no steady window"),
        requests_per_s=_rate(len(valid), whole),
        completion_tokens=Quantity(float(tokens), "tokens", Provenance.SERVER_REPORTED),
        prompt_tokens=_prompt_tokens(valid),
        ttft=describe([m.ttft_ms for m in each if m.ttft_ms is not None], "ms", Provenance.MEASURED),
        tpot=describe(
            [m.tpot_ms for m in each if m.tpot_ms is not None],
            "ms",
            Provenance.ESTIMATED if tpot_estimated else Provenance.DERIVED,
            note="the first chunk is assumed to hold one token" if tpot_estimated else "",
        ),
        latency=describe([m.latency_ms for m in each], "ms", Provenance.MEASURED),
        inter_chunk=describe(_joined([m.inter_chunk_ms for m in each]), "ms", Provenance.MEASURED),
        token_gap=describe(
            _joined(token_gaps) if gaps_known else [],
            "ms",
            Provenance.DERIVED,
            absent="unavailable: the server does not say how many tokens a chunk holds",
        ),
        send_lag=describe(
            [(r.send_ns - r.intended_send_ns) / MILLISECOND for r in requests], "ms", Provenance.MEASURED
        ),
        output_tokens=describe([float(r.completion_tokens or 0) for r in valid], "tokens", Provenance.SERVER_REPORTED),
        acceptance_length=accepted.length,
        acceptance_per_position=accepted.per_position,
        acceptance=accepted,
        looping_share=Quantity(looping, "1", Provenance.DERIVED, "" if each else "no valid request"),
        cached_share=_cached_share(valid),
        requests=len(requests),
        failed=failures,
        uncounted=uncounted,
        duration_s=Quantity((end_ns - start_ns) / 1e9, "s", Provenance.MEASURED),
        notes=(*accepted.notes, *_lints(requests, failures, uncounted)),
    )


def window_named(
    name: Literal["whole", "steady"], requests: Sequence[RequestResult], level: int, *, open_loop: bool
) -> Window | None:
    """One of a cell's two windows; None where it has none."""
    if name == "whole":
        return whole_window(requests)
    return open_window(requests) if open_loop else steady_window(requests, level)


def _why_no_throughput(valid: int, uncounted: int) -> str:
    if uncounted:
        return f"{uncounted} requests ended without a token count from the server"
    return "" if valid else "no valid request"


def _tokens_within(valid: Sequence[RequestResult], window: Window | None) -> float:
    return sum(tokens_within(r, window) for r in valid) if window is not None else 0.0


def _throughput(
    valid: Sequence[RequestResult], window: Window | None, tokens: float, missing: str, no_window: str
) -> Quantity:
    unit = "tok/s"
    if missing or window is None:
        return Quantity(None, unit, Provenance.DERIVED, missing or no_window)
    by_characters = window.name == "steady" and any(chunk.tokens is None for r in valid for chunk in r.chunks)
    note = f"{window.name} window of {window.seconds:.3f} s"
    if by_characters:  # at the edges only: the totals are the server's
        note += "; tokens at its edges placed by characters, because the server does not count per chunk"
    return Quantity(tokens / window.seconds, unit, Provenance.DERIVED, note)


def _rate(count: int, window: Window | None) -> Quantity:
    if window is None:
        return Quantity(None, "1/s", Provenance.MEASURED, "no time passed")
    return Quantity(count / window.seconds, "1/s", Provenance.MEASURED, "valid requests over the whole window")


def _prompt_tokens(valid: Sequence[RequestResult]) -> Quantity:
    if any(r.prompt_tokens is None for r in valid):
        return Quantity(None, "tokens", Provenance.SERVER_REPORTED, "not reported for every request")
    return Quantity(float(sum(r.prompt_tokens or 0 for r in valid)), "tokens", Provenance.SERVER_REPORTED)


def _cached_share(valid: Sequence[RequestResult]) -> Quantity:
    known = [(r.cached_tokens, r.prompt_tokens) for r in valid if r.cached_tokens is not None and r.prompt_tokens]
    if not known or len(known) < len(valid):
        return Quantity(None, "1", Provenance.SERVER_REPORTED, "the server does not report cached tokens")
    share = sum(cached or 0 for cached, _ in known) / sum(prompt or 0 for _, prompt in known)
    return Quantity(share, "1", Provenance.SERVER_REPORTED)


def _joined(arrays: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.float64)


def _lints(requests: Sequence[RequestResult], failures: int, uncounted: int) -> list[str]:
    """What cannot be, or should not: each a sentence."""
    notes = []
    if failures:
        notes.append(f"{failures} of {len(requests)} requests failed")
    if uncounted:
        notes.append(f"{uncounted} of {len(requests)} requests have no token count")
    backwards = sum(
        r.send_ns < r.intended_send_ns
        or r.end_ns < r.send_ns
        or any(b.arrival_ns < a.arrival_ns for a, b in itertools.pairwise(r.chunks))
        for r in requests
    )
    if backwards:
        notes.append(f"time runs backwards in {backwards} requests: the clock was stepped")
    return notes
