"""The report as one HTML file: opens offline, runs no script, loads nothing, escapes everything it was not sure of."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from breakeven.lab.family import only_conditions
from breakeven.lab.report import cell_plots, plots, policy, words
from breakeven.lab.stats.quantile import requests_floor
from breakeven.lab.summary import ALL, BreakEvenSummary, Comparison, Summary

_OPTIONAL = ("interactions", "main_effects", "tails", "multiplicity", "aa", "sentinel")
_SEPARATE = ("commands", "invocation")  # shown as command lines, not in the table of facts


@dataclass(frozen=True, slots=True)
class _Arm:
    """What the top of the page says of one arm."""

    name: str
    answer: str
    break_even: str
    outlook: str
    rows: Sequence[words.Row]
    ratio: plots.Chart


@dataclass(frozen=True, slots=True)
class _Table:
    """The comparisons of one arm in one condition."""

    arm: str
    condition: str
    break_even: BreakEvenSummary
    break_even_words: str
    rows: Sequence[Comparison]


def page(summary: Summary) -> str:
    """The whole page; the same summary gives the same text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("breakeven.lab.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "percent": words.percent,
        "rate": words.rate,
        "share": lambda value: "–" if value is None else f"{value * 100:.3g}%",
        "ratio": lambda value: "–" if value is None else f"{value:.3f}",
        "decimals": lambda value: "–" if value is None else f"{value:.2f}",
        "p": _p,
        "sign": lambda verdict: words.SIGNS.get(verdict, "·"),
        "outcome": words.outcome,
    }
    return environment.get_template("report.html.j2").render(**_context(summary))


def _context(summary: Summary) -> dict[str, Any]:
    campaign = summary.campaign
    metrics: tuple[Literal["ttft", "latency"], ...] = ("ttft", "latency")
    distributions = {
        metric: [
            chart for level in campaign.levels if (chart := plots.distribution(summary, metric, level)) is not None
        ]
        for metric in metrics
    }
    choices = policy.choices(summary)
    stability = (cell_plots.drift(summary), cell_plots.order(summary))
    tail_charts = [cell_plots.tails(summary, metric) for metric in cell_plots.TAILS]
    acceptance_charts = (
        plots.needed_acceptance(summary), plots.acceptance_length(summary), plots.acceptance_positions(summary),
    )  # fmt: skip
    return {
        "summary": summary,
        "campaign": campaign,
        "run": summary.run,
        "signs": words.SIGNS,
        "warning": words.warning(summary),
        "regime": words.regime(summary),
        "open_loop": words.open_loop(summary),
        "blocks_compared": words.blocks_compared(summary),
        "statement": words.statement(summary),
        "arms": [_arm(summary, arm) for arm in summary.arms],
        "extra": _extra(summary),
        "imported": words.imported(summary),
        "choices": choices,
        "only_conditions": only_conditions(summary.comparisons),
        "choice_metric": words.METRIC_WORDS[policy.primary_metric(summary)],
        "policy": policy.sentence(summary, choices),
        "deployable": policy.deployable(summary),
        "twins": words.twins(summary),
        "throughput": plots.throughput(summary),
        "pareto": cell_plots.pareto(summary),
        "tails": [chart for chart in tail_charts if chart is not None],
        "tail_rows": list(_tail_rows(summary)),
        "floors": {name: requests_floor(quantile) for name, quantile in cell_plots.QUANTILES.items()},
        "stability": [chart for chart in stability if chart is not None],
        "gates": campaign.resolved.get("gates") or {},
        "times": [plots.time(summary, "ttft"), plots.time(summary, "tpot")],
        "distributions": distributions,
        "needed": words.needed_rows(summary),
        "acceptance_charts": [chart for chart in acceptance_charts if chart is not None],
        "tables": [_table(summary, arm, condition) for arm in summary.arms for condition in _conditions(summary)],
        "agreement_totals": [a for a in summary.agreement if a.level is None and a.condition in _conditions(summary)],
        "agreement_levels": [a for a in summary.agreement if a.level is not None and a.condition == ALL],
        "metric_words": words.METRIC_WORDS,
        "facts": list(_flat(summary.environment)),
        "commands": _commands(summary.environment.get("commands")),
        "invocation": _command(summary.environment.get("invocation")),
        "resolved": json.dumps(campaign.resolved, indent=2, ensure_ascii=False),
        "arm_colours": plots.ARM_COLOURS,
    }


def _extra(summary: Summary) -> dict[str, Any]:
    """Parts that a summary has only where the campaign asked for them; what is missing is empty."""
    whole = summary.model_dump(mode="json")
    return {name: whole.get(name) for name in _OPTIONAL}


def _tail_rows(summary: Summary) -> Iterator[tuple[str, str, int, Mapping[str, float]]]:
    """(time, arm, level, quantiles in milliseconds)."""
    for metric, name in cell_plots.TAILS.items():
        figures = cell_plots.tail_figures(summary, metric)
        for arm in summary.campaign.arms:
            for level in summary.campaign.levels:
                if (arm.name, level) in figures:
                    yield name, arm.name, level, figures[arm.name, level]


def _conditions(summary: Summary) -> list[str]:
    """ "all" alone where there is one domain: the two would be the same."""
    conditions = summary.campaign.conditions
    return [ALL, *conditions] if len(conditions) > 1 else [ALL]


def _arm(summary: Summary, arm: str) -> _Arm:
    return _Arm(
        name=arm,
        answer=words.answer(summary, arm),
        break_even=words.break_even_sentence(summary.break_even[arm], summary.campaign.confidence),
        outlook=words.outlook(summary, arm),
        rows=words.rows(summary, arm),
        ratio=plots.ratio(summary, arm),
    )


def _table(summary: Summary, arm: str, condition: str) -> _Table:
    found = summary.break_even[arm]
    for entry in summary.break_even_by_condition:
        if (entry.arm, entry.break_even.condition) == (arm, condition):
            found = entry.break_even
    return _Table(
        arm=arm,
        condition=condition,
        break_even=found,
        break_even_words=words.break_even_sentence(found, summary.campaign.confidence),
        rows=[c for c in summary.comparisons if (c.arm, c.condition) == (arm, condition)],
    )


def number(value: float | None) -> str:
    """Four significant digits at most, never in powers of ten."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.4g}'):,.6f}".rstrip("0").rstrip(".")


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as (dotted name, text); what is unknown is left out."""
    for name, item in value.items():
        path = f"{prefix}{name}"
        if not prefix and name in _SEPARATE:
            continue
        if isinstance(item, Mapping):
            yield from _flat(item, f"{path}.")
        elif isinstance(item, list) and any(isinstance(part, Mapping) for part in item):
            for index, part in enumerate(item):
                yield from _flat(part if isinstance(part, Mapping) else {"": part}, f"{path}.{index}.")
        elif isinstance(item, list):
            if item:
                yield path, ", ".join(map(str, item))
        elif name.endswith("_bytes") and isinstance(item, int):
            yield path.removesuffix("_bytes"), f"{item / 2**30:.1f} GiB"
        elif item is not None:
            yield path, str(item)


def _commands(commands: Any) -> list[tuple[str, str]]:
    """(arm, command line); arms that the lab did not start have none."""
    if not isinstance(commands, Mapping):
        return []
    return [(str(arm), line) for arm, parts in commands.items() if (line := _command(parts))]


def _command(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    return shlex.join(map(str, parts)) if isinstance(parts, list) else ""
