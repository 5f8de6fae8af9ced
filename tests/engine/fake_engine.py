"""A deterministic engine without a model: bytes in, letters out. Obeys the engine's contract, thread rule included."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from breakeven.engine.config import EngineConfig
from breakeven.engine.request import (
    ContextLengthError,
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenOutput,
)

EOS = 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class FakeTokenizer:
    """One token per byte, and an end-of-sequence token that has no text."""

    vocab_size = 257
    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_text(self, token_id: int, /) -> str:
        return "</s>" if token_id == EOS else bytes([token_id]).decode(errors="replace")

    def token_bytes(self, token_id: int, /) -> bytes:
        return b"</s>" if token_id == EOS else bytes([token_id])

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        if messages[0]["role"] == "nobody":
            raise RuntimeError("roles must be somebody")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + "".join(f"[{k}={v}]" for k, v in template_kwargs.items()) + "<assistant>" * add_generation_prompt


@dataclass
class FakeStats:
    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 10_000
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass
class _Sequence:
    prompt: list[int]
    params: SamplingParams
    limit: int
    produced: int = 0
    steps: int = 0


class FakeEngine:
    """Each step gives every running request `tokens_per_step` letters, which depend on its prompt and seed alone.

    A request ends at `max_tokens`, or by EOS after `natural_length` tokens. `failing_step`: step() raises at that
    call. `step_s`: how long a step takes. The KV that a request holds is its prompt plus its tokens.
    """

    def __init__(
        self,
        *,
        config: EngineConfig | None = None,
        tokens_per_step: int = 1,
        natural_length: int = 1000,
        step_s: float = 0.0,
        failing_step: int | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = FakeTokenizer()
        self.max_context = 4096
        self.tokens_per_step = tokens_per_step
        self.natural_length = natural_length
        self.step_s = step_s
        self.failing_step = failing_step
        self.sequences: dict[str, _Sequence] = {}
        self.totals = FakeStats()
        self.aborted: list[str] = []
        self.steps = 0
        self.resets = 0
        self.gate = threading.Event()  # cleared: step() stands still
        self.gate.set()
        self.held = threading.Event()  # set while step() stands at the gate
        self.polls = 0  # calls of has_work()
        self._thread: int | None = None

    def _on_engine_thread(self) -> None:
        """All calls come from one thread."""
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "the engine was called from two threads"

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._on_engine_thread()
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        if len(prompt_ids) >= self.max_context:
            raise ContextLengthError(f"the prompt has {len(prompt_ids)} tokens; the context is {self.max_context}")
        if any(not 0 <= token < 257 for token in prompt_ids):
            raise ValueError("token id out of range")

    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._on_engine_thread()
        assert request_id not in self.sequences
        limit = min(params.max_tokens or self.max_context, self.max_context - len(prompt_ids))
        self.sequences[request_id] = _Sequence(list(prompt_ids), params, limit)
        self.totals.prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> None:
        self._on_engine_thread()
        if self.sequences.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_work(self) -> bool:
        self._on_engine_thread()
        self.polls += 1
        return bool(self.sequences)

    def step(self) -> list[RequestOutput]:
        self._on_engine_thread()
        if not self.gate.is_set():
            self.held.set()
            self.gate.wait(30)
            self.held.clear()
        if self.step_s:
            time.sleep(self.step_s)
        self.steps += 1
        if self.failing_step is not None and self.steps >= self.failing_step:
            raise RuntimeError("a kernel fell over")
        running = list(self.sequences.items())[: self.config.max_running_requests]
        return [self._advance(request_id, sequence) for request_id, sequence in running]

    def _advance(self, request_id: str, sequence: _Sequence) -> RequestOutput:
        params = sequence.params
        tokens: list[TokenOutput] = []
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        text = ""
        while len(tokens) < self.tokens_per_step and finish is None:
            token = self._next_token(sequence)
            sequence.produced += 1
            top = ((token, -0.5), (0, float("-inf")))[: params.logprobs] if params.logprobs else ()
            tokens.append(TokenOutput(token, -0.5 if params.logprobs is not None else None, top))
            if token == EOS:
                finish = "stop"
            else:
                text += chr(token)
                if chr(token) in params.stop:
                    finish, stop_reason, text = "stop", chr(token), text[:-1]
                elif sequence.produced >= sequence.limit:
                    finish = "length"
        sequence.steps += 1
        self.totals.generated_tokens += len(tokens)
        speculation = None
        if self.config.speculation is not None:
            accepted = len(tokens) - 1
            total = self.totals.speculation
            total.drafts += 1
            total.draft_tokens += self.tokens_per_step - 1
            total.accepted_tokens += accepted
            per_position = total.accepted_per_position
            per_position.extend([0] * (accepted - len(per_position)))
            for position in range(accepted):
                per_position[position] += 1
            speculation = SpeculationStats(
                drafts=sequence.steps,
                draft_tokens=sequence.steps * (self.tokens_per_step - 1),
                accepted_tokens=sequence.produced - sequence.steps,
                accepted_per_position=[sequence.steps] * (self.tokens_per_step - 1),
                steps=sequence.steps,
            )
        if finish is not None:
            del self.sequences[request_id]
        return RequestOutput(
            request_id=request_id,
            tokens=tuple(tokens),
            text=text,
            prompt_tokens=len(sequence.prompt),
            cached_tokens=2 if len(sequence.prompt) > 2 else 0,
            completion_tokens=sequence.produced,
            finish_reason=finish,
            stop_reason=stop_reason,
            speculation=speculation,
        )

    def _next_token(self, sequence: _Sequence) -> int:
        if sequence.produced >= self.natural_length and not sequence.params.ignore_eos:
            return EOS
        start = sum(sequence.prompt) + (sequence.params.seed or 0)
        return ord(LETTERS[(start + sequence.produced) % 26])

    def reset_prefix_cache(self) -> bool:
        self._on_engine_thread()
        self.resets += 1
        return not self.sequences

    def stats(self) -> FakeStats:
        self._on_engine_thread()
        self.totals.running = len(self.sequences)
        self.totals.kv_tokens_used = self.kv_held()
        return self.totals

    def kv_held(self) -> int:
        """Tokens of KV that unfinished requests hold."""
        return sum(len(s.prompt) + s.produced for s in list(self.sequences.values()))


def expected_text(prompt: str, count: int, seed: int = 0) -> str:
    """What the engine answers to a text prompt."""
    start = sum(prompt.encode()) + seed
    return "".join(LETTERS[(start + i) % 26] for i in range(count))
