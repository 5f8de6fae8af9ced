"""Which arm at which load: the policy that the verdicts support, in words, and as flags of an engine. Pure.

Only a verdict moves anybody off the baseline: an arm that pays by the declared primary metric and hurts no domain is
chosen, the best of several by its ratio; that is the rule of `lab.policy`. Where none pays the baseline stays, and
where an arm is undecided that is said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from breakeven.lab.family import only_conditions
from breakeven.lab.policy import Policy, PolicyError, decide, export
from breakeven.lab.policy.decide import NOTHING_COMPARED, gain, hurt_domains, vetoed
from breakeven.lab.report import words
from breakeven.lab.summary import ALL, Summary


@dataclass(frozen=True, slots=True)
class Choice:
    """At one level: the arm to run, its change (of the primary metric, arm ÷ baseline), and what is open. `decided`:
    rests on verdicts alone."""

    level: int
    arm: str
    ratio: float | None
    decided: bool
    reason: str


def choices(summary: Summary) -> list[Choice]:
    """One for each level, by rising level. A level without any comparison keeps the baseline, undecided. None at all
    where every acceptance is synthetic: such a campaign asks what a drafter would need, not what to run."""
    if only_conditions(summary.comparisons):
        return []
    baseline, metric = summary.campaign.baseline, primary_metric(summary)
    rows = {(c.arm, c.condition, c.level): c for c in summary.comparisons if c.metric == metric and not c.synthetic}
    found = []
    for level in summary.campaign.levels:
        here = {arm: rows[arm, ALL, level] for arm in summary.arms if (arm, ALL, level) in rows}
        paying = [arm for arm, c in here.items() if c.verdict == "pays" and c.ratio is not None]
        hurting = {arm: hurt for arm in paying if (hurt := hurt_domains(arm, level, rows, summary.campaign.conditions))}
        allowed = [arm for arm in paying if arm not in hurting]
        undecided = [arm for arm, c in here.items() if c.verdict == "undecided"]
        veto = "; ".join(vetoed(arm, where) for arm, where in hurting.items())
        if allowed:
            best = max(allowed, key=lambda arm: gain(here[arm]))
            others = [arm for arm in allowed if arm != best]
            so = "do" if len(others) > 1 else "does"
            reason = f"pays{f'; so {so} {words.joined(others)}, less' if others else ''}"
            found.append(Choice(level, best, here[best].ratio, True, f"{reason}; {veto}" if veto else reason))
        elif undecided or not here:
            reason = f"{words.joined(undecided)} undecided" if undecided else NOTHING_COMPARED
            found.append(Choice(level, baseline, None, False, f"{reason}; {veto}" if veto else reason))
        elif veto:
            found.append(Choice(level, baseline, None, True, veto))
        else:
            kinds = {c.verdict for c in here.values()}
            reason = (
                "nothing pays"
                if len(kinds) > 1
                else {"hurts": "speculation hurts"}.get(next(iter(kinds)), "makes no difference")
            )
            found.append(Choice(level, baseline, None, True, reason))
    return found


def primary_metric(summary: Summary) -> str:
    """The metric that the policy goes by."""
    return str(summary.campaign.resolved.get("primary_metric", "throughput"))


def needed(summary: Summary) -> str:
    """What takes the policy's place where acceptance is synthetic: the length that breaks even, level by level."""
    if len({tuple(row.arms) for row in summary.needed_acceptance}) != 1:
        return "Conditions, not results: they give no policy."
    parts, beyond = [], defaultdict[str, list[int]](list)
    for row in words.needed_rows(summary):
        if row.length == words.UNKNOWN:
            beyond[row.note or "nothing is known"].append(row.level)
            continue
        interval = row.note or "no interval" if row.interval == words.UNKNOWN else row.interval
        parts.append(f"at {words.streams([row.level])} {row.length} ({interval})")
    parts += [f"at {words.streams(levels)} {note}" for note, levels in beyond.items()]
    return f"To break even, a drafter needs, in tokens a round: {'; '.join(parts)}."


def sentence(summary: Summary, found: Sequence[Choice]) -> str:
    """The policy in one or two sentences."""
    if only_conditions(summary.comparisons):
        return needed(summary)
    if not any(c.decided for c in found):
        why = "single runs decide nothing" if words.imported(summary) else "no level is decided yet"
        return f"No policy: {why}. Until then {summary.campaign.baseline} is the safe choice."
    parts = []
    for arm, group in groupby((c for c in found if c.decided), key=lambda c: c.arm):
        levels = [c.level for c in group]
        parts.append(f"{arm} at {words.streams(levels)}")
    text = f"Run {words.joined(parts)}."
    open_levels = [c.level for c in found if not c.decided]
    if open_levels:
        text += (
            f" At {words.streams(open_levels)} it is open: stay with {summary.campaign.baseline} until it is decided."
        )
    return text


def ranges_in_words(found: Policy) -> str:
    """`3 deep at 1 to 4, 1 deep at 5 to 8, off from 9 sequences on`."""
    if found.off:
        reasons = ["it pays on the whole, but hurts a domain"] if any(c.vetoed for c in found.choices) else []
        if any(choice.undecided for choice in found.choices):
            reasons.append("no gain is decided yet")
        if not reasons:
            compared = any(choice.reason != NOTHING_COMPARED for choice in found.choices)
            reasons.append("nothing pays" if compared else NOTHING_COMPARED)
        return f"off at every load: {'; '.join(reasons)}"
    parts = []
    for first, last, depth in found.ranges[:-1]:
        where = f"{first} to {last}" if last > first else f"{first}"
        parts.append(f"{f'{depth} deep' if depth else 'off'} at {where}")
    first, _, depth = found.ranges[-1]
    parts.append(f"{f'{depth} deep' if depth else 'off'} from {first} sequences on")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Deployable:
    """What the report says of a schedule. `flags`: of the engine's command line, empty where there is none to give, and
    `why_not` says why. `content`: of the file that the flags name."""

    words: str
    flags: str
    content: str
    notes: tuple[str, ...]
    why_not: str


def deployable(summary: Summary) -> Deployable:
    """The schedule that the verdicts support, in the terms of the engine that was measured."""
    if only_conditions(summary.comparisons):
        return Deployable("", "", "", (), "synthetic acceptance is a condition, not a result")
    try:
        found = decide(summary)
    except PolicyError as problem:
        return Deployable("", "", "", (), str(problem))
    if found.off:
        return Deployable(ranges_in_words(found), "", "", found.notes, "")
    try:
        exported = export(found)
    except PolicyError as problem:
        return Deployable(ranges_in_words(found), "", "", found.notes, str(problem))
    content = exported.content if exported.names_file else ""
    return Deployable(
        ranges_in_words(found), exported.command("policy-file"), content, (*found.notes, *exported.notes), ""
    )
