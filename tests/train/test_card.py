"""The card beside a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from breakeven.train.card import write_card


def test_the_card_weighs_acceptance_against_the_cost_of_a_round(tmp_path: Path) -> None:
    row = {"head": "narrow", "streams": 1, "shape": "chain 3", "step_ms": 30.0, "plain_step_ms": 20.0}
    serving = {
        "command": "python benchmarks/draft_cost.py",
        "hardware": "two cores",
        "date": "2026-01-02",
        "acceptance": "chain 3, some prompts",
        "rows": [row | {"acceptance_length": 2.7}, row | {"head": "wide"}],
    }
    data = [{"source": "a list", "licence": "MIT", "prompts": 7}]
    facts = {"target": "smol", "command": "train", "hardware": "a GPU", "seed": 0, "facts": {}, "data": data}
    card = {**facts, "serving": serving}
    write_card(tmp_path, card)
    page = (tmp_path / "README.md").read_text()
    assert "| narrow | 1 | chain 3 | 1.50 | 2.70 | 1.80 |" in page
    assert "| source | licence | prompts made |" in page
    assert "| a list | MIT | 7 |" in page
    assert "| wide | 1 | chain 3 | 1.50 | – | – |" in page


def test_shapes_that_were_evaluated_on_different_prompts_all_have_their_rows(tmp_path: Path) -> None:
    def entry(length: float) -> dict[str, Any]:
        half = {"prompts": 3, "acceptance_length": length, "low": length - 0.1, "high": length + 0.1}
        half["per_position"] = [0.5]
        return {"all": half, "without_loops": half, "loops": {**half, "prompts": 0}}

    evaluation = {
        "chain 3": {"groups": {"few": entry(2.0), "many": entry(2.5)}, "means": {}},
        "chain 7": {"groups": {"other": entry(3.5), "many": entry(3.0)}, "means": {}},
    }
    facts = {"target": "smol", "command": "train", "hardware": "a GPU", "seed": 0, "facts": {}, "data": []}
    write_card(tmp_path, {**facts, "evaluation": {"head": evaluation}})
    lines = (tmp_path / "README.md").read_text().splitlines()
    two, two_and_half = "2.00 [1.90, 2.10]", "2.50 [2.40, 2.60]"
    assert f"| few | 3 | 0% | {two} | {two} | – | – |" in lines
    assert f"| many | 3 | 0% | {two_and_half} | {two_and_half} | 3.00 [2.90, 3.10] | 3.00 [2.90, 3.10] |" in lines
    assert "| other | 3 | 0% | – | – | 3.50 [3.40, 3.60] | 3.50 [3.40, 3.60] |" in lines
    assert "| other | – | 0.50 |" in lines
