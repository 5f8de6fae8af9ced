"""HTTP/1.1 as bytes: building a request, finding the end of a response, decoding a whole one. Pure, no I/O.

The load generator needs three things of HTTP and no more: bytes to send, the exact moment a response ends (RFC 9112,
section 6.3), and, after the cell, the body with the arrival time of every part. The first two run while measuring and
are therefore small; the third runs afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 1024

_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) +([0-9]{3})(?:[ \t].*)?\Z", re.DOTALL)
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r?\Z", re.DOTALL)
_END_OF_TRAILER = re.compile(rb"\r?\n|(?:[^\n]+\n)+?\r?\n")
_DIGITS = re.compile(r"[0-9]{1,18}\Z")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")


class HttpError(ValueError):
    """The bytes are not a response that HTTP/1.x allows; the message says what was wrong."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart for connecting. `authority` is the Host header; `path` includes the query."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str


def parse_url(url: str) -> Target:
    """Takes an http(s) URL apart. Raises ValueError, in plain words, for anything it cannot connect to."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise ValueError(f"endpoint URL {url!r} cannot be read: {problem}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"endpoint URL {url!r} must begin with http:// or https://")
    if not parts.hostname:
        raise ValueError(f"endpoint URL {url!r} names no host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("endpoint URL carries a user name or password: put credentials into the endpoint's headers")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(c <= " " for c in path):
        raise ValueError(f"endpoint URL {url!r} has a path that must be percent-encoded")
    host = parts.hostname
    shown = f"[{host}]" if ":" in host else host
    default = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, host, port, shown if port == default else f"{shown}:{port}", path)


def request_head(target: Target, headers: Mapping[str, str]) -> bytes:
    """Everything of a POST before its length: the request line and headers. `finish_request` adds length and body.

    The caller's headers replace the defaults of the same name. Compression is refused by default, since a compressed
    stream hides when each event arrived. Raises ValueError for a header that could not be sent as it is.
    """
    merged = {
        "host": ("Host", target.authority),
        "user-agent": ("User-Agent", "breakeven"),
        "accept": ("Accept", "text/event-stream, application/json"),
        "accept-encoding": ("Accept-Encoding", "identity"),
        "content-type": ("Content-Type", "application/json"),
        "connection": ("Connection", "keep-alive"),
    }
    for name, value in headers.items():
        if not _TOKEN.match(name):
            raise ValueError(f"header name {name!r} has characters that HTTP does not allow")
        if any(c in value for c in "\r\n\0"):
            raise ValueError(f"header {name!r} has a line break or NUL in its value")
        if name.lower() in ("content-length", "transfer-encoding"):
            raise ValueError(f"header {name!r} is set by the client itself: leave it out")
        merged[name.lower()] = (name, value)
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in merged.values())]
    try:
        return "\r\n".join(lines).encode("latin-1") + b"\r\nContent-Length: "
    except UnicodeEncodeError:
        raise ValueError("a header has characters outside Latin-1: percent-encode or drop them") from None


def finish_request(head: bytes, body: bytes) -> bytes:
    """The bytes of one request, from `request_head` and the body."""
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


class Framing(Enum):
    """How the end of a body is known."""

    NONE = "no body"
    LENGTH = "content-length"
    CHUNKED = "chunked"
    CLOSE = "connection close"


@dataclass(frozen=True, slots=True)
class Head:
    """A response's status line and headers (names in lower case, repeated ones joined by a comma)."""

    status: int
    headers: Mapping[str, str]
    framing: Framing
    length: int  # of the body; meaningful with Framing.LENGTH only
    keep_alive: bool


