"""The one sampler, shared by plain decoding and verification: a token per row of logits, and logprobs on request.

The order of the warps is in `warp`, the noise in `gumbel`, the gathering of requests' data in `sampling_batch`.
A row's result does not depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from breakeven.engine.gumbel import argmax_rows, draw
from breakeven.engine.request import TokenOutput
from breakeven.engine.sampling_batch import (
    Draw,
    RowBlock,
    RowSpec,
    SamplingBatch,
    SamplingProfile,
    build_batch,
    profile,
    unique_tokens,
)
from breakeven.engine.warp import draw_truncated

__all__ = [
    "RowSpec",
    "SampleResult",
    "SamplingBatch",
    "SamplingProfile",
    "build_batch",
    "profile",
    "raw_logprobs",
    "sample",
    "unique_tokens",
]

_LOGPROB_ELEMENTS = 1 << 22  # logits turned into logprobs at once


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Drawn tokens int64 [R], on the logits' device. Holds the logits: ask for logprobs before they are overwritten."""

    tokens: Tensor
    logits: Tensor
    batch: SamplingBatch

    def token_list(self) -> list[int]:
        """The tokens on the host; waits for the device."""
        return [int(token) for token in self.tokens.tolist()]

    def outputs(self, rows: Sequence[int] | None = None) -> list[TokenOutput]:
        """Token and logprobs of some rows (None: all), in the order asked for. Ask for the rows that emitted only."""
        rows = range(self.batch.num_rows) if rows is None else rows
        tokens = self.token_list()
        outputs = [TokenOutput(tokens[row]) for row in rows]
        if self.batch.logprobs is None:
            return outputs
        asked = [(place, row, best) for place, row in enumerate(rows) if (best := self.batch.logprobs[row]) is not None]
        found = raw_logprobs(self.logits, [row for _, row, _ in asked], self.tokens, [best for *_, best in asked])
        for (place, _, _), output in zip(asked, found, strict=True):
            outputs[place] = output
        return outputs


def sample(logits: Tensor, batch: SamplingBatch) -> SampleResult:
    """Draw one token per row. logits [R, V], float32 or bfloat16, left as they are.

    Raises ValueError if the logits' rows are not the batch's.
    """
    if logits.dim() != 2 or logits.shape[0] != batch.num_rows:
        raise ValueError(f"the batch has {batch.num_rows} rows, but the logits' shape is {tuple(logits.shape)}")
    if batch.num_rows == 0:
        return SampleResult(torch.empty(0, dtype=torch.int64, device=logits.device), logits, batch)
    if batch.has_greedy:  # of all rows: cheaper than picking out the greedy ones
        tokens = argmax_rows(logits)
    else:
        tokens = torch.empty(batch.num_rows, dtype=torch.int64, device=logits.device)
    for block in batch.blocks:
        tokens[block.rows] = _draw_block(logits.index_select(0, block.rows).float(), block)
    return SampleResult(tokens, logits, batch)


def _draw_block(logits: Tensor, block: RowBlock) -> Tensor:
    """Tokens [B] from the block's own copy of its logits, float32 [B, V], which is changed in place."""
    if block.edits is not None:
        block.edits.apply_(logits)
    if block.draw is Draw.GREEDY:
        return argmax_rows(logits)
    assert block.temperature is not None
    assert block.keys is not None
    logits.div_(block.temperature)
    if block.truncation is None:
        return draw(logits, block.keys)
    return draw_truncated(logits, block.keys, block.truncation)


def raw_logprobs(logits: Tensor, rows: Sequence[int], tokens: Tensor, best: Sequence[int]) -> list[TokenOutput]:
    """Logprobs (natural log) of the model's own distribution, before any warp.

    logits [R, V]; tokens int64 [R], the drawn ones; for each of `rows`, `best` says how many of the most likely tokens
    to list (most likely first; ties by the lower id). Waits for the device.
    """
    outputs: list[TokenOutput] = []
    chunk = max(1, _LOGPROB_ELEMENTS // logits.shape[1])
    for start in range(0, len(rows), chunk):
        outputs += _raw_logprobs(logits, rows[start : start + chunk], tokens, best[start : start + chunk])
    return outputs


def _raw_logprobs(logits: Tensor, rows: Sequence[int], tokens: Tensor, best: Sequence[int]) -> list[TokenOutput]:
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, index).float(), -1)
    chosen = tokens[index]
    chosen_logprobs = logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
    most = min(max(best) + 1, logits.shape[1])
    top_values, top_ids = (part.tolist() for part in torch.topk(logprobs, most))
    outputs = []
    for row, (token, logprob, number) in enumerate(zip(chosen.tolist(), chosen_logprobs, best, strict=True)):
        values, ids = top_values[row], top_ids[row]
        if 0 < number < most and values[number] == values[number - 1]:  # a tie at the end: let the lower id win
            ids = (logprobs[row] >= values[number - 1]).nonzero().squeeze(1)
            values, ids = logprobs[row][ids].tolist(), ids.tolist()
        ranked = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        outputs.append(TokenOutput(token, logprob, tuple(ranked[:number])))
    return outputs
