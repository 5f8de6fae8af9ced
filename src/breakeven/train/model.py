"""The drafter as a trainable module, its parameters under the checkpoint's own names; fp32 masters, any compute type.

Structure: EAGLE-3 (arXiv 2503.01840), as in the official code. The taps are scaled per channel by 1/rms before `fc`
(SmolLM2's channels differ by two orders of magnitude); `export_weights` folds the scale into `fc.weight`, so a
checkpoint shows nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from breakeven.engine.models.drafter_config import DrafterConfig

Weights = Mapping[str, Tensor]


class _Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = _Scale(config.hidden_size)
        self.hidden_norm = _Scale(config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Scale(config.hidden_size)
        self.mlp = _MLP(config)


class DrafterModule(nn.Module):
    """An EAGLE-3 head. Parameters are fp32; `compute_weights` gives them in the compute type, once per forward."""

    tap_scale: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Scale(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([_Scale(config.target_hidden_size) for _ in range(3)])
        if config.norm_before_fc:
            self.input_norm = _Scale(3 * config.target_hidden_size)
        self.register_buffer("tap_scale", torch.ones(3 * config.target_hidden_size))

    def start_from_target(self, head: Tensor, norm: Tensor, target_ids: Tensor) -> None:
        """Head rows and final norm of the target. head [vocab, hidden], norm [hidden], target_ids int64 [Vd]."""
        with torch.no_grad():
            self.lm_head.weight.copy_(head[target_ids.to(head.device)].float())
            self.norm.weight.copy_(norm.float())

    def compute_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every parameter in `dtype`, with gradients flowing back to the masters."""
        return {name: parameter.to(dtype) for name, parameter in self.named_parameters()}

    def export_weights(self, dtype: torch.dtype, rows: Tensor | None = None) -> dict[str, Tensor]:
        """A checkpoint's tensors on the CPU, the taps' scale folded into `fc`. `rows`: head rows kept, None: all."""
        tensors = {name: parameter.detach().cpu().clone() for name, parameter in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] * self.tap_scale.cpu()
        if rows is not None:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][rows]
        return {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}

    def fuse(self, weights: Weights, taps: Tensor) -> Tensor:
        """g [..., H] of target features [..., 3, H_target]."""
        config = self.config
        if config.fc_norm:
            taps = torch.stack([self._norm(taps[..., i, :], weights[f"fc_norm.{i}.weight"]) for i in range(3)], dim=-2)
        flat = taps.flatten(-2)
        if config.norm_before_fc:
            flat = self._norm(flat, weights["input_norm.weight"])
        return F.linear(flat * self.tap_scale.to(flat.dtype), weights["fc.weight"])

    def qkv(self, weights: Weights, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value [batch, heads, rows, dim] before rotation, and the residual; inputs [batch, rows, H]."""
        config = self.config
        normed = self._norm(hidden, weights["midlayer.hidden_norm.weight"])
        x = torch.cat((self._norm(embedding, weights["midlayer.input_layernorm.weight"]), normed), dim=-1)

        def heads(name: str, count: int) -> Tensor:
            projected = F.linear(x, weights[f"midlayer.self_attn.{name}.weight"])
            return projected.view(*projected.shape[:-1], count, config.head_dim).transpose(1, 2)

        return (
            heads("q_proj", config.num_heads),
            heads("k_proj", config.num_kv_heads),
            heads("v_proj", config.num_kv_heads),
            normed if config.norm_before_residual else hidden,
        )

    def finish(self, weights: Weights, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next step takes as hidden, what the head takes) [batch, rows, H].

        attended [batch, heads, rows, dim]; residual [batch, rows, H].
        """
        merged = attended.transpose(1, 2).flatten(-2)
        a = F.linear(merged, weights["midlayer.self_attn.o_proj.weight"]) + residual
        normed = self._norm(a, weights["midlayer.post_attention_layernorm.weight"])
        gate = F.linear(normed, weights["midlayer.mlp.gate_proj.weight"])
        up = F.linear(normed, weights["midlayer.mlp.up_proj.weight"])
        y = F.linear(F.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"]) + a
        out = self._norm(y, weights["norm.weight"])
        return (out if self.config.norm_output else y), out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
