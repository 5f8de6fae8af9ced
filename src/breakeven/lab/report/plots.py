"""Charts as inline SVG. Colours are CSS variables of the page, so one chart serves light, dark and paper.

Matplotlib draws with stand-in colours, which are exchanged for the variables in its output. `Figure` objects only, no
pyplot; names are drawn as text, never as mathematics; the same summary gives the same bytes.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from breakeven.lab.report import words
from breakeven.lab.summary import ALL, IntervalFigure, MetricName, Summary

_INK, MUTED, _GRID, _BAND, _SPAN = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {_INK: "--ink", MUTED: "--muted", _GRID: "--line", _BAND: "--band", _SPAN: "--span"}
ARM_COLOURS = 7  # --arm-0 (the baseline) to --arm-6
_MARKERS = "osD^vPX"
_INTERVAL = "_"  # the marker at an interval's ends
_DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), "-", (0, (5, 2)))
_LOG_FROM = 15  # ratio of the largest to the smallest from which a y axis is logarithmic
_SIZE = (4.9, 3.3)  # inches
_SMALL = (2.9, 2.2)
_TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
_FINE = (0.90, 0.92, 0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06, 1.08, 1.10)
_SETTINGS = {
    # Matplotlib's own defaults beneath ours: a user's matplotlibrc must not change a report.
    **{name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")},
    "svg.fonttype": "none",
    "svg.hashsalt": "breakeven",
    "text.parse_math": False,
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.edgecolor": _GRID,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "text.color": _INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.unicode_minus": False,
    "path.simplify": False,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """`svg`: an <svg> element without namespaces, ids prefixed by `name`. `caption`: plain text."""

    name: str
    title: str
    caption: str
    svg: str


def throughput(summary: Summary) -> Chart:
    """Tokens per second of every arm over load, all domains pooled, with intervals."""
    confidence = f"{summary.campaign.confidence * 100:g}%"
    return _over_load(
        summary,
        "throughput",
        "Throughput over load",
        "tokens per second",
        f"Geometric mean over blocks with its {confidence} interval, which holds launch-to-launch scatter. The ratio"
        " is surer than these bars look, because it pairs the arms of each block.",
    )


def time(summary: Summary, metric: Literal["ttft", "tpot"]) -> Chart:
    """Mean TTFT or TPOT of every arm over load."""
    said = {"ttft": "Time to first token", "tpot": "Time per output token"}[metric]
    confidence = f"{summary.campaign.confidence * 100:g}%"
    return _over_load(
        summary,
        metric,
        f"{said} ({words.METRIC_WORDS[metric]})",
        "milliseconds",
        f"Mean over the requests of a block; of these the geometric mean over blocks, with its {confidence} interval.",
    )


def ratio(summary: Summary, arm: str) -> Chart:
    """Throughput of one arm ÷ the baseline over load: interval, blocks, domains, margin band and break-even."""
    c = summary.campaign
    index = [a.name for a in c.arms].index(arm)
    tone = colour(index)

    def draw(axes: Axes) -> None:
        axes.axhspan(1 / (1 + c.margin), 1 + c.margin, color=_BAND, linewidth=0, zorder=0)
        axes.axhline(1, color=MUTED, linewidth=1, zorder=1)
        seen = [1 / (1 + c.margin) / 1.02, (1 + c.margin) * 1.02]
        if len(c.conditions) > 1:
            for number, domain in enumerate(c.conditions):
                points = [(r.level, r.comparison.ratio) for r in words.rows(summary, arm, domain) if r.comparison.ratio]
                axes.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    color=tone,
                    alpha=0.6,
                    linewidth=1,
                    linestyle=(0, (3 + 2 * (number % 3), 2)),
                    marker=_MARKERS[1:][number % 6],
                    markersize=3.5,
                    markerfacecolor="none",
                    label=domain,
                )
                seen += [y for _, y in points if y]
        rows = [r.comparison for r in words.rows(summary, arm) if r.comparison.ratio is not None]
        for row in rows:
            values = list(row.block_ratios.values())
            axes.plot([row.level] * len(values), values, color=tone, alpha=0.45, linestyle="none", marker=".", ms=5)
            seen += [*values, *(v for v in (row.ci_low, row.ci_high) if v is not None)]
        _line(
            axes,
            index,
            [row.level for row in rows],
            [row.ratio or 1.0 for row in rows],
            [(row.ci_low, row.ci_high) for row in rows],
            f"all {'conditions' if c.factors else 'domains'}" if len(c.conditions) > 1 else arm,
        )
        # An interval of two blocks can be absurdly wide: it is cut at the frame, and the table has the figures.
        low, high = max(min(seen), 0.1), min(max(seen), 10.0)
        axes.set_yscale("log")
        axes.set_ylim(low / 1.04, high * 1.04)
        ticks = _FINE if high / low < 1.25 else _TICKS
        axes.yaxis.set_major_locator(FixedLocator(_thinned([t for t in ticks if low / 1.04 <= t <= high * 1.04])))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        _break_even_marks(axes, summary, arm)
        axes.set_ylabel("ratio of throughput")  # the title names the arms, which may be long

    caption = (
        f"Band: ±{c.margin * 100:g}%, too small to matter. Bars: {c.confidence * 100:g}% interval; dots: single blocks."
    )
    found = summary.break_even[arm]
    if found.level is not None:
        caption += f" Vertical line: break-even, {found.level:.3g} streams"
        caption += ", shaded: its interval." if found.ci_low is not None or found.ci_high is not None else "."
    return chart(summary, f"ratio-{index}", f"{arm} against {c.baseline}", caption, draw, load_axis=True)


def distribution(summary: Summary, metric: Literal["ttft", "latency"], level: int) -> Chart | None:
    """Cumulative distribution over requests at one level; None without data."""
    names = [a.name for a in summary.campaign.arms]
    of_metric = [d for d in summary.distributions if (d.metric, d.condition) == (metric, ALL)]
    found = [d for d in of_metric if d.level == level]
    if not found:
        return None
    log_scale = any(wide(d.quantiles) for d in of_metric)  # the same kind of axis at every level
    positive = [q for d in found for q in d.quantiles if q > 0]

    def draw(axes: Axes) -> None:
        for d in found:
            shares = [100 * i / (len(d.quantiles) - 1) for i in range(len(d.quantiles))]
            index = names.index(d.arm)
            axes.plot(d.quantiles, shares, color=colour(index), linestyle=dash(index), linewidth=1.6, label=d.arm)
        if positive and log_scale:
            logarithmic(axes, "x", min(positive), max(positive), most=4)
        else:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.set_ylim(0, 101)
        axes.yaxis.set_major_locator(FixedLocator([0, 50, 90, 100]))
        axes.set_ylabel("% of requests")
        axes.set_xlabel("milliseconds")

    name = words.METRIC_WORDS[metric]
    title = f"{name[:1].upper()}{name[1:]}, {words.streams([level])}"
    count = ", ".join(f"{d.arm} {d.count}" for d in found)
    return chart(summary, f"{metric}-{level}", title, f"Requests: {count}.", draw, size=_SMALL)


def acceptance_length(summary: Summary) -> Chart | None:
    """Mean acceptance length over load, by arm and domain; None if no arm reports it."""
    series = _acceptance_series(summary)
    if not series:
        return None

    def draw(axes: Axes) -> None:
        for arm, condition in series:
            rows = [a for a in summary.acceptance if (a.arm, a.condition) == (arm, condition)]
            _acceptance_line(
                axes, summary, arm, condition, [a.level for a in rows], [a.length.value or 1.0 for a in rows]
            )
        axes.set_ylim(bottom=1)
        axes.set_ylabel("tokens per drafted step")

    caption = "1 + accepted ÷ drafts: what one verification gives, where something was drafted. 1 means nothing gained."
    return chart(summary, "acceptance-length", "Acceptance length over load", caption, draw, load_axis=True)


def needed_acceptance(summary: Summary) -> Chart | None:
    """The acceptance length that breaks even over load, beside what real drafters reached; None without synthetic arms.

    An end of an interval that the lengths measured do not bound is drawn to the outermost of them.
    """
    rows = summary.needed_acceptance
    if not rows:
        return None
    groups = list(dict.fromkeys(tuple(row.arms) for row in rows))

    def draw(axes: Axes) -> None:
        names = [arm.name for arm in summary.campaign.arms]
        for group in groups:
            mine = [row for row in rows if tuple(row.arms) == group]
            tone = colour(names.index(group[0]))
            at = [row.level for row in mine if row.length is not None]
            needed = [row.length for row in mine if row.length is not None]
            others = ", …" if len(group) > 1 else ""
            label = "needed" if len(groups) == 1 else f"needed ({group[0]}{others})"
            axes.plot(at, needed, color=tone, marker=_MARKERS[0], markersize=5, linewidth=1.8, label=label)
            for row in mine:
                low = row.lengths[0] if row.ci_low is None and row.low_open else row.ci_low
                high = row.lengths[-1] if row.ci_high is None and row.high_open else row.ci_high
                if low is None or high is None:
                    continue
                axes.plot([row.level] * 2, [low, high], color=tone, linewidth=1.4, alpha=0.8)
                for end, is_open, arrow in ((low, row.low_open, "v"), (high, row.high_open, "^")):
                    marker = arrow if is_open else _INTERVAL
                    axes.plot([row.level], [end], color=tone, marker=marker, markersize=6, linestyle="none")
            for length in mine[0].lengths:
                axes.axhline(length, color=_GRID, linewidth=0.8, linestyle=(0, (1, 3)), zorder=0)
        pretended = {arm.name for arm in summary.campaign.arms if arm.pretends}
        for arm, condition in _acceptance_series(summary):
            if arm not in pretended:
                seen = [a for a in summary.acceptance if (a.arm, a.condition) == (arm, condition)]
                lengths = [a.length.value or 1.0 for a in seen]
                _acceptance_line(axes, summary, arm, condition, [a.level for a in seen], lengths)
        axes.set_ylim(bottom=1)
        axes.set_ylabel("tokens per drafted step")

    confidence = f"{summary.campaign.confidence * 100:g}%"
    caption = (
        "Where throughput equals the baseline's, interpolated between acceptance lengths that were set (dotted), with"
        f" its {confidence} interval; an arrow: not bounded by them. A drafter above the line pays at that load, if a"
        " round of it costs the same. What real drafters reached stands beside it."
    )
    return chart(summary, "needed-acceptance", "Acceptance needed to break even", caption, draw, load_axis=True)


def acceptance_positions(summary: Summary) -> Chart | None:
    """Share of drafts accepted at least so deep, by arm and domain, over all levels; None if not reported."""
    curves = []
    for arm, condition in _acceptance_series(summary):
        rows = [a for a in summary.acceptance if (a.arm, a.condition) == (arm, condition) and a.per_position]
        depth = min((len(a.per_position) for a in rows), default=0)
        if depth:
            shares = [sum(100 * (a.per_position[i].value or 0.0) for a in rows) / len(rows) for i in range(depth)]
            curves.append((arm, condition, shares))
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        for arm, condition, shares in curves:
            _acceptance_line(axes, summary, arm, condition, range(1, len(shares) + 1), shares)
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("depth of the draft")
        axes.set_ylabel("% of drafts accepted this deep")

    caption = "Mean over levels. Where the curve is near 0, deeper drafts only cost."
    return chart(summary, "acceptance-positions", "Acceptance by position", caption, draw)


def _acceptance_series(summary: Summary) -> list[tuple[str, str]]:
    """(arm, condition) pairs that have acceptance; "all" only where it is the one condition."""
    conditions = summary.campaign.conditions
    pairs = dict.fromkeys((a.arm, a.condition) for a in summary.acceptance)
    return [(arm, condition) for arm, condition in pairs if condition in conditions]


def _acceptance_line(
    axes: Axes, summary: Summary, arm: str, condition: str, x: Sequence[float], y: Sequence[float]
) -> None:
    """The colour says which arm, dashes and marker which domain."""
    domain = summary.campaign.conditions.index(condition)
    axes.plot(
        x, y, color=colour([a.name for a in summary.campaign.arms].index(arm)), linestyle=dash(domain + 1),
        marker=_MARKERS[domain % len(_MARKERS)], markersize=4.5, linewidth=1.5, label=f"{arm}, {condition}",
    )  # fmt: skip


def _over_load(summary: Summary, metric: MetricName, title: str, unit: str, caption: str) -> Chart:
    def draw(axes: Axes) -> None:
        values: list[float] = []
        for index, arm in enumerate(summary.campaign.arms):
            found: list[tuple[int, IntervalFigure]] = [
                (row.level, row.metrics[metric])
                for row in summary.levels
                if (row.arm, row.condition) == (arm.name, ALL) and metric in row.metrics
            ]
            _line(
                axes,
                index,
                [level * 1.02 ** (index - (len(summary.campaign.arms) - 1) / 2) for level, _ in found],
                [figure.value for _, figure in found],
                [(figure.ci_low, figure.ci_high) for _, figure in found],
                arm.name,
            )
            values += [figure.value for _, figure in found]
        if wide(values):
            logarithmic(axes, "y", min(values), max(values))
        elif values:
            axes.set_ylim(0, max(values) * 1.25)
            axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_ylabel(unit)

    return chart(summary, metric, title, caption, draw, load_axis=True)


def wide(values: Sequence[float]) -> bool:
    """Do they span so much that only a log axis shows them all?"""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) > _LOG_FROM


def logarithmic(axes: Axes, side: Literal["x", "y"], low: float, high: float, most: int = 7) -> None:
    """A log axis with ticks at 1, 2, 5, 10, …; fewer where that would be more than `most`."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    (axes.set_xscale if side == "x" else axes.set_yscale)("log")
    (axes.set_xlim if side == "x" else axes.set_ylim)(low / 1.2, high * 1.3)
    ticks: list[float] = []
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**e for e in range(-3, 8) for m in mantissas if low / 1.2 <= m * 10.0**e <= high * 1.3]
        if len(ticks) <= most:
            break
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())


