"""The experimental design: who is measured when, with which prompts and which seeds. Pure and reproducible.

Every order and draw is a function of the campaign's seed through SHA-256, never of Python's `hash()` or of a library's
generator, so a plan made on one machine is the plan on every other, for ever.

Sources: E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments" (1949).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def stable_hash(*parts: object) -> int:
    """A 256-bit integer that depends on the parts' text alone (separator-safe); equal on every machine and version."""
    text = "".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def stable_shuffle(items: Sequence[T], *parts: object) -> tuple[T, ...]:
    """The items in an order drawn by `parts`: sorted by the hash of each one's position."""
    return tuple(items[i] for i in sorted(range(len(items)), key=lambda i: stable_hash("shuffle", *parts, i)))


def block_seed(seed: int, block: int) -> int:
    """The sampling seed of a block, the same for each of its arms: 31 bits, which every server accepts."""
    return stable_hash("block", seed, block) % 2**31


def request_seed(seed: int, block: int, condition: str, level: int, index: int) -> int:
    """The sampling seed of one request of a cell, the same for every arm: 31 bits."""
    return stable_hash("request", seed, block, condition, level, index) % 2**31


# --- orders ---------------------------------------------------------------------------------------------------------


def williams_square(n: int) -> tuple[tuple[int, ...], ...]:
    """Orders of n treatments, balanced for position and for first-order carry-over.

    Even n: n rows; each treatment is once in each position and follows each other treatment exactly once. Odd n: one
    square cannot do that, so 2n rows (a square and its mirror); each treatment is twice in each position and follows
    each other exactly twice. The mirror of every row is a row.

    Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"a Williams square needs at least one treatment, not {n}")
    first = [(step + 1) // 2 if step % 2 else (n - step // 2) % n for step in range(n)]  # 0, 1, n-1, 2, n-2, …
    rows = [tuple((entry + shift) % n for entry in first) for shift in range(n)]
    if n % 2 and n > 1:
        rows += [tuple(reversed(row)) for row in rows]
    return tuple(rows)


def _counterbalanced(items: Sequence[T], blocks: int, seed: int, purpose: str) -> tuple[tuple[T, ...], ...]:
    """One order per block: randomised Williams squares, dealt as row, mirror, row, mirror, …

    A row followed by its mirror cancels a linear drift every two blocks, so a campaign that stops before the square
    is complete is still fair to within one block. Each pass through the square relabels the treatments afresh.
    """
    if blocks < 0:
        raise ValueError(f"blocks must not be negative, but is {blocks}")
    if not items:
        raise ValueError(f"there are no {purpose} to put in order")
    if len(set(items)) != len(items):
        raise ValueError(f"{purpose} must be distinct, but are {list(items)}")
    pairs = sorted({min((row, row[::-1]), (row[::-1], row)) for row in williams_square(len(items))})
    orders: list[tuple[T, ...]] = []
    cycle = 0
    while len(orders) < blocks:
        labels = stable_shuffle(items, seed, purpose, "labels", cycle)
        for number, pair in enumerate(stable_shuffle(pairs, seed, purpose, "pairs", cycle)):
            rows = stable_shuffle(pair, seed, purpose, "within", cycle, number)
            orders += [tuple(labels[entry] for entry in row) for row in rows]
        cycle += 1
    return tuple(orders[:blocks])


def arm_orders(arms: Sequence[str], blocks: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """The order of the arms' launches in each block. Raises ValueError for no arms or equal names."""
    return _counterbalanced(arms, blocks, seed, "arms")


def level_orders(levels: Sequence[int], blocks: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The order of the load levels in each block, the same for all its arms. Raises ValueError as `arm_orders`."""
    return _counterbalanced(levels, blocks, seed, "levels")


def condition_orders(conditions: Sequence[str], blocks: int, seed: int) -> tuple[tuple[str, ...], ...]:
    """The order of the conditions in each block, the same for all its arms. Raises ValueError as `arm_orders`."""
    return _counterbalanced(conditions, blocks, seed, "conditions")


@dataclass(frozen=True, slots=True)
class Balance:
    """How often each treatment stood where. `complete`: every count is equal, so drift and carry-over cancel."""

    positions: Mapping[tuple[str, int], int]  # (treatment, position from 0) → times
    carry_over: Mapping[tuple[str, str], int]  # (treatment, its predecessor) → times
    complete: bool


def balance(orders: Sequence[Sequence[object]]) -> Balance:
    """Count positions and successions in the orders. Treatments are named by `str`."""
    names = [[str(entry) for entry in order] for order in orders]
    treatments = sorted({entry for order in names for entry in order})
    positions = Counter({(t, p): 0 for t in treatments for p in range(len(treatments))})
    carry = Counter({(a, b): 0 for a in treatments for b in treatments if a != b})
    for order in names:
        positions.update((entry, position) for position, entry in enumerate(order))
        carry.update((after, before) for before, after in itertools.pairwise(order))
    complete = len(set(positions.values())) <= 1 and len(set(carry.values())) <= 1
    return Balance(dict(positions), dict(carry), complete)


# --- prompts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the supply of prompts was too small. Counts are of requests (per arm)."""

    across_blocks: int  # requests whose prompt an earlier block had already used
    within_block: int  # requests whose prompt another cell of the same block had already used
    within_cell: int  # requests whose prompt the same cell had already used
    note: str  # one sentence; empty when every prompt is fresh


@dataclass(frozen=True, slots=True)
class PromptSelection(Sequence[tuple[str, ...]]):
    """The prompt ids of each block, in the order in which they are sent. Indexing and iterating go by block."""

    blocks: tuple[tuple[str, ...], ...]
    reuse: Reuse

    def __getitem__(self, block):  # type: ignore[no-untyped-def]  # Sequence's overloads add nothing here
        return self.blocks[block]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.blocks)


