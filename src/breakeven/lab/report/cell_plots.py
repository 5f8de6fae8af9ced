"""Charts of what single cells and blocks show: throughput against speed, tails, drift over time, order of launch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from breakeven.lab.report import plots, words
from breakeven.lab.report.plots import Chart
from breakeven.lab.stats.quantile import requests_floor
from breakeven.lab.summary import ALL, CellSummary, Summary

TAILS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "inter_chunk": "Inter-chunk latency",
    "latency": "End-to-end latency",
}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SMALL_SHARE = 0.02  # drift charts show at least ±2%


def pareto(summary: Summary) -> Chart | None:
    """Throughput of all streams against the speed one user sees (1000 ÷ TPOT), a point a level; None without TPOT."""
    curves: dict[int, list[tuple[float, float, int]]] = {}
    for index, arm in enumerate(summary.campaign.arms):
        for row in summary.levels:
            if (row.arm, row.condition) == (arm.name, ALL) and {"throughput", "tpot"} <= row.metrics.keys():
                speed = 1000 / row.metrics["tpot"].value
                curves.setdefault(index, []).append((speed, row.metrics["throughput"].value, row.level))
    if not curves:
        return None
    names = [arm.name for arm in summary.campaign.arms]

    def draw(axes: Axes) -> None:
        for index, points in curves.items():
            speeds, rates = [p[0] for p in points], [p[1] for p in points]
            axes.plot(
                speeds, rates, color=plots.colour(index), linestyle=plots.dash(index), marker=plots.marker(index),
                markersize=5.5, linewidth=1.8, label=names[index],
            )  # fmt: skip
            for speed, rate, level in points:
                axes.annotate(
                    str(level), (speed, rate), textcoords="offset points", xytext=(5, 5), fontsize=8,
                    color=plots.colour(index),
                )  # fmt: skip
        every = [point for points in curves.values() for point in points]
        if plots.wide([p[1] for p in every]):
            plots.logarithmic(axes, "y", min(p[1] for p in every), max(p[1] for p in every))
        else:
            axes.set_ylim(0, max(p[1] for p in every) * 1.2)
        axes.set_xlim(0, max(p[0] for p in every) * 1.12)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_xlabel("tok/s of one stream (1000 ÷ TPOT)")
        axes.set_ylabel("tok/s of all streams")

    caption = (
        "Up: more from the server. Right: faster for each reader. Numbers: streams. A curve that lies outside another"
        " is better at both; where they cross, it depends on the load."
    )
    return plots.chart(summary, "pareto", "Throughput against speed per user", caption, draw)


def tails(summary: Summary, metric: str) -> Chart | None:
    """Median and p99 of a time over load: geometric means over valid cells; None where no cell has it.

    No p99 is drawn where cells are too small for one (`tail_figures`).
    """
    found = tail_figures(summary, metric)
    if not found:
        return None

    def draw(axes: Axes) -> None:
        values: list[float] = []
        for index, arm in enumerate(summary.campaign.arms):
            for statistic, line in (("p50", "-"), ("p99", (0, (2, 1.5)))):
                points = [
                    (level, found[arm.name, level][statistic])
                    for level in summary.campaign.levels
                    if statistic in found.get((arm.name, level), {})
                ]
                if points:
                    axes.plot(
                        [x for x, _ in points], [y for _, y in points], color=plots.colour(index), linestyle=line,
                        marker=plots.marker(index), markersize=4, linewidth=1.5, label=f"{arm.name} {statistic}",
                    )  # fmt: skip
                    values += [y for _, y in points]
        if plots.wide(values):
            plots.logarithmic(axes, "y", min(v for v in values if v > 0), max(values))
        elif values:
            axes.set_ylim(0, max(values) * 1.2 or 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_ylabel("milliseconds")

    caption = "Solid: median of a cell; dotted: its p99. Geometric mean over the valid cells of all domains and blocks."
    if without := withheld(summary, metric):
        caption += f" {without}"
    return plots.chart(summary, f"tail-{metric}", f"{TAILS[metric]}: median and tail", caption, draw, load_axis=True)


def tail_figures(summary: Summary, metric: str) -> Mapping[tuple[str, int], Mapping[str, float]]:
    """(arm, level) → quantile → milliseconds: geometric mean over valid cells that have it above 0.

    A quantile is left out where any of these cells has fewer requests than LoadGen's floor asks for: the p99 of a dozen
    requests is their largest, and a mean of largest values is no estimate of a p99. Chunks of one request are not
    independent, so that inter-chunk latency is held to the same number of requests.
    """
    logs: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in summary.cells:
        if cell.valid:
            for statistic in QUANTILES:
                figure = cell.metrics.get(f"{metric}_{statistic}")
                if figure is not None and figure.value is not None and figure.value > 0:
                    logs[cell.arm, cell.level][statistic].append(math.log(figure.value))
    fewest = _fewest_requests(summary)
    return {
        at: {s: math.exp(sum(v) / len(v)) for s, v in by.items() if s == "p50" or fewest[at] >= _floor(s)}
        for at, by in logs.items()
    }


def withheld(summary: Summary, metric: str) -> str:
    """A sentence that names the levels without a p99 and the number of requests it takes; empty if none lacks it."""
    lacking = {level for (_, level), found in tail_figures(summary, metric).items() if "p99" not in found}
    if not lacking:
        return ""
    at = "" if lacking == set(summary.campaign.levels) else f" at {words.streams(sorted(lacking))}"
    return f"No p99{at}: it takes {_floor('p99')} requests in every cell (LoadGen's floor)."


def _floor(statistic: str) -> int:
    return requests_floor(QUANTILES[statistic])


def _fewest_requests(summary: Summary) -> Mapping[tuple[str, int], int]:
    """(arm, level) → properly ended requests of the smallest valid cell."""
    found: dict[tuple[str, int], int] = {}
    for cell in summary.cells:
        if cell.valid:
            at, count = (cell.arm, cell.level), cell.requests - cell.failed
            found[at] = min(count, found.get(at, count))
    return found


def drift(summary: Summary) -> Chart | None:
    """Throughput of every cell against its arm's, domain's and level's mean, over time; None with one block."""
    points = _deviations(summary)
    times = [_seconds(cell) for cell, _ in points]
    known = [t for t in times if t is not None]
    if len(known) < len(points) or not points or max(known) == min(known):
        return None
    names = [arm.name for arm in summary.campaign.arms]
    hours = max(known) - min(known) > 5400

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=plots.MUTED, linewidth=1)
        for index, name in enumerate(names):
            own = [(t, 100 * d) for t, (cell, d) in zip(known, points, strict=True) if cell.arm == name]
            axes.plot(
                [(t - min(known)) / (3600 if hours else 60) for t, _ in own], [d for _, d in own],
                color=plots.colour(index), linestyle="none", marker=plots.marker(index), markersize=4, alpha=0.75,
                label=name,
            )  # fmt: skip
        _around_zero(axes, [d for _, d in points])
        axes.set_xlabel("hours since the start" if hours else "minutes since the start")
        axes.set_ylabel("% from the mean")

    caption = (
        "Each point: one cell, against the mean of its arm, domain and level. A slope or a step that all arms share is"
        " the machine, and cancels in the ratios; one of a single arm does not."
    )
    return plots.chart(summary, "drift", "Drift: throughput over time", caption, draw)


