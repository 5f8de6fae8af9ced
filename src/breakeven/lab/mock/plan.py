"""From a script and a request to the bytes a mock server will send, built once and shared by requests of one shape."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from breakeven.lab.mock.lifelike import Turn
from breakeven.lab.mock.script import MockScript

_NEWLINES = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
_WORDS = ("alpha ", "beta ", "gamma ", "delta ", "épsilon ", "zeta ", "日本 ", "eta\n", "🙂 ", "theta ")


class Ending(Enum):
    """What follows the last write of a plan."""

    FINISHED = "the response is over"
    STALL = "nothing more comes"
    CLOSE = "the connection closes in mid-response"
    RESET = "the connection is reset"
    EXIT = "the process exits"


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What of a request's body decides the answer."""

    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    turn: Turn | None = None  # what a lifelike server says

    @classmethod
    def of(cls, chat: bool, body: dict[str, Any], turn: Turn | None = None) -> RequestShape:
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        return cls(
            chat=chat,
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            max_tokens=limit if isinstance(limit, int) and limit > 0 else None,
            turn=turn,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The writes of one response. `head` goes out with the first write, after the request's own header line.

    `gaps_ns[i]` is the time between write i and the next. `tokens[i]` is the number of tokens of the content chunk
    that write i completes, and 0 if it completes none.
    """

    head: bytes
    writes: tuple[bytes, ...]
    gaps_ns: tuple[int, ...]
    tokens: tuple[int, ...]
    ending: Ending
    keep_alive: bool
    texts: tuple[str, ...]
    counters: dict[str, int]


def chunk_tokens(script: MockScript, max_tokens: int | None) -> tuple[list[int], bool]:
    """The tokens of each content chunk of a request, and whether max_tokens ended it."""
    pattern = script.token_pattern
    counts: list[int] = []
    left = max_tokens if max_tokens is not None else sum(pattern) * script.chunks
    for index in range(script.chunks):
        count = min(pattern[index % len(pattern)], left)
        counts.append(count)
        left -= count
        if left == 0:
            return counts, max_tokens is not None and (
                index + 1 < script.chunks or count < pattern[index % len(pattern)]
            )
    return counts, False


def speculation_counters(script: MockScript, counts: list[int]) -> dict[str, int]:
    """The counters' rise over one request: every chunk but the first is a step that drafted `draft_tokens`."""
    if not script.draft_tokens:
        return {}
    if "counters_still" in script.faults:
        return {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    accepted = [min(count - 1, script.draft_tokens) for count in counts[1:]]
    if "counters_past_end" in script.faults:
        accepted += [script.draft_tokens] * (4 // script.draft_tokens + 1)
    rise = {
        "num_drafts": len(accepted),
        "num_draft_tokens": len(accepted) * script.draft_tokens,
        "num_accepted_tokens": sum(accepted),
    }
    for position in range(script.draft_tokens):
        rise[f"accepted_pos_{position}"] = sum(a > position for a in accepted)
    return rise


class _Builder:
    def __init__(self, script: MockScript, shape: RequestShape) -> None:
        self.script = script
        self.shape = shape
        self.newline = _NEWLINES[script.newline]
        self.chunked = shape.stream and script.chunked and not script.http10

    def message(
        self, text: str | None, completed: int, finish: str | None = None, role: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self.shape.chat:
            delta: dict[str, str] = {"role": "assistant"} if role else {}
            if text is not None:
                delta["content"] = text
            choice["delta"] = delta
        else:
            choice["text"] = text or ""
        choice |= {"logprobs": None, "finish_reason": finish}
        kind = "chat.completion.chunk" if self.shape.chat else "text_completion"
        message = {"id": "mock", "object": kind, "created": 0, "model": self.script.model, "choices": [choice]}
        if self.shape.continuous_usage and not self.script.no_usage:
            message["usage"] = self.usage(completed)
        return message

    def usage(self, completed: int) -> dict[str, Any]:
        reported = max(0, completed + self.script.usage_offset)
        turn = self.shape.turn
        prompt = len(turn.prompt_ids) if turn else self.script.prompt_tokens
        cached = turn.cached_tokens if turn else self.script.cached_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": reported,
            "total_tokens": prompt + reported,
        }
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def event(self, data: bytes) -> bytes:
        comment = b": mock" + self.newline if self.script.comments else b""
        return comment + b"data: " + data + self.newline * 2

    def frame(self, payload: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(payload), payload) if self.chunked else payload

    def send(self, message: dict[str, Any]) -> bytes:
        return self.frame(self.event(_dump(message)))

    def content(self, index: int, tokens: int, completed: int) -> tuple[bytes, str]:
        """The event of one content chunk, padded to size, and its text."""
        if self.shape.turn:
            text = "".join(self.shape.turn.words[completed - tokens : completed])
            return self.send(self.message(text, completed)), text
        text = "".join(_WORDS[(completed - tokens + i) % len(_WORDS)] for i in range(tokens))
        size = len(self.event(_dump(self.message(text, completed))))
        text += "." * max(0, self.script.bytes_per_chunk - size)
        return self.send(self.message(text, completed)), text


def build_plan(script: MockScript, shape: RequestShape) -> Plan:
    """Pure: the same script and shape give the same bytes."""
    builder = _Builder(script, shape)
    version = "1.0" if script.http10 else "1.1"
    turn = shape.turn
    if turn is None:
        counts, limited = chunk_tokens(script, shape.max_tokens)
        if "eos_ignored" in script.faults and shape.max_tokens is not None:
            counts, limited = chunk_tokens(replace(script, chunks=shape.max_tokens), shape.max_tokens)[0], True
    elif turn.refusal:
        code = None if "context_uncoded" in script.faults else "context_length_exceeded"
        error = {"message": turn.refusal, "type": "invalid_request_error", "code": code}
        body = _dump({"error": error})
        return _whole(script, version, 400, body, (), 0, {})
    else:
        endless = replace(script, chunks=max(1, len(turn.words)))
        counts, limited = chunk_tokens(endless, len(turn.words))[0] if turn.words else [], turn.limited
    finish = "length" if limited else script.finish_reason
    counters = speculation_counters(script, counts)
    if script.http_status != 200:
        body = _dump({"error": {"message": "the mock was told to fail", "type": "mock", "code": script.http_status}})
        return _whole(script, version, script.http_status, body, (), 0, {})
    if not shape.stream:
        return _not_streamed(script, builder, version, counts, finish, counters)

    writes: list[bytes] = []
    texts: list[str] = []
    ending = Ending.FINISHED
    closing = b""  # after the last content chunk, in the same write
    completed = 0
    for index, tokens in enumerate(counts):
        if script.stall_after == index or script.die_after == index or script.cut_after == index:
            break
        completed += tokens
        if script.error_event_at == index:
            closing = builder.frame(builder.event(_dump({"error": {"message": "the mock broke off", "code": 500}})))
            break
        if script.malformed_at == index:
            writes.append(builder.frame(builder.event(b'{"choices": [{"index": 0, "text": "tr')))
            texts.append("")
            continue
        frame, text = builder.content(index, tokens, completed)
        writes.append(frame)
        texts.append(text)
    done = len(writes)
    if script.stall_after is not None and done == script.stall_after:
        ending = Ending.STALL
    elif script.die_after is not None and done == script.die_after:
        ending = {"exit": Ending.EXIT, "reset": Ending.RESET, "close": Ending.CLOSE}[script.death]
    else:
        if not closing and not (script.cut_after is not None and done == script.cut_after):
            closing = _closing(script, builder, finish, completed, counters)
        if builder.chunked:
            closing += b"0\r\n\r\n"
    if shape.chat:
        opening = builder.send(builder.message("", 0, role=True))
        writes = [opening + writes[0], *writes[1:]] if writes else [opening]
    if closing:
        writes = [*writes[:-1], writes[-1] + closing] if writes else [closing]
    gap = round(script.gap_s * 1e9)
    completes = [*counts[:done], *([0] * (len(writes) - done))]
    if "buffered" in script.faults:
        writes, gap, completes = [b"".join(writes)], 0, [sum(completes)]
    headers = [f"HTTP/{version} 200 OK", "Content-Type: text/event-stream; charset=utf-8"]
    if builder.chunked:
        headers.append("Transfer-Encoding: chunked")
    if script.closing == "announced":
        headers.append("Connection: close")
    keep_alive = builder.chunked and script.closing == "keep"
    if script.malformed_at is not None and script.malformed_at < len(completes):
        completes[script.malformed_at] = 0
    pieces, gaps, piece_tokens = _split(script, writes, gap, completes)
    return Plan(
        _head(headers), tuple(pieces), tuple(gaps), tuple(piece_tokens), ending, keep_alive, tuple(texts), counters
    )


def _closing(script: MockScript, builder: _Builder, finish: str, completed: int, counters: dict[str, int]) -> bytes:
    """finish_reason, usage and [DONE], as they follow the last content chunk."""
    last = builder.message("" if not builder.shape.chat else None, completed, finish)
    if script.report_speculation:
        last["metrics"] = {"speculative_decoding": counters}
    closing = builder.send(last)
    if builder.shape.include_usage and not script.no_usage:
        message = builder.message(None, completed)
        closing += builder.send({**message, "choices": [], "usage": builder.usage(completed)})
    return closing + builder.frame(builder.event(b"[DONE]"))


def _not_streamed(
    script: MockScript, builder: _Builder, version: str, counts: list[int], finish: str, counters: dict[str, int]
) -> Plan:
    completed = 0
    texts: list[str] = []
    for index, tokens in enumerate(counts):
        completed += tokens
        texts.append(builder.content(index, tokens, completed)[1])
    text = "".join(texts)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"message": {"role": "assistant", "content": text}} if builder.shape.chat else {"text": text}
    message: dict[str, Any] = {"id": "mock", "model": script.model, "choices": [choice]}
    if builder.shape.turn and builder.shape.turn.show_ids:
        message["prompt_token_ids"] = list(builder.shape.turn.prompt_ids)
    if not script.no_usage:
        message["usage"] = builder.usage(completed)
    if script.report_speculation:
        message["metrics"] = {"speculative_decoding": counters}
    return _whole(script, version, 200, _dump(message), tuple(texts), completed, counters)


def _whole(
    script: MockScript,
    version: str,
    status: int,
    body: bytes,
    texts: tuple[str, ...],
    tokens: int,
    counters: dict[str, int],
) -> Plan:
    headers = [f"HTTP/{version} {status} Mock", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if script.closing == "announced":
        headers.append("Connection: close")
    pieces, gaps, piece_tokens = _split(script, [body], 0, [tokens])
    keep = script.closing == "keep" and version == "1.1"
    return Plan(_head(headers), tuple(pieces), tuple(gaps), tuple(piece_tokens), Ending.FINISHED, keep, texts, counters)


def _head(lines: list[str]) -> bytes:
    return "\r\n".join(lines).encode() + b"\r\n"


def _split(
    script: MockScript, writes: list[bytes], gap: int, tokens: list[int]
) -> tuple[list[bytes], list[int], list[int]]:
    """Cuts each write into pieces, so that the last piece of each keeps its tokens; the pace of writes stays."""
    if script.split_bytes is None:
        return writes, [gap] * len(writes), tokens
    step = script.split_bytes
    between = round(script.split_gap_s * 1e9)
    pieces: list[bytes] = []
    gaps: list[int] = []
    counts: list[int] = []
    for write, count in zip(writes, tokens, strict=True):
        parts = [write[i : i + step] for i in range(0, len(write), step)] or [b""]
        pieces += parts
        gaps += [between] * (len(parts) - 1) + [max(0, gap - between * (len(parts) - 1))]
        counts += [0] * (len(parts) - 1) + [count]
    return pieces, gaps, counts


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
