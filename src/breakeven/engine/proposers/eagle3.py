"""EAGLE-3 drafting: chains and trees from a trained head that reads the target's own features.

`num_steps` levels come from one row in full per request (its root) and num_steps - 1 further forwards of the head on
its own output, `eagle_topk` rows per request each; of all candidates the best `num_draft_tokens` - 1 are verified
(EAGLE-2's re-ranking, `draft_tree`; the three numbers mean what they mean in SGLang). Nothing is read back from the
device until all levels are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from breakeven.engine.config import SpeculationConfig
from breakeven.engine.draft_tree import best_trees
from breakeven.engine.models.drafter import Drafter, Workspace
from breakeven.engine.proposers.base import DraftContext
from breakeven.engine.proposers.features import FeatureStore
from breakeven.engine.tree import DraftTree


@dataclass(slots=True)
class _Level:
    """The head's output for one level's rows: logits [batch * rows, draft vocab], hidden [batch * rows, hidden]."""

    logits: Tensor
    hidden: Tensor


class Eagle3Proposer:
    """One shape over the engine's one feature store. What it drafts depends on the request's tokens only."""

    def __init__(self, config: SpeculationConfig, store: FeatureStore) -> None:
        self._store = store
        self._drafter = store.drafter
        self._topk = min(config.eagle_topk, store.drafter.config.draft_vocab_size)
        self._max_nodes = config.num_draft_tokens - 1
        # A node needs all its ancestors, so none lies deeper than there are nodes to choose.
        self._levels = min(config.num_steps, self._max_nodes)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        wanted = [context for context in contexts if context.max_depth >= 1]
        if not wanted:
            return [None] * len(contexts)
        trees = iter(self._draft(wanted))
        return [
            next(trees).limit(max_depth=context.max_depth) if context.max_depth >= 1 else None for context in contexts
        ]

    def forget(self, request_id: str) -> None:
        self._store.forget(request_id)

    @torch.inference_mode()
    def _draft(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        round_ = _Round(self._drafter, self._store, contexts, self._levels, self._topk)
        if self._topk == 1:
            return [DraftTree.chain(tokens) for tokens in _chain(round_, self._drafter, self._levels).tolist()]
        return _tree(round_, self._drafter, self._levels, self._topk, self._max_nodes)


class _Round:
    """One round's forwards: the roots at construction (after filing what waited), then level by level."""

    def __init__(
        self, drafter: Drafter, store: FeatureStore, contexts: Sequence[DraftContext], levels: int, topk: int
    ) -> None:
        self._drafter = drafter
        self.batch = len(contexts)
        self._topk = topk
        rows = store.draft_rows(contexts)
        filed = rows.slots.shape[0]
        hidden = drafter.fuse(rows.features)
        x, residual = drafter.inputs(hidden, rows.tokens)
        if filed:
            drafter.extend(x[:filed], rows.positions[:filed], rows.slots, store.cache)
        self._workspace = _workspace(drafter, store, contexts, 1 + (levels - 1) * topk)
        depths = torch.arange(levels, device=rows.positions.device)
        positions = rows.positions[filed:] + depths.unsqueeze(1)  # [levels, batch]
        cos, sin = drafter.rotary(positions.reshape(-1))
        self._cos = cos.view(levels, self.batch, 1, -1)
        self._sin = sin.view(levels, self.batch, 1, -1)
        y = drafter.rows(x[filed:], residual[filed:], (self._cos[0], self._sin[0]), self._workspace, 0)
        self.root = _Level(*drafter.predict(y))

    def next(self, level: int, hidden: Tensor, tokens: Tensor, visible: Tensor | None) -> _Level:
        """Level `level` (from 1): topk rows per request. hidden [batch * topk, hidden]; tokens int64 [batch * topk];
        visible: see `Drafter.rows`."""
        cos, sin = self._cos[level], self._sin[level]
        if self._topk > 1:
            cos, sin = (t.repeat_interleave(self._topk, dim=0) for t in (cos, sin))
        x, residual = self._drafter.inputs(hidden, tokens)
        first = 1 + (level - 1) * self._topk
        return _Level(
            *self._drafter.predict(
                self._drafter.rows(x, residual, (cos, sin), self._workspace, first, visible),
            )
        )


