"""One raw exchange → one `RequestResult`: what an OpenAI-compatible server said, and when. Pure; runs after the cell.

Tokens are counted by the server's own `usage` and by nothing else. A chunk's tokens are what the server says came
with it: the rise of `usage.completion_tokens` since the last content chunk (`continuous_usage_stats`), or the number
of its token ids, or of its logprobs; else unknown (None). A text is never re-tokenised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from breakeven.lab.client.http1 import DecodedResponse, HttpError, decode_exchange
from breakeven.lab.client.sse import SseEvent, SseParser
from breakeven.lab.client.types import Chunk, RawExchange, RequestResult

_decode = json.JSONDecoder().raw_decode  # json.loads without what one line of an event does not need
OVERLONG = "context_length_exceeded"  # OpenAI's code for a prompt that does not fit
_SHOWN = 200  # characters of a server's own words in an error


def parse_exchange(raw: RawExchange) -> RequestResult:
    """Parses everything received for one request. Never raises: what is wrong with the answer is in `error`.

    `chunks` holds the content-bearing events of a streamed answer and is empty for one that was not streamed, which
    has a text and a usage but no moment of its first token.
    """
    if not raw.data:
        return _result(raw, None, _Answer(), raw.error or "the server sent no answer")
    try:
        response = decode_exchange(raw.data, raw.reads)
    except HttpError as problem:
        return _result(raw, None, _Answer(), raw.error or str(problem))
    answer = _Answer()
    coding = response.headers.get("content-encoding", "identity").lower()
    if coding not in ("", "identity"):
        answer.problem(f"the answer is compressed ({coding}), which hides when its events arrived")
    elif response.status != 200:
        answer.problem(f"HTTP {response.status}: {_server_words(response.body)}")
    elif _is_stream(response):
        _read_stream(response, answer, cut=raw.error is not None or not response.complete)
    elif raw.error is None:
        _read_whole(response.body, answer)
    error = answer.error or raw.error
    if error is None and not response.complete:
        error = "the answer stops before its announced end"
    return _result(raw, response.status, answer, error)


class _Answer:
    """What has been learnt of an answer so far."""

    __slots__ = (
        "cached_tokens",
        "chunks",
        "completion_tokens",
        "counted",
        "done",
        "error",
        "finish_reason",
        "pending_tokens",
        "prompt_tokens",
        "speculation",
        "texts",
    )

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.texts: list[str] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.speculation: dict[str, float] | None = None
        self.error: str | None = None
        self.done = False
        self.counted: int | None = 0  # usage.completion_tokens at the last content chunk; None if it did not say
        self.pending_tokens = 0  # token ids seen since the last content chunk

    def problem(self, words: str) -> None:
        """Notes what is wrong; the first finding stays, since later ones mostly follow from it."""
        if self.error is None:
            self.error = words

    def usage(self, usage: Mapping[str, Any]) -> int | None:
        """Takes a usage object; returns its completion_tokens."""
        completion = _count(usage.get("completion_tokens"))
        if completion is not None:
            if self.completion_tokens is not None and completion < self.completion_tokens:
                self.problem(f"the server's usage went backwards: {self.completion_tokens} then {completion} tokens")
            self.completion_tokens = completion
        prompt = _count(usage.get("prompt_tokens"))
        if prompt is not None:
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            cached = _count(details.get("cached_tokens"))
            if cached is not None:
                self.cached_tokens = cached
        return completion


def _read_stream(response: DecodedResponse, answer: _Answer, cut: bool) -> None:
    parser = SseParser()
    feed = parser.feed
    number = 0
    for arrival, segment in response.segments:
        for event in feed(segment, arrival):
            number += 1
            _read_event(event, number, answer)
    rest = parser.unfinished()
    if rest is not None and rest.strip() == b"[DONE]":
        answer.done = True  # some servers leave out the last empty line; nothing is lost by it
    elif not answer.done and answer.finish_reason is None and not cut:
        # A transport error says more than "cut", so it is left to the caller to report.
        where = "inside an event" if rest is not None else f"after {len(answer.chunks)} content chunks"
        answer.problem(f"the stream was cut: it ends {where}, without finish_reason and without [DONE]")


def _read_event(event: SseEvent, number: int, answer: _Answer) -> None:
    data = event.data
    if data[:1] != b"{":
        data = data.strip()
        if data == b"[DONE]":
            answer.done = True
            return
        if not data:
            return
    try:
        text = data.decode()
        message, end = _decode(text)
        if end != len(text) and text[end:].strip():
            raise ValueError("more than one value")
    except (ValueError, RecursionError):
        answer.problem(f"event {number} of the stream is not valid JSON: {_shown(data)}")
        return
    if not isinstance(message, dict):
        answer.problem(f"event {number} of the stream is not a JSON object: {_shown(data)}")
        return
    if message.get("error"):
        answer.problem(f"the server reported an error inside the stream: {_error_words(message)}")
        return
    counted = _read_counts(message, answer)
    characters = 0
    listed: int | None = None
    choices = message.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            answer.problem(f"event {number} of the stream has a choice that is not an object: {_shown(data)}")
            continue
        reason = choice.get("finish_reason")
        if reason is not None:
            answer.finish_reason = str(reason)
        words = _choice_text(choice, "delta")
        if words:
            characters += len(words)
            if not choice.get("index"):
                answer.texts.append(words)
        tokens = _listed_tokens(choice)
        if tokens is not None:
            listed = (listed or 0) + tokens
            answer.pending_tokens += tokens
    if not characters:
        return
    count: int | None = None
    if counted is not None and answer.counted is not None and counted >= answer.counted:
        count = counted - answer.counted
    elif listed is not None:
        count = answer.pending_tokens
    answer.counted = counted
    answer.pending_tokens = 0
    answer.chunks.append(Chunk(event.arrival_ns, count, characters))


def _read_counts(message: dict[str, Any], answer: _Answer) -> int | None:
    """Usage and speculation counters of a message; the completion tokens that it counts."""
    metrics = message.get("metrics")
    if isinstance(metrics, dict):
        _read_speculation(metrics, answer)
    usage = message.get("usage")
    return answer.usage(usage) if isinstance(usage, dict) else None


def _read_whole(body: bytes, answer: _Answer) -> None:
    """An answer that was not streamed."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        answer.problem(f"the answer is not valid JSON: {_shown(body)}")
        return
    if not isinstance(message, dict):
        answer.problem(f"the answer is not a JSON object: {_shown(body)}")
        return
    if message.get("error"):
        answer.problem(f"the server reported an error: {_error_words(message)}")
        return
    _read_counts(message, answer)
    choices = message.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        answer.problem(f"the answer has no choices: {_shown(body)}")
        return
    answer.texts.append(_choice_text(choices[0], "message"))
    reason = choices[0].get("finish_reason")
    answer.finish_reason = None if reason is None else str(reason)


