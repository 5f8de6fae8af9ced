"""Stopping: checked token by token, it must be what looking at the whole text would say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakeven.engine.request import SamplingParams
from breakeven.engine.stop import StopChecker, StopDecision
from breakeven.engine.tokenizer import IncrementalDetokenizer, Tokenizer

EOS, STOP_ID = 100, 101


class Pieces:
    """A detokenizer for which token n is the n-th piece; EOS and the stop id have texts of their own."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return {EOS: "<eos>", STOP_ID: "<id>"}.get(token_id) or self.pieces[token_id]

    def flush(self) -> str:
        return ""


def run(pieces: list[str], tokens: list[int], max_tokens: int = 1000, **params: Any) -> tuple[str, list[StopDecision]]:
    checker = StopChecker(SamplingParams(**params), (EOS,), Pieces(pieces), max_tokens)
    decisions: list[StopDecision] = []
    for token in tokens:
        decisions.append(checker.push(token))
        if decisions[-1].finished:
            break
    return "".join(decision.text for decision in decisions) + checker.flush(), decisions


def oracle(
    pieces: list[str], tokens: list[int], max_tokens: int, stops: tuple[str, ...], min_tokens: int, include: bool
) -> tuple[str, str | None, str | int | None, int]:
    """(text, finish reason, stop reason, tokens used), by searching the whole text after each token."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        may_stop = count >= min_tokens
        ends = may_stop and token in (EOS, STOP_ID)
        before = len(text)
        text += {EOS: "<eos>" * include, STOP_ID: "<id>" * include}[token] if ends else Pieces(pieces).push(token)
        found = [
            (start + len(stop), start, stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if may_stop and found:
            end, start, stop = min(found)
            return text[: end if include else start], "stop", stop, count
        if ends:
            return text, "stop", None if token == EOS else STOP_ID, count
        if count == max_tokens:
            return text, "length", None, count
    return text, None, None, len(tokens)


cases = st.fixed_dictionaries(
    {
        "pieces": st.lists(st.text("abc", max_size=4), min_size=1, max_size=6),
        "choices": st.lists(st.integers(0, 7), max_size=14),
        "stops": st.lists(st.text("abc", min_size=1, max_size=5), max_size=3, unique=True).map(tuple),
        "max_tokens": st.integers(1, 15),
        "min_share": st.floats(0, 1),
        "include": st.booleans(),
    }
)


@settings(max_examples=500, deadline=None)
@given(cases)
def test_token_by_token_it_stops_where_the_whole_text_says(case: dict[str, Any]) -> None:
    pieces = case["pieces"]
    tokens = [choice if choice < len(pieces) else (EOS, STOP_ID, 0)[choice % 3] for choice in case["choices"]]
    min_tokens = int(case["min_share"] * min(case["max_tokens"], 4))
    text, decisions = run(
        pieces,
        tokens,
        case["max_tokens"],
        stop=case["stops"],
        stop_token_ids=(STOP_ID,),
        min_tokens=min_tokens,
        include_stop_str_in_output=case["include"],
    )
    last = decisions[-1] if decisions else StopDecision("")
    expected = oracle(pieces, tokens, case["max_tokens"], case["stops"], min_tokens, case["include"])
    assert (text, last.finished, last.stop_reason, len(decisions)) == expected
    assert all(decision.finished is None for decision in decisions[:-1])


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
)
def test_text_is_held_back_exactly_while_it_may_begin_a_stop_string(pieces: list[str], stops: tuple[str, ...]) -> None:
    checker = StopChecker(SamplingParams(stop=stops), (), Pieces(pieces), 1000)
    whole = released = ""
    for token in range(len(pieces)):
        whole += pieces[token]
        decision = checker.push(token)
        released += decision.text
        if decision.finished:
            return
        held = max(n for n in range(len(whole) + 1) if any(whole.endswith(s[:n]) for s in stops if n < len(s)))
        assert released == whole[: len(whole) - held]
    assert released + checker.flush() == whole


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_the_text_does_not_depend_on_where_tokens_are_cut(text: str, cuts: list[int], stops: tuple[str, ...]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    coarse = [text[a:b] for a, b in pairwise(bounds)]
    assert (
        run(coarse, list(range(len(coarse))), stop=stops)[0] == run(list(text), list(range(len(text))), stop=stops)[0]
    )


def test_a_stop_string_cuts_the_text_in_the_middle_of_a_token() -> None:
    text, decisions = run(["one\n", "\ntwo"], [0, 1], stop=("\n\n",))
    assert (text, decisions[-1].stop_reason) == ("one", "\n\n")
    text, _ = run(["one\n", "\ntwo"], [0, 1], stop=("\n\n",), include_stop_str_in_output=True)
    assert text == "one\n\n"


def test_stop_wins_over_length_within_the_budget_and_not_beyond() -> None:
    for token, params in ((0, {"stop": ("x",)}), (EOS, {}), (STOP_ID, {"stop_token_ids": (STOP_ID,)})):
        assert run(["x"], [token], max_tokens=1, **params)[1][-1].finished == "stop"
    assert run(["a", "x"], [0, 1], max_tokens=1, stop=("x",))[1][-1].finished == "length"


def test_what_was_held_back_comes_out_at_the_end() -> None:
    assert run(["ab"], [0, EOS], stop=("abc",))[0] == "ab"
    assert run(["ab"], [0], max_tokens=1, stop=("abc",))[0] == "ab"
    assert run(["ab"], [0], stop=("abc",))[0] == "ab"


def test_eos_is_text_when_ignored_and_before_min_tokens() -> None:
    assert run(["a"], [0, EOS, 0], ignore_eos=True)[0] == "a<eos>a"
    text, decisions = run(["a"], [EOS, 0, EOS, EOS], min_tokens=2)
    assert (text, len(decisions)) == ("<eos>a", 3)
    text, decisions = run(["a"], [EOS], ignore_eos=True, stop_token_ids=(EOS,))
    assert (text, decisions[-1].stop_reason) == ("", EOS)


def test_nothing_may_be_pushed_after_the_end() -> None:
    checker = StopChecker(SamplingParams(), (EOS,), Pieces([]), 5)
    checker.push(EOS)
    assert checker.flush() == ""
    with pytest.raises(RuntimeError, match="finished"):
        checker.push(0)
    with pytest.raises(ValueError, match="max_tokens"):
        StopChecker(SamplingParams(), (EOS,), Pieces([]), 0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(3, 299), min_size=1, max_size=20), stop=st.sampled_from(["the", "�", "é", "😀", " a"]))
def test_stop_strings_are_matched_in_decoded_text(
    tiny_llama_dir: Callable[..., Path], ids: list[int], stop: str
) -> None:
    tokenizer = _tokenizer(tiny_llama_dir())
    checker = StopChecker(SamplingParams(stop=(stop,)), (2,), IncrementalDetokenizer(tokenizer), len(ids))
    text, finished, used = "", None, 0
    while finished is None:
        decision = checker.push(ids[used])
        text, finished, used = text + decision.text, decision.finished, used + 1
    whole = tokenizer.decode(ids)
    assert text == whole.split(stop)[0]
    assert finished == ("stop" if stop in whole else "length")


_TOKENIZERS: dict[Path, Tokenizer] = {}


def _tokenizer(directory: Path) -> Tokenizer:
    if directory not in _TOKENIZERS:
        _TOKENIZERS[directory] = Tokenizer.from_directory(directory, (2,))
    return _TOKENIZERS[directory]
