"""From raw bytes to a request's result: tokens are the server's, and what is wrong is said in plain words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.client import RawExchange, RequestResult, parse_exchange
from breakeven.lab.client.parse import says_overlong
from breakeven.lab.mock import MockScript
from breakeven.lab.mock.plan import RequestShape, build_plan

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def exchange(data: bytes, reads: list[tuple[int, int]] | None = None, error: str | None = None) -> RawExchange:
    reads = reads if reads is not None else [(100, len(data))]
    return RawExchange("r", "p", 3, 10, 20, reads, data, 900, error)


def stream(*events: Any, end: bytes = b"0\r\n\r\n", times: int = 100, error: str | None = None) -> RequestResult:
    """One event a read, at 100, 200, …; an event is JSON, or bytes as they are."""
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    reads: list[tuple[int, int]] = []
    for event in events:
        payload = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        data += b"%x\r\n%b\r\n" % (len(payload), payload)
        reads.append((times * (len(reads) + 1), len(data)))
    data += end
    if reads and end:
        reads[-1] = (reads[-1][0], len(data))
    return parse_exchange(exchange(data, reads, error))


def text(words: str, completion: int | None = None, **more: Any) -> dict[str, Any]:
    event: dict[str, Any] = {"choices": [{"index": 0, "text": words, "finish_reason": None, **more}]}
    if completion is not None:
        event["usage"] = {"prompt_tokens": 7, "completion_tokens": completion}
    return event


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def usage(completion: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": completion, **more}}


DONE = b"[DONE]"


def test_a_completion_stream_gives_chunks_times_usage_and_text() -> None:
    result = stream(
        text("Hel"),
        text("lo"),
        text("", finish_reason="stop"),
        usage(4, prompt_tokens_details={"cached_tokens": 5}),
        DONE,
    )
    assert result.error is None
    assert [(c.arrival_ns, c.tokens, c.characters) for c in result.chunks] == [(100, None, 3), (200, None, 2)]
    assert (result.text, result.finish_reason, result.http_status) == ("Hello", "stop", 200)
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (7, 4, 5)
    assert (result.intended_send_ns, result.send_ns, result.first_byte_ns, result.end_ns) == (10, 20, 100, 900)
    assert (result.request_id, result.prompt_id, result.stream) == ("r", "p", 3)


def test_a_chat_stream_counts_content_reasoning_and_tool_calls_but_not_the_role() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    result = stream(
        chat(role="assistant", content=""), chat(reasoning_content="hm"), chat(reasoning="m", content=None),
        chat(content="é"), chat(tool_calls=[call]), usage(9), DONE,
    )  # fmt: skip
    assert [(c.arrival_ns, c.characters) for c in result.chunks] == [(200, 2), (300, 1), (400, 1), (500, 3)]
    assert result.text == "hmméf{}"


def test_a_chunks_tokens_are_the_rise_of_continuous_usage_since_the_last_content() -> None:
    result = stream(text("", 0), text("a", 3), text("", 4), text("bc", 6), text("d", 7), usage(8), DONE)
    assert [c.tokens for c in result.chunks] == [3, 3, 1]
    assert result.completion_tokens == 8


def test_usage_on_the_last_content_chunk_alone_is_no_count_of_that_chunk() -> None:
    result = stream(text("a"), text("b"), text("c", 9, finish_reason="stop"), DONE)
    assert [c.tokens for c in result.chunks] == [None, None, None]
    assert result.completion_tokens == 9


@pytest.mark.parametrize(
    "listed",
    [
        lambda n: {"token_ids": list(range(n))},
        lambda n: {"logprobs": {"tokens": ["x"] * n}},
        lambda n: {"logprobs": {"content": [{}] * n}},
    ],
)
def test_listed_tokens_count_where_usage_does_not(listed: Any) -> None:
    result = stream(text("a", **listed(2)), text("", **listed(1)), text("b", **listed(1)), usage(4), DONE)
    assert [c.tokens for c in result.chunks] == [2, 2]


def test_no_usage_leaves_the_count_open_and_is_no_error() -> None:
    result = stream(text("a"), text("", finish_reason="stop"), DONE)
    assert (result.completion_tokens, result.prompt_tokens, result.error) == (None, None, None)


@pytest.mark.parametrize("wrong", [None, True, -1, "7", 1.5])
def test_a_usage_that_is_no_count_counts_nothing(wrong: Any) -> None:
    result = stream(text("a"), {"choices": [], "usage": {"completion_tokens": wrong}}, DONE)
    assert result.completion_tokens is None


def test_per_request_speculation_is_kept_with_lists_by_position() -> None:
    last = text("", finish_reason="stop") | {
        "metrics": {"speculative_decoding": {"num_drafts": 3, "accepted": [2, 1], "kind": "x", "on": True}}
    }
    result = stream(text("a"), last, DONE)
    assert result.speculation == {"num_drafts": 3.0, "accepted_0": 2.0, "accepted_1": 1.0}


@pytest.mark.parametrize(
    "events, words",
    [
        ([text("a"), b'{"choices": [', text("b"), DONE], "event 2 of the stream is not valid JSON"),
        ([text("a"), b'{"a": 1} {"b": 2}', DONE], "event 2 of the stream is not valid JSON"),
        ([text("a"), b"\xff", DONE], "not valid JSON"),
        ([text("a"), b"[1]", DONE], "not a JSON object"),
        ([b"[" * 100_000, DONE], "not valid JSON"),
        ([{"choices": [3]}, DONE], "choice that is not an object"),
        ([text("a"), {"error": {"message": "out of memory", "code": 500}}], "error inside the stream: out of memory"),
        ([text("a"), {"error": "boom"}], "error inside the stream: boom"),
        ([text("a"), text("b")], "stream was cut: it ends after 2 content chunks"),
        ([], "stream was cut: it ends after 0 content chunks"),
        ([text("a", 5), text("b", 3), DONE], "usage went backwards"),
    ],
)
def test_what_is_wrong_with_a_stream_is_said(events: list[Any], words: str) -> None:
    error = stream(*events).error
    assert error is not None
    assert words in error


def test_chunks_before_and_after_a_broken_event_are_kept() -> None:
    result = stream(text("a"), b"{", text("b"), DONE)
    assert result.text == "ab"
    assert result.error is not None


def test_either_finish_reason_or_done_is_an_end() -> None:
    assert stream(text("a", finish_reason="length")).error is None
    assert stream(text("a"), DONE).error is None


def test_done_without_its_last_empty_line_is_an_end() -> None:
    data = HEAD + b"\r\ndata: " + json.dumps(text("a")).encode() + b"\n\ndata: [DONE]\n"
    assert parse_exchange(exchange(data)).error is None


def test_a_transport_error_is_reported_with_what_had_come() -> None:
    result = stream(text("a"), end=b"", error="connection reset by 127.0.0.1:1")
    assert result.error == "connection reset by 127.0.0.1:1"
    assert result.text == "a"


def test_the_servers_own_error_says_more_than_the_reset_after_it() -> None:
    result = stream({"error": {"message": "dying"}}, end=b"", error="connection reset")
    assert result.error is not None
    assert "dying" in result.error


@pytest.mark.parametrize(
    "status, body, words",
    [
        (429, b'{"error": {"message": "queue full"}}', "HTTP 429: queue full"),
        (400, b'{"object": "error", "message": "too long"}', "HTTP 400: too long"),
        (422, b'{"detail": [{"loc": ["body"]}]}', 'HTTP 422: [{"loc": ["body"]}]'),
        (500, b"Internal Server Error", "HTTP 500: 'Internal Server Error'"),
        (503, b"", "HTTP 503: the server gave no reason"),
        (204, b"", "HTTP 204"),
    ],
)
def test_a_status_other_than_200_is_an_error_with_the_servers_words(status: int, body: bytes, words: str) -> None:
    data = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
    result = parse_exchange(exchange(data))
    assert result.http_status == status
    assert result.error is not None
    assert words in result.error


def test_an_answer_that_is_not_streamed_has_text_and_usage_and_no_chunks() -> None:
    message = {
        "choices": [{"message": {"role": "assistant", "content": "hé"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }
    body = json.dumps(message).encode()
    result = parse_exchange(
        exchange(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
    )
    assert (result.text, result.completion_tokens, result.finish_reason, result.error) == ("hé", 3, "stop", None)
    assert result.chunks == ()


@pytest.mark.parametrize(
    "body, words",
    [
        (b"<html>", "not valid JSON"),
        (b"3", "not a JSON object"),
        (b"{}", "no choices"),
        (b'{"error": "x"}', "reported an error: x"),
    ],
)
def test_what_is_wrong_with_an_answer_that_is_not_streamed_is_said(body: bytes, words: str) -> None:
    result = parse_exchange(exchange(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)))
    assert result.error is not None
    assert words in result.error


@pytest.mark.parametrize(
    "data, error, words",
    [
        (b"", None, "no answer"),
        (b"", "connection refused by x", "connection refused by x"),
        (b"SMTP ready\r\n\r\n", None, "not HTTP/1.x"),
        (b"HTTP/1.1 200 OK\r\nA:", None, "stops inside its headers"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\nxx", None, "compressed (gzip)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "connection closed", "connection closed"),
    ],
)
def test_an_answer_that_cannot_be_read_is_explained(data: bytes, error: str | None, words: str) -> None:
    found = parse_exchange(exchange(data, error=error)).error
    assert found is not None
    assert words in found


def test_surrogates_split_over_events_are_joined_and_lone_ones_replaced() -> None:
    halves = [b'{"choices": [{"text": "\\ud83d"}]}', b'{"choices": [{"text": "\\ude42 \\ud83d"}]}']
    result = stream(*halves, DONE)
    assert result.text == "🙂 \ufffd"
    result.text.encode()


scripts = st.builds(
    MockScript,
    chunks=st.integers(1, 6),
    tokens_per_chunk=st.sampled_from([1, 3, (1, 4, 2)]),
    bytes_per_chunk=st.sampled_from([0, 300]),
    newline=st.sampled_from(["lf", "crlf", "cr"]),
    comments=st.booleans(),
    chunked=st.booleans(),
    http10=st.booleans(),
    cached_tokens=st.sampled_from([None, 4]),
    draft_tokens=st.sampled_from([0, 3]),
    report_speculation=st.booleans(),
    no_usage=st.booleans(),
)
shapes = st.builds(
    RequestShape,
    chat=st.booleans(),
    stream=st.just(True),
    include_usage=st.booleans(),
    continuous_usage=st.booleans(),
    max_tokens=st.sampled_from([None, 1, 4]),
)


@given(scripts, shapes, st.lists(st.integers(0, 100_000), max_size=60))
def test_any_read_boundaries_give_the_same_parse(script: MockScript, shape: RequestShape, cuts: list[int]) -> None:
    plan = build_plan(script, shape)
    data = plan.head + b"\r\n" + b"".join(plan.writes)
    edges = sorted({len(data), *(1 + i % len(data) for i in cuts)})
    result = parse_exchange(exchange(data, [(k, end) for k, end in enumerate(edges)]))
    assert result.error is None
    assert result.text == "".join(plan.texts)
    assert [c.characters for c in result.chunks] == [len(t) for t in plan.texts]
    counted = shape.continuous_usage and not script.no_usage
    assert [c.tokens for c in result.chunks] == [n if counted else None for n in plan.tokens]
    known = (shape.include_usage or shape.continuous_usage) and not script.no_usage
    assert result.completion_tokens == (sum(plan.tokens) if known else None)
    assert [c.arrival_ns for c in result.chunks] == sorted(c.arrival_ns for c in result.chunks)


@given(st.binary(max_size=300), st.lists(st.integers(0, 1000), max_size=10))
def test_no_bytes_whatever_make_the_parser_raise(tail: bytes, cuts: list[int]) -> None:
    for head in (b"", HEAD + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", HEAD + b"\r\ndata: "):
        data = head + tail
        edges = sorted({len(data), *(i % (len(data) + 1) for i in cuts)})
        assert parse_exchange(exchange(data, [(k, e) for k, e in enumerate(edges)])).request_id == "r"


def test_a_prompt_beyond_the_context_is_told_by_openais_code_or_by_its_words() -> None:
    def refused(**error: Any) -> str:
        body = json.dumps({"error": error}).encode()
        head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return parse_exchange(exchange(head + body)).error or ""

    coded = refused(message="too many tokens", code="context_length_exceeded")
    assert coded.endswith("too many tokens (context_length_exceeded)")
    assert says_overlong(coded)
    assert says_overlong(refused(message="This model's maximum context length is 8192 tokens", code=400))
    assert says_overlong(refused(message="the request exceeds the available context size", code=400))
    assert not says_overlong(refused(message="temperature must be below 2", code="invalid_value"))
