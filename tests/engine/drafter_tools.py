"""Tiny random drafters, and checkpoints of them with one thing changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from breakeven.engine.config import ModelConfig
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.drafter_save import save_drafter
from breakeven.engine.models.drafter_tensors import drafter_shapes

TARGET = ModelConfig(
    family="llama",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=256,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
    bos_token_id=1,
)
TINY = DrafterConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    vocab_size=50,
    draft_vocab_size=20,
    tap_boundaries=(2, 6, 9),
)


def config_for(target: ModelConfig, draft_vocab_size: int, **changes: Any) -> DrafterConfig:
    """A drafter's shape like one layer of `target`, tapped at the usual boundaries."""
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        tap_boundaries=(2, target.num_layers // 2, target.num_layers - 3),
    )
    return replace(config, **changes)


def random_weights(
    config: DrafterConfig, seed: int = 0, *, fusion_bias: bool = False, embedding: bool = False
) -> dict[str, Tensor]:
    """Every tensor of `config`, norms near one, `d2t` onto a random part of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in drafter_shapes(config).items()
    }
    for name in weights:
        if name.endswith("norm.weight") or name.startswith("fc_norm"):
            weights[name] += 1
    if fusion_bias:
        weights["fc.bias"] = torch.randn(config.hidden_size, generator=generator)
    if embedding:
        weights["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    weights["d2t"] = chosen - torch.arange(config.draft_vocab_size)
    return weights


def written(
    directory: Path,
    *,
    config: DrafterConfig = TINY,
    target: ModelConfig = TARGET,
    weights: Mapping[str, Tensor] | None = None,
    json_changes: Mapping[str, Any] | None = None,
    tensor_change: Callable[[dict[str, Tensor]], object] | None = None,
    **options: Any,
) -> Path:
    """A saved drafter whose config.json (a value of None takes a key out) and tensors are then changed."""
    save_drafter(directory, config, target, random_weights(config) if weights is None else weights, **options)
    if json_changes:
        path = directory / "config.json"
        values = json.loads(path.read_text()) | dict(json_changes)
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    if tensor_change is not None:
        tensors = load_file(directory / "model.safetensors")
        tensor_change(tensors)
        save_file(tensors, directory / "model.safetensors")
    return directory
