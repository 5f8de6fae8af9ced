from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.engine.tree import DraftTree, TreeError

paths = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8)


def prefixes(given_paths: list[list[int]]) -> list[tuple[int, ...]]:
    """Every distinct non-empty prefix, in order of first appearance."""
    return list(dict.fromkeys(tuple(path[:end]) for path in given_paths for end in range(1, len(path) + 1)))


def test_a_chain_continues_token_by_token() -> None:
    tree = DraftTree.chain([7, 7, 9])
    assert tree == DraftTree((7, 7, 9), (0, 1, 2))
    assert len(tree) == 4
    assert tree.depths == (0, 1, 2, 3)
    assert tree.ancestor_masks == (0b1, 0b11, 0b111, 0b1111)
    assert tree.is_chain
    assert tree.child(1, 7) == 2
    assert tree.child(3, 7) is None


def test_an_empty_tree_is_the_root_alone() -> None:
    tree = DraftTree.chain([])
    assert (len(tree), tree.max_depth, tree.ancestor_masks, tree.paths) == (1, 0, (1,), ((),))


def test_branches_see_their_ancestors_only() -> None:
    tree = DraftTree.from_paths([[1, 2], [1, 3], [4]])
    assert tree == DraftTree((1, 2, 3, 4), (0, 1, 1, 0))
    assert tree.ancestor_masks == (0b1, 0b11, 0b111, 0b1011, 0b10001)
    assert not tree.is_chain


@given(paths)
def test_from_paths_merges_shared_prefixes_and_nothing_else(given_paths: list[list[int]]) -> None:
    assert list(DraftTree.from_paths(given_paths).paths[1:]) == prefixes(given_paths)


@given(paths, st.integers(0, 10))
def test_from_paths_with_little_room_keeps_earlier_paths_first(given_paths: list[list[int]], room: int) -> None:
    assert list(DraftTree.from_paths(given_paths, room).paths[1:]) == prefixes(given_paths)[:room]


@given(paths, st.integers(-1, 6), st.integers(-1, 12))
def test_limit_keeps_the_first_nodes_that_are_not_too_deep(given_paths: list[list[int]], depth: int, room: int) -> None:
    tree = DraftTree.from_paths(given_paths)
    expected = [path for path in tree.paths[1:] if len(path) <= depth][: max(room, 0)]
    assert list(tree.limit(depth, room).paths[1:]) == expected
    assert tree.limit() == tree


@given(paths)
def test_masks_depths_paths_and_children_agree(given_paths: list[list[int]]) -> None:
    tree = DraftTree.from_paths(given_paths)
    for node, path in enumerate(tree.paths):
        ancestors = [node]
        while ancestors[-1] != 0:
            ancestors.append(tree.parents[ancestors[-1] - 1])
        assert tree.ancestor_masks[node] == sum(1 << ancestor for ancestor in ancestors)
        assert tree.depths[node] == len(path) == len(ancestors) - 1
        for child, parent in pairwise(ancestors):
            assert tree.child(parent, tree.tokens[child - 1]) == child


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ((1, 2), (0,), "one parent per token"),
        ((1, 2), (0, 2), "node 2 has parent 2"),
        ((1,), (-1,), "node 1 has parent -1"),
        ((-5,), (0,), "negative token id -5"),
        ((1, 2, 2), (0, 1, 1), "node 3 repeats token 2 among the children of node 1"),
    ],
)
def test_a_broken_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(TreeError, match=complaint):
        DraftTree(tokens, parents)
