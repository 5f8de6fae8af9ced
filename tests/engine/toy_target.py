"""A toy target of eight tokens whose logits are a function of the whole context, and its exact distributions.

The exact side is written without the engine's sampler: dense, one row at a time, in float64 NumPy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from breakeven.engine.request import SamplingParams
from breakeven.engine.sampling import RowSpec, build_batch, profile, sample, unique_tokens
from breakeven.engine.tree import DraftTree
from breakeven.engine.verify import walk_batch

VOCAB = 8
EOS = (0,)
PROMPT = (5, 2, 2)
TreeMaker = Callable[[tuple[int, ...]], DraftTree | None]


@cache
def toy_logits(context: tuple[int, ...]) -> NDArray[np.float32]:
    """float32 [8], different for each context."""
    return np.random.default_rng([11, *context]).normal(scale=1.5, size=VOCAB).astype(np.float32)


def warp(
    logits: NDArray[np.float32],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int],
) -> NDArray[np.float64]:
    """The warped logits, -inf where excluded: the documented order, step by step. temperature 0 is left to callers."""
    x = logits.astype(np.float64)
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, value in params.logit_bias.items():
        x[token] += value
    if len(output) < params.min_tokens:
        x[[*params.stop_token_ids, *(() if params.ignore_eos else eos)]] = -np.inf
    if params.temperature == 0:
        return x
    x /= params.temperature
    greatest = x.max()
    if params.top_k:
        x[x < np.sort(x)[-min(params.top_k, len(x))]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        mass = np.cumsum(np.exp(x[order] - greatest))
        last = int(np.searchsorted(mass, params.top_p * mass[-1]))
        x[x < x[order[last]]] = -np.inf
    if params.min_p:
        x[x < greatest + np.log(params.min_p)] = -np.inf
    return x


def exact_sequences(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every output of `length` tokens after PROMPT, by enumeration."""
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for output, probability in probabilities.items():
            x = warp(toy_logits(PROMPT + output), params, PROMPT, output, EOS)
            weights = np.exp(x - x.max())
            for token, weight in enumerate(weights / weights.sum()):
                longer[(*output, token)] = probability * float(weight)
        probabilities = longer
    return probabilities


def generate(
    params: SamplingParams, seeds: Sequence[int], length: int, tree_maker: TreeMaker, *, forget_path: bool = False
) -> tuple[list[tuple[int, ...]], int]:
    """Outputs of `length` tokens, one per seed, by rounds of draft and verify; also the number of drafts accepted.

    `forget_path` is a deliberate mistake, to show that tests notice it: penalties and min_tokens of all nodes are
    computed as at the root.
    """
    made, prompt_tokens = profile(params), unique_tokens(PROMPT)
    outputs: list[tuple[int, ...]] = [()] * len(seeds)
    accepted_drafts = 0
    while unfinished := [index for index, output in enumerate(outputs) if len(output) < length]:
        trees, rows, logits = [], [], []
        for index in unfinished:
            output = outputs[index]
            tree = tree_maker(PROMPT + output)
            counts = Counter(output)
            for path in [()] if tree is None else tree.paths:
                rows.append(
                    RowSpec(
                        profile=made,
                        seed=seeds[index],
                        position=len(PROMPT) + len(output) + len(path),
                        output_counts=counts,
                        prompt_tokens=prompt_tokens,
                        path=() if forget_path else path,
                        emitted=len(output) + (0 if forget_path else len(path)),
                    )
                )
                logits.append(toy_logits(PROMPT + output + path))
            trees.append(tree)
        result = sample(torch.from_numpy(np.stack(logits)), build_batch(rows, VOCAB, EOS))
        for index, accepted in zip(unfinished, walk_batch(trees, result.token_list()), strict=True):
            outputs[index] = (outputs[index] + accepted.tokens)[:length]
            accepted_drafts += accepted.num_drafts
    return outputs, accepted_drafts


def no_tree(context: tuple[int, ...]) -> None:
    return None


def likely_chain(context: tuple[int, ...]) -> DraftTree:
    """The toy's own greedy guess, three deep."""
    tokens: tuple[int, ...] = ()
    for _ in range(3):
        tokens = (*tokens, int(toy_logits(context + tokens).argmax()))
    return DraftTree.chain(tokens)


def likely_tree(context: tuple[int, ...]) -> DraftTree:
    """The two most likely tokens, and of each the two most likely that follow."""

    def best(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*tokens, int(token)) for token in np.argsort(-toy_logits(context + tokens))[:2]]

    return DraftTree.from_paths(itertools.chain.from_iterable(best(first) for first in best(())))


def repeating_tree(context: tuple[int, ...]) -> DraftTree:
    """Every token once, and each of them a second time: whatever is drawn is accepted, and then may be repeated."""
    return DraftTree.from_paths([[token, token] for token in range(VOCAB)])


def random_tree(context: tuple[int, ...]) -> DraftTree | None:
    """Any tree or none, depending on the context only."""
    rng = np.random.default_rng([23, *context])
    return DraftTree.from_paths(
        [[int(token) for token in rng.integers(VOCAB, size=rng.integers(4))] for _ in range(rng.integers(5))]
    ).limit(max_nodes=int(rng.integers(9)))
