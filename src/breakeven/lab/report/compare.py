"""Two summaries beside each other: what changed in the setup, and whether their ratios differ at each level.

Each run gives the mean of its blocks' log ratios with a standard error. The difference of two runs' means is judged by
Welch's t test (Welch 1947, degrees of freedom after Satterthwaite), since the runs are independent and may scatter
differently: two intervals that overlap do not show equality, and two that do not overlap show less than this test. Its
interval is on the ratio of ratios; a run with one block has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from breakeven.lab.report.terminal import clean
from breakeven.lab.stats.student import t_quantile
from breakeven.lab.summary import Comparison, Summary

Answer = Literal["differs", "within the margin", "not told apart", "no interval"]
_IGNORED = ("invocation", "load_average", "imported.files")  # differ between any two runs and say nothing
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that differs; None: not there."""

    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """One arm at one level of one condition in both runs. `change`: second ÷ first, with its interval."""

    arm: str
    condition: str
    level: int
    first: Comparison
    second: Comparison
    change: float
    ci_low: float | None
    ci_high: float | None
    answer: Answer


@dataclass(frozen=True, slots=True)
class RunComparison:
    """`only`: arm, condition and level that one run alone has."""

    first: str
    second: str
    confidence: float
    margin: float
    changes: tuple[Change, ...]
    pairs: tuple[Pair, ...]
    only: tuple[str, ...]


def compare_summaries(a: Summary, b: Summary, first: str, second: str) -> RunComparison:
    """Throughput of every arm, condition and level that both have. ValueError if the two share none."""
    mine, theirs = _throughputs(a), _throughputs(b)
    confidence = max(a.campaign.confidence, b.campaign.confidence)
    margin = min(a.campaign.margin, b.campaign.margin)
    pairs = tuple(_pair(at, mine[at], theirs[at], confidence, margin) for at in mine if at in theirs)
    if not pairs:
        raise ValueError(
            f"{first} and {second} have no arm, domain and level in common: {_arms(a)} against {_arms(b)}. Arms are"
            " matched by name"
        )
    only = [f"{' '.join(map(str, at))}: only {first}" for at in mine if at not in theirs]
    only += [f"{' '.join(map(str, at))}: only {second}" for at in theirs if at not in mine]
    return RunComparison(first, second, confidence, margin, tuple(_changes(a, b)), pairs, tuple(only))


def _arms(summary: Summary) -> str:
    return ", ".join(arm.name for arm in summary.campaign.arms)


def _throughputs(summary: Summary) -> dict[tuple[str, str, int], Comparison]:
    return {
        (c.arm, c.condition, c.level): c
        for c in summary.comparisons
        if c.metric == "throughput" and c.ratio is not None
    }


def _pair(at: tuple[str, str, int], a: Comparison, b: Comparison, confidence: float, margin: float) -> Pair:
    change, low, high = welch(
        [math.log(v) for v in a.block_ratios.values()], [math.log(v) for v in b.block_ratios.values()], confidence
    )
    answer: Answer = "not told apart"
    if low is None or high is None:
        answer = "no interval"
    elif low >= 1 / (1 + margin) and high <= 1 + margin:
        answer = "within the margin"
    elif low > 1 or high < 1:
        answer = "differs"
    return Pair(*at, a, b, change, low, high, answer)


def welch(a: Sequence[float], b: Sequence[float], confidence: float) -> tuple[float, float | None, float | None]:
    """exp(mean b − mean a) with Welch's interval; none unless both have two values. ValueError if one is empty."""
    if not a or not b:
        raise ValueError("both runs need at least one block")
    difference = float(np.mean(b) - np.mean(a))
    if len(a) < 2 or len(b) < 2:
        return math.exp(difference), None, None
    va, vb = float(np.var(a, ddof=1)) / len(a), float(np.var(b, ddof=1)) / len(b)
    if va + vb == 0:
        return math.exp(difference), math.exp(difference), math.exp(difference)
    share = va / (va + vb)
    degrees = 1 / (share**2 / (len(a) - 1) + (1 - share) ** 2 / (len(b) - 1))
    # Rounded down, which widens: quantiles here are of whole degrees of freedom.
    half = t_quantile(0.5 + confidence / 2, max(1, math.floor(degrees))) * math.sqrt(va + vb)
    return math.exp(difference), math.exp(difference - half), math.exp(difference + half)


