"""Server-sent events out of a byte stream, whatever its read boundaries (WHATWG HTML, section 9.2.6). Pure.

An event arrives when the read arrives that completes it: the one with the line end of its closing empty line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One event: when the read arrived that completed it, its data (lines joined by LF), and its type if it has one."""

    arrival_ns: int
    data: bytes
    name: bytes = b""


class SseParser:
    """Incremental parser: the events are the same however the stream is cut into segments.

    Line ends are LF, CRLF or CR, mixed at will. Comments, `id`, `retry` and unknown fields are passed over; an event
    without a data line is none. What is left when the stream ends is not an event; `unfinished` shows it.
    """

    __slots__ = ("_at_start", "_lines", "_name", "_skip_line_feed", "_tail")

    def __init__(self) -> None:
        self._tail = b""  # the beginning of a line whose end has not come
        self._lines: list[bytes] = []  # data lines of the event under way
        self._name = b""
        self._skip_line_feed = False  # the last line ended with CR: a LF right after it belongs to that line end
        self._at_start = True

    def feed(self, segment: bytes, arrival_ns: int) -> list[SseEvent]:
        """Takes the next bytes of the stream and returns the events that they complete."""
        if (
            # The common case, and the only one that speed matters in: a read that is exactly one plain event.
            segment[:6] == b"data: "
            and segment.find(b"\n") == len(segment) - 2
            and segment[-1:] == b"\n"
            and b"\r" not in segment
            and not (self._tail or self._lines or self._name or self._at_start)
        ):
            self._skip_line_feed = False
            return [SseEvent(arrival_ns, segment[6:-2])]
        if not segment:
            return []
        return self._feed(segment, arrival_ns)

    def _feed(self, segment: bytes, arrival_ns: int) -> list[SseEvent]:
        text = self._tail + segment if self._tail else segment
        if self._at_start:
            if len(text) < 3 and _BYTE_ORDER_MARK.startswith(text):
                self._tail = text
                return []
            self._at_start = False
            text = text.removeprefix(_BYTE_ORDER_MARK)
        if self._skip_line_feed:
            text = text.removeprefix(b"\n")
            self._skip_line_feed = False
        events: list[SseEvent] = []
        position = 0
        for end in _LINE_END.finditer(text):
            line = text[position : end.start()]
            position = end.end()
            if line:
                self._take_line(line)
                continue
            if self._lines:
                events.append(SseEvent(arrival_ns, b"\n".join(self._lines), self._name))
                self._lines = []
            self._name = b""
        self._tail = text[position:]
        if not self._tail and text[-1:] == b"\r":
            self._skip_line_feed = True
        return events

    def _take_line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            self._lines.append(value)
        elif field == b"event":
            self._name = value

    def unfinished(self) -> bytes | None:
        """The data of an event that never got its closing empty line; None if the stream stopped between events."""
        lines = list(self._lines)
        field, colon, value = self._tail.partition(b":")
        if field == b"data" and colon:
            lines.append(value.removeprefix(b" "))
        elif not lines and not (field and b"data".startswith(field)):
            return None
        return b"\n".join(lines)
