"""The tensors of a checkpoint: which there must be, and how they are read from safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.config_hf import read_json

READABLE_TYPES = {"F32", "F16", "BF16"}
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # in old checkpoints; follows from the config


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and the shape, (out, in) for matrices, of every tensor that the model is made of."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    linears = (
        ("self_attn.q_proj", width, hidden, config.attention_bias),
        ("self_attn.k_proj", kv_width, hidden, config.attention_bias),
        ("self_attn.v_proj", kv_width, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, width, config.attention_output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files, single or sharded. ConfigError if there are none, or if the index names one that is missing."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            f"{single} is missing, and so is {index.name}; weights are read from safetensors only. Download them, or "
            "convert others with transformers' save_pretrained"
        )
    return indexed_files(index)


def indexed_files(index: Path) -> list[Path]:
    """The files that a shard index names, beside it. ConfigError if it is malformed, or if one is missing."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: weight_map must map tensor names to file names; download the file again")
    files = [index.parent / Path(name).name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing, though {index.name} names it; download it")
    return files


def check_tensors(directory: Path, config: ModelConfig) -> None:
    """Compare names, shapes and types in the files' headers with the config, without reading any weights."""
    _locate(directory, config)


def read_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of `expected_shapes`, contiguous, on the CPU, in `dtype`, in memory of its own."""
    weights: dict[str, torch.Tensor] = {}
    for file, names in _locate(directory, config).items():
        with opened(file) as handle:
            for name in names:
                weights[name] = handle.get_tensor(name).to(dtype, copy=True).contiguous()
    return weights


def _locate(directory: Path, config: ModelConfig) -> dict[Path, list[str]]:
    """Which file holds which of the expected tensors; ConfigError for one missing, misshapen, quantised or extra."""
    expected = expected_shapes(config)
    found: dict[Path, list[str]] = {}
    missing = dict.fromkeys(expected)
    for file in safetensors_files(directory):
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                part = handle.get_slice(name)
                shape, kind = tuple(part.get_shape()), part.get_dtype()
                if name not in expected:
                    if _DERIVED.search(name) or (name == "lm_head.weight" and config.tie_embeddings):
                        continue
                    raise ConfigError(
                        f"{file}: tensor {name} does not belong to a {config.family} model with this config.json; the "
                        "model would give other answers without it, so it is not served"
                    )
                if shape != expected[name]:
                    raise ConfigError(
                        f"{file}: tensor {name} has shape {shape}, but config.json implies {expected[name]}; weights "
                        "and config.json do not belong together"
                    )
                if kind not in READABLE_TYPES:
                    raise ConfigError(
                        f"{file}: tensor {name} is of type {kind}; only {', '.join(sorted(READABLE_TYPES))} are "
                        "served, use the unquantised weights"
                    )
                found.setdefault(file, []).append(name)
                missing.pop(name, None)
    if missing:
        names = list(missing)
        raise ConfigError(
            f"{directory}: tensor {names[0]} is missing from the weights"
            + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
            + "; download them again, or correct config.json (num_hidden_layers, tie_word_embeddings)"
        )
    return found


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """`safe_open` whose failures are ConfigErrors that name the file."""
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged, truncated or unreadable ({error}); download it again") from None
