"""A Llama-, Qwen2- or Qwen3-shaped decoder over ragged rows. One forward for prefill, decode and verify."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.config import ModelConfig
from breakeven.engine.linear import GatedUnit, Linear
from breakeven.engine.step_ops import StepOps
from breakeven.engine.taps import FeatureTaps


def rope_tables(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [max_position, head_dim] in `dtype`; angles are computed in float64, then rounded once."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device) / config.head_dim
    # transformers computes the inverse frequencies in float32; the same rounding keeps our logits next to its own.
    inverse = (1.0 / (config.rope_theta ** half.float())).double()
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None:
        wavelength = 2 * math.pi / inverse
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        inverse = torch.where(
            wavelength > low, inverse / scaling.factor, torch.where(wavelength < high, inverse, blended)
        )
    positions = torch.arange(config.max_position, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse.float()).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer; q, k and v are one matrix."""

    input_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gated: GatedUnit
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None


class LlamaModel:
    """The target's weights and its forward."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.config = config

        def get(name: str) -> Tensor:
            return weights[name].to(device)

        def optional(name: str) -> Tensor | None:
            return get(name) if name in weights else None

        def joined(prefix: str, parts: Sequence[str]) -> Linear:
            weight = torch.cat([get(f"{prefix}.{part}.weight") for part in parts])
            biases = [get(name) for part in parts if (name := f"{prefix}.{part}.bias") in weights]
            return Linear(weight, torch.cat(biases) if biases else None)

        self.embedding = get("model.embed_tokens.weight")
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            base = f"model.layers.{index}"
            self.layers.append(
                Layer(
                    input_norm=get(f"{base}.input_layernorm.weight"),
                    qkv=joined(f"{base}.self_attn", ("q_proj", "k_proj", "v_proj")),
                    output=joined(f"{base}.self_attn", ("o_proj",)),
                    post_norm=get(f"{base}.post_attention_layernorm.weight"),
                    gated=GatedUnit(
                        get(f"{base}.mlp.gate_proj.weight"),
                        get(f"{base}.mlp.up_proj.weight"),
                        optional(f"{base}.mlp.gate_proj.bias"),
                        optional(f"{base}.mlp.up_proj.bias"),
                    ),
                    down=joined(f"{base}.mlp", ("down_proj",)),
                    q_norm=get(f"{base}.self_attn.q_norm.weight") if config.qk_norm else None,
                    k_norm=get(f"{base}.self_attn.k_norm.weight") if config.qk_norm else None,
                )
            )
        self.final_norm = get("model.norm.weight")
        self.head = Linear(self.embedding if config.tie_embeddings else get("lm_head.weight"), None)
        self.cos, self.sin = rope_tables(config, self.embedding.dtype, device)

    def forward(
        self,
        tokens: Tensor,
        sampled_rows: Tensor | None,
        ops: StepOps,
        taps: FeatureTaps | None = None,
    ) -> Tensor:
        """Logits [sampled rows, vocab]; `ops` writes the rows' K and V into the cache.

        tokens int64 [rows]; `sampled_rows` int64 [sampled] picks rows for the head, None: all of them;
        `taps` is shown the residual stream of all rows at every layer boundary.
        """
        config = self.config
        hidden = F.embedding(tokens, self.embedding)
        rows = hidden.shape[0]
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        last = len(self.layers) - 1
        tap_last = taps is not None and len(self.layers) in taps.boundaries
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.record(index, hidden)
            qkv = layer.qkv(ops.norm(hidden, layer.input_norm)).view(rows, heads + 2 * kv_heads, dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                query = F.rms_norm(qkv[:, :heads], (dim,), layer.q_norm, eps)
                key = F.rms_norm(qkv[:, heads : heads + kv_heads], (dim,), layer.k_norm, eps)
                qkv = torch.cat((query, key, qkv[:, heads + kv_heads :]), dim=1)
            query = ops.rotate_and_store(index, qkv)
            if index == last and sampled_rows is not None and sampled_rows.shape[0] == 0 and not tap_last:
                break  # nothing is sampled: the last layer's K and V were all that mattered
            attended = ops.attend(index, query)
            hidden = layer.output.add(attended.reshape(rows, heads * dim), hidden)
            hidden = layer.down.add(layer.gated(ops.norm(hidden, layer.post_norm)), hidden)
        if taps is not None and tap_last:
            taps.record(len(self.layers), hidden)
        if sampled_rows is not None:
            hidden = hidden[sampled_rows]
        return self.head(ops.norm(hidden, self.final_norm))