def _headers(lines: Sequence[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.rstrip(b"\r").partition(b":")
        if not colon or not name.strip():
            raise HttpError(f"the answer has a header line without a colon: {line[:80]!r}")
        key, text = name.strip().decode("latin-1").lower(), value.strip().decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def parse_head(block: bytes) -> Head:
    """Parses a response head (without its closing empty line). Raises HttpError if it is not one.

    The framing follows RFC 9112, section 6.3, in its order: statuses without a body, Transfer-Encoding,
    Content-Length, and else the end of the connection.
    """
    first, *rest = block.split(b"\n")
    matched = _STATUS_LINE.match(first.rstrip(b"\r"))
    if not matched:
        raise HttpError(f"the answer is not HTTP/1.x: it begins with {first[:60]!r}")
    minor, status = int(matched[1]), int(matched[2])
    headers = _headers(rest)
    connection = {option.strip().lower() for option in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in connection if minor == 0 else "close" not in connection
    encoding, declared = headers.get("transfer-encoding"), headers.get("content-length")
    if status < 200 or status in (204, 304):
        return Head(status, headers, Framing.NONE, 0, keep_alive)
    if encoding is not None:
        if encoding.split(",")[-1].strip().lower() != "chunked":
            return Head(status, headers, Framing.CLOSE, 0, False)
        # Both headers, or chunks in HTTP/1.0: read the chunks, but never trust the connection again.
        return Head(status, headers, Framing.CHUNKED, 0, keep_alive and declared is None and minor == 1)
    if declared is not None:
        values = {value.strip() for value in declared.split(",")}
        if len(values) != 1 or not _DIGITS.match(next(iter(values))):
            raise HttpError(f"the answer's Content-Length cannot be read: {declared!r}")
        return Head(status, headers, Framing.LENGTH, int(values.pop()), keep_alive)
    return Head(status, headers, Framing.CLOSE, 0, False)


def _chunk_size(line: bytes) -> int:
    """The size in a chunk's first line (without its LF; a CR and extensions are allowed)."""
    matched = _CHUNK_SIZE.match(line)
    if not matched:
        raise HttpError(f"the answer's chunked encoding is broken: {line[:40]!r} is not a chunk size")
    return int(matched[1], 16)


class _Phase(Enum):
    HEAD = 0
    CHUNK = 1
    LENGTH = 2
    CLOSE = 3
    TRAILER = 4
    DONE = 5


class ResponseFramer:
    """Finds the end of one response in bytes that come in any pieces.

    `feed` returns True once the response is over; `surplus` then says how many of the last piece's bytes are not part
    of it. In a chunked body it skips from size line to size line without looking at the content, so that a read of
    one event costs one search of a few bytes, and it is exact wherever the reads fall.
    """

    __slots__ = ("_buffer", "_phase", "_skip", "head", "surplus")

    def __init__(self) -> None:
        self._phase = _Phase.HEAD
        self._buffer = b""  # an unfinished head or line
        self._skip = 0  # bytes of the body still to pass over
        self.head: Head | None = None
        self.surplus = 0

    @property
    def status(self) -> int | None:
        return self.head.status if self.head else None

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request: the response is over, exactly, and allows it."""
        return self._phase is _Phase.DONE and self.surplus == 0 and self.head is not None and self.head.keep_alive

    def feed(self, data: bytes) -> bool:
        """Takes the next piece. Raises HttpError if the bytes break HTTP; the response can then not be followed."""
        phase = self._phase
        if phase is _Phase.CHUNK:
            return self._chunks(data, 0)
        if phase is _Phase.LENGTH:
            return self._length(data, 0)
        if phase is _Phase.CLOSE:
            return False
        if phase is _Phase.HEAD:
            return self._heads(data)
        if phase is _Phase.TRAILER:
            return self._trailer(data, 0)
        self.surplus += len(data)
        return True

    def end_of_connection(self) -> bool:
        """The server has closed: True if that is a proper end of the response."""
        if self._phase is _Phase.CLOSE:
            self._phase = _Phase.DONE
        return self._phase is _Phase.DONE

    def _heads(self, data: bytes) -> bool:
        searched = max(0, len(self._buffer) - 3)
        block = self._buffer + data if self._buffer else data
        while True:
            end = _END_OF_HEAD.search(block, searched)
            if end is None:
                if len(block) > MAX_HEAD_BYTES:
                    raise HttpError(f"the answer's headers are longer than {MAX_HEAD_BYTES} bytes")
                if not b"HTTP/1."[: len(block)] == block[:7]:
                    raise HttpError(f"the answer is not HTTP/1.x: it begins with {block[:60]!r}")
                self._buffer = block
                return False
            head = parse_head(block[: end.start()])
            block = block[end.end() :]
            if head.status >= 200 or head.status == 101:
                break
            searched = 0  # an interim answer (100, 103): the real one follows
        self._buffer = b""
        self.head = head
        if head.framing is Framing.CHUNKED:
            self._phase = _Phase.CHUNK
            return self._chunks(block, 0)
        if head.framing is Framing.CLOSE:
            self._phase = _Phase.CLOSE
            return False
        self._phase = _Phase.LENGTH
        self._skip = head.length
        return self._length(block, 0)

    def _length(self, data: bytes, position: int) -> bool:
        self._skip -= len(data) - position
        if self._skip > 0:
            return False
        return self._done(-self._skip)

    def _chunks(self, data: bytes, position: int) -> bool:
        position += self._skip
        size = len(data)
        while position < size:
            eol = data.find(b"\n", position)
            if eol < 0:
                self._buffer += data[position:]
                self._check_line()
                self._skip = 0
                return False
            line = data[position:eol]
            if self._buffer:
                line, self._buffer = self._buffer + line, b""
            length = _chunk_size(line)
            if length == 0:
                self._skip = 0
                self._phase = _Phase.TRAILER
                return self._trailer(data, eol + 1)
            position = eol + length + 3  # the LF, the content, and its CR LF
        self._skip = position - size
        return False

    def _trailer(self, data: bytes, position: int) -> bool:
        while True:
            eol = data.find(b"\n", position)
            if eol < 0:
                self._buffer += data[position:]
                self._check_line()
                return False
            line, self._buffer = self._buffer + data[position:eol], b""
            position = eol + 1
            if line in (b"\r", b""):
                return self._done(len(data) - position)

    def _check_line(self) -> None:
        if len(self._buffer) > MAX_LINE_BYTES:
            raise HttpError(f"the answer's chunked encoding has a line longer than {MAX_LINE_BYTES} bytes")

    def _done(self, surplus: int) -> bool:
        self._phase = _Phase.DONE
        self.surplus = surplus
        return True


@dataclass(frozen=True, slots=True)
class DecodedResponse:
    """A response with its body taken out of the framing: `segments` holds (arrival in ns, bytes) per read, in order.

    `complete` is False if the bytes stop before the end that the framing announced.
    """

    status: int
    headers: Mapping[str, str]
    segments: tuple[tuple[int, bytes], ...]
    complete: bool

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.segments)


def decode_exchange(data: bytes, reads: Sequence[tuple[int, int]]) -> DecodedResponse:
    """Decodes all the bytes received for one request; `reads` holds (time in ns, end offset in `data`) in order.

    Raises HttpError if there is no whole response head, or if the framing is broken.
    """
    start = 0
    while True:
        end = _END_OF_HEAD.search(data, start)
        if end is None:
            if data[start : start + 7] != b"HTTP/1."[: len(data) - start]:
                raise HttpError(f"the answer is not HTTP/1.x: it begins with {data[start : start + 60]!r}")
            raise HttpError("the answer stops inside its headers")
        head = parse_head(data[start : end.start()])
        start = end.end()
        if head.status >= 200 or head.status == 101:
            break
    complete = True
    if head.framing is Framing.CHUNKED:
        spans, complete = _chunk_spans(data, start)
    elif head.framing is Framing.CLOSE:
        spans = [(start, len(data))]
    else:
        spans = [(start, min(start + head.length, len(data)))]
        complete = start + head.length <= len(data)
    return DecodedResponse(head.status, head.headers, tuple(_segments(data, spans, reads)), complete)


def _chunk_spans(data: bytes, position: int) -> tuple[list[tuple[int, int]], bool]:
    """Where the chunks' contents lie in `data`, and whether the closing chunk is there."""
    spans: list[tuple[int, int]] = []
    size = len(data)
    while position < size:
        eol = data.find(b"\n", position)
        if eol < 0:
            return spans, False
        length = _chunk_size(data[position:eol])
        if length == 0:
            return spans, _END_OF_TRAILER.match(data, eol + 1) is not None
        begin = eol + 1
        spans.append((begin, min(begin + length, size)))
        position = begin + length + 2
    return spans, False


def _segments(
    data: bytes, spans: Sequence[tuple[int, int]], reads: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, bytes]]:
    """Cuts the body's spans at the reads' ends: one segment per read that brought some of the body."""
    remaining = iter(spans)
    begin, end = next(remaining, (len(data), len(data)))
    for arrival, read_end in reads:
        if begin >= read_end:
            continue
        parts: list[bytes] = []
        while begin < read_end:
            if end > read_end:
                parts.append(data[begin:read_end])
                begin = read_end
            else:
                if end > begin:
                    parts.append(data[begin:end])
                begin, end = next(remaining, (len(data), len(data)))
        if parts:
            yield arrival, parts[0] if len(parts) == 1 else b"".join(parts)
