"""The card beside a checkpoint."""

from __future__ import annotations

from pathlib import Path

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
