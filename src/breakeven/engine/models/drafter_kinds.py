"""Which kind of drafter a checkpoint holds, told by its config.json and the names of its tensors; EAGLE-3 is served.

Each loader names its kinds in its own way, so every mark is looked at: a drafter that is not EAGLE-3 must be refused by
name, as it would otherwise fail later with a tensor that seems to be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from breakeven.engine.config import ConfigError

SERVED = "this engine serves EAGLE-3 drafters of one Llama layer"
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_PARALLEL_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
_BY_ARCHITECTURE: tuple[tuple[str, str], ...] = (
    (r"peagle|parallel", "P-EAGLE (parallel drafting)"),
    (r"dflash|lilicorr", "DFlash"),
    (r"dspark", "DSpark"),
    (r"medusa", "Medusa"),
    (r"mlpspeculator|mlp_speculator", "an MLP speculator"),
    (r"mtp|nextn", "an MTP (multi-token prediction) head"),
    (r"eagle3.*(deepseek|kimi)|(deepseek|kimi).*eagle3", "EAGLE-3 with multi-head latent attention (MLA)"),
    (r"eagle3.*qwen3forcausallm|qwen3forcausallm.*eagle3", "EAGLE-3 with a Qwen3 layer (norms on q and k)"),
    (r"eagle(?!.*3)", "EAGLE-1 or EAGLE-2"),
)
_BY_SPECULATORS_TYPE = {
    "eagle": "EAGLE-1 or EAGLE-2",
    "peagle": "P-EAGLE (parallel drafting)",
    "dflash": "DFlash",
    "dflash2": "DFlash",
    "dspark": "DSpark",
    "mtp": "an MTP (multi-token prediction) head",
    "fast_mtp": "an MTP (multi-token prediction) head",
    "mlp": "an MLP speculator",
    "independent": "an independent draft model",
}
_BY_TENSOR: tuple[tuple[str, str], ...] = (
    (r"mask_hidden$", "P-EAGLE (parallel drafting)"),
    (r"(kv_a_proj|kv_b_proj|q_a_proj|kv_a_layernorm)", "EAGLE-3 with multi-head latent attention (MLA)"),
    (r"self_attn\.[qk]_norm\.", "EAGLE-3 with a Qwen3 layer (norms on q and k)"),
    (r"medusa_head|^\d+\.\d+\.linear\.", "Medusa"),
    (r"(^|\.)(eh_proj|enorm|hnorm)\.", "an MTP (multi-token prediction) head"),
    (r"markov", "DSpark"),
    (r"\.experts\.", "an EAGLE-3 drafter with a mixture of experts"),
)


def refuse_config(where: object, config: Mapping[str, Any]) -> None:
    """ConfigError, beginning with `where`, if the config.json `config` is of a drafter that is not served."""
    kind = _kind_of_config(config)
    if kind is not None:
        raise refusal(where, kind)


def refuse_tensors(where: object, names: Iterable[str]) -> None:
    """ConfigError, beginning with `where`, if the tensors' names show a drafter that is not served."""
    for name in names:
        for pattern, kind in _BY_TENSOR:
            if re.search(pattern, name):
                raise refusal(where, f"{kind}, by its tensor {name}")
        layer = re.match(r"(?:model\.)?layers\.([1-9]\d*)\.", name)
        if layer is not None:
            raise refusal(where, f"of several layers, by its tensor {name}")


def refusal(where: object, kind: str) -> ConfigError:
    """The error for a drafter of a `kind` that is not served."""
    return ConfigError(
        f"{where}: the drafter is {kind}; {SERVED}. Give another drafter, or serve it with its own engine"
    )


def _kind_of_config(config: Mapping[str, Any]) -> str | None:
    speculators_type = config.get("speculators_model_type")
    if isinstance(speculators_type, str) and speculators_type != "eagle3":
        return _BY_SPECULATORS_TYPE.get(speculators_type, f"of speculators' type {speculators_type!r}")
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    model_type = config.get("model_type")
    for text in (*names, *([model_type] if isinstance(model_type, str) else [])):
        for pattern, kind in _BY_ARCHITECTURE:
            if re.search(pattern, text.lower()):
                return f"{kind}, by its name {text!r}"
    inner = config.get("transformer_layer_config")
    eagle = config.get("eagle_config")
    for values in (config, inner if isinstance(inner, dict) else {}, eagle if isinstance(eagle, dict) else {}):
        found = _kind_of_keys(values)
        if found is not None:
            return found
    return None


def _kind_of_keys(values: Mapping[str, Any]) -> str | None:
    if values.get("parallel_drafting") is True:
        return "P-EAGLE (parallel drafting)"
    for key in _PARALLEL_KEYS:
        if values.get(key) is not None:
            return f"one that drafts in parallel (P-EAGLE or alike), by its {key}"
    if values.get("dflash_config"):
        return "DFlash, by its dflash_config"
    if values.get("medusa_num_heads"):
        return "Medusa, by its medusa_num_heads"
    if values.get("num_nextn_predict_layers"):
        return "an MTP (multi-token prediction) head, by its num_nextn_predict_layers"
    for key in _MLA_KEYS:
        if values.get(key):
            return f"EAGLE-3 with multi-head latent attention (MLA), by its {key}"
    model_type = values.get("model_type")
    if isinstance(model_type, str) and re.match(r"kimi|deepseek", model_type):
        return f"EAGLE-3 with multi-head latent attention (MLA), by its model_type {model_type!r}"
    if values.get("use_aux_hidden_state") is False:
        return "EAGLE-1-like (use_aux_hidden_state is false: it takes no fused features)"
    return None
