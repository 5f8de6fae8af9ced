from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from toy_target import (
    TreeMaker,
    exact_sequences,
    generate,
    likely_chain,
    likely_tree,
    no_tree,
    random_tree,
    repeating_tree,
)

from breakeven.engine.request import SamplingParams
from breakeven.engine.tree import DraftTree
from breakeven.engine.verify import Accepted, walk, walk_batch

PARAMETERS = {
    "temperature 1": SamplingParams(),
    "temperature low": SamplingParams(temperature=0.6),
    "temperature high": SamplingParams(temperature=1.7),
    "top_p": SamplingParams(top_p=0.8),
    "top_k": SamplingParams(top_k=3),
    "min_p": SamplingParams(min_p=0.15),
    "all truncations": SamplingParams(temperature=1.3, top_k=6, top_p=0.85, min_p=0.1),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-1.2),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "repetition below 1": SamplingParams(repetition_penalty=0.6),
    "logit bias": SamplingParams(logit_bias={1: 2.5, 4: -100.0, 6: 0.5}),
    "min_tokens": SamplingParams(min_tokens=2, stop_token_ids=(3,)),
    "everything": SamplingParams(
        temperature=1.2,
        top_p=0.9,
        top_k=6,
        min_p=0.03,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias={2: 1.0, 7: -1.0},
        min_tokens=2,
        stop_token_ids=(3,),
    ),
}
LENGTH = 3


def oracle(tree: DraftTree, draws: Sequence[int]) -> Accepted:
    """The deepest node all of whose edges agree with what was drawn at their upper ends."""
    chains = []
    for node in range(len(tree)):
        chain = [node]
        while chain[0] != 0:
            chain.insert(0, tree.parents[chain[0] - 1])
        if all(tree.tokens[chain[i + 1] - 1] == draws[chain[i]] for i in range(len(chain) - 1)):
            chains.append(chain)
    deepest = max(chains, key=len)
    drafted = [tree.tokens[node - 1] for node in deepest[1:]]
    return Accepted((*drafted, draws[deepest[-1]]), tuple(deepest))


@st.composite
def trees_with_draws(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    tree = DraftTree.from_paths(draw(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8)))
    return tree, draw(st.lists(st.integers(0, 2), min_size=len(tree), max_size=len(tree)))


@given(trees_with_draws())
def test_the_walk_finds_the_deepest_node_that_agrees_with_the_draws(case: tuple[DraftTree, list[int]]) -> None:
    tree, draws = case
    accepted = walk(tree, draws)
    assert accepted == oracle(tree, draws)
    assert accepted.num_drafts == len(accepted.tokens) - 1


@given(st.lists(trees_with_draws(), max_size=4))
def test_a_batch_is_walked_request_by_request(cases: list[tuple[DraftTree, list[int]]]) -> None:
    trees: list[DraftTree | None] = [None, *(tree for tree, _ in cases)]
    draws = [5, *(token for _, tokens in cases for token in tokens)]
    assert walk_batch(trees, draws) == [Accepted((5,), (0,)), *(walk(tree, tokens) for tree, tokens in cases)]


def test_a_wrong_number_of_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes, 1 draws"):
        walk(DraftTree.chain([1]), [1])
    with pytest.raises(ValueError, match="3 nodes in all, 4 draws"):
        walk_batch([DraftTree.chain([1]), None], [1, 2, 3, 4])


def agreement(outputs: Sequence[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p value of Pearson's chi-square test; outcomes expected fewer than five times are pooled.

    0 if an impossible outcome occurred.
    """
    counts = Counter(outputs)
    if any(exact[output] == 0 for output in counts):
        return 0.0
    expected = np.array(list(exact.values())) * len(outputs)
    observed = np.array([counts[output] for output in exact], np.float64)
    often = expected >= 5
    expected, observed = (np.append(values[often], values[~often].sum()) for values in (expected, observed))
    return float(chisquare(observed[expected > 0], expected[expected > 0]).pvalue)


@pytest.mark.parametrize("tree_maker", [likely_chain, likely_tree, repeating_tree], ids=["chain", "tree", "repeats"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_verification_follows_the_exact_distribution(name: str, tree_maker: TreeMaker) -> None:
    seeds = range(1000, 2500)
    outputs, accepted_drafts = generate(PARAMETERS[name], seeds, LENGTH, tree_maker)
    assert accepted_drafts > len(seeds) / 4  # or the tree was hardly put to the test
    assert agreement(outputs, exact_sequences(PARAMETERS[name], LENGTH)) > 1e-4


@pytest.mark.parametrize("name", ["temperature 1", "everything"])
def test_any_set_of_seeds_follows_the_exact_distribution(name: str) -> None:
    huge = [int(seed) for seed in np.random.default_rng(3).integers(2**64, size=1000, dtype=np.uint64)]
    seeds = [*huge, *range(-500, 0), *range(0, 500 << 32, 1 << 32)]
    outputs, _ = generate(PARAMETERS[name], seeds, LENGTH, likely_tree)
    assert agreement(outputs, exact_sequences(PARAMETERS[name], LENGTH)) > 1e-4


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition", "min_tokens", "everything"])
def test_the_chi_square_test_notices_rows_that_ignore_their_path(name: str) -> None:
    outputs, _ = generate(PARAMETERS[name], range(1000, 3000), LENGTH, repeating_tree, forget_path=True)
    assert agreement(outputs, exact_sequences(PARAMETERS[name], LENGTH)) < 1e-6


@pytest.mark.parametrize("name", [*PARAMETERS, "greedy", "greedy with penalties"])
def test_the_same_seed_gives_the_same_tokens_with_any_tree_or_none(name: str) -> None:
    greedy = {
        "greedy": SamplingParams(temperature=0),
        "greedy with penalties": SamplingParams(temperature=0, frequency_penalty=0.9, repetition_penalty=1.2),
    }
    params = (PARAMETERS | greedy)[name]
    seeds = range(12)
    plain, _ = generate(params, seeds, 14, no_tree)
    for tree_maker in (likely_chain, likely_tree, repeating_tree, random_tree):
        speculated, accepted_drafts = generate(params, seeds, 14, tree_maker)
        assert speculated == plain
        assert accepted_drafts > 0
