"""Which depth at which level, and the schedule that follows. Pure.

At each level an arm is *allowed* if its verdict on the declared primary metric is "pays" and no single domain's verdict
is "hurts": then its interval lies above the baseline, and no part of the traffic falls under it beyond the margin. Of
the allowed arms of one family the one with the largest ratio is chosen; without any, speculation is off. Of several
families the one with the largest sum of log ratios over the levels wins. An arm that is undecided is never chosen,
however promising: more blocks decide it, a policy does not.

The best of several arms is chosen by the same data that shows its gain, so the gain is a little too good, the more so
the more arms there are; `breakeven tune` measures the winner again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from breakeven.lab.policy.ranges import Range, schedule, single_switch
from breakeven.lab.policy.shapes import SYNTHETIC, Shape, shape, unlike

if TYPE_CHECKING:
    from breakeven.lab.summary import Comparison, Summary

_ALL = "all"  # the condition that pools all domains
NOTHING_COMPARED = "nothing was compared"


class PolicyError(ValueError):
    """There is no policy to be had, or an engine cannot follow it; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """What runs at one level. `arm` is the baseline where `depth` is 0. `ratio`: of the primary metric, arm ÷ baseline
    (its interval beside it), as the summary has it; None where nothing speculates. `reason`: in plain words.
    Where `depth` is 0: `undecided` are the arms, of any family, whose drafts may yet pay; `vetoed`: something pays on
    the whole, but hurts a domain."""

    level: int
    arm: str
    depth: int
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    reason: str
    undecided: tuple[str, ...] = ()
    vetoed: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """A schedule and what it rests on. `arm`: the deepest of the chosen family; empty where speculation is off at every
    level. `settings`: that arm's. `ranges`: (first, last, depth) by batch size, from 1, without gaps."""

    baseline: str
    metric: str
    margin: float
    arm: str
    shape: Shape
    settings: Mapping[str, Any]
    choices: tuple[LevelChoice, ...]
    ranges: tuple[Range, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def off(self) -> bool:
        """Does nothing pay at any level?"""
        return not self.arm


def decide(summary: Summary) -> Policy:
    """The policy that a summary supports. PolicyError where its levels are no batch sizes, or no depth is known."""
    digest = summary.campaign
    resolved = digest.resolved
    if digest.open_loop:
        raise PolicyError(
            "a schedule goes by the number of sequences, but the levels of this run are rates of arrival: measure the"
            " same arms in closed loop (arrivals: closed)"
        )
    if (resolved.get("workload") or {}).get("sessions"):
        raise PolicyError(
            "a schedule goes by the number of sequences, but the levels of this run are sessions in play, many of them"
            " thinking: measure the same arms without workload.sessions"
        )
    metric = str(resolved.get("primary_metric", "throughput"))
    settings = {arm.name: arm.settings for arm in digest.arms}
    pretended = {arm.name for arm in digest.arms if arm.pretends}
    shapes = {name: _real(shape(settings[name]), name in pretended) for name in summary.arms}
    base = _real(shape(settings.get(digest.baseline, {})), digest.baseline in pretended)
    if base.known and base.depth:
        raise PolicyError(
            f"off in a schedule is depth 0, but the baseline {digest.baseline!r} drafts {base.depth} deep itself, so"
            " nothing here was compared with off: measure against a baseline without speculation"
        )
    unknown = {name: found.reason for name, found in shapes.items() if not found.known}
    families: dict[str, list[str]] = {}
    for name, found in shapes.items():
        if found.known and found.depth:
            families.setdefault(found.family, []).append(name)
    if not families:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unknown.items())
        raise PolicyError(f"no arm says how deep it drafts{f' ({reasons})' if reasons else ''}")
    rows = {
        (c.arm, c.condition, c.level): c
        for c in summary.comparisons
        if c.metric == metric and c.arm in shapes and shapes[c.arm].known and not c.synthetic
    }
    levels = sorted(digest.levels)
    everyone = [name for members in families.values() for name in members]
    best: tuple[float, list[str], list[LevelChoice]] | None = None
    for members in families.values():
        chosen = [
            _choose(level, members, everyone, shapes, rows, digest.conditions, digest.baseline) for level in levels
        ]
        total = sum(gain(rows[choice.arm, _ALL, choice.level]) for choice in chosen if choice.depth)
        if best is None or total > best[0]:
            best = (total, members, chosen)
    assert best is not None
    _, members, chosen = best
    notes = [f"{name} is left out: {reason}" for name, reason in unknown.items()]
    if not base.known:
        notes.append(f"off is depth 0, and whether the baseline {digest.baseline} drafts is not known: {base.reason}")
    notes += _waiting(chosen)
    if not any(choice.depth for choice in chosen):
        return Policy(
            digest.baseline, metric, digest.margin, "", Shape(shapes[members[0]].engine), {}, tuple(chosen),
            schedule(levels, [0] * len(levels), lambda depth, level: False), tuple(notes),
        )  # fmt: skip
    limit = -math.log1p(digest.margin)

    def safe_arm(name: str, level: int) -> bool:
        """Is this arm shown, at this level, not to be below the baseline by more than the margin, in no domain?"""
        row = rows.get((name, _ALL, level))
        low = None if row is None else _low(row)
        return low is not None and low >= limit and not hurt_domains(name, level, rows, digest.conditions)

    def safe(depth: int, level: int) -> bool:
        return any(shapes[name].depth_at(level) == depth and safe_arm(name, level) for name in members)

    depths = {choice.level: choice.depth for choice in chosen}

    def switch(low: int, high: int) -> int | None:
        """Where an arm with a schedule of its own goes over from one chosen depth to the other, if safe at both."""
        places = (
            single_switch(shapes[name].ranges, low, high)
            for name in members
            if shapes[name].ranges
            and all(shapes[name].depth_at(level) == depths[level] and safe_arm(name, level) for level in (low, high))
        )
        return min((place for place in places if place is not None), default=None)

    for name in members:
        taxed = [
            level for level in levels
            if shapes[name].ranges
            and not shapes[name].depth_at(level)
            and (row := rows.get((name, _ALL, level))) is not None
            and row.verdict == "hurts"
        ]  # fmt: skip
        if taxed:
            notes.append(
                f"{name} hurts at {', '.join(map(str, taxed))} streams, where its own schedule is off: being ready to"
                f" speculate costs something there, so the baseline is the better choice for such loads"
            )
    used = depths.values()
    deepest = max((n for n in members if shapes[n].depth in used or shapes[n].ranges), key=lambda n: shapes[n].depth)
    notes += _notes(levels, chosen, settings[deepest], settings[digest.baseline], digest.baseline)
    ranges = schedule(levels, list(depths.values()), safe, switch)
    return Policy(
        digest.baseline, metric, digest.margin, deepest, shapes[deepest], settings[deepest], tuple(chosen), ranges,
        tuple(notes),
    )  # fmt: skip


