"""Trees of drafted tokens: what a verify forward scores, as plain data (design after EAGLE-2/3, arXiv 2406.16858).

Node 0 is the root: the last token already sampled, whose KV is not yet computed. Drafted token i is node i + 1.
Nodes, root included, are the rows of the verify forward, in this order; parents come before their children.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


class TreeError(ValueError):
    """A tree that breaks a rule; the message names the node."""


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens and the node each hangs from.

    `tokens[i]` is the token of node i + 1; `parents[i]` is the node (0: the root) it continues. Siblings hold distinct
    tokens, so that a drawn token picks at most one child. The order of nodes is also their priority: `limit` keeps the
    first ones. Raises TreeError if a rule is broken.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise TreeError(f"a tree needs one parent per token, got {len(self.tokens)} and {len(self.parents)}")
        siblings: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            if not 0 <= parent < node:
                raise TreeError(f"node {node} has parent {parent}; a parent must come before its child, from 0")
            if token < 0:
                raise TreeError(f"node {node} has the negative token id {token}")
            if (parent, token) in siblings:
                raise TreeError(f"node {node} repeats token {token} among the children of node {parent}")
            siblings.add((parent, token))

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> DraftTree:
        """Each token continues the one before it, the first the root."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(len(tokens))))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], max_nodes: int | None = None) -> DraftTree:
        """Paths from the root merged where they share a prefix, at most `max_nodes` drafted nodes (root excluded).

        Nodes are filed path by path, each from the root down, so earlier paths win when the room runs out.
        """
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = index.get((node, token))
                if child is None:
                    if max_nodes is not None and len(tokens) >= max_nodes:
                        break
                    tokens.append(token)
                    parents.append(node)
                    child = index[node, token] = len(tokens)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        """Nodes, root included: the rows of the verify forward."""
        return len(self.tokens) + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node: root 0, its children 1. A node's position is the root's position plus its depth."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Tokens on the longest path, root excluded; 0 if nothing is drafted."""
        return max(self.depths)

    @cached_property
    def ancestor_masks(self) -> tuple[int, ...]:
        """Bit j of entry i: node i attends to node j, being itself or an ancestor. Own bit OR the parent's mask."""
        masks = [1]
        for node, parent in enumerate(self.parents, start=1):
            masks.append(1 << node | masks[parent])
        return tuple(masks)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Drafted tokens from the root (excluded) down to and including each node; the root's is empty."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*paths[parent], token))
        return tuple(paths)

    @cached_property
    def is_chain(self) -> bool:
        """Every node continues the one before it, so that a plain causal mask serves."""
        return all(parent == node for node, parent in enumerate(self.parents))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents, self.tokens, strict=True)
        return {pair: node for node, pair in enumerate(pairs, start=1)}

    def child(self, node: int, token: int) -> int | None:
        """The node that continues `node` with `token`, if it was drafted."""
        return self._children.get((node, token))

    def limit(self, max_depth: int | None = None, max_nodes: int | None = None) -> DraftTree:
        """The tree without nodes deeper than `max_depth`, then the first `max_nodes` drafted ones of what is left.

        Always again a tree, as parents come first. None: no limit; below 1: nothing is left but the root.
        """
        depth_limit = self.max_depth if max_depth is None else max_depth
        room = len(self.tokens) if max_nodes is None else max_nodes
        if depth_limit >= self.max_depth and room >= len(self.tokens):
            return self
        new_index = {0: 0}
        tokens: list[int] = []
        parents: list[int] = []
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            if len(tokens) >= room:
                break
            if self.depths[node] <= depth_limit:
                tokens.append(token)
                parents.append(new_index[parent])
                new_index[node] = len(tokens)
        return DraftTree(tuple(tokens), tuple(parents))