def _choice_text(choice: Mapping[str, Any], chat_key: str) -> str:
    """What a reader sees of a choice: its text, or a chat's reasoning, content and tool calls."""
    text = choice.get("text")
    if isinstance(text, str):
        return text
    part = choice.get(chat_key)
    if not isinstance(part, dict):
        return ""
    content = part.get("content")
    reasoning = part.get("reasoning_content") or part.get("reasoning")
    calls = part.get("tool_calls")
    if not reasoning and not calls:
        return content if isinstance(content, str) else ""
    words = [value for value in (reasoning, content) if isinstance(value, str)]
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            words += [v for v in (function.get("name"), function.get("arguments")) if isinstance(v, str)]
    return "".join(words)


def _listed_tokens(choice: Mapping[str, Any]) -> int | None:
    """How many tokens the server lists for this chunk, by their ids or their logprobs; None if it lists none."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        for key in ("tokens", "content"):
            entries = logprobs.get(key)
            if isinstance(entries, list):
                return len(entries)
    return None


def _read_speculation(metrics: Mapping[str, Any], answer: _Answer) -> None:
    """Keeps `metrics.speculative_decoding`, with a list as one entry per position (`name_0`, `name_1`, …)."""
    found = metrics.get("speculative_decoding")
    if not isinstance(found, dict):
        return
    kept: dict[str, float] = {}
    for name, value in found.items():
        numbers: Sequence[tuple[str, Any]] = (
            [(f"{name}_{i}", v) for i, v in enumerate(value)] if isinstance(value, list) else [(name, value)]
        )
        for key, number in numbers:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                kept[key] = float(number)
    answer.speculation = kept


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_stream(response: DecodedResponse) -> bool:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        return True
    return kind != "application/json" and response.body.lstrip()[:5] in (b"data:", b"event")


def _server_words(body: bytes) -> str:
    """The message of an error body in OpenAI's or FastAPI's shape, or else its beginning."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return _shown(body) if body.strip() else "the server gave no reason"
    return _error_words(message) if isinstance(message, dict) else _shown(body)


def _error_words(message: Mapping[str, Any]) -> str:
    error = message.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error
    found = error or message.get("message") or message.get("detail") or message
    words = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    words = _clean(words if len(words) <= _SHOWN else words[:_SHOWN] + "…")
    return f"{words} ({OVERLONG})" if error_code(message) == OVERLONG and OVERLONG not in words else words


def error_code(message: Mapping[str, Any]) -> str | None:
    """What a server's error body calls the error (OpenAI's `error.code`), where it is a word."""
    error = message.get("error")
    code = error.get("code") if isinstance(error, dict) else message.get("code")
    return code if isinstance(code, str) else None


def says_overlong(words: str) -> bool:
    """Whether an error says that a prompt does not fit the model's context.

    By OpenAI's code, or in the words of vLLM and SGLang ("maximum context length", "context length") and llama.cpp
    ("exceed_context_size_error", "available context size").
    """
    return OVERLONG in words or re.search(r"context[ _](length|size)", words, re.IGNORECASE) is not None


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def _clean(text: str) -> str:
    """A text that UTF-8 can hold: surrogate pairs split over two events are joined, lone ones replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _result(raw: RawExchange, status: int | None, answer: _Answer, error: str | None) -> RequestResult:
    return RequestResult(
        request_id=raw.request_id,
        prompt_id=raw.prompt_id,
        stream=raw.stream,
        intended_send_ns=raw.intended_send_ns,
        send_ns=raw.send_ns,
        first_byte_ns=raw.reads[0][0] if raw.reads else None,
        end_ns=raw.end_ns,
        http_status=status,
        chunks=tuple(answer.chunks),
        text=_clean("".join(answer.texts)),
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        error=error,
        speculation=answer.speculation,
    )
