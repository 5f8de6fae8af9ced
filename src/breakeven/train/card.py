"""The card that stands beside a checkpoint, and the report of a run: JSON for programs, Markdown for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from breakeven.train.evaluate import groups_of, table_lines
from breakeven.train.files import write_bytes, write_json


def write_card(directory: Path, card: Mapping[str, Any], name: str = "README.md") -> None:
    """`card.json` and the Markdown page."""
    write_json(directory / "card.json", dict(card))
    write_bytes(directory / name, ("\n".join(card_lines(card)) + "\n").encode())


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """The page: what it is, how it was made, what it was trained on, what it accepts."""
    lines = [f"# EAGLE-3 drafter for {card['target']}", ""]
    lines += [f"Made by `{card['command']}` ({card['hardware']}, seed {card['seed']}).", ""]
    lines += [card["note"], ""] if card.get("note") else []
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in card["facts"].items()]
    if card["data"]:
        lines += ["", "## Data", "", "Answers are the target's own. Prompts that were made, by source (of these, what"]
        lines += ["was too long or what a time box left unanswered is not trained on). A package's licence is what its"]
        lines += ["metadata name; of several a single word may be the first.", ""]
        lines += ["| source | licence | prompts made |", "|---|---|---|"]
        lines += [f"| {item['source']} | {item['licence']} | {item['prompts']} |" for item in card["data"]]
    if card.get("training"):
        last = card["training"][-1]
        replay = card.get("replay") or []
        head, rule = ("| engine's replay |", "---|") if replay else ("|", "")
        lines += ["", "## Training", "", f"| depth | accuracy on held-out conversations {head}", f"|---|---|{rule}"]
        for depth, value in enumerate(last["accuracy"], 1):
            other = f" {replay[depth - 1]:.3f} |" if depth <= len(replay) else " – |" if replay else ""
            lines.append(f"| {depth} | {value:.3f} |{other}")
    for name, evaluation in card.get("evaluation", {}).items():
        lines += ["", f"## Mean acceptance length: {name}", ""]
        lines += ["Greedy, bonus token included, 95% interval over prompts; looping answers set apart.", ""]
        lines += table_lines(evaluation)
        for shape, table in evaluation.items():
            lines += [""] + [f"- {shape}, {label}: {value:.3f}" for label, value in table["means"].items()]
        lines += ["", "| share of rounds that accept position | " + " | ".join(evaluation) + " |"]
        lines += ["|" + "---|" * (1 + len(evaluation))]
        for group in groups_of(evaluation):
            cells = []
            for table in evaluation.values():
                shares = table["groups"].get(group, {}).get("all", {}).get("per_position", ())
                cells.append(" ".join(f"{share:.2f}" for share in shares) or "–")
            lines.append(f"| {group} | " + " | ".join(cells) + " |")
    if card.get("serving"):
        lines += _serving_lines(card["serving"])
    if card.get("decoded"):
        lines += ["", "## What is learnt", "", "The learnt span of a few conversations, decoded:", ""]
        for text in card["decoded"]:
            lines += ["```text", text.replace("```", "'''"), "```", ""]
    return lines


def _serving_lines(serving: Mapping[str, Any]) -> list[str]:
    """Width and vocabulary against what a step costs: `rows` of `benchmarks/draft_cost.py`, with the acceptance length
    where a drafter of that shape was trained."""
    lines = ["", "## What drafting costs", "", f"`{serving['command']}` ({serving['hardware']}, {serving['date']})."]
    lines += [f"A round's time over a plain step's; with a measured acceptance length ({serving['acceptance']}) also"]
    lines += ["the length divided by that cost: what tokens per second would gain if a server did nothing but rounds."]
    lines += ["That is computed and no measurement: a campaign is.", ""]
    lines += [
        "| drafter | streams | shape | round / plain step | acceptance length | length ÷ cost |",
        "|---|---|---|---|---|---|",
    ]
    for row in serving["rows"]:
        cost = row["step_ms"] / row["plain_step_ms"]
        length = row.get("acceptance_length")
        end = ("–", "–") if length is None else (f"{length:.2f}", f"{length / cost:.2f}")
        lines.append(f"| {row['head']} | {row['streams']} | {row['shape']} | {cost:.2f} | {end[0]} | {end[1]} |")
    return lines
