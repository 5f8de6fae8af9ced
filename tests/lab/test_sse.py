"""Server-sent events: the same events however the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.client.sse import SseEvent, SseParser


def parse(stream: bytes, cuts: list[int] | None = None) -> list[SseEvent]:
    parser = SseParser()
    edges = sorted({0, len(stream), *(i % (len(stream) + 1) for i in cuts or [])})
    events: list[SseEvent] = []
    for time, (a, b) in enumerate(pairwise(edges)):
        events += parser.feed(stream[a:b], time)
    return events


def reference(stream: bytes) -> list[tuple[bytes, bytes]]:
    """The standard's algorithm (WHATWG HTML 9.2.6), a line at a time, on the whole stream."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events: list[tuple[bytes, bytes]] = []
    data: list[bytes] = []
    name = b""
    for line in text.split(b"\n")[:-1]:
        if not line:
            if data:
                events.append((b"\n".join(data), name))
            data, name = [], b""
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value
    return events


lines = st.sampled_from(
    [
        b"data: one",
        b"data:two",
        b"data: \xe2\x82\xac",
        b"data",
        b"data:",
        b": ping",
        b"event: error",
        b"id: 4",
        b"x: y",
        b"",
        b"",
    ]
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
streams = st.builds(
    lambda mark, pairs, rest: mark + b"".join(a + b for a, b in pairs) + rest,
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(lines, ends), max_size=25),
    st.sampled_from([b"", b"data: cut", b"dat"]),
)


@given(streams, st.lists(st.integers(0, 1000), max_size=40))
def test_events_are_the_standards_whatever_the_read_boundaries(stream: bytes, cuts: list[int]) -> None:
    assert [(e.data, e.name) for e in parse(stream, cuts)] == reference(stream)


@given(streams)
def test_byte_by_byte_an_event_arrives_with_the_byte_that_completes_it(stream: bytes) -> None:
    for event in parse(stream, list(range(len(stream)))):
        before, after = parse(stream[: event.arrival_ns]), parse(stream[: event.arrival_ns + 1])
        assert len(after) == len(before) + 1


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b and b"\r" not in b), max_size=10))
def test_one_event_a_read_takes_the_short_way_to_the_same_result(datas: list[bytes]) -> None:
    parser = SseParser()
    found = [e for i, d in enumerate(datas) for e in parser.feed(b"data: " + d + b"\n\n", i)]
    assert [(e.arrival_ns, e.data) for e in found] == list(enumerate(datas))


@pytest.mark.parametrize(
    "stream, rest",
    [
        (b"data: a\n\n", None),
        (b"data: a\n\n: comment", None),
        (b"data: a\n\ndata: [DONE]\n", b"[DONE]"),
        (b"data: [DONE]", b"[DONE]"),
        (b"data: {\ndata: 1", b"{\n1"),
        (b"event: x\n", None),
    ],
)
def test_what_is_left_at_the_end_is_no_event_but_can_be_seen(stream: bytes, rest: bytes | None) -> None:
    parser = SseParser()
    parser.feed(stream, 0)
    assert parser.unfinished() == rest
