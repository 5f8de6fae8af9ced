"""Writing an EAGLE-3 drafter in the formats that other engines and trainers read, and making its vocabulary smaller."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.drafter_config_json import CONVENTION_KEY, LAYER_IDS_KEY, DrafterFormat
from breakeven.engine.models.drafter_tensors import (
    HEAD,
    LAYER,
    MEMBERS,
    OFFSETS,
    drafter_shapes,
    optional_shapes,
)

_ARCHITECTURES: Mapping[str, str] = {
    "official": "LlamaForCausalLMEagle3",
    "vllm": "Eagle3LlamaForCausalLM",
    "speculators": "Eagle3Speculator",
}
_VERIFIERS: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def save_drafter(
    directory: Path | str,
    config: DrafterConfig,
    target: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    format: DrafterFormat = "official",
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int | None = None,
    verifier_name: str | None = None,
    speculative_tokens: int = 3,
) -> Path:
    """Write config.json and safetensors into `directory` (made if need be; older weights there are replaced).

    `weights`: official names (`drafter_tensors.drafter_shapes`), `d2t` among them unless the vocabularies are the same.
    `t2d` is derived from it. `max_shard_bytes`: the most that one weight file may take; None: one file.
    `verifier_name`, `speculative_tokens`: only said in the speculators format. ConfigError if weights and `config` do
    not belong together, if the format cannot hold them, or if the directory cannot be written.
    """
    path = Path(directory).expanduser()
    tensors = _checked(config, weights, dtype, format)
    renamed = {_stored_name(name, format): tensor for name, tensor in tensors.items()}
    shards = _shards(renamed, max_shard_bytes)
    if format == "speculators":
        document = _speculators_json(config, target, dtype, verifier_name, speculative_tokens)
    else:
        document = _plain_json(config, target, dtype, format, has_fusion_bias="fc.bias" in tensors)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in (*path.glob("model*.safetensors"), *path.glob("*.index.json"), *path.glob("pytorch_model*.bin")):
            old.unlink()
        if len(shards) == 1:
            _save_file(shards[0], path / "model.safetensors")
        else:
            _save_shards(path, shards)
        text = json.dumps(document, indent=2) + "\n"
        (path / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give one that can be written"
        raise ConfigError(f"the drafter cannot be written to {path} ({error.strerror or error}); {advice}") from None
    return path


def prune_vocabulary(
    weights: Mapping[str, Tensor], config: DrafterConfig, keep_ids: Sequence[int]
) -> tuple[dict[str, Tensor], DrafterConfig]:
    """The same drafter over fewer tokens: only rows of `lm_head.weight` and entries of `d2t` change.

    `keep_ids`: target ids, in any order, each in the present draft vocabulary. ConfigError if not.
    """
    if OFFSETS in weights:
        targets = weights[OFFSETS].to("cpu", torch.int64) + torch.arange(config.draft_vocab_size)
    else:
        targets = torch.arange(config.draft_vocab_size)
    rows = {int(token): row for row, token in enumerate(targets)}
    kept = sorted(set(keep_ids))
    unknown = next((token for token in kept if token not in rows), None)
    if unknown is not None:
        raise ConfigError(f"keep_ids: target id {unknown} is not in the drafter's vocabulary, so it cannot be kept")
    if not kept:
        raise ConfigError("keep_ids: a drafter needs at least one token; give some")
    chosen = torch.tensor([rows[token] for token in kept])
    pruned = {name: tensor for name, tensor in weights.items() if name != MEMBERS}
    pruned[HEAD] = weights[HEAD][chosen.to(weights[HEAD].device)].contiguous()
    pruned[OFFSETS] = torch.tensor(kept) - torch.arange(len(kept))
    return pruned, replace(config, draft_vocab_size=len(kept))


def _checked(
    config: DrafterConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, format: DrafterFormat
) -> dict[str, Tensor]:
    """The tensors to write, on the CPU in their final types, `t2d` included; ConfigError for one that does not fit."""
    required, optional = drafter_shapes(config), optional_shapes(config)
    expected = required | optional
    for name in required:
        if name not in weights:
            raise ConfigError(f"the drafter's weights lack {name}, which its config implies; add it")
    for name, tensor in weights.items():
        if name not in expected:
            raise ConfigError(f"the drafter's weights have {name}, which no drafter with this config has; leave it out")
        if tuple(tensor.shape) != expected[name]:
            raise ConfigError(
                f"the drafter's {name} has shape {tuple(tensor.shape)}, but its config implies {expected[name]}"
            )
    if "fc.bias" in weights and format != "official":
        raise ConfigError(f"the {format} format has no place for fc.bias; save the drafter in the official format")
    if OFFSETS not in weights and config.draft_vocab_size != config.vocab_size:
        raise ConfigError("the drafter's weights lack d2t, without which a smaller vocabulary has no meaning; add it")
    order = [name for name in expected if name in weights and name not in (OFFSETS, MEMBERS)]
    tensors = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in order}
    offsets = weights.get(OFFSETS)
    if offsets is None:
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    offsets = offsets.detach().to("cpu", torch.int64).contiguous()
    targets = offsets + torch.arange(config.draft_vocab_size)
    if bool((targets[1:] <= targets[:-1]).any()) or int(targets[0]) < 0 or int(targets[-1]) >= config.vocab_size:
        raise ConfigError("the drafter's d2t does not lead to ascending target ids within the vocabulary; correct it")
    members = torch.zeros(config.vocab_size, dtype=torch.bool)
    members[targets] = True
    return tensors | {OFFSETS: offsets, MEMBERS: members}


def _stored_name(name: str, format: DrafterFormat) -> str:
    return name if format == "official" else name.replace(LAYER, "layers.0.", 1)


def _shards(tensors: Mapping[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    """The tensors in their order, cut into files of at most `max_bytes`, headers included."""
    if max_bytes is None:
        return [dict(tensors)]
    header = 256  # bytes of the header for each tensor, and once for the file: generous
    shards: list[dict[str, Tensor]] = [{}]
    used = header
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() + header
        if size + header > max_bytes:
            raise ConfigError(
                f"max_shard_bytes is {max_bytes}, but {name} alone takes {size + header}; raise it, or prune the "
                "vocabulary"
            )
        if used + size > max_bytes:
            shards.append({})
            used = header
        shards[-1][name] = tensor
        used += size
    return shards


def _save_file(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors leaves it readable by its owner only


def _save_shards(path: Path, shards: Sequence[Mapping[str, Tensor]]) -> None:
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save_file(shard, path / file)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _layer_json(config: DrafterConfig, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The Llama keys. Rotary settings and positions are the target's, as the head is trained and served with them."""
    scaling: dict[str, Any] | None = None
    if target.rope_scaling is not None:
        rope = target.rope_scaling
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            scaling |= {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_position,
            }
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_ids[0] if target.eos_token_ids else None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _flags_json(config: DrafterConfig) -> dict[str, Any]:
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS_KEY: list(config.tap_boundaries),
        CONVENTION_KEY: "boundary",
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _plain_json(
    config: DrafterConfig, target: ModelConfig, dtype: torch.dtype, format: DrafterFormat, *, has_fusion_bias: bool
) -> dict[str, Any]:
    document: dict[str, Any] = {"architectures": [_ARCHITECTURES[format]]}
    document |= _layer_json(config, target, dtype) | _flags_json(config)
    if has_fusion_bias:
        document["bias"] = True  # as SGLang names it
    return document


def _speculators_json(
    config: DrafterConfig, target: ModelConfig, dtype: torch.dtype, verifier_name: str | None, tokens: int
) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES["speculators"]],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier_name, "architectures": [_VERIFIERS[target.family]]},
        },
        "transformer_layer_config": _layer_json(config, target, dtype),
        **_flags_json(config),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
