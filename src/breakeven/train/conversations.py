"""Conversations as training rows: exactly the token ids that the server would compute, and which of them are learnt.

A row is {"id", "domain", "conversations": [{"role", "content"}, …], "prompt_ids", "answer_ids"}. SpecForge and
speculators read `id` and `conversations`; the ids spare them nothing and spare us a re-tokenisation that need not give
back what the target sampled. Rows without ids (from elsewhere) are rendered with the target's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from breakeven.engine.config import ConfigError
from breakeven.engine.tokenizer import Tokenizer
from breakeven.train.loops import loop_start

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of a whole conversation; `mask[i]` is the weight with which predicting token i is learnt."""

    id: str
    domain: str
    tokens: tuple[int, ...]
    mask: tuple[float, ...]
    greedy: bool = False  # the answer is the target's argmax at each place

    def spans(self) -> list[tuple[int, int]]:
        """Runs of learnt tokens, [start, end)."""
        found: list[tuple[int, int]] = []
        for index, weight in enumerate(self.mask):
            if weight > 0 and (index == 0 or self.mask[index - 1] == 0):
                found.append((index, index + 1))
            elif weight > 0:
                found[-1] = (found[-1][0], index + 1)
        return found


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids that the server computes for a chat request with these messages. ValueError if it cannot be rendered."""
    return tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=True), add_special_tokens=False)


def messages_of(row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """The row's messages with OpenAI's roles; ShareGPT's `from`/`value` are read too. ConfigError if malformed."""
    raw = row.get("conversations", row.get("messages"))
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{where}: 'conversations' must be a list of messages")
    messages = []
    for number, item in enumerate(raw):
        role = item.get("role", item.get("from")) if isinstance(item, dict) else None
        content = item.get("content", item.get("value")) if isinstance(item, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise ConfigError(
                f"{where}: message {number} needs a role ({', '.join(sorted(_ROLES))}) and a text as content"
            )
        messages.append({"role": _ROLES[role], "content": content})
    return messages


def encode_row(tokenizer: Tokenizer, row: Mapping[str, Any], where: str, loop_weight: float = 1.0) -> Conversation:
    """A row as token ids and weights. Tokens of an answer's loop tail get `loop_weight`. ConfigError if malformed."""
    row_id, domain = str(row.get("id", where)), str(row.get("domain", "unknown"))
    prompt, answer = row.get("prompt_ids"), row.get("answer_ids")
    if prompt is not None and answer is not None:
        for name, ids in (("prompt_ids", prompt), ("answer_ids", answer)):
            if not isinstance(ids, list) or not all(
                isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in ids
            ):
                raise ConfigError(f"{where}: {name} must be token ids of this target's vocabulary")
        tokens = [*prompt, *answer]
        mask = [0.0] * len(prompt) + _answer_weights(answer, loop_weight)
        return Conversation(row_id, domain, tuple(tokens), tuple(mask), greedy=row.get("temperature") == 0)
    tokens, mask = _rendered(tokenizer, messages_of(row, where), where, loop_weight)
    return Conversation(row_id, domain, tuple(tokens), tuple(mask))


def _rendered(
    tokenizer: Tokenizer, messages: list[dict[str, str]], where: str, loop_weight: float
) -> tuple[list[int], list[float]]:
    """Each assistant turn as the server would have seen it: the prompt's ids, the answer's, and the end of turn."""
    tokens: list[int] = []
    mask: list[float] = []
    end = list(tokenizer.eos_token_ids[:1])
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise ConfigError(f"{where}: the first message is the assistant's; there is nothing that it answers")
        try:
            prompt = prompt_ids(tokenizer, messages[:index])
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if prompt[: len(tokens)] != tokens:  # the template renders earlier turns differently: keep what is common
            common = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), len(prompt))
            del tokens[common:], mask[common:]
        mask += [0.0] * (len(prompt) - len(tokens))
        tokens = prompt
        answer = tokenizer.encode(message["content"], add_special_tokens=False) + end
        tokens = tokens + answer
        mask += _answer_weights(answer, loop_weight)
    if not tokens:
        raise ConfigError(f"{where}: there is no assistant turn to learn from")
    return tokens, mask


def _answer_weights(answer: Sequence[int], loop_weight: float) -> list[float]:
    weights = [1.0] * len(answer)
    start = loop_start(answer) if loop_weight < 1 else None
    if start is not None:
        weights[start:] = [loop_weight] * (len(answer) - start)
    return weights
