"""Re-ranking drafted candidates, against a brute-force oracle that knows paths only."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.engine.draft_tree import best_trees, pool_size
from breakeven.engine.tree import DraftTree

Path = tuple[int, ...]


class Candidates:
    """A random pool: log-probabilities by path, tokens distinct among siblings; `ties`: scores often alike."""

    def __init__(self, seed: int, levels: int, topk: int, *, ties: bool) -> None:
        rng = np.random.default_rng(seed)
        self.levels, self.topk = levels, topk
        self.paths: list[Path] = []
        self.scores: list[float] = []
        self.frontiers: list[list[int]] = []
        continued: list[tuple[Path, float]] = [((), 0.0)]
        for level in range(levels):
            children: list[tuple[Path, float]] = []
            for path, score in continued:
                drops = -np.sort(rng.integers(0, 4, topk) / 2 if ties else rng.exponential(size=topk))
                tokens = rng.permutation(20)[:topk]
                children += [
                    ((*path, int(token)), float(np.float32(score + min(drop, 0.0))))
                    for token, drop in zip(tokens, drops, strict=True)
                ]
            self.paths += [path for path, _ in children]
            self.scores += [score for _, score in children]
            frontier = sorted(range(len(children)), key=lambda place: -children[place][1])[:topk]
            rng.shuffle(frontier)  # the order within a frontier is the device's business
            if level == 0:
                frontier = list(range(topk))
            elif level + 1 < levels:
                self.frontiers.append(frontier)
            continued = [children[place] for place in frontier]

    def best(self, max_nodes: int) -> DraftTree:
        [tree] = best_trees(
            np.array([[path[-1] for path in self.paths]]),
            np.array([self.scores], np.float32),
            np.array(self.frontiers, np.int64).reshape(1, len(self.frontiers), self.topk),
            self.levels,
            self.topk,
            max_nodes,
        )
        return tree


shapes = {"seed": st.integers(0, 10**6), "levels": st.integers(1, 5), "topk": st.integers(1, 4)}


@given(**shapes, max_nodes=st.integers(1, 63), ties=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_best_candidates_are_chosen_with_all_their_ancestors(
    seed: int, levels: int, topk: int, max_nodes: int, ties: bool
) -> None:
    made = Candidates(seed, levels, topk, ties=ties)
    order = sorted(range(len(made.paths)), key=lambda place: (-made.scores[place], place))
    chosen = [made.paths[place] for place in sorted(order[:max_nodes])]
    assert list(made.best(max_nodes).paths[1:]) == chosen  # a node's path shows that its ancestors are there
    for path in chosen:
        assert path[:-1] == () or path[:-1] in chosen


@given(**shapes, max_nodes=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_no_other_tree_of_that_size_is_worth_more(seed: int, levels: int, topk: int, max_nodes: int) -> None:
    """The sum of path probabilities is the expected number of accepted drafts if the head is calibrated."""
    made = Candidates(seed, min(levels, 3), min(topk, 2), ties=False)
    value = {path: float(np.exp(score)) for path, score in zip(made.paths, made.scores, strict=True)}
    size = min(max_nodes, len(made.paths))
    ours = sum(value[path] for path in made.best(max_nodes).paths[1:])
    for other in itertools.combinations(made.paths, size):
        if all(path[:-1] == () or path[:-1] in other for path in other):
            assert sum(value[path] for path in other) <= ours + 1e-6


def test_two_steps_of_top_four_give_a_pool_of_twenty_and_sixteen_nodes() -> None:
    made = Candidates(3, 2, 4, ties=False)
    assert pool_size(2, 4) == len(made.paths) == 20
    tree = made.best(15)
    assert len(tree) == 16
    assert tree.max_depth <= 2


def test_each_request_of_a_batch_has_its_own_tree() -> None:
    pools = [Candidates(seed, 4, 3, ties=False) for seed in range(5)]
    trees = best_trees(
        np.array([[path[-1] for path in pool.paths] for pool in pools]),
        np.array([pool.scores for pool in pools], np.float32),
        np.array([pool.frontiers for pool in pools], np.int64),
        4,
        3,
        11,
    )
    assert trees == [pool.best(11) for pool in pools]


def test_scores_that_are_not_numbers_still_make_a_tree() -> None:
    """Damaged weights may give NaN; such candidates come last, and what comes first is still a tree."""
    tokens = np.arange(20)[None]
    for nan_from in (0, 4, 10):
        scores = -np.arange(20, dtype=np.float32)[None]
        scores[:, nan_from:] = np.nan
        [tree] = best_trees(tokens, scores, np.zeros((1, 0, 4), np.int64), 2, 4, 15)
        assert len(tree) == 16
