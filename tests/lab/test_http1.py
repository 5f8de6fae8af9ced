"""HTTP as bytes: the end of a response is found exactly, wherever the reads fall."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.client.http1 import (
    Framing,
    HttpError,
    ResponseFramer,
    decode_exchange,
    finish_request,
    parse_head,
    parse_url,
    request_head,
)


def chunked(parts: list[bytes], trailer: bytes = b"", extension: bytes = b"") -> bytes:
    return b"".join(b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in parts if p) + b"0\r\n" + trailer + b"\r\n"


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(i % (len(data) + 1) for i in at)})
    return [data[a:b] for a, b in pairwise(edges)]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
bodies = st.lists(st.binary(max_size=40), max_size=6)
cuts = st.lists(st.integers(0, 10_000), max_size=30)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(a whole response with a known end, its body); bodies may hold what looks like chunk framing."""
    parts = draw(bodies) + draw(st.lists(st.sampled_from([b"0\r\n\r\n", b"\r\n", b"data: x\n\n"]), max_size=2))
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"])
    )
    if draw(st.booleans()):
        trailer = draw(st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]))
        extension = draw(st.sampled_from([b"", b";name=value", b" "]))
        framed = b"Transfer-Encoding: chunked\r\n\r\n" + chunked(parts, trailer, extension)
    else:
        framed = b"Content-Length: %d\r\n\r\n" % sum(map(len, parts)) + b"".join(parts)
    return interim + HEAD + framed, b"".join(parts)


@given(responses(), cuts, st.sampled_from([b"", b"H", b"HTTP/1.1 200 OK\r\n\r\n"]))
def test_the_end_is_found_at_the_same_byte_wherever_the_reads_fall(
    response: tuple[bytes, bytes], at: list[int], glued: bytes
) -> None:
    data, _ = response
    framer = ResponseFramer()
    seen = 0
    for piece in cut(data + glued, at):
        seen += len(piece)
        over = framer.feed(piece)
        assert over == (seen >= len(data))
    assert seen - framer.surplus == len(data)
    assert framer.reusable == (glued == b"")


@given(responses(), cuts)
def test_the_body_comes_out_whole_and_each_byte_with_the_read_that_brought_it(
    response: tuple[bytes, bytes], at: list[int]
) -> None:
    data, body = response
    reads: list[tuple[int, int]] = []
    for piece in cut(data, at):
        reads.append((1000 + len(reads), (reads[-1][1] if reads else 0) + len(piece)))
    decoded = decode_exchange(data, reads)
    assert (decoded.body, decoded.complete, decoded.status) == (body, True, 200)
    times = [arrival for arrival, _ in decoded.segments]
    assert times == sorted(set(times))
    # An oracle: decode the prefix that had come by each read.
    came = b""
    for arrival, end in reads:
        came += dict(decoded.segments).get(arrival, b"")
        try:
            known = decode_exchange(data[:end], [(0, end)]).body
        except HttpError:
            known = b""
        assert came == known


@given(responses(), st.integers(0, 10_000))
def test_a_response_that_stops_early_is_never_complete(response: tuple[bytes, bytes], at: int) -> None:
    data, body = response
    data = data[: at % len(data)]
    framer = ResponseFramer()
    assert not (data and framer.feed(data))
    assert not framer.end_of_connection()
    if framer.head is None:
        with pytest.raises(HttpError, match="headers"):
            decode_exchange(data, [(1, len(data))])
        return
    decoded = decode_exchange(data, [(1, len(data))])
    assert not decoded.complete
    assert body.startswith(decoded.body)


@given(st.binary(max_size=200), cuts)
def test_garbage_has_the_same_outcome_wherever_the_reads_fall(data: bytes, at: list[int]) -> None:
    whole, pieces = ResponseFramer(), ResponseFramer()

    def outcome(framer: ResponseFramer, parts: list[bytes]) -> str:
        over = False
        try:
            for part in parts:
                over = framer.feed(part)
        except HttpError:
            return "error"
        return "over" if over else "unfinished"

    assert outcome(whole, [data]) == outcome(pieces, cut(data, at))