def _line(
    axes: Axes,
    index: int,
    x: Sequence[float],
    y: Sequence[float],
    intervals: Sequence[tuple[float | None, float | None]],
    label: str,
) -> None:
    tone = colour(index)
    for at, (low, high) in zip(x, intervals, strict=True):
        if low is not None and high is not None:
            axes.plot([at, at], [low, high], color=tone, linewidth=1.4, solid_capstyle="butt", alpha=0.9)
            axes.plot([at, at], [low, high], color=tone, linestyle="none", marker=_INTERVAL, markersize=7)
    axes.plot(
        x, y, color=tone, linestyle=dash(index), marker=_MARKERS[index % len(_MARKERS)], markersize=5.5,
        linewidth=1.8, label=label, zorder=3,
    )  # fmt: skip


def _mark_cut_intervals(axes: Axes) -> bool:
    """Puts an arrow at the frame where an interval passes it; whether there is one."""
    bottom, top = axes.get_ylim()
    cut: list[tuple[float, float, str, Any]] = []
    for line in axes.get_lines():
        if line.get_marker() == _INTERVAL:
            x, ends = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
            if ends.min() < bottom:
                cut.append((x[0], bottom, "v", line.get_color()))
            if ends.max() > top:
                cut.append((x[0], top, "^", line.get_color()))
    for at, edge, symbol, edge_tone in cut:
        axes.plot([at], [edge], color=edge_tone, linestyle="none", marker=symbol, markersize=5, clip_on=False)
    return bool(cut)