def order(summary: Summary) -> Chart | None:
    """As `drift`, by the place of the launch within its block; None if every arm has the same place in all blocks."""
    started: dict[tuple[int, str], float] = {}
    for cell in summary.cells:
        at = _seconds(cell)
        if at is None:
            return None
        started[cell.block, cell.arm] = min(at, started.get((cell.block, cell.arm), at))
    places: dict[tuple[int, str], int] = {}
    for block in {b for b, _ in started}:
        ranked = sorted((at, arm) for (b, arm), at in started.items() if b == block)
        if len({at for at, _ in ranked}) < len(ranked):
            return None
        places |= {(block, arm): place for place, (_, arm) in enumerate(ranked, 1)}
    points = _deviations(summary)
    if not points or len(set(places.values())) < 2 or len(places) == len({arm for _, arm in places}):
        return None
    names = [arm.name for arm in summary.campaign.arms]

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=plots.MUTED, linewidth=1)
        for index, name in enumerate(names):
            by_place: dict[int, list[float]] = defaultdict(list)
            for cell, deviation in points:
                if cell.arm == name:
                    by_place[places[cell.block, cell.arm]].append(100 * deviation)
            shift = 0.12 * (index - (len(names) - 1) / 2)
            for place, values in by_place.items():
                axes.plot(
                    [place + shift] * len(values), values, color=plots.colour(index), linestyle="none", marker=".",
                    markersize=5, alpha=0.5,
                )  # fmt: skip
            axes.plot(
                [place + shift for place in sorted(by_place)],
                [sum(by_place[p]) / len(by_place[p]) for p in sorted(by_place)],
                color=plots.colour(index), linestyle="none", marker=plots.marker(index), markersize=7, label=name,
            )  # fmt: skip
        _around_zero(axes, [d for _, d in points])
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(places.values()))))
        axes.set_xlabel("place of the launch within its block")
        axes.set_ylabel("% from the mean")

    caption = (
        "Dots: cells; large marks: their mean. Arms swap places between blocks, so an effect of the order evens out."
    )
    return plots.chart(summary, "order", "Order: throughput by place in the block", caption, draw)


def _deviations(summary: Summary) -> list[tuple[CellSummary, float]]:
    """Valid cells with log throughput minus the mean of their arm, condition and level, if that has two or more."""
    groups: dict[tuple[str, str, int], list[tuple[CellSummary, float]]] = defaultdict(list)
    for cell in summary.cells:
        figure = cell.metrics.get("throughput")
        if cell.valid and figure is not None and figure.value is not None and figure.value > 0:
            groups[cell.arm, cell.condition, cell.level].append((cell, math.log(figure.value)))
    found = []
    for members in groups.values():
        mean = sum(value for _, value in members) / len(members)
        if len(members) > 1:
            found += [(cell, value - mean) for cell, value in members]
    return found


def _seconds(cell: CellSummary) -> float | None:
    try:
        return datetime.fromisoformat(cell.started).timestamp()
    except ValueError:
        return None


def _around_zero(axes: Axes, values: Sequence[float]) -> None:
    bound = 100 * max(_SMALL_SHARE, *(abs(value) for value in values)) * 1.1
    axes.set_ylim(-bound, bound)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}" if value else "0"))
