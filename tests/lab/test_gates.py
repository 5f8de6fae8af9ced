"""The gates of a cell: each fault makes it invalid, with a reason that names the fault; a good cell passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from breakeven.lab.campaign import Gates
from breakeven.lab.client.types import Chunk, RequestResult
from breakeven.lab.gates import cached_share, check_cell, send_lag_p99_ms

MS = 1_000_000
GOOD = RequestResult(
    request_id="r0",
    prompt_id="p0",
    stream=0,
    intended_send_ns=0,
    send_ns=1 * MS,
    first_byte_ns=50 * MS,
    end_ns=100 * MS,
    http_status=200,
    chunks=(Chunk(50 * MS, 1, 4), Chunk(90 * MS, 2, 8)),
    text="some text",
    finish_reason="stop",
    prompt_tokens=100,
    completion_tokens=3,
    cached_tokens=0,
    error=None,
)


def _reasons(
    *requests: RequestResult, planned: int | None = None, cpu: float = 0.01, gates: Gates | None = None
) -> str:
    found = check_cell(
        requests,
        gates or Gates(),
        planned=len(requests) if planned is None else planned,
        max_tokens=16,
        start_ns=0,
        end_ns=100 * MS,
        client_cpu_s=cpu,
    )
    return " | ".join(found)


def test_a_cell_without_a_fault_is_valid() -> None:
    assert _reasons(GOOD, replace(GOOD, request_id="r1")) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "connection reset", "http_status": None}, "1 of 2 requests failed (allowed: 0%)"),
        ({"error": "HTTP 400: too long (context_length_exceeded)", "http_status": 400}, "1 prompts do not fit the"),
        ({"error": "HTTP 400: This model's maximum context length is 8192", "http_status": 400}, "raise its limit"),
        ({"http_status": 500}, "the first of them, r1: HTTP 500"),
        ({"completion_tokens": None}, "1 of 2 answers came without usage"),
        ({"completion_tokens": 17}, "1 answers are longer than max_tokens (r1: 17 against 16)"),
        ({"send_ns": 80 * MS}, "the client sent late: p99 of its lag is"),
        ({"end_ns": 0}, "time ran backwards in 1 requests"),
    ],
)
def test_one_faulty_request_makes_the_cell_invalid(changes: dict[str, object], words: str) -> None:
    assert words in _reasons(GOOD, replace(GOOD, request_id="r1", **changes))  # type: ignore[arg-type]


def test_requests_that_were_never_sent_count_as_failed() -> None:
    assert "1 of 2 requests were not sent" in _reasons(GOOD, planned=2)


def test_a_warm_cache_makes_the_cell_invalid() -> None:
    assert "90% of the prompt tokens were in the server's prefix cache" in _reasons(replace(GOOD, cached_tokens=90))
    assert _reasons(replace(GOOD, cached_tokens=None)) == ""


def test_a_busy_client_makes_the_cell_invalid() -> None:
    assert "the client was busy 95% of the time" in _reasons(GOOD, cpu=0.095)


def test_a_server_that_generates_nothing_makes_the_cell_invalid() -> None:
    assert "generated no token" in _reasons(replace(GOOD, completion_tokens=0))


def test_the_campaign_may_allow_failures_and_missing_usage() -> None:
    failed = replace(GOOD, error="reset")
    assert _reasons(GOOD, failed, gates=Gates(max_failed_share=0.5)) == ""
    assert _reasons(replace(GOOD, completion_tokens=None), gates=Gates(require_usage=False)) == ""


def test_the_cached_share_is_over_tokens_and_leaves_failed_requests_out() -> None:
    other = replace(GOOD, prompt_tokens=300, cached_tokens=100)
    assert cached_share([GOOD, other, replace(other, error="x")]) == 0.25
    assert cached_share([]) is None


def test_the_send_lag_counts_from_the_intended_send() -> None:
    assert send_lag_p99_ms([GOOD]) == 1.0
    assert send_lag_p99_ms([]) == 0.0