def _real(found: Shape, pretended: bool) -> Shape:
    """The shape, unknown for an arm whose acceptance is synthetic by whatever setting."""
    return replace(found, reason=SYNTHETIC) if pretended else found


_Rows = Mapping[tuple[str, str, int], "Comparison"]


def _choose(
    level: int,
    members: Sequence[str],
    everyone: Sequence[str],
    shapes: Mapping[str, Shape],
    rows: _Rows,
    conditions: Sequence[str],
    baseline: str,
) -> LevelChoice:
    """The choice of one family at a level. `everyone`: the speculating arms of all families."""
    here = {
        name: row
        for name in everyone
        if shapes[name].depth_at(level) and (row := rows.get((name, _ALL, level))) is not None
    }
    paying = [name for name, row in here.items() if row.verdict == "pays"]
    hurting = {name: where for name in paying if (where := hurt_domains(name, level, rows, conditions))}
    allowed = [name for name in paying if name not in hurting]
    if own := [name for name in allowed if name in members]:
        best = max(own, key=lambda name: gain(here[name]))
        row = here[best]
        return LevelChoice(level, best, shapes[best].depth_at(level), row.ratio, row.ci_low, row.ci_high, "pays")
    undecided = tuple(name for name, row in here.items() if row.verdict == "undecided")
    if hurting:
        reason = vetoed(*next(iter(hurting.items())))
    elif undecided:
        reason = f"{', '.join(undecided)} undecided"
    elif allowed:
        reason = f"{', '.join(allowed)} pays, but differs from the arms of this schedule in more than depth"
    else:
        compared = any((name, _ALL, level) in rows for name in everyone)
        reason = "nothing pays" if compared else NOTHING_COMPARED
    return LevelChoice(level, baseline, 0, None, None, None, reason, undecided, bool(hurting))


def vetoed(name: str, where: Sequence[str]) -> str:
    """Why an arm that pays is not used."""
    return f"{name} pays on the whole, but hurts {' and '.join(where)}"


def hurt_domains(name: str, level: int, rows: _Rows, conditions: Sequence[str]) -> list[str]:
    """The domains in which an arm hurts at a level."""
    found = ((condition, rows.get((name, condition, level))) for condition in conditions)
    return [condition for condition, row in found if row is not None and row.verdict == "hurts"]


def gain(row: Comparison) -> float:
    """The log ratio, above 0 where the arm is better."""
    if row.ratio is None or row.ratio <= 0:
        return -math.inf
    return math.log(row.ratio) if row.better == "higher" else -math.log(row.ratio)


def _low(row: Comparison) -> float | None:
    """The end of the interval on the worse side, as a log ratio above 0 where better; None without an interval."""
    end = row.ci_low if row.better == "higher" else row.ci_high
    if end is None or end <= 0:
        return None
    return math.log(end) if row.better == "higher" else -math.log(end)


def _waiting(chosen: Sequence[LevelChoice]) -> list[str]:
    """Where speculation is off and some arm is not decided."""
    waiting = [choice for choice in chosen if choice.undecided]
    if not waiting:
        return []
    told = ", ".join(
        f"{choice.level} stream{'s' if choice.level != 1 else ''} ({', '.join(choice.undecided)})" for choice in waiting
    )
    return [f"off at {told} for want of a verdict, not because of one"]


def _notes(
    levels: Sequence[int],
    chosen: Sequence[LevelChoice],
    settings: Mapping[str, Any],
    baseline: Mapping[str, Any],
    name: str,
) -> list[str]:
    notes = []
    if chosen[-1].depth:
        notes.append(
            f"speculation still pays at the highest level measured ({levels[-1]}); above it nothing is known, so it is"
            " off there: measure higher levels to extend it"
        )
    if levels[0] > 1 and chosen[0].depth:
        notes.append(f"below {levels[0]} streams nothing was measured; the depth of {levels[0]} is carried down")
    if different := unlike(settings, baseline):
        notes.append(
            f"off means depth 0 of this server, which differs from {name} in {', '.join(different)}: whether it costs"
            f" nothing there was not measured"
        )
    return notes
