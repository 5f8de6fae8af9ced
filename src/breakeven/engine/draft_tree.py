"""Which drafted candidates are verified: EAGLE-2's global re-ranking (arXiv 2406.16858, section 4.2), pure.

Drafting yields levels. Level 0 holds the k most likely tokens after the root. The k best nodes of a level, its
frontier, are each continued by their own k most likely tokens, which makes the k * k candidates of the next level; the
frontier of level 0 is all of it. All candidates of all levels form the pool, level after level: k + (levels - 1) * k²,
which is how SGLang counts (`num_steps` levels; 2 steps of top 4 give a pool of 20).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from breakeven.engine.tree import DraftTree


def pool_size(levels: int, topk: int) -> int:
    """Candidates in all levels together."""
    return topk + (levels - 1) * topk * topk


def pool_parents(frontiers: NDArray[np.int64], levels: int, topk: int) -> NDArray[np.int64]:
    """Place in the pool of each candidate's parent, -1 for the root: [batch, pool].

    frontiers [batch, max(levels - 2, 0), topk]: row l names, by place within level l + 1, the nodes of its frontier in
    the order in which they were continued.
    """
    batch = frontiers.shape[0]
    parents = np.full((batch, pool_size(levels, topk)), -1, np.int64)
    for level in range(1, levels):
        start = pool_size(level, topk)
        if level == 1:
            continued = np.broadcast_to(np.arange(topk), (batch, topk))
        else:
            continued = pool_size(level - 1, topk) + frontiers[:, level - 2]
        parents[:, start : start + topk * topk] = np.repeat(continued, topk, axis=1)
    return parents


def best_trees(
    tokens: NDArray[np.int64],
    scores: NDArray[np.float32],
    frontiers: NDArray[np.int64],
    levels: int,
    topk: int,
    max_nodes: int,
) -> list[DraftTree]:
    """One tree per row of the batch: the `max_nodes` candidates of the highest score, in the order of the pool.

    tokens and scores [batch, pool]; a score is the log-probability of the path, so it never rises from a parent to its
    child. Of equal scores the earlier in the pool wins. Both together mean that whoever is chosen has all its ancestors
    chosen, and that parents come first. frontiers: see `pool_parents`.
    """
    parents = pool_parents(frontiers, levels, topk)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :max_nodes]
    chosen = np.sort(order, axis=1)
    batch, nodes = chosen.shape
    node_of = np.zeros((batch, parents.shape[1] + 1), np.int64)  # the last column is the root: place -1, node 0
    np.put_along_axis(node_of, chosen, np.broadcast_to(np.arange(1, nodes + 1), chosen.shape), axis=1)
    chosen_tokens = np.take_along_axis(tokens, chosen, axis=1).tolist()
    chosen_parents = np.take_along_axis(node_of, np.take_along_axis(parents, chosen, axis=1), axis=1).tolist()
    return [DraftTree(tuple(row), tuple(up)) for row, up in zip(chosen_tokens, chosen_parents, strict=True)]
