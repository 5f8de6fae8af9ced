"""Acceptance on held-out prompts, through the engine itself: what a server would accept, counted as it counts.

Mean acceptance length is 1 + accepted / drafts over all rounds of a group (token-weighted, bonus included), with a
percentile bootstrap over prompts. Answers that fall into loops are shown apart: speculation accepts loops too well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breakeven.engine.engine import Engine
from breakeven.engine.request import SamplingParams
from breakeven.train.conversations import prompt_ids
from breakeven.train.heldout import MT_BENCH, HeldOutPrompt
from breakeven.train.loops import loop_start


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt's counters, as the engine gave them."""

    id: str
    suite: str
    category: str
    tokens: int
    drafts: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    looping: bool


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A group's mean acceptance length with its 95% interval, and the share of rounds that accept each position."""

    prompts: int
    tokens: int
    acceptance_length: float | None
    low: float | None
    high: float | None
    per_position: tuple[float, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def run_prompts(
    engine: Engine,
    prompts: Sequence[HeldOutPrompt],
    max_tokens: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[PromptResult]:
    """Greedy answers of at most `max_tokens`; prompts too long for the engine's context are left out."""
    waiting: dict[str, HeldOutPrompt] = {}
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        ids = prompt_ids(engine.tokenizer, [{"role": role, "content": content} for role, content in prompt.messages])
        if len(ids) + max_tokens <= engine.max_context:
            waiting[str(number)] = prompt
            engine.add_request(str(number), ids, SamplingParams(temperature=0, max_tokens=max_tokens))
    results: dict[int, PromptResult] = {}
    while engine.has_work():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
            if output.finish_reason is None:
                continue
            prompt, stats = waiting[output.request_id], output.speculation
            assert stats is not None
            tokens = answers.pop(output.request_id)
            results[int(output.request_id)] = PromptResult(
                prompt.id,
                prompt.suite,
                prompt.category,
                len(tokens),
                stats.drafts,
                stats.accepted_tokens,
                tuple(stats.accepted_per_position),
                loop_start(tokens) is not None,
            )
            advance(len(results), len(waiting))
    return [results[number] for number in sorted(results)]


def group_result(results: Sequence[PromptResult], depth: int, resamples: int, seed: int = 0) -> GroupResult:
    """The group's figures; intervals None where there are no drafts."""
    drafts = np.array([item.drafts for item in results], np.float64)
    accepted = np.array([item.accepted for item in results], np.float64)
    positions = np.zeros(depth)
    for item in results:
        count = min(depth, len(item.accepted_per_position))
        positions[:count] += item.accepted_per_position[:count]
    total = drafts.sum()
    tokens = sum(item.tokens for item in results)
    if total == 0:
        return GroupResult(len(results), tokens, None, None, None, ())
    low, high = _bootstrap(drafts, accepted, resamples, seed)
    return GroupResult(
        len(results),
        tokens,
        round(float(1 + accepted.sum() / total), 4),
        round(low, 4),
        round(high, 4),
        tuple(round(float(value / total), 4) for value in positions),
    )


def _bootstrap(
    drafts: NDArray[np.float64], accepted: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, float]:
    random = np.random.default_rng(seed)
    index = random.integers(0, len(drafts), (resamples, len(drafts)))
    ratios = 1 + accepted[index].sum(1) / np.maximum(drafts[index].sum(1), 1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def summarise(results: Sequence[PromptResult], depth: int, resamples: int) -> dict[str, Any]:
    """Per suite and category: all answers, those that do not loop, those that do; and the unweighted means of
    Spec-Bench: over its non-code categories, and over its six tasks (MT-bench as one, its coding left out)."""
    groups: dict[str, list[PromptResult]] = {}
    for item in results:
        for name in dict.fromkeys((item.suite, f"{item.suite}/{item.category}", *_tasks(item))):
            groups.setdefault(name, []).append(item)
    table: dict[str, Any] = {}
    for name, items in groups.items():
        looping = [item for item in items if item.looping]
        straight = [item for item in items if not item.looping]
        table[name] = {
            "all": group_result(items, depth, resamples).plain(),
            "without_loops": group_result(straight, depth, resamples).plain(),
            "loops": group_result(looping, depth, resamples).plain(),
        }
    means = {}
    for label, names in (
        ("Spec-Bench non-code categories", [n for n in table if _is_category(n) and n != "Spec-Bench/coding"]),
        ("Spec-Bench six tasks", [n for n in table if n.startswith("Spec-Bench task/")]),
    ):
        for kind in ("all", "without_loops"):
            values = [table[n][kind]["acceptance_length"] for n in names]
            known = [value for value in values if value is not None]
            if known:
                means[f"{label}, {kind}"] = round(sum(known) / len(known), 4)
    return {"groups": table, "means": means}


def _is_category(name: str) -> bool:
    return name.startswith("Spec-Bench/")


def _tasks(item: PromptResult) -> tuple[str, ...]:
    if item.suite != "Spec-Bench" or item.category == "coding":
        return ()
    return (f"Spec-Bench task/{'mt_bench' if item.category in MT_BENCH else item.category}",)


def groups_of(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of all groups, sorted. Shapes may have been evaluated on different prompts."""
    return sorted({name for table in tables.values() for name in table["groups"]})


def table_lines(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown rows, one per group: prompts, share of looping answers, then per shape the length with its interval.

    The first two are given once where the shapes agree, else for each shape in the order of the columns (`3 / 30`).
    """
    shapes = list(tables)
    lines = [
        "| group | prompts | looping | " + " | ".join(f"{shape}: all | without loops" for shape in shapes) + " |",
        "|" + "---|" * (3 + 2 * len(shapes)),
    ]
    for name in groups_of(tables):
        entries = [tables[shape]["groups"].get(name) for shape in shapes]
        prompts = [None if entry is None else entry["all"]["prompts"] for entry in entries]
        looping = [None if entry is None else entry["loops"]["prompts"] / entry["all"]["prompts"] for entry in entries]
        cells = [name, _by_shape(prompts, "d"), _by_shape(looping, ".0%")]
        for entry in entries:
            cells += ["–" if entry is None else _cell(entry[kind]) for kind in ("all", "without_loops")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _by_shape(values: Sequence[float | None], form: str) -> str:
    """The value that the shapes agree on, or all of them; None is a shape without the group."""
    known = [format(value, form) for value in values if value is not None]
    if len(set(known)) == 1:
        return known[0]
    return " / ".join("–" if value is None else format(value, form) for value in values)


def _cell(entry: Mapping[str, Any]) -> str:
    if entry["acceptance_length"] is None:
        return "–"
    return f"{entry['acceptance_length']:.2f} [{entry['low']:.2f}, {entry['high']:.2f}]"
