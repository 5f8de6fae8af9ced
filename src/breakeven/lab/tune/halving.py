"""Successive halving: how many candidates are measured in which round, and in how many blocks. Pure.

Every round spends about the same: as candidates fall by `eta`, blocks rise by it (Jamieson and Talwalkar,
"Non-stochastic best arm identification and hyperparameter optimization", 2016). The unit is a block, one launch of
every candidate and of the baseline, because launches, not requests, are what scatters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """`number` from 1. `candidates` are measured in `blocks` blocks, and `keep` of them stay."""

    number: int
    candidates: int
    blocks: int
    keep: int


def rounds(candidates: int, *, eta: int = 2, first_blocks: int = 2, finalists: int = 2) -> tuple[Round, ...]:
    """The rounds for so many candidates; at least one, so that there is something to choose by.

    Each round keeps one in `eta`, rounded up, and not fewer than `finalists`. Raises ValueError for fewer than one
    candidate, block or finalist, or eta below 2.
    """
    if candidates < 1 or first_blocks < 1 or finalists < 1 or eta < 2:
        raise ValueError(
            f"halving needs at least 1 candidate, block and finalist, and eta of at least 2, not {candidates},"
            f" {first_blocks}, {finalists} and {eta}"
        )
    found: list[Round] = []
    left = candidates
    while not found or left > finalists:
        keep = min(left, max(finalists, -(-left // eta)))
        found.append(Round(len(found) + 1, left, -(-first_blocks * candidates // left), keep))
        left = keep
    return tuple(found)


def launches(plan: tuple[Round, ...]) -> int:
    """Servers started over all rounds, the baseline's included."""
    return sum((step.candidates + 1) * step.blocks for step in plan)
