"""A Hugging Face `config.json` (and `generation_config.json`) read into a `ModelConfig`, or a reason why not.

Field names and defaults are those of transformers' LlamaConfig, Qwen2Config and Qwen3Config; both the older way of
writing rope settings (`rope_theta`, `rope_scaling`) and that of transformers 5 (`rope_parameters`) are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from breakeven.engine.config import ConfigError, ModelConfig, RopeScaling

Family = Literal["llama", "qwen2", "qwen3"]
ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MOST_LAYERS = 1024
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError naming the file if it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {path.parent} is not a complete Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


class JsonFields:
    """Typed access to one JSON object, with errors that name the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {self.prefix}{name} {problem}")

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                self.fail(name, "is missing; it is needed to know the model's shape")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(name, f"must be a positive whole number, got {value!r}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            if default is None:
                self.fail(name, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.fail(name, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, got {value!r}")
        return value


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the model in `directory`. ConfigError names the file, the field and what to do."""
    path = directory / "config.json"
    fields = JsonFields(path, read_json(path))
    family = _family(fields)
    _refuse_unsupported(fields)

    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.fail("num_attention_heads", f"({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = fields.positive_int("head_dim", 128 if family == "qwen3" else max(hidden_size // num_heads, 1))
    if head_dim % 2:
        fields.fail("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    num_layers = fields.positive_int("num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        fields.fail("num_hidden_layers", f"is {num_layers}; at most {_MOST_LAYERS} are served")
    max_position = fields.positive_int("max_position_embeddings")
    _refuse_sliding_window(fields, family, num_layers, max_position)
    rope_theta, rope_scaling = _rope(fields)
    vocab_size = fields.positive_int("vocab_size")
    attention_bias = family == "qwen2" or fields.flag("attention_bias")
    bos_token_ids = _token_ids(fields, "bos_token_id", vocab_size)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rope_theta=rope_theta,
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and family != "qwen2",  # transformers: one flag for all four, but Qwen2
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        rope_scaling=rope_scaling,
        eos_token_ids=_eos_token_ids(directory, fields, vocab_size),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
    )


def _family(fields: JsonFields) -> Family:
    architectures = fields.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if architectures is None:
        model_type = fields.get("model_type")
        if model_type in ARCHITECTURES.values():
            return cast(Family, model_type)
        fields.fail("model_type", f"is {model_type!r}; this engine serves {', '.join(ARCHITECTURES.values())}")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        fields.fail("architectures", f"is {architectures!r}; this engine serves {known}. Use another engine for it")
    return ARCHITECTURES[architectures[0]]


def _refuse_unsupported(fields: JsonFields) -> None:
    if fields.get("quantization_config") is not None:
        fields.fail("quantization_config", "is set; quantised checkpoints are not served, use the original weights")
    for name in _EXPERT_FIELDS:
        if fields.get(name):
            fields.fail(name, f"is {fields.get(name)!r}; mixture-of-experts models are not served")
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        fields.fail("hidden_act", f"is {activation!r}; only silu is served")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        fields.fail("partial_rotary_factor", f"is {fields.get('partial_rotary_factor')!r}; only 1 is served")


def _refuse_sliding_window(fields: JsonFields, family: Family, num_layers: int, max_position: int) -> None:
    """Refuse a window that some layer applies and that is shorter than the context; anything else changes nothing."""
    if family == "llama":
        return  # transformers' Llama knows no sliding window
    window = fields.get("sliding_window")
    if not fields.flag("use_sliding_window") or window is None:
        return
    window = fields.positive_int("sliding_window")
    layer_types = fields.get("layer_types")
    if layer_types is None:  # layers from max_window_layers on are windowed; 28 is transformers' default
        first = fields.get("max_window_layers")
        applies = num_layers > (first if isinstance(first, int) else 28)
    else:
        applies = any(kind != "full_attention" for kind in layer_types)
    if applies and window < max_position:
        fields.fail(
            "use_sliding_window",
            f"is true with sliding_window {window} below max_position_embeddings {max_position}; windowed attention is "
            f"not served. Lower max_position_embeddings to {window} to serve the model within its window",
        )


def _rope(fields: JsonFields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling or None) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        fields.fail(name, f"must be an object, got {values!r}")
    if set(values) == {"full_attention"}:
        values = values["full_attention"]
    rope = JsonFields(fields.path, values, prefix=f"{name}.")
    theta = rope.positive_float("rope_theta", fields.positive_float("rope_theta", 10_000.0))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        rope.fail("partial_rotary_factor", f"is {rope.get('partial_rotary_factor')!r}; only 1 is served")
    kind = rope.get("rope_type") or rope.get("type")
    if kind is None:
        if set(values) - {"rope_theta", "partial_rotary_factor"}:
            rope.fail("rope_type", "is missing")
        return theta, None
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.positive_float("factor"))
    if kind != "llama3":
        rope.fail(
            "rope_type",
            f"is {kind!r}; default, linear and llama3 are served. If the model scales only for contexts beyond its "
            f"native length, remove the scaling from {name} and set max_position_embeddings to that length",
        )
    return theta, RopeScaling(
        "llama3",
        rope.positive_float("factor"),
        rope.positive_float("low_freq_factor"),
        rope.positive_float("high_freq_factor"),
        rope.positive_int("original_max_position_embeddings"),
    )


def _token_ids(fields: JsonFields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            fields.fail(name, f"must hold token ids from 0 to {vocab_size - 1}, got {token_id!r}")
    return tuple(dict.fromkeys(values))


def _eos_token_ids(directory: Path, fields: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """As transformers' generate: those of generation_config.json; without them, those of config.json."""
    path = directory / "generation_config.json"
    if path.is_file() and (ids := _token_ids(JsonFields(path, read_json(path)), "eos_token_id", vocab_size)):
        return ids
    return _token_ids(fields, "eos_token_id", vocab_size)