def test_a_body_without_length_ends_with_the_connection() -> None:
    framer = ResponseFramer()
    assert not framer.feed(HEAD + b"\r\ndata: x\n\n")
    assert framer.end_of_connection()
    assert not framer.reusable


def test_a_response_without_a_body_ends_with_its_head() -> None:
    framer = ResponseFramer()
    assert framer.feed(b"HTTP/1.1 204 No Content\r\nContent-Length: 9\r\n\r\n")
    assert framer.surplus == 0


@pytest.mark.parametrize(
    "head, keep_alive, framing",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1", True, Framing.LENGTH),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close", False, Framing.LENGTH),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1", False, Framing.LENGTH),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: Keep-Alive", True, Framing.LENGTH),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked", True, Framing.CHUNKED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3", False, Framing.CHUNKED),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive", False, Framing.CHUNKED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip", False, Framing.CLOSE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7, 7", True, Framing.LENGTH),
        (b"HTTP/1.1 200", False, Framing.CLOSE),
        (b"HTTP/1.1 304 Not Modified", True, Framing.NONE),
    ],
)
def test_framing_and_keep_alive_follow_rfc_9112(head: bytes, keep_alive: bool, framing: Framing) -> None:
    parsed = parse_head(head)
    assert (parsed.keep_alive, parsed.framing) == (keep_alive, framing)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1.x"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP/1.x"),
        (b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n", "without a colon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4, 5\r\n\r\n", "Content-Length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "not a chunk size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x4\r\nabcd\r\n", "not a chunk size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcdefgh\r\n", "not a chunk size"),
        (HEAD + b"X: " + b"x" * 300_000, "longer than"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 20_000, "longer than"),
    ],
)
def test_broken_framing_is_named(data: bytes, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        ResponseFramer().feed(data)


@pytest.mark.parametrize(
    "url, host, port, authority, path",
    [
        ("http://localhost:8000/v1/completions", "localhost", 8000, "localhost:8000", "/v1/completions"),
        ("https://api.example.org/v1/x?a=b", "api.example.org", 443, "api.example.org", "/v1/x?a=b"),
        ("http://[::1]:99", "::1", 99, "[::1]:99", "/"),
    ],
)
def test_urls_are_taken_apart(url: str, host: str, port: int, authority: str, path: str) -> None:
    target = parse_url(url)
    assert (target.host, target.port, target.authority, target.path) == (host, port, authority, path)


@pytest.mark.parametrize(
    "url, words",
    [
        ("localhost:8000/v1", "must begin with"),
        ("ftp://x/", "must begin with"),
        ("http:///v1", "names no host"),
        ("http://x:99999/", "cannot be read"),
        ("http://me:pw@x/", "credentials"),
        ("http://x/a b", "percent-encoded"),
    ],
)
def test_a_url_that_cannot_be_connected_to_is_explained(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_url(url)


def test_a_request_has_its_length_and_the_callers_headers_win() -> None:
    target = parse_url("http://h:1/p")
    data = finish_request(request_head(target, {"authorization": "Bearer k", "ACCEPT": "*/*"}), b'{"a":1}')
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /p HTTP/1.1"
    assert b"Content-Length: 7" in lines
    assert b"Host: h:1" in lines
    assert b"authorization: Bearer k" in lines
    assert [x for x in lines if x.lower().startswith(b"accept:")] == [b"ACCEPT: */*"]
    assert body == b'{"a":1}'


@pytest.mark.parametrize("headers", [{"a b": "x"}, {"a": "x\r\nb: y"}, {"Content-Length": "3"}, {"a": "日"}])
def test_a_header_that_would_break_the_request_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="header"):
        request_head(parse_url("http://h/"), headers)
