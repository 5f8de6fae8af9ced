"""Attention of the training-time test: causal keys of step 0, and of each later step only the query's own row.

Query i of step k sees the step-0 keys 0..i and, for 1 ≤ j ≤ k, the step-j key at i (EAGLE-3, arXiv 2503.01840,
figure 6). One softmax over both. The causal part is a flash kernel; its log-sum-exp merges it with the few diagonal
scores. Backward gives the kernel the merged output and log-sum-exp, with which its gradients of the causal part are
those of the joint softmax:
dS_ij = P_ij (dO·v_j − dO·O), and both P and O there are the merged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chain_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """[batch, heads, rows, dim] for query of this shape; keys[j], values[j] of step j [batch, kv_heads, rows, dim]."""
    fold = query.shape[1] // keys[0].shape[1]
    if fold > 1:
        keys = [key.repeat_interleave(fold, dim=1) for key in keys]
        values = [value.repeat_interleave(fold, dim=1) for value in values]
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    if has_flash(query):
        own_keys, own_values = torch.stack(list(keys[1:])), torch.stack(list(values[1:]))
        merged: Tensor = _Merged.apply(query, keys[0], values[0], own_keys, own_values)  # type: ignore[no-untyped-call]
        return merged
    return plain_chain_attention(query, keys, values)


def plain_chain_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The same by matrix products, all heads present in keys and values: for devices without a kernel, and tests."""
    rows, scale = query.shape[2], query.shape[3] ** -0.5
    causal = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
    scores = (query @ keys[0].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~causal, float("-inf"))
    own = [(query * key).float().sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
    out = weights[..., :rows] @ values[0]
    for index, value in enumerate(values[1:]):
        out = out + weights[..., rows + index, None] * value
    return out


def has_flash(query: Tensor) -> bool:
    """Whether PyTorch has a flash kernel with log-sum-exp for this query."""
    if query.device.type == "cpu":
        return query.dtype in (torch.float32, torch.bfloat16, torch.float64)
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 128
    )


class _Merged(torch.autograd.Function):
    """Causal part by kernel, diagonals by hand. own_keys and own_values [steps, batch, heads, rows, dim]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        scale = query.shape[-1] ** -0.5
        extra: tuple[Any, ...] = ()
        if query.device.type == "cpu":
            base, base_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, True, scale=scale
            )
        else:
            base, base_lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, True, False, scale=scale
            )
            extra = tuple(rest[:6])  # cumulative lengths, maxima, the state of a dropout that is not used
        scores = (query * own_keys).sum(-1, dtype=torch.float32) * scale
        lse = torch.logsumexp(torch.cat((base_lse.unsqueeze(0), scores)), dim=0)
        out = base * (base_lse - lse).exp().unsqueeze(-1).to(base.dtype)
        probabilities = (scores - lse).exp()
        out = out + (probabilities.unsqueeze(-1).to(base.dtype) * own_values).sum(0)
        merged: Tensor = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, own_keys, own_values, merged, lse, probabilities)
        ctx.extra, ctx.scale = extra, scale
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, own_keys, own_values, out, lse, probabilities = ctx.saved_tensors
        grad = grads[0]
        scale: float = ctx.scale
        if query.device.type == "cpu":
            d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse.contiguous(), 0.0, True, scale=scale
            )
        else:
            cum_q, cum_k, max_q, max_k, seed, offset = ctx.extra
            d_query, d_key, d_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, out, lse.contiguous(), cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset,
                scale=scale,
            )  # fmt: skip
        delta = (grad * out).sum(-1, dtype=torch.float32)
        d_scores = probabilities * ((grad * own_values).sum(-1, dtype=torch.float32) - delta) * scale
        d_scores = d_scores.unsqueeze(-1).to(query.dtype)
        d_query = d_query + (d_scores * own_keys).sum(0)
        d_own_keys = d_scores * query
        d_own_values = probabilities.unsqueeze(-1).to(query.dtype) * grad
        return d_query, d_key, d_value, d_own_keys, d_own_values
