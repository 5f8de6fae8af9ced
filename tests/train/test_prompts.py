"""Prompts: distinct, reproducible, licensed, and clear of what is held out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from breakeven.engine.config import ConfigError
from breakeven.train.config import DOMAINS, PromptsConfig
from breakeven.train.heldout import human_eval_request, raw_texts, read_held_out
from breakeven.train.prompts.build import build_prompts
from breakeven.train.prompts.decontaminate import HeldOut, measurement_prompts
from breakeven.train.prompts.reading import article_requests, reading_prompts, worth_reading
from breakeven.train.prompts.source_code import coding_prompts, functions, permissive_packages, prose_passages
from breakeven.train.prompts.tools import bfcl_prompts

CONFIG = PromptsConfig(total=400, packages=("rich",), max_source_files=25)
SOURCE = '''
def add(a, b):
    """Return the sum of two numbers, whatever they are.

    Nothing else happens here.
    """
    total = a + b
    if total == 0:
        return None
    return [total for _ in range(1)][0]
'''


def quiet(line: str) -> None:
    assert line


def test_prompts_are_distinct_reproducible_and_of_every_domain() -> None:
    rows, report = build_prompts(CONFIG, DOMAINS, 3, [], None, quiet)
    again, _ = build_prompts(CONFIG, DOMAINS, 3, [], None, quiet)
    assert [row.id for row in rows] == [row.id for row in again]
    assert len({row.id for row in rows}) == len(rows)
    assert set(report.per_domain) == set(DOMAINS)
    assert all(count > 20 for count in report.per_domain.values())
    assert sum(report.per_source.values()) == len(rows)


def test_a_held_out_prompt_never_gets_in() -> None:
    rows, _ = build_prompts(CONFIG, DOMAINS, 3, [], None, quiet)
    forbidden = [row.text for row in rows if len(row.messages) == 1][:40]
    cleaned, report = build_prompts(CONFIG, DOMAINS, 3, forbidden, None, quiet)
    assert report.held_out >= 40
    assert not {row.text for row in cleaned} & set(forbidden)


def test_texts_that_share_thirteen_words_with_a_held_out_one_are_found() -> None:
    words = [f"word{n}" for n in range(30)]
    held_out = HeldOut([" ".join(words), "Short one!"])
    assert held_out.contains("Before, " + " ".join(words[5:18]).upper() + "; after")
    assert not held_out.contains(" ".join(words[5:17]))
    assert held_out.contains("short  ONE")
    assert not held_out.contains("short one more")


def test_the_suites_that_measure_are_excluded() -> None:
    texts = measurement_prompts()
    assert len(texts) > 200
    held_out = HeldOut(texts)
    assert all(held_out.contains(text) for text in texts)


def test_functions_are_read_with_signature_docstring_and_body(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    found = list(functions([("here", path), ("here", tmp_path / "broken.py")]))
    assert [(item.name, item.signature) for item in found] == [("add", "def add(a, b):")]
    assert found[0].summary == "Return the sum of two numbers, whatever they are."
    assert found[0].body.startswith("    total = a + b")
    texts = [row.text for seed in range(20) for row in coding_prompts(found, seed)]
    completion = next(text for text in texts if '```python\ndef add(a, b):\n    """Return' in text)
    assert "total" not in completion
    assert any("bug" in text for text in texts)


def test_only_permissively_licensed_packages_are_read() -> None:
    found = permissive_packages(None)
    assert "rich" in found
    assert "breakeven" not in found
    assert all(licence for licence in found.values())
    assert permissive_packages(("rich", "no-such-package")) == {"rich": found["rich"]}


def test_passages_are_prose(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    prose = "This is a long sentence about nothing in particular. " * 5
    path.write_text(f'def f():\n    """{prose}\n\n    x = 1; y = 2\n    """\n    return 1\n')
    assert prose_passages(list(functions([("m", path)])), []) == [("m", prose.strip())]


def test_bfcl_questions_come_with_and_without_tools(tmp_path: Path) -> None:
    row = {"question": [[{"role": "user", "content": "Add 1 and 2."}]], "function": [{"name": "add"}]}
    (tmp_path / "BFCL_v4_simple.json").write_text(json.dumps(row) + "\n")
    rows = list(bfcl_prompts(tmp_path, 0))
    assert [row.domain for row in rows] == ["agentic"] * 3
    assert rows[0].text == "Add 1 and 2."
    assert '{"name": "add"}' in rows[1].text
    assert rows[2].messages[0][0] == "system"
    with pytest.raises(ConfigError, match=r"holds no BFCL"):
        list(bfcl_prompts(tmp_path / "none", 0))


def test_held_out_files_of_the_three_kinds_are_read(tmp_path: Path) -> None:
    code = tmp_path / "HumanEval.jsonl.gz"
    code.write_bytes(gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}).encode()))
    [prompt] = read_held_out(code)
    assert (prompt.suite, prompt.text) == ("HumanEval", human_eval_request("def f():\n"))
    assert "```python\ndef f():\n```" in prompt.text
    spec = tmp_path / "q.jsonl"
    spec.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["first", "second"]}) + "\n")
    assert [(p.suite, p.category, p.text) for p in read_held_out(spec)] == [("Spec-Bench", "qa", "first")]
    assert set(raw_texts(spec)) == {"first", "second"}
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}))
    assert [p.text for p in read_held_out(own)] == ["x"]
    own.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="neither HumanEval"):
        read_held_out(own)


def test_articles_become_summaries_and_questions_that_hold_their_text() -> None:
    articles = [" ".join(f"{name}{number}" for number in range(90)) + "." for name in ("river", "castle", "engine")]
    rows = list(reading_prompts(articles, 3))
    assert rows == list(reading_prompts(articles, 3))
    assert len(rows) == 2 * len(articles)
    for article, summary, question in zip(articles, rows[::2], rows[1::2], strict=True):
        assert article in summary.text
        assert article in question.text
        assert "Question: " in question.text
    assert {row.domain for row in rows} == {"chat"}


def test_only_long_varied_articles_are_read() -> None:
    varied = " ".join(f"word{number}" for number in range(80))
    assert worth_reading(varied)
    assert not worth_reading("too short to read")
    assert not worth_reading("again and " * 60)
    assert not worth_reading(varied + "\N{REPLACEMENT CHARACTER}")
    assert len(set(article_requests(200, 1))) > 150
