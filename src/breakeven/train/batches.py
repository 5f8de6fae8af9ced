"""Conversations in batches of similar length, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breakeven.train.conversations import Conversation

_POOL = 64  # micro-batches whose conversations are sorted by length together
LENGTH_MULTIPLE = 32  # lengths are padded to a multiple of this


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded conversations, and the places whose next token is learnt.

    tokens int64 [batch, length]; places int64 [M] flat indices batch · length + m; offsets int64 [M]: m; weight
    float32 [M]; greedy bool [M]: the answer is the target's argmax. `num_tokens` without padding; `mass`: Σ weight.
    """

    tokens: Tensor
    places: Tensor
    offsets: Tensor
    weight: Tensor
    greedy: Tensor
    num_tokens: int
    mass: float

    def to(self, device: torch.device) -> Batch:
        def moved(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return Batch(
            moved(self.tokens),
            moved(self.places),
            moved(self.offsets),
            moved(self.weight),
            moved(self.greedy),
            self.num_tokens,
            self.mass,
        )


def collate(conversations: Sequence[Conversation], max_length: int, pad: int = 0) -> Batch:
    """Cut to max_length, pad to the longest (rounded up), list the places. Position 0 predicts nothing: no row does."""
    cut = [(item.tokens[:max_length], item.mask[:max_length], item.greedy) for item in conversations]
    longest = max(len(tokens) for tokens, _, _ in cut)
    length = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    tokens = np.full((len(cut), length), pad, np.int64)
    weights = np.zeros((len(cut), length), np.float32)
    greedy = np.zeros((len(cut), length), np.bool_)
    for row, (ids, mask, is_greedy) in enumerate(cut):
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids) - 1] = mask[1:]  # place m stands for the prediction of token m + 1
        greedy[row] = is_greedy
    weights[:, 0] = 0
    places = np.flatnonzero(weights)
    chosen = weights.ravel()[places]
    return Batch(
        tokens=torch.from_numpy(tokens),
        places=torch.from_numpy(places),
        offsets=torch.from_numpy(places % length),
        weight=torch.from_numpy(chosen),
        greedy=torch.from_numpy(greedy.ravel()[places]),
        num_tokens=sum(len(ids) for ids, _, _ in cut),
        mass=float(chosen.sum()),
    )


def plan_epoch(
    lengths: NDArray[np.int64], micro_tokens: int, max_length: int, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Micro-batches as indices of conversations, shuffled. Each holds at most `micro_tokens`, padding counted."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    clipped = np.minimum(lengths, max_length)
    mean = max(float(clipped.mean()), 1.0) if len(lengths) else 1.0
    pool = max(1, int(_POOL * micro_tokens / mean))
    plan: list[NDArray[np.int64]] = []
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        part = part[np.argsort(clipped[part], kind="stable")]
        current: list[int] = []
        for index in part:
            padded = -(-int(clipped[index]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            if current and padded * (len(current) + 1) > micro_tokens:
                plan.append(np.array(current, np.int64))
                current = []
            current.append(int(index))
        if current:
            plan.append(np.array(current, np.int64))
    return [plan[index] for index in random.permutation(len(plan))]


def steps_per_epoch(lengths: NDArray[np.int64], micro_tokens: int, max_length: int, seed: int, per_step: int) -> int:
    """Optimiser steps of the first epoch; `per_step` micro-batches (of all processes) make one."""
    return max(1, len(plan_epoch(lengths, micro_tokens, max_length, seed, 0)) // per_step)


def step_batches(
    lengths: NDArray[np.int64], micro_tokens: int, max_length: int, seed: int, per_step: int, first_step: int
) -> Iterator[list[NDArray[np.int64]]]:
    """For each optimiser step from `first_step` on, its `per_step` micro-batches. Never ends.

    An epoch's last micro-batches that do not fill a step are left to other epochs, where the order is another.
    """
    step, epoch = 0, 0
    while True:
        plan = plan_epoch(lengths, micro_tokens, max_length, seed, epoch)
        while len(plan) < per_step:  # fewer conversations than one step takes: use them again
            plan = plan + plan
        for start in range(0, len(plan) - per_step + 1, per_step):
            if step >= first_step:
                yield plan[start : start + per_step]
            step += 1
        epoch += 1