def _changes(a: Summary, b: Summary) -> Iterator[Change]:
    """Facts of campaign, environment and version that differ, by name."""
    mine, theirs = _facts(a), _facts(b)
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            yield Change(name, mine.get(name), theirs.get(name))


def _facts(summary: Summary) -> dict[str, str]:
    sources: dict[str, Any] = {
        "breakeven": summary.run.breakeven_version,
        "campaign": {k: v for k, v in summary.campaign.resolved.items() if k != "name"},
        **summary.environment,
    }
    return dict(_flat({k: v for k, v in sources.items() if k not in _IGNORED}))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, item in value.items():
        path = f"{prefix}{name}"
        if path in _IGNORED:
            continue
        if isinstance(item, Mapping):
            yield from _flat(item, f"{path}.")
        else:
            yield path, " ".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item)


def print_comparison(found: RunComparison, console: Console | None = None) -> None:
    """In a terminal."""
    console = console or Console()
    console.print(Text.assemble((clean(found.first), "bold"), " against ", (clean(found.second), "bold")))
    console.print()
    if not found.changes:
        console.print("Nothing recorded of the setup differs.")
    for change in found.changes[:_SHOWN]:
        line = f"  {change.name}: {change.first or 'not recorded'} -> {change.second or 'not recorded'}"
        console.print(Text(clean(line)), soft_wrap=True)
    if len(found.changes) > _SHOWN:
        console.print(f"  and {len(found.changes) - _SHOWN} more")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for heading in ("arm", "domain", "streams", "first ratio", "second ratio", "second / first", ""):
        table.add_column(heading, justify="right" if "ratio" in heading or heading == "streams" else "left")
    for p in found.pairs:
        table.add_row(
            Text(clean(p.arm)), Text(clean(p.condition)), str(p.level), Text(_ratio(p.first)), Text(_ratio(p.second)),
            Text(_interval(p.change, p.ci_low, p.ci_high)), p.answer,
        )  # fmt: skip
    console.print()
    console.print(table)
    console.print()
    console.print(Text(_legend(found)))
    for line in found.only:
        console.print(Text(clean(line)))


def comparison_markdown(found: RunComparison) -> str:
    """For a pull request."""
    from breakeven.lab.report.markdown import plain

    lines = [f"## breakeven: {plain(found.first)} → {plain(found.second)}", ""]
    if found.changes:
        lines += ["| changed | first | second |", "|:---|:---|:---|"]
        lines += [
            f"| {plain(c.name)} | {plain(c.first or '–')} | {plain(c.second or '–')} |" for c in found.changes[:_SHOWN]
        ]
    else:
        lines.append("Nothing recorded of the setup differs.")
    lines += [
        "",
        "| arm | domain | streams | first | second | second ÷ first | |",
        "|:---|:---|---:|:---|:---|:---|:---|",
    ]
    lines += [
        f"| {plain(p.arm)} | {plain(p.condition)} | {p.level} | {_ratio(p.first)} | {_ratio(p.second)}"
        f" | {_interval(p.change, p.ci_low, p.ci_high)} | {p.answer} |"
        for p in found.pairs
    ]
    return "\n".join([*lines, "", plain(_legend(found))]) + "\n"


def _legend(found: RunComparison) -> str:
    return (
        f"Ratios of throughput, arm / baseline, with {found.confidence * 100:g}% intervals; margin"
        f" {found.margin * 100:g}%. The runs were measured at different times: a difference may be the machine's."
    )


def _ratio(c: Comparison) -> str:
    return _interval(c.ratio or math.nan, c.ci_low, c.ci_high)


def _interval(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else " (no interval)")
