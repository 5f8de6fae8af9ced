"""The draft vocabulary: the target tokens that answers use most."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from breakeven.train.conversations import Conversation


def count_tokens(conversations: Iterable[Conversation], vocab_size: int) -> NDArray[np.int64]:
    """How often each token is learnt (mask above 0): int64 [vocab]."""
    counts = np.zeros(vocab_size, np.int64)
    for item in conversations:
        tokens = np.asarray(item.tokens, np.int64)[np.asarray(item.mask) > 0]
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def choose_vocab(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The `size` most frequent target ids, ascending; ties go to the lower id (as SpecForge maps them)."""
    if not 0 < size <= len(counts):
        raise ValueError(f"the draft vocabulary must have 1 to {len(counts)} tokens, asked for {size}")
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size]).astype(np.int64)


def offsets(target_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """d2t as checkpoints store it: target id = i + d2t[i]."""
    return target_ids - np.arange(len(target_ids), dtype=np.int64)


def coverage(counts: NDArray[np.int64], target_ids: NDArray[np.int64]) -> float:
    """Share of the learnt tokens that the vocabulary holds."""
    total = int(counts.sum())
    return float(counts[target_ids].sum() / total) if total else 0.0


def pruned_rows(counts: NDArray[np.int64], target_ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Which rows of a trained head stay in a vocabulary of `size`: the most frequent, ascending."""
    if not 0 < size <= len(target_ids):
        raise ValueError(f"the trained vocabulary has {len(target_ids)} tokens; it cannot be pruned to {size}")
    return choose_vocab(counts[target_ids], size)
