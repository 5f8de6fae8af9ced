"""Request bodies for OpenAI-compatible servers. Pure: the same arguments give the same bytes.

Only what is set is sent. A server's own default then stays in force, and a server that refuses a parameter it does
not know is not sent it. Keys stand in a fixed order, so that bodies of two arms can be compared byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from breakeven.lab.workload.prompt import Prompt

# OpenAI's own parameters first, then the extensions that vLLM, SGLang, llama.cpp and the embedded engine share.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)
# What the lab itself decides: `extra` must not change it behind the campaign's back.
_RESERVED = frozenset(
    (
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "seed", "stream", "stream_options"),
        *("n", "best_of"),
        *SAMPLING_FIELDS,
    )
)


def chat_body(
    prompt: Prompt,
    model: str,
    sampling: Mapping[str, Any],
    max_tokens: int | None,
    seed: int | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    continuous_usage: bool = True,
) -> bytes:
    """The body of a streaming POST to /v1/chat/completions, as UTF-8 JSON.

    `sampling` holds names of SAMPLING_FIELDS; a value of None counts as not set, and so do `max_tokens` None and
    `seed` None. `extra` adds fields that the lab does not know (such as `chat_template_kwargs`), sorted by name.
    `continuous_usage` asks for token counts in every chunk; turn it off for servers that refuse the option.
    ValueError for an unknown sampling name, an `extra` that would override another field, or what JSON cannot hold.
    """
    messages = [{"role": message["role"], "content": message["content"]} for message in prompt.messages]
    return _body({"model": model, "messages": messages}, sampling, max_tokens, seed, extra, continuous_usage)


def completion_body(
    prompt: Prompt | str | Sequence[int],
    model: str,
    sampling: Mapping[str, Any],
    max_tokens: int | None,
    seed: int | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    continuous_usage: bool = True,
) -> bytes:
    """The body of a streaming POST to /v1/completions: for a text, token ids, or a Prompt as `plain_text` writes it.

    The other arguments and the errors are those of `chat_body`.
    """
    if isinstance(prompt, Prompt):
        given: str | list[int] = plain_text(prompt)
    else:
        given = prompt if isinstance(prompt, str) else list(prompt)
    return _body({"model": model, "prompt": given}, sampling, max_tokens, seed, extra, continuous_usage)


def plain_text(prompt: Prompt) -> str:
    """A conversation as text, for models and routes without a chat template.

    A lone user message is its content. Anything longer is written as a transcript (System:, User:, Assistant:), with
    an open Assistant: at the end.
    """
    if len(prompt.messages) == 1:
        return prompt.messages[0]["content"]
    turns = [f"{message['role'].capitalize()}: {message['content']}" for message in prompt.messages]
    return "\n\n".join([*turns, "Assistant:"])


def _body(
    head: Mapping[str, Any],
    sampling: Mapping[str, Any],
    max_tokens: int | None,
    seed: int | None,
    extra: Mapping[str, Any] | None,
    continuous_usage: bool,
) -> bytes:
    unknown = sorted(set(sampling) - set(SAMPLING_FIELDS))
    if unknown:
        raise ValueError(
            f"sampling has an unknown parameter {unknown[0]!r}: known are {', '.join(SAMPLING_FIELDS)}; "
            f"put anything else into the extra fields"
        )
    clash = sorted(set(extra or {}) & _RESERVED)
    if clash:
        raise ValueError(f"the extra field {clash[0]!r} is set by the lab itself: set it in the campaign instead")
    fields = dict(head)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    fields |= {name: sampling[name] for name in SAMPLING_FIELDS if sampling.get(name) is not None}
    if seed is not None:
        fields["seed"] = seed
    fields["stream"] = True
    fields["stream_options"] = {"include_usage": True} | ({"continuous_usage_stats": True} if continuous_usage else {})
    fields |= dict(sorted((extra or {}).items()))
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as problem:
        raise ValueError(f"the request cannot be written as JSON: {problem}") from None
