"""The sentences of a report, shared by the terminal, the HTML page and the Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from breakeven.lab.stats.breakeven import describe_ranges
from breakeven.lab.summary import ALL, AcceptanceSummary, BreakEvenSummary, Comparison, LevelSummary, Summary
from breakeven.lab.verdict import Verdict

_MANY_BLOCKS = 200  # beyond, the number says only: not in practice
SIGNS: Mapping[Verdict, str] = {"pays": "▲", "hurts": "▼", "equivalent": "≈", "undecided": "~"}
UNKNOWN = "–"
CONDITION = "condition"  # stands where a verdict would, if the acceptance was set
METRIC_WORDS = {"throughput": "throughput", "ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


@dataclass(frozen=True, slots=True)
class Row:
    """One level of one arm: what the verdict table shows. `baseline`, `arm`: throughput in tok/s."""

    level: int
    comparison: Comparison
    baseline: float | None
    arm: float | None
    ttft: Comparison | None
    tpot: Comparison | None
    latency: Comparison | None
    acceptance: AcceptanceSummary | None


def rows(summary: Summary, arm: str, condition: str = ALL) -> list[Row]:
    """The verdict table of an arm, by rising level."""
    found = []
    for level in summary.campaign.levels:
        by_metric = {
            c.metric: c for c in summary.comparisons if (c.arm, c.condition, c.level) == (arm, condition, level)
        }
        primary = by_metric.get("throughput")
        if primary is None:
            continue
        accepted = (a for a in summary.acceptance if (a.arm, a.condition, a.level) == (arm, condition, level))
        found.append(
            Row(
                level=level,
                comparison=primary,
                baseline=_throughput(summary.levels, summary.campaign.baseline, condition, level),
                arm=_throughput(summary.levels, arm, condition, level),
                ttft=by_metric.get("ttft"),
                tpot=by_metric.get("tpot"),
                latency=by_metric.get("latency"),
                acceptance=next(accepted, None),
            )
        )
    return found


def _throughput(levels: Sequence[LevelSummary], arm: str, condition: str, level: int) -> float | None:
    for row in levels:
        if (row.arm, row.condition, row.level) == (arm, condition, level) and "throughput" in row.metrics:
            return row.metrics["throughput"].value
    return None


def outcome(c: Comparison) -> str:
    """What stands in a verdict's place: a comparison of synthetic acceptance has none."""
    return CONDITION if c.synthetic else c.verdict


def answer(summary: Summary, arm: str) -> str:
    """One sentence: at which levels the arm pays, hurts, makes no difference, or cannot be told."""
    by_verdict: dict[Verdict, list[int]] = {}
    pretended = {a.name: a.synthetic_acceptance for a in summary.campaign.arms if a.pretends}
    if arm in pretended or summary.campaign.baseline in pretended:
        who = arm if arm in pretended else summary.campaign.baseline
        length = pretended[who]
        yielding = "of that acceptance" if length is None else f"whose rounds yield {length:g} tokens"
        return (
            f"{arm} gets no verdict, because the acceptance of {who} is synthetic: its ratios are those of a drafter"
            f" {yielding}."
        )
    for row in rows(summary, arm):
        by_verdict.setdefault(row.comparison.verdict, []).append(row.level)
    phrases: dict[Verdict, str] = {
        "pays": "pays at {}",
        "equivalent": "makes no difference at {}",
        "hurts": "hurts at {}",
        "undecided": "is undecided at {}",
    }
    parts = [phrase.format(streams(by_verdict[v])) for v, phrase in phrases.items() if v in by_verdict]
    if not parts:
        return f"{arm} was not compared with {summary.campaign.baseline}."
    return f"{arm} {joined(parts)}."


def twins(summary: Summary) -> list[str]:
    """Arms that are set up exactly as the baseline (A/A): what they show is noise. Their ports may differ."""

    def setting(given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in ("port", "url")}

    base = next((a for a in summary.campaign.arms if a.baseline), None)
    if base is None or imported(summary):
        return []
    return [a.name for a in summary.campaign.arms if not a.baseline and setting(a.settings) == setting(base.settings)]


def imported(summary: Summary) -> bool:
    """Were the figures measured by another tool, and imported?"""
    return isinstance(summary.environment.get("imported"), dict)


def streams(levels: Sequence[int]) -> str:
    """ "1, 2 and 5 streams"."""
    return f"{joined([str(level) for level in levels])} {'stream' if list(levels) == [1] else 'streams'}"


