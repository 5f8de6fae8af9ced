"""What the search makes of its measurements: which candidates stay, and the schedule they propose. Pure.

A candidate is worth what it gains at the levels where it gains: the sum over levels of max(0, log ratio), because a
schedule turns it off elsewhere. Several of one family (they differ in depth alone) are worth the best of them at each
level. All of this is by point estimates: the search only proposes. What is reported is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from breakeven.lab.policy.ranges import Range, schedule
from breakeven.lab.policy.shapes import Shape

Gains = Mapping[str, Mapping[int, float]]  # candidate → level → mean log ratio over blocks, above 0 where better


@dataclass(frozen=True, slots=True)
class Proposal:
    """`winner`: the best single candidate, run at every load; empty where nothing gains anywhere. `deepest`: of the
    schedule's family, the one whose settings it takes. `ranges`: the schedule; `depths`: its depth at each level."""

    winner: str
    deepest: str
    depths: tuple[int, ...]
    ranges: tuple[Range, ...]


def mean_gains(block_gains: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, dict[int, float]]:
    """The means over blocks; levels without a valid block are left out."""
    return {
        name: {level: sum(values) / len(values) for level, values in by_level.items() if values}
        for name, by_level in block_gains.items()
    }


def worth(names: Sequence[str], gains: Gains, families: Mapping[str, str], levels: Sequence[int]) -> float:
    """Of the best family among `names`: the sum over levels of the best gain there, or 0 for off."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(families[name], []).append(name)
    return max(
        (
            sum(max(0.0, *(gains.get(name, {}).get(level, 0.0) for name in members)) for level in levels)
            for members in groups.values()
        ),
        default=0.0,
    )


def survivors(gains: Gains, families: Mapping[str, str], levels: Sequence[int], keep: int) -> tuple[str, ...]:
    """The `keep` candidates that stay, best first: one at a time the one that adds most to what a schedule of those
    already kept is worth, then the one that is worth most by itself, then by order. Candidates without a single valid
    figure never stay."""
    waiting = [name for name, by_level in gains.items() if by_level]
    kept: list[str] = []
    while waiting and len(kept) < keep:
        best = max(
            waiting,
            key=lambda name: (
                worth([*kept, name], gains, families, levels),
                worth([name], gains, families, levels),
                _total(gains[name], levels),
            ),
        )
        kept.append(best)
        waiting.remove(best)
    return tuple(kept)


def _total(by_level: Mapping[int, float], levels: Sequence[int]) -> float:
    """Where nothing gains: the least loss."""
    return sum(by_level.get(level, -math.inf) for level in levels)


def propose(gains: Gains, shapes: Mapping[str, Shape], levels: Sequence[int]) -> Proposal:
    """The best single shape, and the best schedule of one family. `levels`: ascending."""
    known = [name for name, by_level in gains.items() if by_level]
    families = {name: shapes[name].family for name in known}
    off = Proposal("", "", tuple(0 for _ in levels), schedule(levels, [0] * len(levels), lambda depth, level: False))
    if not known or worth(known, gains, families, levels) <= 0:
        return off
    winner = max(known, key=lambda name: worth([name], gains, families, levels))
    family = max(
        dict.fromkeys(families.values()),
        key=lambda key: worth([name for name in known if families[name] == key], gains, families, levels),
    )
    members = [name for name in known if families[name] == family]
    depths = []
    for level in levels:
        here = {name: gains[name][level] for name in members if level in gains[name]}
        best = max(here, key=lambda name: here[name], default=None)
        depths.append(shapes[best].depth if best is not None and here[best] > 0 else 0)

    def gained(depth: int, level: int) -> bool:
        return any(shapes[name].depth == depth and gains[name].get(level, -1.0) >= 0 for name in members)

    deepest = max((n for n in members if shapes[n].depth in depths), key=lambda name: shapes[name].depth)
    return Proposal(winner, deepest, tuple(depths), schedule(levels, depths, gained))
