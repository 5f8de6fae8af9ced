"""When a request is finished, decided token by token, and which text may be released meanwhile.

One checker serves plain decode and speculation alike: accepted tokens pass through it one by one, so the text ends
where it would have ended without speculation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from breakeven.engine.request import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """What the checker needs of an `IncrementalDetokenizer`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StopDecision:
    """The outcome of one token. `stop_reason`: the stop string or stop id that matched; None for EOS and length."""

    text: str
    finished: FinishReason | None = None
    stop_reason: str | int | None = None


class StopChecker:
    """Applies EOS, stop ids, stop strings, min_tokens and max_tokens to one request.

    - EOS and stop ids end the request at once; their own text is left out, unless include_stop_str_in_output.
    - A stop string ends it at the character that completes it, in the middle of a token if need be; of strings
      completed by the same character the longest counts. The text is cut before the string, or after it with
      include_stop_str_in_output. Text that may be the beginning of a stop string is held back, and no longer.
    - Before the min_tokens-th token none of these count; a stop string that begins before it and ends in it or later
      does.
    - The max_tokens-th token ends the request with "length", unless it ends it with "stop".
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer, max_tokens: int
    ) -> None:
        """`max_tokens`: the request's budget, already limited by the context; at least 1."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._matchers = [_Matcher(stop) for stop in params.stop if stop]
        self._held = ""
        self._tokens = 0
        self._finished = False

    def push(self, token_id: int) -> StopDecision:
        """Take the next generated token. RuntimeError after the request has finished."""
        if self._finished:
            raise RuntimeError("the request has finished; no further token belongs to it")
        self._tokens += 1
        may_stop = self._tokens >= self._min_tokens
        is_eos = may_stop and token_id in self._eos_token_ids
        if is_eos or (may_stop and token_id in self._stop_token_ids):
            text = self._detokenizer.push(token_id) if self._include_stop else ""
            return self._finish(text, "stop", None if is_eos else token_id)
        text = self._detokenizer.push(token_id)
        if self._tokens >= self._max_tokens:
            return self._finish(text, "length", None)
        released, stop = self._match(text, may_stop)
        self._finished = stop is not None
        return StopDecision(released, "stop" if self._finished else None, stop)

    def flush(self) -> str:
        """The text still held back, for a request that ends from outside (abort); "" after it has finished."""
        if self._finished:
            return ""
        self._finished = True
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _finish(self, text: str, reason: FinishReason, stop_reason: int | None) -> StopDecision:
        """The last token: all text comes out, and may itself complete a stop string, which is then the reason."""
        self._finished = True
        released, stop = self._match(text + self._detokenizer.flush(), self._tokens >= self._min_tokens)
        if stop is not None:
            return StopDecision(released, "stop", stop)
        released, self._held = released + self._held, ""
        return StopDecision(released, reason, stop_reason)

    def _match(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """(text to release, stop string completed or None)."""
        if not self._matchers:
            return text, None
        buffer = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            completed = [matcher.stop for matcher in self._matchers if matcher.feed(character)]
            if completed and may_stop:
                stop = max(completed, key=len)
                self._held = ""
                return buffer[: index if self._include_stop else index - len(stop)], stop
        release = len(buffer) - max(matcher.matched for matcher in self._matchers)
        self._held = buffer[release:]
        return buffer[:release], None


class _Matcher:
    """Knuth, Morris and Pratt's automaton (SIAM J. Comput. 6, 1977): constant amortised cost per character."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest proper prefix of `stop` that the text so far ends with
        self._fallback = [0] * (len(stop) + 1)  # [n]: length of the longest proper border of stop[:n]
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length]
            length += stop[index] == stop[length]
            self._fallback[index + 1] = length

    def feed(self, character: str) -> bool:
        """Take the next character; True if it completes the stop string."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self._fallback[self.matched]
        if character == self.stop[self.matched]:
            self.matched += 1
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[self.matched]
        return True