def joined(parts: Sequence[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def break_even_sentence(found: BreakEvenSummary, confidence: float) -> str:
    """Break-even in plain words, with its interval and what is open."""
    if not found.levels:
        return "Break-even is unknown: no block has valid figures of both arms."
    first, last = _number(found.levels[0]), _number(found.levels[-1])
    if not found.monotone:
        return f"There is no single break-even: {found.note}."
    if found.low_open and found.high_open:
        point = f"The estimate is {_number(found.level)} streams, but the" if found.level is not None else "The"
        return f"{point} data do not bound the break-even: more blocks are needed."
    if found.level is None:
        above = found.fitted[-1] > 1
        where = f"above {_plural(last)}, the highest level" if above else f"below {_plural(first)}, the lowest level"
        if found.blocks < 2:
            return f"Break-even seems to lie {where} measured; one block gives no interval."
        sure = found.ci_low is not None if above else found.ci_high is not None
        bound = found.ci_low if above else found.ci_high
        tail = ""
        if sure and bound is not None and _number(bound) != (last if above else first):
            side = "no lower than" if above else "no higher than"
            tail = f" ({side} {_number(bound)} at {confidence:.0%} confidence)"
        return f"Break-even lies {where} measured{tail}."
    if found.blocks < 2:
        return f"Break-even is near {_number(found.level)} streams in the one block; one block gives no interval."
    low = f"open below {first}" if found.ci_low is None else f"{_number(found.ci_low)}"
    high = f"open above {last}" if found.ci_high is None else f"{_number(found.ci_high)}"
    if found.ci_low is None:
        interval = f"{low}, at most {high}"
    elif found.ci_high is None:
        interval = f"at least {low}, {high}"
    else:
        interval = f"{low} to {high}"
    return f"Break-even is at {_number(found.level)} streams ({confidence:.0%} interval: {interval})."


def condition_sentences(summary: Summary, arm: str) -> list[str]:
    """Did a factor matter? A sentence per contrast of each, over all levels; empty with one condition.

    Where the domain is the only factor its values are the conditions.
    """
    sentences = []
    asked = {f"arm × {name}": name.replace("_", " ").capitalize() for name in summary.campaign.factors}
    for r in summary.interactions:
        factor = (asked or {"arm × condition": "Domain"}).get(r.factor)
        if factor is not None and (r.arm, r.metric, r.level) == (arm, "throughput", None):
            interval = "" if r.ci_low is None or r.ci_high is None else f" [{percent(r.ci_low)}, {percent(r.ci_high)}]"
            sentences.append(
                f"{factor}: the ratio in {r.condition} against {r.against}, over all levels, is"
                f" {percent(r.ratio)}{interval}, {r.verdict}."
            )
    return sentences


def regime(summary: Summary) -> list[str]:
    """What is said of the conditions at the top: a cache declared warm, and the factors that are crossed."""
    campaign, sentences = summary.campaign, []
    factors = {name: values for name, values in campaign.factors.items() if len(values) > 1}
    if factors:
        told = " × ".join(f"{name.replace('_', ' ')} ({', '.join(values)})" for name, values in factors.items())
        sentences.append(
            f"Conditions: {told}, each with each; figures over all conditions pool them, and what a factor changes is"
            " told apart below."
        )
    if sessions := (campaign.resolved.get("workload") or {}).get("sessions"):
        mean = " on average" if sessions.get("think_spread") == "exponential" else ""
        context = (
            "The context holds what the model itself said, so from the second turn on arms get the same prompts only"
            " where their answers agree."
            if sessions.get("answers") == "own"
            else "The context holds recorded answers, the same for all arms."
        )
        sentences.append(
            "Sessions: a level is a number of dialogues in play; each turn is sent when the answer before it has come"
            f" and {sessions.get('think_s'):g} s{mean} have passed, so throughput includes that waiting. Later turns"
            f" find their own history in the prefix cache. {context}"
        )
    crossed = (campaign.resolved.get("conditions") or {}).get("cache") or ()
    if "warm" in crossed or campaign.resolved.get("cache") == "warm":
        where = ' In the conditions named "warm" the' if crossed else " The"
        shares = [
            share
            for cell in summary.cells
            if cell.valid and (not crossed or "warm" in cell.condition.split("+"))
            for share in [cell.metrics["cached_share"].value]
            if share is not None
        ]
        found = (
            f" {min(shares):.0%} to {max(shares):.0%} of a valid cell's prompt tokens came from it."
            if shares
            else " The servers do not report its hits, so that it was warm rests on the sending alone."
        )
        sentences.append(
            f"Declared warm prefix cache.{where} prompts of each cell were sent once before it was measured, so its"
            f" times to first token leave most of the prefill out.{found}"
        )
    return sentences


def blocks_compared(summary: Summary) -> str:
    """`5` blocks, or `3 of 5` where no comparison has all that were planned."""
    planned = summary.campaign.blocks
    most = max((row.blocks for row in summary.comparisons), default=planned)
    return f"{planned}" if most >= planned else f"{most} of {planned}"


def open_loop(summary: Summary) -> bool:
    """Is a level a rate, by the campaign?"""
    return summary.campaign.open_loop


def correction(summary: Summary, arm: str) -> str:
    """Levels whose verdict stands alone, but not as one of several; empty if there are none."""
    alpha = 1 - summary.campaign.confidence
    weak = [
        c.level
        for c in summary.comparisons
        if c.primary and c.arm == arm and c.verdict in ("pays", "hurts") and (c.p_adjusted or 0.0) > alpha
    ]
    if not weak:
        return ""
    return (
        f"With all levels asked at once (Holm), the difference at {streams(weak)} is not significant: take it as a"
        " lead, not as a result."
    )


def sure_ranges(found: BreakEvenSummary) -> str:
    """Where the arm surely pays or hurts, for a ratio that does not fall steadily; empty otherwise."""
    if found.monotone or not found.levels:
        return ""
    parts = [
        f"{word} {describe_ranges([(r.low, r.high) for r in ranges], found.levels)}"
        for word, ranges in (("surely pays", found.surely_pays), ("surely hurts", found.surely_hurts))
        if ranges
    ]
    return f"By intervals at each load it {' and '.join(parts)}." if parts else ""


def _plural(number: str) -> str:
    return f"{number} stream{'' if number == '1' else 's'}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def outlook(summary: Summary, arm: str) -> str:
    """What it would take to decide the undecided levels; empty if there are none."""
    open_rows = [
        row for row in rows(summary, arm) if row.comparison.verdict == "undecided" and not row.comparison.synthetic
    ]
    if not open_rows:
        return ""
    few = [row for row in open_rows if row.comparison.blocks < 2]
    if few and imported(summary):
        return (
            f"Undecided at {streams([row.level for row in few])}: single run: no interval. Nobody knows how far"
            " another run would lie from this one."
        )
    if few:
        return (
            f"Undecided at {streams([row.level for row in few])}: fewer than two valid blocks, so no interval. Use at"
            " least two; three or more are advisable."
        )
    known = [row for row in open_rows if row.comparison.blocks_needed is not None]
    hopeless = [row for row in open_rows if row.comparison.blocks_needed is None]
    parts = []
    if known:
        each = [f"{_blocks(row.comparison.blocks_needed or 0)} at {row.level}" for row in known]
        each[0] = each[0].replace(" at ", " blocks in total at ")
        rough = "" if min(row.comparison.blocks for row in known) > 4 else ", rough as they are with so few blocks"
        plural = "s" if known[-1].level != 1 else ""
        parts.append(f"if the estimates hold{rough}, a verdict takes {joined(each)} stream{plural}")
    if hopeless:
        at = streams([row.level for row in hopeless])
        parts.append(f"at {at} no reasonable number of blocks would do: the effect is at the margin or lost in noise")
    return f"Undecided: {'; '.join(parts)}."


def _blocks(count: int) -> str:
    return f"about {count}" if count <= _MANY_BLOCKS else f"more than {_MANY_BLOCKS}"


def warning(summary: Summary) -> str:
    """What must be said before anything else; empty if every planned cell is there and valid."""
    run, parts = summary.run, []
    if run.cells_invalid:
        parts.append(
            f"{run.cells_invalid} of {run.cells_finished} cells "
            + ("is invalid and takes" if run.cells_invalid == 1 else "are invalid and take")
            + " no part in any comparison"
        )
    if summary.missing:
        parts.append(
            f"{len(summary.missing)} of {run.cells_planned} planned cells"
            f" {'is' if len(summary.missing) == 1 else 'are'} missing: the run is not finished"
        )
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def percent(ratio: float) -> str:
    """A ratio as a change: +12.3%, or ×12 from ten times on."""
    return f"×{ratio:.3g}" if ratio >= 10 else f"{(ratio - 1) * 100:+.1f}%".replace("-", "−")


def rate(value: float | None) -> str:
    """Three significant digits, never in powers of ten."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def statement(summary: Summary) -> str:
    """What is to be known of a run before anything in it is read, such as that it confirms a search; may be empty."""
    tuning = summary.environment.get("tuning")
    return str(tuning.get("statement", "")) if isinstance(tuning, Mapping) else ""


@dataclass(frozen=True, slots=True)
class NeededRow:
    """One row of the table of needed acceptance, every cell as text but the numbers of streams and blocks."""

    level: int
    length: str
    interval: str
    bootstrap: str
    reached: str
    arms: str
    blocks: int
    note: str


def needed_rows(summary: Summary) -> list[NeededRow]:
    """The acceptance lengths that break even, beside those that real arms reached at the same level."""
    pretended = {arm.name for arm in summary.campaign.arms if arm.pretends}
    rows = []
    for row in summary.needed_acceptance:
        reached = [
            f"{a.arm} {a.length.value:.2f}"
            for a in summary.acceptance
            if a.level == row.level and a.condition == ALL and a.arm not in pretended and a.length.value is not None
        ]
        both_open = row.low_open and row.high_open
        rows.append(
            NeededRow(
                level=row.level,
                length=UNKNOWN if row.length is None else f"{row.length:.2f}",
                interval=_between(row.ci_low, row.ci_high, both_open),
                bootstrap=_between(row.bootstrap_low, row.bootstrap_high, both_open),
                reached=", ".join(reached) or UNKNOWN,
                arms=joined(row.arms),
                blocks=row.blocks,
                note=row.note,
            )
        )
    return rows


def _between(low: float | None, high: float | None, both_open: bool) -> str:
    """An interval that may be open: `2.10 to 2.60`, `below 2.60`, `above 2.10`, `not bounded`; `–` where unknown."""
    if low is not None and high is not None:
        return f"{low:.2f} to {high:.2f}"
    if high is not None:
        return f"below {high:.2f}"
    return f"above {low:.2f}" if low is not None else "not bounded" if both_open else UNKNOWN