def _break_even_marks(axes: Axes, summary: Summary, arm: str) -> None:
    found = summary.break_even[arm]
    if found.level is None or not found.monotone:
        return
    if found.ci_low is not None or found.ci_high is not None:
        left, right = axes.get_xlim()
        axes.axvspan(found.ci_low or left, found.ci_high or right, color=_SPAN, linewidth=0, zorder=0)
        axes.set_xlim(left, right)
    axes.axvline(found.level, color=_INK, linewidth=1, linestyle=(0, (2, 2)), zorder=1)


def _thinned(ticks: Sequence[float]) -> list[float]:
    """At most 8 ticks, 1 among them."""
    if len(ticks) <= 8:
        return list(ticks)
    one = ticks.index(1.0) if 1.0 in ticks else 0
    return [t for i, t in enumerate(ticks) if (i - one) % 2 == 0]


def colour(index: int) -> str:
    """The stand-in colour of an arm, by its place."""
    return f"#0a0a{index % ARM_COLOURS:02x}"


def marker(index: int) -> str:
    """The marker of an arm, by its place."""
    return _MARKERS[index % len(_MARKERS)]


def dash(index: int) -> Any:
    """The dashes of an arm, by its place."""
    return _DASHES[index % len(_DASHES)]


def chart(
    summary: Summary,
    name: str,
    title: str,
    caption: str,
    draw: Callable[[Axes], None],
    *,
    load_axis: bool = False,
    size: tuple[float, float] = _SIZE,
) -> Chart:
    """Draw one chart and make it an element of the page."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        if load_axis:
            _load_axis(axes, summary.campaign.levels)
        draw(axes)
        if _mark_cut_intervals(axes):
            caption += " An arrow: the interval goes on beyond the picture; summary.json has its ends."
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=3)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1 or (labels and len(summary.campaign.arms) > 1):
            figure.legend(
                handles,
                labels,
                loc="outside upper left",
                ncols=_columns(labels, size),
                handlelength=2.0 if size == _SIZE else 1.2,
                columnspacing=2.0 if size == _SIZE else 1.0,
            )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Chart(name, title, caption, _inline(buffer.getvalue(), name, title))


def _columns(labels: Sequence[str], size: tuple[float, float]) -> int:
    """As many columns of a legend, 3 at most, as the longest label lets fit into the chart's width."""
    each = 0.075 * max(map(len, labels)) + 0.55  # inches: letters of 9 points, the line and the gap
    return max(1, min(3, len(labels), int(size[0] / each)))


def _load_axis(axes: Axes, levels: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(min(levels) / 1.15, max(levels) * 1.15)
    axes.xaxis.set_major_locator(FixedLocator([float(level) for level in levels]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("streams")


def _inline(svg: str, name: str, title: str) -> str:
    """Matplotlib's file as an element of a page: no prologue, namespaces, metadata or style; variables for colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href=", "href=")
    # Ids are numbered, because Matplotlib makes them from coordinates, whose last bit depends on the processor.
    numbers = {found: f"{n}" for n, found in enumerate(dict.fromkeys(re.findall(r'\bid="([mp][0-9a-f]{10})"', svg)))}
    svg = re.sub(r"\b[mp][0-9a-f]{10}\b", lambda found: numbers.get(found[0], found[0]), svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, f"var({variable})")
    svg = re.sub(r"#0a0a(\d\d)", lambda found: f"var(--arm-{int(found.group(1))})", svg)
    view_box = re.search(r'viewBox="[^"]+"', svg)
    head = f'<svg role="img" aria-label="{html.escape(title)}" {view_box.group() if view_box else ""}>'
    return re.sub(r"^<svg[^>]*>", lambda _: head, svg, count=1).strip()