@dataclass(frozen=True, slots=True)
class CellPromptSelection:
    """The prompt ids of each cell: `cells[block][key]`, in the order in which they are sent."""

    cells: tuple[Mapping[Hashable, tuple[str, ...]], ...]
    reuse: Reuse


def select_prompts(prompt_ids: Sequence[str], need: int, blocks: int, seed: int) -> PromptSelection:
    """Draw `need` prompts for each block, fresh as long as the supply lasts; arms do not enter, so they share them.

    Raises ValueError for an empty or repeating list of ids, or a negative need.
    """
    chosen = select_cell_prompts(prompt_ids, {"block": need}, blocks, seed)
    return PromptSelection(tuple(cells["block"] for cells in chosen.cells), chosen.reuse)


def select_cell_prompts(
    prompt_ids: Sequence[str], needs: Mapping[Key, int], blocks: int, seed: int
) -> CellPromptSelection:
    """Draw prompts for every cell of every block. `needs`: requests per cell, by level or any other key.

    The rule: a cell takes the prompts used least so far, then those used least under its own key, then by lot. So no
    prompt is used twice while an unused one is left, reuse is as even as it can be, and a prompt repeats inside a
    cell only after that cell has used them all. Within each pass the order is random. The same for all arms.

    Raises ValueError for an empty or repeating list of ids, or a negative need.
    """
    if len(set(prompt_ids)) != len(prompt_ids):
        twice = [name for name, times in Counter(prompt_ids).items() if times > 1]
        raise ValueError(f"prompt ids must be distinct, but these repeat: {twice[:5]}")
    if any(count < 0 for count in needs.values()) or blocks < 0:
        raise ValueError("the numbers of requests and of blocks must not be negative")
    if not prompt_ids and any(needs.values()):
        raise ValueError("there are no prompts to choose from")
    used: Counter[str] = Counter()
    used_under: dict[Key, Counter[str]] = {key: Counter() for key in needs}
    cells: list[dict[Hashable, tuple[str, ...]]] = []
    across = within_block = within_cell = 0
    for block in range(blocks):
        earlier = set(used)
        here: set[str] = set()
        chosen: dict[Hashable, tuple[str, ...]] = {}
        for key, need in needs.items():
            sequence: list[str] = []
            while len(sequence) < need:
                lot = stable_shuffle(prompt_ids, seed, "lot", block, key, len(sequence))
                ranked = sorted(lot, key=lambda name, under=used_under[key]: (used[name], under[name]))  # type: ignore[misc]
                taken = ranked[: need - len(sequence)]
                sequence.extend(stable_shuffle(taken, seed, "order", block, key, len(sequence)))
                used.update(taken)
                used_under[key].update(taken)
            distinct = set(sequence)
            across += sum(name in earlier for name in sequence)
            within_block += sum(name in here for name in sequence)
            within_cell += len(sequence) - len(distinct)
            here |= distinct
            chosen[key] = tuple(sequence)
        cells.append(chosen)
    return CellPromptSelection(
        tuple(cells),
        Reuse(across, within_block, within_cell, _reuse_note(len(prompt_ids), across, within_block, within_cell)),
    )


def _reuse_note(supply: int, across: int, within_block: int, within_cell: int) -> str:
    parts = [
        f"{count} {where}"
        for count, where in (
            (across, "in a later block"),
            (within_block, "in another cell of the same block"),
            (within_cell, "within a cell"),
        )
        if count
    ]
    if not parts:
        return ""
    return (
        f"the supply of {supply} prompts is too small for fresh ones throughout; requests that reuse a prompt: "
        + ", ".join(parts)
    )
