"""The step plan: what one forward of the target computes, in plain host data. No tensors, no requests.

Prefill, decode and verify are one thing: each sequence contributes rows (token, position) that continue its cached
prefix. They differ in how many rows there are, which of them are sampled, and whether the rows form a tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a step.

    Row i is stored at index `prefix + i` of the sequence's pages. `positions` are the rotary positions: for a tree,
    prefix + depth. `visible` None: row i sees the prefix and rows 0..i; else bit j of visible[i] says whether row i
    sees row j. `sampled`: how many of the last rows need logits.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    prefix: int
    pages: tuple[int, ...]
    sampled: int
    visible: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All the rows of one forward, sequence after sequence."""

    sequences: tuple[SequenceRows, ...]
    num_rows: int = field(init=False)
    num_sampled: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_rows", sum(len(sequence) for sequence in self.sequences))
        object.__setattr__(self, "num_sampled", sum(sequence.sampled for sequence in self.sequences))
