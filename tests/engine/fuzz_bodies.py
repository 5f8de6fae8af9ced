"""Request bodies for fuzzing: anything at all, and well-formed ones at the borders of what is allowed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from server_tools import CHAT, COMPLETIONS

_FIELDS = sorted(
    {
        "model", "prompt", "messages", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids",
        "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "include_stop_str_in_output", "logprobs",
        "top_logprobs", "echo", "suffix", "best_of", "tools", "response_format", "chat_template_kwargs",
        "add_generation_prompt", "return_token_ids", "return_speculation", "unknown",
    }
)  # fmt: skip
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-2, 20) | st.floats() | st.floats(0, 1)
    | st.text(st.characters(exclude_categories=[]), max_size=8)
    | st.sampled_from(["fake", "user", "text", "1e999", "\ud800", 2**63, -(2**63), 10**400, 1e308, -0.0])
)  # fmt: skip
_KEYS = st.sampled_from(["role", "content", "type", "text", "include_usage", "continuous_usage_stats", "1"]) | st.text(
    max_size=4
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=3), max_leaves=8
)
_PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("fake"),
    "prompt": st.text(max_size=8)
    | st.lists(st.text(max_size=4), max_size=3)
    | st.lists(st.integers(-1, 258), max_size=4),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "nobody"]), "content": st.text(max_size=8)}),
        max_size=3,
    ),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    "n": st.integers(1, 4),
    "max_tokens": st.integers(0, 20),
    "logprobs": st.integers(0, 21) | st.booleans(),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3),
    "temperature": st.floats(0, 2),
    "seed": st.integers(),
}
_OBJECTS = st.fixed_dictionaries({}, optional=dict.fromkeys(_FIELDS, _VALUES)) | st.fixed_dictionaries(
    {}, optional=_PLAUSIBLE | dict.fromkeys(("unknown", "logit_bias", "chat_template_kwargs", "top_k"), _VALUES)
)
ANY_BODIES = st.one_of(
    _OBJECTS.map(lambda value: json.dumps(value).encode()),
    _OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")),
    _VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
)


def well_formed(vocab_size: int, context: int) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """(path, body) for a server of one model, "fake": every field of its right type and in its range, the borders
    included; in a third of the bodies one field lies just beyond."""
    token = st.integers(0, vocab_size - 1) | st.just(vocab_size - 1)
    length = st.integers(1, 20) | st.integers(1, context - 1) | st.just(context - 1)
    words = st.lists(st.sampled_from(["the ", "and", "re", " ", "0", "é", "😀", "<|im_end|>"]), min_size=1, max_size=8)
    text = words.map("".join) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    ids = st.tuples(st.lists(token, min_size=1, max_size=4), length).map(lambda p: (p[0] * p[1])[: p[1]])
    penalty = st.sampled_from([-2, -2.0, -1e-300, 0, 2]) | st.floats(-2, 2)
    bias = st.sampled_from([-100, 100, 0, 1e-320]) | st.floats(-100, 100)
    stop = st.sampled_from([" ", "e", "the", "\ufffd", "x" * 40, "<|im_end|>"]) | st.text(min_size=1, max_size=2)
    limit = st.integers(1, 12) | st.integers(1, context - 1)
    common: dict[str, st.SearchStrategy[Any]] = {
        "model": st.just("fake"),
        "n": st.sampled_from([1, 2, 4]),
        "temperature": st.sampled_from([0, -0.0, 5e-324, 1e-308, 1e-6, 1, 2]) | st.floats(0, 2),
        "top_p": st.sampled_from([5e-324, 1e-9, 0.999999999, 1]) | st.floats(0, 1, exclude_min=True),
        "top_k": st.sampled_from([-1, 0, 1, 2, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1]),
        "min_p": st.sampled_from([0, 5e-324, 1e-9, 1]) | st.floats(0, 1),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": st.sampled_from([5e-324, 1e-40, 1e-9, 0.5, 1, 10]) | st.floats(0.01, 10),
        "logit_bias": st.one_of(
            st.dictionaries(token.map(str), bias, max_size=5),
            bias.map(lambda value: {str(token): value for token in range(vocab_size)}),
        ),
        "seed": st.sampled_from([-(2**63), -1, 0, 2**63 - 1]) | st.integers(0, 3),
        "stop": stop | st.lists(stop, max_size=4),
        "stop_token_ids": st.lists(token, max_size=5) | st.just(list(range(vocab_size))),
        "min_tokens": st.sampled_from([0, 1]),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_speculation": st.booleans(),
        "max_tokens": limit,
    }
    beyond: dict[str, st.SearchStrategy[Any]] = {
        "model": st.just("another"),
        "n": st.sampled_from([0, 129]),
        "temperature": st.sampled_from([-1e-300, 2.1]),
        "top_p": st.sampled_from([0, 1.1]),
        "top_k": st.sampled_from([-2, 2**31]),
        "min_p": st.just(1.1),
        "presence_penalty": st.just(2.1),
        "repetition_penalty": st.sampled_from([0, 10.1]),
        "logit_bias": st.sampled_from([{"0": 100.5}, {str(vocab_size): 1}, {"-1": 1}]),
        "seed": st.just(2**63),
        "stop": st.just("") | st.lists(stop, min_size=65, max_size=65),
        "stop_token_ids": st.sampled_from([[-1], [vocab_size], [2**31]]),
        "min_tokens": st.just(2**31 - 1),
        "max_tokens": st.sampled_from([0, context, 2**31 - 1, 2**31, 10**12]),
    }
    delivery = st.one_of(
        st.just({}),
        st.just({"stream": True}),
        st.tuples(st.booleans(), st.booleans()).map(
            lambda flags: {
                "stream": True,
                "stream_options": {"include_usage": flags[0], "continuous_usage_stats": flags[1]},
            }
        ),
    )
    message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": text})
    of_route = {
        COMPLETIONS: (
            {"prompt": text | ids | st.lists(text, min_size=1, max_size=3) | st.lists(ids, min_size=1, max_size=3)},
            {"logprobs": st.sampled_from([0, 1, 20])},
            {
                "prompt": st.sampled_from(["", "x" * context, [0] * context, [[0], []], [[1], [vocab_size]], [-1]]),
                "logprobs": st.just(21),
            },
        ),
        CHAT: (
            {"messages": st.lists(message, min_size=1, max_size=2)},
            {"logprobs": st.just(True), "max_completion_tokens": limit, "add_generation_prompt": st.booleans()},
            {
                "messages": st.sampled_from([[], [{"role": "user", "content": "x" * context}]]),
                "top_logprobs": st.just(21),
                "max_completion_tokens": st.just(10**12),
            },
        ),
    }

    @st.composite
    def request(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
        path = draw(st.sampled_from([COMPLETIONS, CHAT]))
        needed, optional, wrong = of_route[path]
        body: dict[str, Any] = draw(st.fixed_dictionaries(needed, optional=common | optional)) | draw(delivery)
        if draw(st.integers(0, 2)) == 0:
            wrong = beyond | wrong
            name = draw(st.sampled_from(sorted(wrong)))
            body[name] = draw(wrong[name])
        return path, body

    return request()
