"""Rows, masks, loops, vocabularies, files: what goes into training is exactly what it should be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.engine.config import ConfigError
from breakeven.engine.http.generation import encode_prompts
from breakeven.engine.models.load import load_model
from breakeven.engine.openai_schema import ChatBody, parse_body
from breakeven.train.conversations import Conversation, encode_row, prompt_ids
from breakeven.train.files import Manifest, ShardWriter, read_rows, shards
from breakeven.train.loops import loop_start
from breakeven.train.vocab import choose_vocab, count_tokens, coverage, offsets, pruned_rows

MESSAGES = [{"role": "user", "content": "Say « é » 🙂\n\tand <|im_end|>"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir):  # type: ignore[no-untyped-def]
    return load_model(str(tiny_llama_dir())).tokenizer


@pytest.mark.parametrize(
    "messages",
    [MESSAGES, [{"role": "system", "content": "be brief"}, *MESSAGES],
     [*MESSAGES, {"role": "assistant", "content": "x"},
     {"role": "user", "content": "more"}]],
)  # fmt: skip
def test_a_prompts_ids_are_those_of_the_server(tokenizer, messages) -> None:  # type: ignore[no-untyped-def]
    body = parse_body(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
    engine = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer))
    served = asyncio.run(encode_prompts(engine, body))  # type: ignore[arg-type]
    assert prompt_ids(tokenizer, messages) == list(served[0])


def test_the_learnt_spans_are_the_assistants_turns_with_their_ends(tokenizer) -> None:  # type: ignore[no-untyped-def]
    row = {"id": "a", "conversations": [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "two of"},
        {"from": "human", "value": "three"}, {"from": "gpt", "value": "four"},
    ]}  # fmt: skip
    item = encode_row(tokenizer, row, "row 1")
    decoded = [tokenizer.decode(item.tokens[a:b], skip_special_tokens=False) for a, b in item.spans()]
    assert decoded == ["two of<|im_end|>", "four<|im_end|>"]
    whole = tokenizer.decode(item.tokens, skip_special_tokens=False)
    assert whole == tokenizer.render_chat(
        [{"role": r, "content": c} for r, c in (("user", "one"), ("assistant", "two of"), ("user", "three"))]
    ) + "four<|im_end|>"  # fmt: skip


def test_recorded_ids_are_taken_as_they_are(tokenizer) -> None:  # type: ignore[no-untyped-def]
    row = {"id": "a", "domain": "chat", "temperature": 0, "prompt_ids": [5, 6], "answer_ids": [7, 8, 2]}
    assert encode_row(tokenizer, row, "x") == Conversation("a", "chat", (5, 6, 7, 8, 2), (0, 0, 1, 1, 1), True)


@pytest.mark.parametrize(
    "row,message",
    [
        ({}, "must be a list"),
        ({"conversations": [{"role": "tool", "content": "x"}]}, "message 0 needs a role"),
        ({"conversations": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"conversations": [{"role": "assistant", "content": "x"}]}, "first message"),
        ({"prompt_ids": [1], "answer_ids": [10**6]}, "answer_ids"),
    ],
)
def test_a_malformed_row_is_refused_with_its_place(tokenizer, row, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"file, row 3: .*{message}"):
        encode_row(tokenizer, row, "file, row 3")


def test_a_loop_tail_is_weighed_down_from_its_second_copy_on(tokenizer) -> None:  # type: ignore[no-untyped-def]
    answer = [20, 21, 22] + [30, 31, 32, 33] * 12
    row = {"prompt_ids": [5], "answer_ids": answer}
    mask = encode_row(tokenizer, row, "x", loop_weight=0.25).mask
    assert mask == (0.0, *[1.0] * 7, *[0.25] * 44)


@given(st.lists(st.integers(0, 3), max_size=70), st.integers(2, 4), st.integers(4, 40))
def test_a_loop_is_an_end_of_copies_by_brute_force(tokens: list[int], repeats: int, span: int) -> None:
    best = None
    for period in range(1, len(tokens) // repeats + 1):
        length = period
        while length < len(tokens) and tokens[-1 - length] == tokens[-1 - length + period]:
            length += 1
        if length >= max(repeats * period, span):
            start = len(tokens) - length + period
            best = start if best is None else min(best, start)
    assert loop_start(tokens, repeats, span) == best


def test_the_vocabulary_holds_the_most_used_learnt_tokens() -> None:
    items = [Conversation("a", "chat", (1, 1, 5, 5, 5, 7, 9), (0, 0, 1, 1, 1, 1, 0.5))]
    counts = count_tokens(items, 10)
    assert counts.tolist() == [0, 0, 0, 0, 0, 3, 0, 1, 0, 1]
    assert choose_vocab(counts, 3).tolist() == [5, 7, 9]
    assert choose_vocab(counts, 4).tolist() == [0, 5, 7, 9]  # ties: the lowest id
    assert coverage(counts, np.array([5, 7])) == pytest.approx(0.8)


@given(st.lists(st.integers(0, 50), min_size=5, max_size=40), st.integers(1, 5), st.integers(1, 5))
def test_offsets_lead_back_to_target_ids_and_pruning_keeps_the_most_used(
    counts: list[int], small: int, more: int
) -> None:
    array = np.array(counts)
    size = min(len(counts), small + more)
    small = min(small, size)
    ids = choose_vocab(array, size)
    assert (np.arange(size) + offsets(ids)).tolist() == ids.tolist()
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert ids[pruned_rows(array, ids, small)].tolist() == choose_vocab(array, small).tolist()


def test_shards_are_whole_numbered_and_read_back(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "answers", 0.001)
    rows = [{"id": str(n), "text": "é" * 300} for n in range(10)]
    for row in rows:
        writer.add(row)
    writer.close()
    files = shards(tmp_path, "answers")
    assert len(files) > 1
    assert [row for path in files for row in read_rows(path)] == rows
    assert not list(tmp_path.glob(".*partial*"))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ConfigError, match="line 2"):
        list(read_rows(path))
    (tmp_path / "y.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match=r"y\.jsonl\.gz cannot be read"):
        list(read_rows(tmp_path / "y.jsonl.gz"))


def test_the_manifest_remembers_a_stage_under_its_settings_only(tmp_path: Path) -> None:
    Manifest(tmp_path).finish("vocab", "abc", 1.0, {"size": 3})
    again = Manifest(tmp_path)
    assert again.finished("vocab", "abc")
    assert not again.finished("vocab", "abd")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        Manifest(tmp_path)


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    for stem in ("a", "b"):
        writer = ShardWriter(tmp_path, stem, 1)
        writer.add({"x": 1})
        writer.close()
    assert (tmp_path / "a-00000.jsonl.gz").read_bytes() == (tmp_path / "b-00000.jsonl.gz").read_bytes()
