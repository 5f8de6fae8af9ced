"""From a model's logits to the distribution that is drawn from, row by row.

The order: repetition penalty, frequency penalty, presence penalty, logit bias, min_tokens mask, temperature, top-k,
top-p, min-p. It is documented here because it is observable:

- repetition penalty r over prompt and output tokens: l / r if l > 0, else l * r (CTRL, arXiv 1909.05858; as in
  Hugging Face and vLLM); frequency and presence over output tokens: l - f * count - p * [count > 0] (OpenAI);
- top-k keeps the k best; top-p then keeps the smallest set of best tokens whose mass *within what top-k kept* reaches
  p; min-p keeps tokens whose probability after temperature is at least min_p times the greatest (arXiv 2407.01082;
  a ratio, so renormalising does not move it);
- every truncation is a threshold on the logit: tokens that tie with the last one kept are kept too, so nothing
  depends on how a sort breaks ties (bfloat16 logits tie often). The exception is top_k = 1, which is greedy.

Nothing a row gets depends on the other rows: sums run inside a row only, by kernels that work row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from breakeven.engine.gumbel import draw

CANDIDATES = (128, 1024, 8192)  # best tokens looked at before a row's vocabulary is sorted; any widths give the same


@dataclass(frozen=True, slots=True)
class Scales:
    """Repetition penalties: flat index (row * V + token) int64 [M], penalty float32 [M]. Repeats must agree."""

    index: Tensor
    penalty: Tensor


@dataclass(frozen=True, slots=True)
class Counts:
    """Frequency and presence penalties: flat index int64 [M] without repeats; the rest float32 [M]."""

    index: Tensor
    count: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """Sparse changes to a block of logits [B, V]. None where no row asks.

    `path_counts` are total counts (output and path) of the tokens on a node's path. They replace what `counts` did to
    the same entries, so that a verify row gets to the last bit what a decode row at the same position gets.
    """

    scales: Scales | None = None
    counts: Counts | None = None
    path_counts: Counts | None = None
    bias: tuple[Tensor, Tensor] | None = None  # flat index int64 [M] without repeats, value float32 [M]
    banned: Tensor | None = None  # flat index int64 [M]

    def apply_(self, logits: Tensor) -> None:
        """Change the contiguous float32 logits [B, V] in place."""
        flat = logits.view(-1)
        if self.scales is not None:
            values, penalty = flat[self.scales.index], self.scales.penalty
            flat[self.scales.index] = torch.where(values > 0, values / penalty, values * penalty)
        both = [counts for counts in (self.counts, self.path_counts) if counts is not None]
        before = [flat[counts.index] for counts in both]  # all read before any is written
        for counts, values in zip(both, before, strict=True):
            flat[counts.index] = values - counts.frequency * counts.count - counts.presence
        if self.bias is not None:
            index, value = self.bias
            flat[index] = flat[index] + value
        if self.banned is not None:
            flat[self.banned] = float("-inf")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per row [B]: top_k int64 (V: off), top_p float64 (inf: off), log_min_p float32 (-inf: off).

    `smallest_k` is the least top_k, 0 if some row has none; `needs_mass`: some row has top-p without top-k.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    smallest_k: int
    needs_mass: bool

    def select(self, rows: Tensor) -> Truncation:
        """The same for some of the rows."""
        return Truncation(self.top_k[rows], self.top_p[rows], self.log_min_p[rows], self.smallest_k, self.needs_mass)


def thresholds(best: Tensor, mass: Tensor | None, truncation: Truncation, vocab_size: int) -> Tensor:
    """The least logit kept in each row, float32 [B].

    best float32 [B, C]: the C greatest logits, descending. mass float64 [B]: sum of exp(logit - greatest) over the
    vocabulary, used by rows without top-k. Right only if the threshold lies above best[:, -1], or C = V.
    """
    width = best.shape[1]
    top = best[:, :1]
    kth = best.gather(1, (truncation.top_k - 1).clamp(max=width - 1)[:, None])
    in_top_k = best >= kth
    weights = (best - top).double().exp_().mul_(in_top_k)
    through = weights.cumsum(1)
    total = through[:, -1]
    if mass is not None:
        total = torch.where(truncation.top_k < vocab_size, total, mass)
    before = torch.nn.functional.pad(through[:, :-1], (1, 0))
    kept = in_top_k.logical_and_(before < (truncation.top_p * total)[:, None]).sum(1).clamp_(min=1)
    last = best.gather(1, kept[:, None] - 1).squeeze(1)
    return torch.maximum(last, top.squeeze(1) + truncation.log_min_p)


def draw_truncated(logits: Tensor, keys: Tensor, truncation: Truncation) -> Tensor:
    """Token [B] drawn from each row after top-k, top-p and min-p. logits float32 [B, V] after temperature.

    Looks at a few, then more of a row's best tokens (CANDIDATES), and sorts all only if those do not settle its
    threshold. Noise is made for kept tokens only.
    """
    rows, vocab_size = logits.shape
    tokens = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    on_cpu = logits.device.type == "cpu"
    mass = torch.softmax(logits, -1).amax(-1).double().reciprocal_() if truncation.needs_mass else None
    pending: Tensor | None = None  # rows not settled yet; None: all
    for width in CANDIDATES if on_cpu else CANDIDATES[-1:]:
        if width >= vocab_size or width <= truncation.smallest_k:
            continue
        best, ids = torch.topk(logits, width)
        least = thresholds(best, mass, truncation, vocab_size)
        settled = best[:, -1] < least
        kept = best >= least[:, None]
        if on_cpu:  # free of a device sync, so look no further than the longest kept run
            longest = int(kept.sum(1).mul_(settled).max())
            best, ids, kept = best[:, :longest], ids[:, :longest], kept[:, :longest]
        if bool(settled.any()):
            winner = draw(best.masked_fill(~kept, float("-inf")), keys, ids)[:, None]
            drawn = ids.gather(1, winner).squeeze(1)
            where = settled if pending is None else pending[settled]
            tokens[where] = drawn[settled]
        if bool(settled.all()):
            return tokens
        left = (~settled).nonzero().squeeze(1)
        pending = left if pending is None else pending[left]
        logits, keys, truncation = logits[left], keys[left], truncation.select(left)
        mass = None if mass is None else mass[left]
    best = torch.sort(logits, dim=-1, descending=True).values
    least = thresholds(best, mass, truncation, vocab_size)
    drawn = draw(logits.masked_fill(logits < least[:, None], float("-inf")), keys)
    if pending is None:
        return drawn
    tokens[pending] = drawn
    return tokens
