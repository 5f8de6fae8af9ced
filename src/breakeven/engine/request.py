"""What a caller asks of the engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that the engine cannot serve; the message says why. `code`: what OpenAI's API calls it."""

    code = "invalid_value"


class ContextLengthError(RequestError):
    """A prompt that does not fit the context, or leaves no room for what is asked."""

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop, in OpenAI's terms plus the usual extensions.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` and `min_p == 0` are off. `seed` None: derived from
    the engine's seed and the request id. `logprobs` None: none; n: the chosen token's and the n best.
    `max_tokens` None: up to the context limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checks = (
            (self.temperature >= 0, "temperature must be at least 0"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (self.top_k >= 0, "top_k must be at least 0 (0: off)"),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty must be in [-2, 2]"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]"),
            (0 < self.repetition_penalty <= 10, "repetition_penalty must be in (0, 10]"),
            (self.max_tokens is None or self.max_tokens >= 1, "max_tokens must be at least 1"),
            (self.min_tokens >= 0, "min_tokens must be at least 0"),
            (
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                "min_tokens must not exceed max_tokens",
            ),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs must be in [0, 20]"),
        )
        for ok, message in checks:
            if not ok:
                raise ValueError(message)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One emitted token. `top` lists (token id, logprob) of the best, best first, where logprobs were asked for.

    Logprobs are of the model's raw distribution (before penalties, temperature and truncation), natural log.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SpeculationStats:
    """Counters of one request. Mean acceptance length, bonus included, is 1 + accepted / drafts."""

    drafts: int = 0  # rounds in which at least one token was drafted
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # index: depth - 1
    steps: int = 0  # target forwards that emitted tokens for this request, drafted or not


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one engine step produced for one request.

    `text` is the newly completed text (may lag behind the tokens: partial characters and possible stop strings are
    held back). On the last output `finish_reason` is set; `stop_reason` is the stop string or stop id that matched,
    None for EOS and length.
    """

    request_id: str
    tokens: tuple[TokenOutput, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    speculation: SpeculationStats | None = None
