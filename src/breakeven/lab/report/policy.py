"""Which arm at which load: the policy that the verdicts support, in words. Pure.

Only a verdict moves anybody off the baseline: an arm that pays is chosen, the best of several by its ratio. Where none
pays the baseline stays, and where an arm is undecided that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from breakeven.lab.report import words
from breakeven.lab.summary import Summary


@dataclass(frozen=True, slots=True)
class Choice:
    """At one level: the arm to run, its change, and what is open. `decided`: rests on verdicts alone."""

    level: int
    arm: str
    ratio: float | None
    decided: bool
    reason: str


def choices(summary: Summary) -> list[Choice]:
    """One for each level, by rising level. A level without any comparison keeps the baseline, undecided."""
    baseline = summary.campaign.baseline
    by_arm = {arm: {row.level: row.comparison for row in words.rows(summary, arm)} for arm in summary.arms}
    found = []
    for level in summary.campaign.levels:
        here = {arm: rows[level] for arm, rows in by_arm.items() if level in rows and not rows[level].synthetic}
        paying = {arm: c.ratio for arm, c in here.items() if c.verdict == "pays" and c.ratio is not None}
        undecided = [arm for arm, c in here.items() if c.verdict == "undecided"]
        if paying:
            best = max(paying, key=lambda arm: paying[arm] or 0.0)
            others = [arm for arm in paying if arm != best]
            reason = f"pays{f'; so does {words.joined(others)}, less' if others else ''}"
            found.append(Choice(level, best, paying[best], True, reason))
        elif undecided or not here:
            reason = f"{words.joined(undecided)} undecided" if undecided else "nothing was compared"
            found.append(Choice(level, baseline, None, False, reason))
        else:
            kinds = {c.verdict for c in here.values()}
            reason = (
                "nothing pays"
                if len(kinds) > 1
                else {"hurts": "speculation hurts"}.get(next(iter(kinds)), "makes no difference")
            )
            found.append(Choice(level, baseline, None, True, reason))
    return found


def sentence(summary: Summary, found: Sequence[Choice]) -> str:
    """The policy in one or two sentences."""
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
