"""Lossless verification by one rule (pure).

Candidates are chosen without looking at the noise of the target's draw, so the exact rule is: at each node draw a
token from the target's warped distribution there; if it is a drafted child, descend, otherwise emit it and stop; at a
leaf emit it as the bonus. Greedy is the special case of an argmax draw. No draft probabilities are needed, and the
draw is the one plain decoding makes: with noise keyed by (seed, position) even the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from breakeven.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one round emits.

    `tokens` are the accepted drafts and, last, the token drawn where the walk ended. `nodes` are the rows whose KV is
    kept: the root and the accepted nodes, root first; `tokens[i]` was drawn from the logits of row `nodes[i]`.
    The last token's own KV is not computed yet: it is the next round's root.
    """

    tokens: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        """Drafted tokens accepted; the round's acceptance length is this plus one."""
        return len(self.nodes) - 1


def walk(tree: DraftTree | None, draws: Sequence[int]) -> Accepted:
    """Follow the draws down the tree. `draws[node]` is the token drawn at that node; None: nothing was drafted.

    Raises ValueError if there is not exactly one draw per node.
    """
    num_nodes = 1 if tree is None else len(tree)
    if len(draws) != num_nodes:
        raise ValueError(f"verification needs one draw per node: {num_nodes} nodes, {len(draws)} draws")
    if tree is None:
        return Accepted((draws[0],), (0,))
    tokens, nodes = [draws[0]], [0]
    while (child := tree.child(nodes[-1], tokens[-1])) is not None:
        nodes.append(child)
        tokens.append(draws[child])
    return Accepted(tuple(tokens), tuple(nodes))


def walk_batch(trees: Sequence[DraftTree | None], draws: Sequence[int]) -> list[Accepted]:
    """`walk` for each request; `draws` holds their rows one request after another, each in the order of its nodes.

    Nodes in the results count from each request's own root. Raises ValueError if the number of draws is wrong.
    """
    sizes = [1 if tree is None else len(tree) for tree in trees]
    if sum(sizes) != len(draws):
        raise ValueError(f"verification needs one draw per node: {sum(sizes)} nodes in all, {len(draws)} draws")
    accepted = []
    start = 0
    for tree, size in zip(trees, sizes, strict=True):
        accepted.append(walk(tree, draws[start : start + size]))
        start += size
    return accepted
