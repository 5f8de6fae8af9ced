"""OpenAI's response bodies and stream events, for both routes.

The stream's events are put together from prepared pieces: at thousands of events a second, building and serialising
nested dicts would cost more than sending them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from breakeven.engine.async_engine import TokenizerProtocol
from breakeven.engine.request import RequestOutput, SpeculationStats, TokenOutput

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which is not JSON


@dataclass(slots=True)
class Choice:
    """One answer while it is being generated. `counts_prompt`: the first answer to its prompt."""

    index: int
    prompt_ids: Sequence[int]
    counts_prompt: bool
    started: bool = False
    completion_tokens: int = 0
    text_offset: int = 0  # characters of token texts so far, for logprobs
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Usage:
    """Running totals over all answers of one HTTP request; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, choice: Choice, output: RequestOutput) -> None:
        self.completion_tokens += output.completion_tokens - choice.completion_tokens
        choice.completion_tokens = output.completion_tokens
        if not choice.started:
            choice.started = True
            if choice.counts_prompt:
                self.cached_tokens += output.cached_tokens

    def json(self) -> str:
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{self.prompt_tokens + self.completion_tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached_tokens}}}}}'
        )


def add_speculation(total: SpeculationStats | None, part: SpeculationStats | None) -> SpeculationStats | None:
    """The sum of two counters; None counts as nothing."""
    if total is None or part is None:
        return total or part
    long, short = sorted((total.accepted_per_position, part.accepted_per_position), key=len, reverse=True)
    return SpeculationStats(
        drafts=total.drafts + part.drafts,
        draft_tokens=total.draft_tokens + part.draft_tokens,
        accepted_tokens=total.accepted_tokens + part.accepted_tokens,
        accepted_per_position=[a + (short[i] if i < len(short) else 0) for i, a in enumerate(long)],
        steps=total.steps + part.steps,
    )


def speculation_metrics(stats: SpeculationStats | None) -> dict[str, Any]:
    """The value of `metrics` in a response: counters of this request alone; null without speculation."""
    if stats is None:
        return {"speculative_decoding": None}
    return {
        "speculative_decoding": {
            "num_drafts": stats.drafts,
            "num_draft_tokens": stats.draft_tokens,
            "num_accepted_tokens": stats.accepted_tokens,
            "num_accepted_tokens_per_pos": list(stats.accepted_per_position),
            "num_steps": stats.steps,
        }
    }


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB  # NaN too becomes the lowest


def completion_logprobs(
    tokens: Sequence[TokenOutput], tokenizer: TokenizerProtocol, alternatives: int, offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of /v1/completions, and the text offset after these tokens."""
    texts = [tokenizer.token_text(token.token_id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top: list[dict[str, float | None]] | None = None
    if alternatives:
        top = []
        for token in tokens:
            best: dict[str, float | None] = {}
            for token_id, logprob in token.top[:alternatives]:
                best.setdefault(tokenizer.token_text(token_id), _finite(logprob))
            top.append(best)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }, offset


def chat_logprobs(tokens: Sequence[TokenOutput], tokenizer: TokenizerProtocol, alternatives: int) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            entry(token.token_id, token.logprob)
            | {"top_logprobs": [entry(*candidate) for candidate in token.top[:alternatives]]}
            for token in tokens
        ]
    }


@dataclass(slots=True)
class ResponseFormat:
    """What every response of one HTTP request shares. `logprobs`: alternatives asked for, None for no logprobs."""

    response_id: str
    created: int
    model: str
    chat: bool
    tokenizer: TokenizerProtocol
    logprobs: int | None
    token_ids: bool
    speculation: bool
    include_usage: bool = False
    continuous_usage: bool = False
    _head: str = ""

    def __post_init__(self) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        self._head = (
            f'data: {{"id":{quote(self.response_id)},"object":"{kind}","created":{self.created},'
            f'"model":{quote(self.model)},"choices":['
        )

    def event(self, choice: Choice, output: RequestOutput, usage: Usage, total: SpeculationStats | None) -> bytes:
        """One server-sent event with what one engine step gave one answer.

        `choice` must not have been updated by `usage.add` for this output yet; this does it.
        """
        first = not choice.started
        usage.add(choice, output)
        text = quote(output.text)
        if not self.chat:
            body = f'"text":{text}'
        elif first:  # the role comes with the first text, so that no event is empty
            body = f'"delta":{{"role":"assistant","content":{text}}}'
        else:
            body = f'"delta":{{"content":{text}}}'
        logprobs = "null" if self.logprobs is None else json.dumps(self._logprobs(choice, output.tokens))
        if output.finish_reason is None:
            finish = '"finish_reason":null'
        else:
            stop_reason = json.dumps(output.stop_reason)
            finish = f'"finish_reason":"{output.finish_reason}","stop_reason":{stop_reason}'
        extra = ""
        if self.token_ids:
            if first:
                extra = f',"prompt_token_ids":{json.dumps(list(choice.prompt_ids))}'
            extra += f',"token_ids":{[token.token_id for token in output.tokens]}'
        tail = ""
        if self.continuous_usage:
            tail = f',"usage":{usage.json()}'
        elif self.include_usage:
            tail = ',"usage":null'
        if self.speculation and output.finish_reason is not None:
            tail += f',"metrics":{json.dumps(speculation_metrics(total))}'
        return (
            f'{self._head}{{"index":{choice.index},{body},"logprobs":{logprobs},{finish}{extra}}}]{tail}}}\n\n'.encode()
        )

    def usage_event(self, usage: Usage) -> bytes:
        """The last event where `stream_options.include_usage` was asked for: no choices, and the totals."""
        return f'{self._head}],"usage":{usage.json()}}}\n\n'.encode()

    def response(self, choices: Sequence[Choice], usage: Usage, total: SpeculationStats | None) -> bytes:
        """The body of a response that is not streamed."""
        answer: dict[str, Any] = {
            "id": self.response_id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": json.loads(usage.json()),
        }
        if self.speculation:
            answer["metrics"] = speculation_metrics(total)
        return json.dumps(answer).encode()

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        body: dict[str, Any] = {"index": choice.index}
        if self.chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        body["logprobs"] = None if self.logprobs is None else self._logprobs(choice, choice.tokens)
        body["finish_reason"] = choice.finish_reason
        body["stop_reason"] = choice.stop_reason
        if self.token_ids:
            body["prompt_token_ids"] = list(choice.prompt_ids)
            body["token_ids"] = [token.token_id for token in choice.tokens]
        return body

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
        alternatives = self.logprobs or 0
        if self.chat:
            return chat_logprobs(tokens, self.tokenizer, alternatives)
        value, choice.text_offset = completion_logprobs(tokens, self.tokenizer, alternatives, choice.text_offset)
        return value
