"""What a drafter's config.json declares, read from every format that EAGLE-3 checkpoints come in.

Formats differ in where a field stands and in what its absence means: see docs/drafters.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from breakeven.engine.config import ConfigError
from breakeven.engine.models.config_hf import JsonFields, read_json
from breakeven.engine.models.drafter_kinds import SERVED, refuse_config

DrafterFormat = Literal["official", "vllm", "speculators"]
LayerIds = Literal["boundary", "output"]
"""What a tapped layer's id means: the state after that many layers, or the output of the layer of that index."""

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
CONVENTION_KEY = "eagle_aux_hidden_state_layer_ids_convention"  # ours; other loaders ignore it
CONVENTIONS: tuple[LayerIds, LayerIds] = ("boundary", "output")
_LLAMA_DEFAULTS: Mapping[str, int | float] = {  # speculators leaves out what equals transformers' LlamaConfig
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}


@dataclass(frozen=True, slots=True)
class DeclaredDrafter:
    """A drafter's config.json in one form. None: not said. `notes`: what a user may want to know."""

    path: Path
    format: DrafterFormat
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    rope_theta: float
    target_hidden_size: int | None
    draft_vocab_size: int | None
    layer_ids: tuple[int, int, int] | None
    convention: LayerIds | None
    norm_before_residual: bool
    norm_before_fc: bool | None
    fc_norm: bool | None
    norm_output: bool
    notes: tuple[str, ...]


def read_declared(directory: Path) -> DeclaredDrafter:
    """The declarations in `directory`'s config.json. ConfigError names the file, the field and what to do."""
    path = directory / "config.json"
    values = read_json(path)
    refuse_config(path, values)
    outer = JsonFields(path, values)
    inner = _layer_fields(path, outer)
    in_speculators = inner.values is not outer.values
    notes: list[str] = []
    architecture = _architecture(outer, in_speculators)
    if "eagle3" not in architecture.lower() and architecture != "LlamaForCausalLM":
        outer.fail("architectures", f"is {architecture!r}; {SERVED}. Give another drafter")
    _refuse_unsupported(inner)
    eagle = _object(outer, "eagle_config")

    def flag(name: str) -> bool | None:
        """`name` at the top level, in `eagle_config`, or in the layer's part."""
        for fields in (outer, eagle, inner):
            if fields.get(name) is not None:
                return fields.flag(name)
        return None

    layers = inner.positive_int("num_hidden_layers", 32 if in_speculators else 1)
    if layers != 1:
        inner.fail("num_hidden_layers", f"is {layers}; {SERVED}. Give a drafter of one layer")
    hidden_size = _size(inner, "hidden_size", in_speculators)
    num_heads = _size(inner, "num_attention_heads", in_speculators)
    num_kv_heads = inner.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        inner.fail("num_attention_heads", f"({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = inner.positive_int("head_dim", max(hidden_size // num_heads, 1))
    if head_dim % 2:
        inner.fail("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    residual = flag("norm_before_residual")
    if residual is None and in_speculators:
        notes.append("norm_before_residual is not said; true is taken, as vLLM does for the speculators format")
    norm_output = flag("norm_output") or False
    if norm_output and not in_speculators:
        notes.append(
            "norm_output is true and read as EAGLE-3.1 (the next step takes the normed output). SpecForge wrote it "
            "until 2026-09-15 for heads whose next step takes the un-normed output: if few drafts are accepted, set it "
            "to false in config.json"
        )
    return DeclaredDrafter(
        path=path,
        format="speculators" if in_speculators else "vllm" if architecture.startswith("Eagle3") else "official",
        hidden_size=hidden_size,
        intermediate_size=_size(inner, "intermediate_size", in_speculators),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=inner.positive_float("rms_norm_eps", 1e-6),
        vocab_size=_size(inner, "vocab_size", in_speculators),
        rope_theta=_rope_theta(inner),
        target_hidden_size=_optional_size("target_hidden_size", outer, eagle, inner),
        draft_vocab_size=_optional_size("draft_vocab_size", outer, eagle, inner),
        layer_ids=_layer_ids(outer, eagle, inner),
        convention=_convention(outer),
        norm_before_residual=in_speculators if residual is None else residual,
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_output=norm_output,
        notes=tuple(notes),
    )


def _layer_fields(path: Path, outer: JsonFields) -> JsonFields:
    """The fields of the decoder layer: those of the file itself, or the nested ones of the speculators format."""
    if outer.get("transformer_layer_config") is not None or outer.get("speculators_model_type") is not None:
        return _object(outer, "transformer_layer_config")
    return outer


def _object(outer: JsonFields, name: str) -> JsonFields:
    value = outer.get(name)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        outer.fail(name, f"must be an object, got {value!r}")
    return JsonFields(outer.path, value, prefix=f"{name}.")


def _architecture(outer: JsonFields, in_speculators: bool) -> str:
    value = outer.get("architectures")
    if value is None and in_speculators:
        return "Eagle3Speculator"
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
        outer.fail("architectures", f"must name one architecture, such as LlamaForCausalLMEagle3, got {value!r}")
    return str(value[0])


def _refuse_unsupported(inner: JsonFields) -> None:
    if inner.get("quantization_config") is not None:
        inner.fail("quantization_config", "is set; quantised drafters are not served, use the original weights")
    if inner.get("hidden_act") not in (None, "silu"):
        inner.fail("hidden_act", f"is {inner.get('hidden_act')!r}; only silu is served")
    for name in ("attention_bias", "mlp_bias"):
        if inner.flag(name):
            inner.fail(name, "is true; drafters with biases are not served. Give one without")
    if inner.get("logit_scale") not in (None, 1, 1.0):
        inner.fail("logit_scale", f"is {inner.get('logit_scale')!r}; only 1 is served")
    if inner.get("model_type") not in (None, "llama"):
        inner.fail("model_type", f"is {inner.get('model_type')!r}; {SERVED}. Give another drafter")


def _size(fields: JsonFields, name: str, in_speculators: bool) -> int:
    return fields.positive_int(name, int(_LLAMA_DEFAULTS[name]) if in_speculators else None)


def _optional_size(name: str, *places: JsonFields) -> int | None:
    for fields in places:
        if fields.get(name) is not None:
            return fields.positive_int(name)
    return None


def _rope_theta(inner: JsonFields) -> float:
    """The base of the head's rotary embedding; without one, 10000, as all trainers' and engines' Llama."""
    parameters = inner.get("rope_parameters")
    if isinstance(parameters, dict) and parameters.get("rope_theta") is not None:
        return JsonFields(inner.path, parameters, f"{inner.prefix}rope_parameters.").positive_float("rope_theta")
    return inner.positive_float("rope_theta", 10_000.0)


def _layer_ids(*places: JsonFields) -> tuple[int, int, int] | None:
    for fields in places:
        value: Any = fields.get(LAYER_IDS_KEY)
        if value is None or value == []:
            continue
        whole = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if not whole or len(value) != 3:
            fields.fail(LAYER_IDS_KEY, f"must hold three whole numbers (low, middle, high), got {value!r}; {SERVED}")
        low, middle, high = value
        if not 0 <= low < middle < high:
            fields.fail(LAYER_IDS_KEY, f"must ascend from 0 or more, got {value}; correct it to what was trained")
        return low, middle, high
    return None


def _convention(outer: JsonFields) -> LayerIds | None:
    value = outer.get(CONVENTION_KEY)
    if value is None:
        return None
    for known in CONVENTIONS:
        if value == known:
            return known
    raise ConfigError(f"{outer.path}: {CONVENTION_KEY} must be 'boundary' or 'output', got {value!r}")
