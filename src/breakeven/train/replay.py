"""The gate between training and serving: the engine's drafter code, fed the same tokens, must be right as often.

Teacher-forced: at depth k of the chain from a root, the drafter is given the tokens that did follow, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from breakeven.engine.models.drafter import Drafter
from breakeven.engine.models.llama import LlamaModel
from breakeven.train.batches import collate
from breakeven.train.conversations import Conversation
from breakeven.train.target import target_states

_PAGE = 16
_ROOTS = 256  # roots that are drafted from at once


@torch.inference_mode()
def replay_accuracy(
    drafter: Drafter, target: LlamaModel, conversations: Sequence[Conversation], steps: int, max_length: int
) -> list[float]:
    """Share of places whose target argmax the engine's drafter gives at each depth, counted as the trainer counts."""
    device = target.embedding.device
    correct, count = torch.zeros(steps, dtype=torch.long), torch.zeros(steps, dtype=torch.long)
    for item in conversations:
        batch = collate([item], max_length).to(device)
        if not batch.mass:
            continue
        length = min(len(item.tokens), max_length)
        tokens = batch.tokens[:, :length]
        states = target_states(target, tokens, drafter.config.tap_boundaries)
        assert states.taps is not None
        best = target.head(states.hidden).argmax(-1)
        learnt = torch.zeros(length + steps + 1, dtype=torch.bool, device=device)
        learnt[batch.offsets] = True
        _replay_one(drafter, tokens[0], states.taps.flatten(1), best, learnt, steps, correct, count)
    return [round(value, 4) for value in (correct / count.clamp_min(1)).tolist()]


def _replay_one(
    drafter: Drafter,
    tokens: Tensor,
    features: Tensor,
    best: Tensor,
    learnt: Tensor,
    steps: int,
    correct: Tensor,
    count: Tensor,
) -> None:
    """Adds to correct and count [steps]. features [n, 3·H_target]; best [n] the target's argmax after each token."""
    device, length = tokens.device, tokens.shape[0]
    num_pages = -(-length // _PAGE)
    extra = -(-steps // _PAGE)
    cache = drafter.new_cache(num_pages + extra, _PAGE)
    row = torch.arange(length - 1, device=device)  # row i is (h_i, t_{i+1}) at position i, filed under slot i + 1
    hidden = drafter.fuse(features[:-1])
    x, residual = drafter.inputs(hidden, tokens[1:])
    drafter.extend(x, row, row + 1, cache)
    wanted = torch.zeros(length - 1, dtype=torch.bool, device=device)
    for step in range(steps):
        wanted |= learnt[row + 1 + step]
    roots = row[wanted]
    pages = torch.arange(num_pages + extra, device=device)
    for part in torch.split(roots, _ROOTS):
        # slots 1..i are filed as seen from root i; the root's own row is among the drafted columns
        workspace = drafter.workspace(cache, pages.expand(len(part), -1), part + 1, steps)
        part_x, part_residual = x[part], residual[part]
        for step in range(steps):
            y = drafter.rows(part_x, part_residual, drafter.rotary(part + step), workspace, step)
            logits, hidden = drafter.predict(y)
            place = part + 1 + step
            counted = learnt[place] & (place < length)
            right = drafter.target_ids[logits.argmax(-1)] == best[place.clamp_max(length - 1)]
            correct[step] += int((right & counted).sum())
            count[step] += int(counted.sum())
            if step + 1 < steps:
                following = tokens[(part + 2 + step).clamp_max(length - 1)]
                part_x, part_residual = drafter.inputs(hidden, following)