def _workspace(drafter: Drafter, store: FeatureStore, contexts: Sequence[DraftContext], drafted: int) -> Workspace:
    """Room for `drafted` rows per request after its filed rows, which are slots 1 to n - 2 of its n tokens."""
    size = store.cache.page_size
    lengths = [len(context.tokens) - 1 for context in contexts]
    extra = -(-drafted // size)
    used = [-(-length // size) for length in lengths]
    table = np.zeros((len(contexts), max(used) + extra + 1), np.int64)  # any page will do for what is hidden
    for row, context, count, length in zip(table, contexts, used, lengths, strict=True):
        row[:count] = context.pages[:count]
        row[-1] = length
    device_table = torch.from_numpy(table).to(store.cache.k.device, non_blocking=True)
    return drafter.workspace(store.cache, device_table[:, :-1], device_table[:, -1], drafted)


def _chain(round_: _Round, drafter: Drafter, levels: int) -> Tensor:
    """The most likely token at each level, on the host: int64 [batch, levels]."""
    level = round_.root
    tokens: list[Tensor] = []
    for depth in range(1, levels + 1):
        tokens.append(drafter.target_ids[level.logits.max(dim=-1).indices])
        if depth < levels:
            level = round_.next(depth, level.hidden, tokens[-1], None)
    return torch.stack(tokens, dim=1).cpu()


def _tree(round_: _Round, drafter: Drafter, levels: int, topk: int, max_nodes: int) -> list[DraftTree]:
    batch, level = round_.batch, round_.root
    device = level.logits.device
    log_probs, candidates = _best(level.logits, topk, drafter)  # [batch, topk] each
    scores, tokens = [log_probs], [candidates]
    frontiers: list[Tensor] = []
    frontier_scores, frontier_tokens = log_probs, candidates
    hidden = level.hidden.unsqueeze(1).expand(-1, topk, -1)
    own = torch.full((topk, topk), float("-inf"), dtype=drafter.dtype, device=device).fill_diagonal_(0)
    own = own.expand(batch, -1, -1)
    visible = torch.cat((torch.zeros(batch, topk, 1, dtype=drafter.dtype, device=device), own), dim=-1)
    for depth in range(1, levels):
        level = round_.next(depth, hidden.reshape(batch * topk, -1), frontier_tokens.reshape(-1), visible)
        log_probs, candidates = _best(level.logits, topk, drafter)
        paths = (frontier_scores.unsqueeze(2) + log_probs.view(batch, topk, topk)).view(batch, -1)
        candidates = candidates.view(batch, -1)
        scores.append(paths)
        tokens.append(candidates)
        if depth + 1 < levels:
            frontier_scores, frontier = paths.topk(topk, dim=1)
            frontier_tokens = candidates.gather(1, frontier)
            parents = frontier // topk
            hidden = _pick(level.hidden.view(batch, topk, -1), parents)
            visible = torch.cat((_pick(visible, parents), own), dim=-1)
            frontiers.append(frontier)
    # One copy to the host: everything as int32, the scores by their bits.
    parts = [torch.cat(tokens, dim=1).int(), torch.cat(scores, dim=1).view(torch.int32)]
    parts += [frontier.int() for frontier in frontiers]
    host = torch.cat(parts, dim=1).cpu().numpy()
    pool = parts[0].shape[1]
    return best_trees(
        host[:, :pool].astype(np.int64),
        np.ascontiguousarray(host[:, pool : 2 * pool]).view(np.float32),
        host[:, 2 * pool :].astype(np.int64).reshape(batch, len(frontiers), topk),
        levels,
        topk,
        max_nodes,
    )


def _best(logits: Tensor, topk: int, drafter: Drafter) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row, most likely first: (log-probabilities over the draft vocabulary, float32,
    never above 0; the target's token ids), [rows, topk] each."""
    logits = logits.float()
    values, choices = logits.topk(topk, dim=-1)
    return (values - logits.logsumexp(dim=-1, keepdim=True)).clamp_(max=0), drafter.target_ids[choices]


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows [batch, n, width], index int64 [batch, m] -> [batch, m, width]."""
    return rows.gather(1, index.unsqueeze(2).expand(-1, -1, rows.shape[2]))
