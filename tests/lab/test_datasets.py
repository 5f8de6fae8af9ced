"""Files of public data sets as prompts: each format recognised, each mistake named with its line."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from breakeven.lab.campaign import FILE_FORMATS, Campaign
from breakeven.lab.plan import load_suites
from breakeven.lab.workload.datasets import FORMATS, READERS, read_dataset, recognise
from breakeven.lab.workload.prompt import PromptError

DATA = os.environ.get("BREAKEVEN_TEST_DATA", "")

RECORDS: dict[str, list[dict[str, Any]]] = {
    "prompts": [{"id": "a-1", "domain": "support", "prompt": "Where is my parcel?"}],
    "sharegpt": [
        {
            "id": "QWJ_0",
            "conversations": [
                {"from": "human", "value": "Name a river."},
                {"from": "gpt", "value": "The Drava."},
                {"from": "human", "value": "And a lake?"},
                {"from": "gpt", "value": "Bled."},
            ],
        }
    ],
    "humaneval": [
        {"task_id": "HumanEval/0", "prompt": "def f(x):\n    '''Double x.'''\n", "entry_point": "f", "test": "…"}
    ],
    "mbpp": [{"task_id": 11, "text": "Write a function to halve a number.", "test_list": ["assert h(4) == 2"]}],
    "spec-bench": [{"question_id": 81, "category": "writing", "turns": ["Compose a limerick.", "Shorten it."]}],
    "speed-bench": [{"category": "multilingual", "turns": [{"role": "user", "content": "Übersetze: harbour"}]}],
    "gsm8k": [{"question": "A baker sells 3 loaves a day. How many in a week?", "answer": "#### 21"}],
    "bfcl": [
        {
            "id": "simple_0",
            "question": [[{"role": "user", "content": "Area of a triangle with base 10 and height 5?"}]],
            "function": [{"name": "triangle_area", "parameters": {"type": "dict"}}],
        }
    ],
    "swe-bench": [
        {
            "instance_id": "repo__repo-1",
            "messages": [
                {"role": "system", "content": "You mend code."},
                {"role": "user", "content": "The parser drops the last line."},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "sh", "arguments": "ls"}}]},
                {"role": "tool", "content": "parser.py"},
                {"role": "assistant", "content": "Done."},
            ],
        }
    ],
}


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RECORDS)
def test_each_format_is_recognised_and_ends_with_a_question(tmp_path: Path, name: str) -> None:
    assert recognise(RECORDS[name][0]) == name
    found = read_dataset(write(tmp_path / "set.jsonl", RECORDS[name]))
    assert found == read_dataset(tmp_path / "set.jsonl", name)
    (prompt,) = found
    assert prompt.messages[-1]["role"] == "user"
    as_list = tmp_path / "set.json"
    as_list.write_text(json.dumps(RECORDS[name], indent=1))
    assert [p.messages for p in read_dataset(as_list)] == [prompt.messages]
    packed = tmp_path / "set.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "set.jsonl").read_bytes()))
    assert read_dataset(packed) == found


def test_every_reader_has_an_example_here_and_a_name_in_the_campaign() -> None:
    assert set(RECORDS) == set(READERS)
    assert ("auto", *FORMATS) == FILE_FORMATS


def test_what_is_asked_is_what_the_record_asks(tmp_path: Path) -> None:
    def only(name: str) -> Any:
        return read_dataset(write(tmp_path / "x.jsonl", RECORDS[name]))[0]

    assert [m["content"] for m in only("sharegpt").messages] == ["Name a river.", "The Drava.", "And a lake?"]
    assert "def f(x):" in only("humaneval").messages[0]["content"]
    assert "assert h(4) == 2" in only("mbpp").messages[0]["content"]
    assert (only("spec-bench").domain, only("spec-bench").id) == ("writing", "x-81")
    assert only("speed-bench").domain == "multilingual"
    bfcl = only("bfcl").messages
    assert "triangle_area" in bfcl[0]["content"]
    assert bfcl[1]["content"].startswith("Area of")
    swe = only("swe-bench").messages
    assert [m["role"] for m in swe] == ["system", "user", "assistant", "user"]
    assert swe[2]["content"] == "sh(ls)"


@pytest.mark.parametrize("name", RECORDS)
def test_parquet_gives_what_json_lines_give(tmp_path: Path, name: str) -> None:
    other = {"unrelated": 1}  # in the second record only, so null in the first, which then has no such key
    records = [RECORDS[name][0], {**RECORDS[name][0], "id": "second-1"}]
    records[1] |= other if name != "prompts" else {}
    if name != "prompts":  # ids of their own are of one type within a column
        records = [{k: v for k, v in record.items() if k not in ("id", "task_id", "question_id")} for record in records]
        records = [{**record, "question_id": f"q{n}"} for n, record in enumerate(records)]
    write(tmp_path / "x.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records, _schema(records)), tmp_path / "x.parquet", row_group_size=1)
    assert read_dataset(tmp_path / "x.parquet", name) == read_dataset(tmp_path / "x.jsonl", name)
    assert len(read_dataset(tmp_path / "x.parquet", name, limit=1)) == 1


def _schema(records: list[dict[str, Any]]) -> pa.Schema:
    return pa.unify_schemas([pa.Table.from_pylist([record]).schema for record in records])


def test_damaged_parquet_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(RECORDS["gsm8k"] * 50), path)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"PAR1", whole[:20] + b"\0" * 40 + whole[60:]):
        path.write_bytes(data)
        with pytest.raises(PromptError, match=r"x\.parquet"):
            read_dataset(path)
    path.write_bytes(whole)
    with pytest.raises(PromptError, match="is Parquet, which has no format csv"):
        read_dataset(path, "csv")
    with pytest.raises(PromptError, match="row 1: not a record of the format bfcl"):
        read_dataset(path, "bfcl")


def test_several_attempts_at_one_task_keep_apart(tmp_path: Path) -> None:
    as_text = {**RECORDS["swe-bench"][0], "messages": json.dumps(RECORDS["swe-bench"][0]["messages"])}
    found = read_dataset(write(tmp_path / "t.jsonl", [RECORDS["swe-bench"][0], as_text]))
    assert [p.id for p in found] == ["t-repo__repo-1", "t-repo__repo-1-000002"]
    assert found[0].messages == found[1].messages
    with pytest.raises(PromptError, match="records 1 and 2 have the same id"):
        read_dataset(write(tmp_path / "h.jsonl", RECORDS["humaneval"] * 2))


def test_mt_bench_is_read_where_its_turns_are_called_prompt(tmp_path: Path) -> None:
    record = {"prompt_id": 7, "category": "writing", "prompt": ["Compose a limerick.", "Shorten it."], "reference": []}
    (prompt,) = read_dataset(write(tmp_path / "mt.jsonl", [record]))
    assert (prompt.domain, prompt.messages[0]["content"]) == ("writing", "Compose a limerick.")


def test_a_pointer_of_git_lfs_is_not_taken_for_prompts(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 83920\n")
    with pytest.raises(PromptError, match="a pointer of Git LFS and not the data: fetch it"):
        read_dataset(path)


def test_trajectories_of_steps_are_read_too(tmp_path: Path) -> None:
    steps = [
        {"response": "look", "observation": "a.py"},
        {"response": "edit", "observation": "ok"},
        {"response": "submit", "observation": ""},
    ]
    record = {"instance_id": "i", "problem_statement": "It fails.", "trajectory": steps}
    (prompt,) = read_dataset(write(tmp_path / "t.jsonl", [record]))
    assert [m["content"] for m in prompt.messages] == ["It fails.", "look", "a.py", "edit", "ok"]


def test_a_table_is_read_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('id,category,Question\n7,law,"What is a tort?\nBriefly."\n8,,Who may vote?\n')
    first, second = read_dataset(path)
    assert (first.id, first.domain, first.messages[0]["content"]) == ("table-7", "law", "What is a tort?\nBriefly.")
    assert second.domain == "table"
    assert len(read_dataset(path, limit=1)) == 1
    assert {p.domain for p in read_dataset(path, domain="mine")} == {"mine"}


@pytest.mark.parametrize(
    ("text", "contents"),
    [("One?\n\nTwo?\n", ["One?", "Two?"]), ("One\nmore?\n---\nTwo?\n---\n", ["One\nmore?", "Two?"])],
)
def test_a_text_holds_a_prompt_a_line_or_a_block(tmp_path: Path, text: str, contents: list[str]) -> None:
    path = tmp_path / "plain.txt"
    path.write_text(text)
    assert [p.messages[0]["content"] for p in read_dataset(path)] == contents


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "holds no prompts"),
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n{"question"', "line 2: not JSON"),
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n{"question": " "}', "line 2: the question is missing or blank"),
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n{"other": 1}', "line 2: not a record of the format gsm8k"),
        ("a.jsonl", '{"what": 1}', "line 1: not recognised; name its format: prompts, sharegpt"),
        ("a.jsonl", '{"question": "Q", "answer": "A"}\n3', "line 2: expected a JSON object, found int"),
        ("a.json", "[\n{},\n]", "line 3: not JSON"),
        ("a.json", "[]", "holds no prompts of this format"),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "Hi"}]}', "holds no prompts of this format"),
        ("a.jsonl", '{"conversations": [{"from": "alien", "value": "Hi"}]}', "line 1: a message is from 'alien'"),
        ("a.csv", "x,y\n1,2\n", "line 1: no column to ask from"),
        ("a.csv", "prompt\nGood?\n' '\n\" \"\n", "line 4: the question is missing or blank"),
        ("a.csv", "id,prompt\n1,One?\n1,Two?\n", "records 1 and 2 have the same id 'a-1'"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_fault(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PromptError, match=words) as raised:
        read_dataset(path)
    assert str(path) in str(raised.value)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "value"]), inner),
    max_leaves=8,
)


@example("swe-bench", "messages", None)
@given(st.sampled_from(sorted(READERS)), st.sampled_from(sorted({k for r in RECORDS.values() for k in r[0]})), _json)
def test_a_record_of_the_wrong_shape_is_an_error_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, name: str, key: str, value: Any
) -> None:
    path = tmp_path_factory.mktemp("d") / "x.jsonl"
    write(path, [{**RECORDS[name][0], key: value}])
    with suppress(PromptError):
        assert read_dataset(path, name)


def test_a_campaign_takes_its_conditions_from_files(tmp_path: Path) -> None:
    one = write(tmp_path / "gsm.jsonl", RECORDS["gsm8k"])
    two = write(tmp_path / "spec.jsonl", RECORDS["spec-bench"])
    value = {
        "arms": {n: {"type": "attach", "url": "http://h"} for n in ("a", "b")},
        "baseline": "a",
        "workload": {"files": [{"path": str(one), "domain": "maths"}, {"path": str(two), "format": "spec-bench"}]},
    }
    campaign = Campaign.model_validate_json(json.dumps(value))
    assert sorted(load_suites(campaign)) == ["maths", "writing"]
    value["workload"]["domains"] = ["none"]  # type: ignore[index]
    with pytest.raises(PromptError, match="holds no prompt of the domain 'none': it has maths, writing"):
        load_suites(Campaign.model_validate_json(json.dumps(value)))


@pytest.mark.skipif(not DATA, reason="BREAKEVEN_TEST_DATA names no folder of public data sets")
@pytest.mark.parametrize(("name", "count"), [("HumanEval.jsonl.gz", 164), ("spec_bench_question.jsonl", 480)])
def test_public_files_are_read_whole(name: str, count: int) -> None:
    path = Path(DATA) / name
    if not path.exists():
        pytest.skip(f"{name} is not there")
    assert len(read_dataset(path)) == count
