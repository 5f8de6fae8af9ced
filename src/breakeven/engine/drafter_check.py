"""A drafter's self-test: what share of first drafts is accepted on a few prompts, and a warning when it is too low.

A checkpoint read by the wrong convention (layer ids, norms, tokenizer) loads, serves, and gives the right answers, as
verification is lossless; only nearly none of its drafts is accepted, and speculation costs instead of paying. Cases
that were reported lie at 4 to 10% (vllm PR 43671, 50170), heads that are read rightly mostly at 40% and more; hence the
threshold.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from breakeven.engine.config import ConfigError
from breakeven.engine.request import RequestOutput, SamplingParams

logger = logging.getLogger("breakeven.engine")

THRESHOLD = 0.25
PROMPTS = (
    "Write a Python function that returns the sum of the even numbers in a list.",
    "Explain in a few sentences why the sky is blue.",
    "List the days of the week, one on each line.",
    "Write a short, friendly e-mail that asks a colleague to move a meeting to Friday.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Describe how to make a cup of tea, step by step.",
)
ANSWER_TOKENS = 24


class _Tokenizer(Protocol):
    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str: ...


class CheckedEngine(Protocol):
    """What the self-test needs of an engine."""

    @property
    def tokenizer(self) -> _Tokenizer: ...

    @property
    def max_context(self) -> int: ...

    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request_id: str) -> None: ...

    def reset_prefix_cache(self) -> bool: ...

    def reset_stats(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DrafterCheck:
    """`drafts`: rounds that drafted; `first_accepted`: those whose first drafted token, or in a tree one of the first,
    was accepted. `warning`: None if the drafter seems to fit, or if nothing was drafted."""

    drafts: int
    first_accepted: int
    generated_tokens: int
    warning: str | None

    @property
    def first_position(self) -> float | None:
        """The share of drafts accepted at the first position, 0 to 1; None if nothing was drafted."""
        return self.first_accepted / self.drafts if self.drafts else None


def check_drafter(engine: CheckedEngine, *, threshold: float = THRESHOLD) -> DrafterCheck:
    """Answer PROMPTS greedily, ANSWER_TOKENS each, with an idle engine that speculates with its drafter.

    Leaves no trace: neither in the engine's totals nor in its prefix cache. Prompts that exceed a short context are
    left out. Must run where the engine may be used, so before it serves.
    """
    in_flight: set[str] = set()
    drafts = first_accepted = generated = 0
    try:
        for number, prompt in enumerate(PROMPTS):
            ids = _prompt_ids(engine.tokenizer, prompt)
            if len(ids) + ANSWER_TOKENS <= engine.max_context:
                request_id = f"drafter-self-test-{number}"
                engine.add_request(request_id, ids, SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS))
                in_flight.add(request_id)
        while in_flight:
            for output in engine.step():
                if output.finish_reason is None:
                    continue
                in_flight.discard(output.request_id)
                generated += output.completion_tokens
                if output.speculation is not None:
                    drafts += output.speculation.drafts
                    first_accepted += next(iter(output.speculation.accepted_per_position), 0)
    finally:
        for request_id in in_flight:
            engine.abort(request_id)
        engine.reset_prefix_cache()
        engine.reset_stats()
    return DrafterCheck(drafts, first_accepted, generated, _warning(drafts, first_accepted, threshold))


def log_drafter_check(engine: CheckedEngine) -> DrafterCheck:
    """`check_drafter`, with its figure in the log, and its warning if there is one."""
    found = check_drafter(engine)
    if found.first_position is None:
        logger.warning("drafter self-test: nothing was drafted, so it says nothing (is the context very short?)")
    else:
        logger.info(
            "drafter self-test: %.0f%% of first drafts accepted (%d of %d) on %d prompts",
            100 * found.first_position,
            found.first_accepted,
            found.drafts,
            len(PROMPTS),
        )
    if found.warning is not None:
        logger.warning("%s", found.warning)
    return found


def _prompt_ids(tokenizer: _Tokenizer, prompt: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    try:
        text = tokenizer.render_chat([{"role": "user", "content": prompt}])
    except Exception as error:  # a template is code of the model's author, and may raise anything
        raise ConfigError(
            f"the drafter's self-test cannot render the model's chat template ({error}); skip it with "
            "--skip-drafter-self-test"
        ) from error
    return tokenizer.encode(text, add_special_tokens=False)


def _warning(drafts: int, first_accepted: int, threshold: float) -> str | None:
    if not drafts or first_accepted >= threshold * drafts:
        return None
    return (
        f"only {100 * first_accepted / drafts:.0f}% of the drafter's first tokens were accepted ({first_accepted} of "
        f"{drafts} drafts; below {100 * threshold:.0f}% something is likely wrong). Answers stay right, but "
        "speculation will cost time. Likely causes: its layer ids mean the other convention (try "
        "--speculative-draft-layer-ids output, or boundary); norm_before_residual, fc_norm or norm_output in its "
        "config.json are not as trained; it was trained for another model, tokenizer or chat template"
    )
