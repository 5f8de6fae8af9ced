"""The frozen target over dense rows: the engine's weights and formulas, with attention that needs no pages.

The rounding of each operation is that of `LlamaModel.forward`, so that the features a drafter is trained on are those
it gets when it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.models.llama import LlamaModel
from breakeven.engine.step_ops import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [rows, heads, dim], key, value [rows, kv_heads, dim]) → [rows, heads, dim]."""


@dataclass(frozen=True, slots=True)
class TargetStates:
    """taps [rows, 3, hidden]: the residual stream at the boundaries, no norm; hidden [rows, hidden]: normed, for the
    head."""

    taps: Tensor | None
    hidden: Tensor


def run_layers(
    model: LlamaModel, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
) -> TargetStates:
    """All layers over flat rows. tokens and positions int64 [rows]; boundary b is the stream after b layers."""
    config = model.config
    rows = tokens.shape[0]
    heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    size = (config.hidden_size,)
    hidden = F.embedding(tokens, model.embedding)
    cos, sin = model.cos[positions].unsqueeze(1), model.sin[positions].unsqueeze(1)
    tapped: dict[int, Tensor] = {}
    for index, layer in enumerate(model.layers):
        if index in taps:
            tapped[index] = hidden
        normed = F.rms_norm(hidden, size, layer.input_norm, eps)
        qkv = layer.qkv(normed).view(rows, heads + 2 * kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = F.rms_norm(qkv[:, :heads], (dim,), layer.q_norm, eps)
            key = F.rms_norm(qkv[:, heads : heads + kv_heads], (dim,), layer.k_norm, eps)
            query_key = rotate(torch.cat((query, key), dim=1), cos, sin)
        else:
            query_key = rotate(qkv[:, : heads + kv_heads], cos, sin)
        attended = attend(index, query_key[:, :heads], query_key[:, heads:], qkv[:, heads + kv_heads :])
        hidden = layer.output.add(attended.reshape(rows, heads * dim), hidden)
        normed = F.rms_norm(hidden, size, layer.post_norm, eps)
        hidden = layer.down.add(layer.gated(normed), hidden)
    if len(model.layers) in taps:
        tapped[len(model.layers)] = hidden
    return TargetStates(
        torch.stack([tapped[boundary] for boundary in taps], dim=1) if taps else None,
        F.rms_norm(hidden, size, model.final_norm, eps),
    )


def causal_attention(batch: int, length: int) -> Attend:
    """Attention of `batch` sequences of `length` rows each, every one from position 0. Padding at the end is harmless:
    nothing before it sees it."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        del layer
        fold = query.shape[1] // key.shape[1]

        def shaped(x: Tensor, repeats: int) -> Tensor:
            x = x.reshape(batch, length, x.shape[1], x.shape[2]).transpose(1, 2)
            return x.repeat_interleave(repeats, dim=1) if repeats > 1 else x

        out = F.scaled_dot_product_attention(shaped(query, 1), shaped(key, fold), shaped(value, fold), is_causal=True)
        return out.transpose(1, 2).reshape(batch * length, query.shape[1], query.shape[2])

    return attend


@torch.no_grad()
def target_states(model: LlamaModel, tokens: Tensor, taps: Sequence[int]) -> TargetStates:
    """Features of padded sequences: tokens int64 [batch, length] → taps [batch·length, 3, hidden], hidden."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(batch)
    return run_layers(model, tokens.reshape(-1), positions, causal_attention(batch, length), taps)
