"""What a reader should know of a run besides the lints of `lints`: notes of cells, open loop, unlike lengths. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from breakeven.lab.campaign import AttachArm, Campaign
from breakeven.lab.cell_summary import notes
from breakeven.lab.lints import cell_lints
from breakeven.lab.metrics import is_valid
from breakeven.lab.records import CellKey
from breakeven.lab.reduced import ReducedCell
from breakeven.lab.samples import members
from breakeven.lab.summary import ALL, Lint

_LENGTH_TOLERANCE = 0.10  # relative difference of two arms' mean output lengths that is worth a lint


def cautions(
    campaign: Campaign, conditions: Sequence[str], cells: Sequence[ReducedCell], valid: Mapping[CellKey, ReducedCell]
) -> list[Lint]:
    """The lints of a run's valid cells, and what is to be said of its load and its arms."""
    where: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        for note in notes(cell):
            where[note].append(cell.key.id)
        if cell.valid and cell.metrics.throughput_tok_s.value is None:
            where[f"no throughput: {cell.metrics.throughput_tok_s.note}"].append(cell.key.id)
    lints = [Lint(message=message, cells=names) for message, names in where.items()]
    if campaign.open_loop:
        arrivals = [campaign.setting(condition).arrivals for condition in conditions]
        processes = " and ".join(dict.fromkeys(a.process for a in arrivals))
        lints.append(
            Lint(
                message=f"open loop, {processes} arrivals: a level is a rate, not a number of streams:"
                f" its number times {arrivals[0].unit_rate:g} requests/s",
                cells=[],
            )
        )
    attached = [name for name, arm in campaign.arms.items() if isinstance(arm, AttachArm) and arm.start_command is None]
    if attached:
        lints.append(
            Lint(
                message=f"{', '.join(attached)}: attached, so not launched anew for each block; the intervals hold the"
                " scatter of one launch over time, not that between launches",
                cells=[],
            )
        )
    unstopped = [
        name
        for name, arm in campaign.arms.items()
        if isinstance(arm, AttachArm) and arm.start_command is not None and arm.stop_command is None
    ]
    if unstopped:
        lints.append(
            Lint(
                message=f"{', '.join(unstopped)}: start_command without stop_command, so nothing shows that each block "
                "was a launch of its own; if the command leaves a running server alone, the intervals hold the scatter "
                "of one launch over time, not that between launches",
                cells=[],
            )
        )
    for arm in (name for name in campaign.arms if name != campaign.baseline):
        for level in sorted(campaign.levels):
            lints += _length_lint(campaign, conditions, arm, level, valid)
    return [*lints, *cell_lints(campaign, valid)]


def _length_lint(
    campaign: Campaign, conditions: Sequence[str], arm: str, level: int, valid: Mapping[CellKey, ReducedCell]
) -> list[Lint]:
    """Arms that do not write equally much do not do the same work."""
    ours = _mean_length(members(arm, ALL, level, conditions, valid))
    theirs = _mean_length(members(campaign.baseline, ALL, level, conditions, valid))
    if ours is None or theirs is None or abs(ours / theirs - 1) <= _LENGTH_TOLERANCE:
        return []
    return [
        Lint(
            message=f"{arm} answers with {ours:.0f} tokens on average at level {level}, {campaign.baseline} with"
            f" {theirs:.0f}: they do not do the same work, so compare TPOT rather than latency",
            cells=[],
        )
    ]


def _mean_length(cells: Sequence[ReducedCell]) -> float | None:
    counts = [r.completion_tokens or 0 for cell in cells for r in cell.record.requests if is_valid(r)]
    return sum(counts) / len(counts) if sum(counts) else None
