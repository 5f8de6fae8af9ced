"""The training-time test: the drafter unrolled over its own outputs, and the loss against the target's distribution.

Row i pairs the target's features h_i with the embedding of t_{i+1} and predicts t_{i+2}. At step k the row takes its
own output of step k − 1 and the embedding of t_{i+1+k}, at rotary position i + k, and predicts t_{i+2+k} (EAGLE-3,
arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.step_ops import rotate
from breakeven.train.attention import chain_attention
from breakeven.train.model import DrafterModule, Weights

_LOGITS = 1 << 29  # elements of draft logits held at once


def unroll(
    model: DrafterModule, weights: Weights, taps: Tensor, embeddings: Tensor, cos: Tensor, sin: Tensor, steps: int
) -> list[Tensor]:
    """What the head takes at each step, [batch, length, H] each; entry [b, i] of step k predicts t_{i+2+k}.

    taps [batch, length, 3, H_target]; embeddings [batch, length, H] of the tokens themselves (shifted here); cos, sin
    [at least length + steps, head_dim]. Rows too close to the end to have an input are garbage: weigh them 0.
    """
    length = embeddings.shape[1]
    hidden = model.fuse(weights, taps)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(steps):
        shift = min(step + 1, length)
        embedded = F.pad(embeddings[:, shift:], (0, 0, 0, shift))
        query, key, value, residual = model.qkv(weights, embedded, hidden)
        turn_cos, turn_sin = cos[step : step + length], sin[step : step + length]
        query, key = rotate(query, turn_cos, turn_sin), rotate(key, turn_cos, turn_sin)
        keys.append(key)
        values.append(value)
        hidden, out = model.finish(weights, chain_attention(query, keys, values), residual)
        outputs.append(out)
    return outputs


SoftLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def soft_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient for the logits, −Σ p log q per row, and the argmax. logits, target [rows, Vd]; weight [rows].

    The gradient is weight · (q − p), in the logits' type.
    """
    log_q = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -(target * log_q).sum(-1)
    gradient = ((log_q.exp() - target) * weight.unsqueeze(-1)).to(logits.dtype)
    return gradient, loss, logits.argmax(-1)


class _HeadLoss(torch.autograd.Function):
    """Σ weight · CE over rows, with the gradients made at once, so that no logits outlive their chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, weight: Tensor, soft_loss: SoftLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = max(1, _LOGITS // head.shape[0])
        d_hidden = torch.empty_like(hidden)
        d_head: Tensor | None = None
        losses, best = [], []
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            gradient, loss, choice = soft_loss(hidden[part] @ head.T, target[part], weight[part])
            d_hidden[part] = gradient @ head
            product = gradient.T @ hidden[part]
            d_head = product if d_head is None else d_head + product
            losses.append(loss)
            best.append(choice)
        loss_rows = torch.cat(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)
        choices = torch.cat(best) if best else torch.zeros(0, dtype=torch.long, device=hidden.device)
        ctx.save_for_backward(d_hidden, torch.zeros_like(head) if d_head is None else d_head)
        ctx.mark_non_differentiable(loss_rows, choices)
        return (loss_rows * weight).sum(), loss_rows, choices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        scale = grads[0]
        return d_hidden * scale.to(d_hidden.dtype), d_head * scale.to(d_head.dtype), None, None, None


@dataclass(frozen=True, slots=True)
class TargetLabels:
    """What the target says at the places that are learnt. p [M, Vd]; known [M]: its argmax is in the draft vocabulary;
    best int64 [M]: the argmax as a draft id, where known."""

    p: Tensor
    known: Tensor
    best: Tensor


@torch.no_grad()
def target_labels(hidden: Tensor, head_in: Tensor, head_out: Tensor | None) -> TargetLabels:
    """hidden [M, H] normed; head_in [Vd, H] the target's head rows of the draft vocabulary, head_out the other rows."""
    rows = max(1, _LOGITS // max(head_in.shape[0], 1))
    p = torch.empty(hidden.shape[0], head_in.shape[0], dtype=hidden.dtype, device=hidden.device)
    known = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    best = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        logits = hidden[part] @ head_in.T
        top, best[part] = logits.max(-1)
        known[part] = True if head_out is None else top >= (hidden[part] @ head_out.T).max(-1).values
        p[part] = logits.softmax(-1)
    return TargetLabels(p, known, best)


@dataclass(frozen=True, slots=True)
class StepLosses:
    """`total`: what is minimised. The others per unrolled step, on the device, no gradient: Σ loss and Σ right over
    rows that count, and how many count. `right` bool [steps, M]: at place m, step k predicted the target's argmax."""

    total: Tensor
    loss: Tensor
    correct: Tensor
    count: Tensor
    right: Tensor


def step_losses(
    outputs: list[Tensor],
    head: Tensor,
    labels: TargetLabels,
    places: Tensor,
    offsets: Tensor,
    weight: Tensor,
    decay: float,
    normaliser: float,
    soft_loss: SoftLoss = soft_cross_entropy,
) -> StepLosses:
    """Σ_k decay^k · Σ weight · CE / normaliser over all steps and places.

    places int64 [M]: flat index (batch · length + m) of the position m whose next token is learnt; offsets int64 [M]:
    m; weight float32 [M]. At step k place m is predicted by row m − 1 − k; where there is none it counts nothing.
    Accuracy counts places whose argmax the draft vocabulary lacks as wrong; the loss leaves them out.
    """
    total = torch.zeros((), dtype=torch.float32, device=places.device)
    losses, corrects, counts, rights = [], [], [], []
    for step, out in enumerate(outputs):
        flat = out.reshape(-1, out.shape[-1])
        reachable = offsets >= step + 1
        learnt = weight * (reachable & labels.known)
        hidden = flat[(places - 1 - step).clamp_min(0)]
        loss, rows, best = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head, labels.p, learnt * (decay**step / normaliser), soft_loss
        )
        total = total + loss
        with torch.no_grad():
            counted = reachable & (weight > 0)
            right = (best == labels.best) & labels.known & counted
            losses.append((rows * (learnt > 0)).sum())
            corrects.append(right.sum())
            counts.append(counted.sum())
            rights.append(right)
    return StepLosses(total, torch.stack(losses), torch.stack(corrects), torch.stack(counts), torch.stack(rights))
