from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from breakeven.engine.config import SpeculationConfig
from breakeven.engine.proposers.base import DraftContext
from breakeven.engine.proposers.ngram import OCCURRENCES_SEARCHED, NgramProposer
from breakeven.engine.tree import DraftTree

CHAIN = SpeculationConfig("ngram", num_steps=3, eagle_topk=1, num_draft_tokens=4, ngram_min=2, ngram_max=4)
TREE = SpeculationConfig("ngram", num_steps=3, eagle_topk=3, num_draft_tokens=8, ngram_min=1, ngram_max=3)

tokens = st.lists(st.integers(0, 2), max_size=40)


def naive(context: Sequence[int], config: SpeculationConfig, max_depth: int) -> DraftTree | None:
    """Search the whole context afresh; continue a match past the end by copying from what is being drafted."""
    depth = min(config.num_steps, max_depth)
    paths: list[list[int]] = []
    for size in range(config.ngram_max, config.ngram_min - 1, -1):
        suffix = list(context[-size:])
        starts = [s for s in range(len(context) - size - 1, -1, -1) if list(context[s : s + size]) == suffix]
        for start in starts[:OCCURRENCES_SEARCHED] if size <= len(context) else ():
            extended = list(context)
            for _ in range(depth):
                extended.append(extended[start + size + len(extended) - len(context)])
            path = extended[len(context) :]
            if path not in paths:
                paths.append(path)
    paths = paths[: config.eagle_topk]
    return DraftTree.from_paths(paths, config.num_draft_tokens - 1) if paths and depth > 0 else None


def propose(proposer: NgramProposer, context: Sequence[int], max_depth: int = 99) -> DraftTree | None:
    (tree,) = proposer.propose([DraftContext("r", context, max_depth)])
    return tree


def test_what_followed_the_last_occurrence_of_the_suffix_is_drafted() -> None:
    context = [1, 2, 7, 8, 9, 1, 2, 5, 6, 4, 1, 2]
    assert propose(NgramProposer(CHAIN), context) == DraftTree.chain([5, 6, 4])


def test_a_longer_match_beats_a_more_recent_one() -> None:
    context = [3, 1, 2, 7, 7, 7, 1, 2, 5, 5, 5, 3, 1, 2]
    assert propose(NgramProposer(CHAIN), context) == DraftTree.chain([7, 7, 7])


def test_a_loop_is_continued_past_the_end_of_the_context() -> None:
    assert propose(NgramProposer(CHAIN), [1, 4, 1, 4, 1, 4]) == DraftTree.chain([1, 4, 1])


def test_different_continuations_become_branches() -> None:
    context = [1, 2, 5, 5, 5, 1, 2, 6, 6, 6, 1, 2]
    config = SpeculationConfig("ngram", num_steps=2, eagle_topk=2, num_draft_tokens=8)
    assert propose(NgramProposer(config), context) == DraftTree.from_paths([[6, 6], [5, 5]])


def test_without_a_match_or_room_nothing_is_drafted() -> None:
    proposer = NgramProposer(CHAIN)
    assert propose(proposer, []) is None
    assert propose(proposer, [1, 2, 3, 4]) is None
    assert propose(proposer, [1, 2, 1, 2, 1, 2], max_depth=0) is None


def test_requests_do_not_see_each_other() -> None:
    contexts = [DraftContext("a", [1, 2, 3, 1, 2], 9), DraftContext("b", [1, 2], 9)]
    assert NgramProposer(CHAIN).propose(contexts) == [DraftTree.chain([3, 1, 2]), None]


@given(tokens, st.integers(0, 4), st.sampled_from([CHAIN, TREE]))
def test_the_index_finds_what_a_naive_search_finds(
    context: list[int], max_depth: int, config: SpeculationConfig
) -> None:
    assert propose(NgramProposer(config), context, max_depth) == naive(context, config, max_depth)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8), st.sampled_from([CHAIN, TREE]))
def test_a_growing_context_is_indexed_as_if_read_at_once(runs: list[list[int]], config: SpeculationConfig) -> None:
    proposer = NgramProposer(config)
    context: list[int] = []
    for run in runs:
        context += run  # the engine appends to its own list
        assert propose(proposer, context) == naive(context, config, 99)


@given(tokens, tokens, st.sampled_from([CHAIN, TREE]))
def test_a_context_that_shrinks_or_is_replaced_is_read_anew(
    first: list[int], second: list[int], config: SpeculationConfig
) -> None:
    proposer = NgramProposer(config)
    propose(proposer, first)
    shorter = first[: len(first) // 2]
    assert propose(proposer, shorter) == naive(shorter, config, 99)
    proposer.forget("r")
    proposer.forget("never seen")
    assert propose(proposer, second) == naive(second, config, 99)


def test_a_replacement_that_is_longer_is_noticed() -> None:
    proposer = NgramProposer(CHAIN)
    propose(proposer, [1, 2, 3, 1, 2])
    longer = [2, 1, 0, 0, 2, 1, 5, 6, 2, 1]
    assert propose(proposer, longer) == naive(longer, CHAIN, 99)


def test_the_depth_and_the_node_budget_are_obeyed() -> None:
    context = [0, 1, 0, 2, 0, 0, 1, 2, 2, 1, 0, 2, 1, 0] * 4
    tree = propose(NgramProposer(TREE), context, max_depth=2)
    assert tree is not None
    assert tree.max_depth == 2
    assert len(tree) <= TREE.num_draft_tokens
