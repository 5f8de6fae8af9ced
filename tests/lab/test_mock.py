"""The mock server: it does what its script says, and tells the truth about it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from breakeven.lab.client import Endpoint, RequestSpec, parse_exchange, run_closed_loop
from breakeven.lab.mock import MockProcess, MockScript, MockServer


@contextmanager
def mock(**script: Any) -> Iterator[MockServer]:
    server = MockServer(MockScript(**{"first_chunk_s": 0.005, "gap_s": 0.004, "chunks": 5, **script}))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)
        assert not thread.is_alive()


def get(server: MockServer, path: str) -> Any:
    with urlopen(server.url + path, timeout=5) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text


def post(server: MockServer, path: str, value: Any = None) -> Any:
    with urlopen(Request(server.url + path, json.dumps(value).encode(), method="POST"), timeout=5) as answer:
        return json.loads(answer.read())


def ask(url: str, count: int = 1, route: str = "/v1/completions", **body: Any) -> list[Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"stream": True, "stream_options": options, **body}
    requests = [RequestSpec(f"r{i}", "p", json.dumps({**asked, "user": f"r{i}"}).encode()) for i in range(count)]
    return [parse_exchange(e) for e in run_closed_loop(Endpoint(url + route), requests, count, timeout_s=5).exchanges]


def test_a_request_is_told_apart_by_the_id_in_its_header_or_its_body() -> None:
    with mock() as server:
        ask(server.url)
        asked = Request(server.url + "/v1/completions", b'{"prompt": "x"}', {"X-Request-ID": "bench-7"}, method="POST")
        urlopen(asked, timeout=5).close()
        truth = server.truth()["requests"]
    assert [(r["user"], r["request_id"]) for r in truth] == [("r0", None), (None, "bench-7")]


def test_chunks_go_out_when_they_are_due_and_never_before() -> None:
    with mock() as server:
        ask(server.url, 3)
        truth = server.truth()["requests"]
    assert len(truth) == 3
    for request in truth:
        for index, sent in enumerate(request["chunk_ns"]):
            assert sent - request["received_ns"] >= 5_000_000 + index * 4_000_000
        assert request["finished"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("pattern, tokens", [(2, [2, 2, 2, 2, 2]), ((1, 3), [1, 3, 1, 3, 1])])
def test_tokens_follow_the_pattern_and_usage_agrees(route: str, pattern: Any, tokens: list[int]) -> None:
    with mock(tokens_per_chunk=pattern, cached_tokens=8) as server:
        (result,) = ask(server.url, route=route)
        assert server.truth()["requests"][0]["tokens"] == tokens
    assert [c.tokens for c in result.chunks] == tokens
    assert (result.completion_tokens, result.prompt_tokens, result.cached_tokens) == (sum(tokens), 32, 8)
    assert (result.finish_reason, result.error) == ("stop", None)


def test_max_tokens_ends_a_request_within_a_chunk() -> None:
    with mock(tokens_per_chunk=3) as server:
        (result,) = ask(server.url, max_tokens=7)
    assert [c.tokens for c in result.chunks] == [3, 3, 1]
    assert result.finish_reason == "length"


def test_an_answer_that_is_not_streamed_says_the_same() -> None:
    with mock(tokens_per_chunk=2) as server:
        (streamed,) = ask(server.url, route="/v1/chat/completions")
        (whole,) = ask(server.url, route="/v1/chat/completions", stream=False)
    assert (whole.text, whole.completion_tokens, whole.chunks) == (streamed.text, 10, ())


def test_events_have_the_size_asked_for() -> None:
    with mock(bytes_per_chunk=400) as server:
        body = b'{"stream": true}'
        with urlopen(Request(f"{server.url}/v1/completions", body, method="POST"), timeout=5) as answer:
            events = answer.read().split(b"\n\n")
    assert [len(event) + 2 for event in events[:5]] == [400] * 5


@pytest.mark.parametrize("split", [1, 7])
def test_pieces_of_a_chunk_are_one_chunk_that_is_sent_with_its_last_piece(split: int) -> None:
    with mock(split_bytes=split, split_gap_s=0.00001, chunks=2, bytes_per_chunk=0) as server:
        (result,) = ask(server.url)
        (request,) = server.truth()["requests"]
    assert result.error is None
    assert len(result.chunks) == len(request["chunk_ns"]) == 2
    assert result.chunks[0].arrival_ns < request["chunk_ns"][1]


def test_a_saturating_server_slows_with_the_requests_in_flight() -> None:
    with mock(gap_s=0.001, gap_per_stream_s=0.004) as server:
        ask(server.url, 1)
        ask(server.url, 4)
        alone, *together = server.truth()["requests"]
    # From the arrival, since each write is due at a time counted from it: 5 ms, and then four gaps.
    assert alone["chunk_ns"][-1] - alone["received_ns"] >= 5_000_000 + 4 * 5_000_000
    assert min(r["chunk_ns"][-1] - r["received_ns"] for r in together) >= 5_000_000 + 3 * 17_000_000


def test_the_first_requests_can_be_slow() -> None:
    with mock(slow_first_requests=1, slow_first_s=0.05) as server:
        ask(server.url)
        ask(server.url)
        first, second = (r["chunk_ns"][0] - r["received_ns"] for r in server.truth()["requests"])
    assert first >= 55_000_000
    assert second < first


def test_wrong_and_missing_usage() -> None:
    with mock(no_usage=True) as server:
        assert ask(server.url)[0].completion_tokens is None
    with mock(usage_offset=3) as server:
        assert ask(server.url)[0].completion_tokens == 8


def test_faults_touch_the_requests_they_are_meant_for() -> None:
    with mock(http_status=500, fault_from=1, fault_every=2) as server:
        statuses = [ask(server.url)[0].http_status for _ in range(5)]
    assert statuses == [200, 500, 200, 500, 200]


def test_speculation_counters_rise_with_what_was_accepted_and_can_be_set() -> None:
    with mock(draft_tokens=3, tokens_per_chunk=(1, 3, 2), report_speculation=True) as server:
        assert get(server, "/metrics") == ""
        (result,) = ask(server.url)
        text = get(server, "/metrics")
        post(server, "/mock/counters", {"num_drafts": 100})
        after = get(server, "/metrics")
    # Chunks of 1, 3, 2, 1, 3 tokens: four steps after the first chunk, accepting 2, 1, 0 and 2 drafted tokens.
    assert "vllm:spec_decode_num_drafts_total 4\n" in text
    assert "vllm:spec_decode_num_draft_tokens_total 12\n" in text
    assert "vllm:spec_decode_num_accepted_tokens_total 5\n" in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3\n' in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 0\n' in text
    assert result.speculation["num_accepted_tokens"] == 5
    assert "vllm:spec_decode_num_drafts_total 100.0\n" in after


def test_the_other_routes() -> None:
    with mock(model="tiny") as server:
        assert get(server, "/health") == {"ready": True}
        assert get(server, "/v1/models")["data"][0]["id"] == "tiny"
        post(server, "/reset_prefix_cache")
        assert get(server, "/mock/truth")["prefix_cache_resets"] == 1
        with pytest.raises(HTTPError, match="404"):
            get(server, "/nowhere")
        with pytest.raises(HTTPError, match="400"):
            post(server, "/v1/completions", [1])


@pytest.mark.parametrize("script", [{"never_ready": True}, {"ready_after_s": 60}])
def test_a_server_that_is_not_ready_says_so(script: dict[str, Any]) -> None:
    with mock(**script) as server, pytest.raises(HTTPError, match="503"):
        get(server, "/health")


def test_another_script_can_be_played() -> None:
    with mock() as server:
        ask(server.url)
        post(server, "/mock/script", {"chunks": 2, "first_chunk_s": 0, "gap_s": 0})
        post(server, "/mock/forget")
        assert len(ask(server.url)[0].chunks) == 2
        assert len(server.truth()["requests"]) == 1
        with pytest.raises(HTTPError, match="400"):
            post(server, "/mock/script", {"chunk": 2})


def test_a_process_of_its_own_serves_and_can_die_in_mid_stream() -> None:
    with MockProcess(
        MockScript(first_chunk_s=0, gap_s=0.002, chunks=4, die_after=2, death="exit", fault_from=1)
    ) as process:
        assert ask(process.url)[0].error is None
        assert len(process.truth()["requests"]) == 1
        (result,) = ask(process.url)
        assert result.error is not None
        assert len(result.chunks) == 2
        assert process.process.wait(5) == 1


def test_the_command_explains_a_bad_script() -> None:
    command = [sys.executable, "-m", "breakeven.lab.mock", "--script"]
    for script, words in (
        ('{"chunk": 1}', "unknown fields: chunk"),
        ("{", "not valid JSON"),
        ('{"chunks": 0}', "at least 1"),
    ):
        done = subprocess.run([*command, script], capture_output=True, text=True, timeout=20)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_script_survives_json() -> None:
    script = MockScript(tokens_per_chunk=(1, 2), die_after=3, newline="crlf")
    assert MockScript.from_json(script.to_json()) == script
