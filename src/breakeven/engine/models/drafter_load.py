"""One way in for every EAGLE-3 checkpoint: official, SGLang and SpecForge, vLLM, speculators.

Everything is checked when a drafter is loaded (names, shapes, types, the vocabulary's map), so that what is wrong with
it is said then and in the checkpoint's own words. Formats and conventions: docs/drafters.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.drafter_config_json import (
    CONVENTIONS,
    LAYER_IDS_KEY,
    DeclaredDrafter,
    LayerIds,
    read_declared,
)
from breakeven.engine.models.drafter_files import StoredTensor, read_stored, stored_tensors
from breakeven.engine.models.drafter_kinds import refusal, refuse_tensors
from breakeven.engine.models.drafter_tensors import (
    EMBEDDING,
    HEAD,
    MEMBERS,
    OFFSETS,
    canonical_name,
    drafter_shapes,
    optional_shapes,
)
from breakeven.engine.models.weights import READABLE_TYPES

_INTEGER_TYPES = {"I64", "I32"}
_TARGET_EMBEDDING = "model.embed_tokens.weight"
_SHIPPED = Path(__file__).resolve().parent.parent / "drafters"


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that fits its target. `notes` say, in whole sentences, how the checkpoint was read."""

    config: DrafterConfig
    directory: Path
    notes: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]  # official name → where it lies

    @property
    def uses_target_head(self) -> bool:
        """The checkpoint has no `lm_head.weight`: the target's head, over the whole vocabulary, is the drafter's."""
        return HEAD not in self.tensors

    def weights(self, dtype: torch.dtype, target_weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """All tensors on the CPU in `dtype` under the official names; `d2t` int64 [draft_vocab_size], always there.

        `target_weights`: the target's, as `LoadedModel.weights` gives them. With them, `lm_head.weight` is the target's
        where the checkpoint has none, and `embed_tokens.weight` is left out where it equals the target's in `dtype`.
        Without them `lm_head.weight` is missing if `uses_target_head`, and the caller takes the target's. Read anew at
        each call; ConfigError if the files have changed or are damaged.
        """
        values = read_stored(self.tensors.values())
        weights = {
            name: values[stored].to(torch.int64 if name == OFFSETS else dtype, copy=True).contiguous()
            for name, stored in self.tensors.items()
        }
        if OFFSETS not in weights:
            weights[OFFSETS] = torch.zeros(self.config.draft_vocab_size, dtype=torch.int64)
        if target_weights is None:
            return weights
        embedding = target_weights[_TARGET_EMBEDDING].to("cpu", dtype)
        if self.uses_target_head:
            weights[HEAD] = target_weights[HEAD].to("cpu", dtype) if HEAD in target_weights else embedding
        own = weights.get(EMBEDDING)
        if own is not None and own.shape == embedding.shape and torch.equal(own, embedding):
            del weights[EMBEDDING]
        return weights


def default_drafter(model_name: str) -> Path | None:
    """The drafter in the box of that name, or None. A model known by name (`load.KNOWN_MODELS`) has one of its own
    name; others for it begin with that name."""
    name = model_name.lower()
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        return None  # a path, not a name
    directory = _SHIPPED / name
    return directory if (directory / "config.json").is_file() else None


def load_drafter(directory: Path | str, target: ModelConfig, *, layer_ids: LayerIds | None = None) -> LoadedDrafter:
    """The EAGLE-3 drafter in `directory` (config.json and weights; or a name in the box), checked against `target`.
    Nothing is downloaded.

    `layer_ids`: what the checkpoint's layer ids mean; None: by the rule of docs/drafters.md, and `notes` say which.
    ConfigError names the file, the field or tensor, what was found and expected, and what to do.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        shipped = default_drafter(str(directory))
        if shipped is None:
            names = ", ".join(sorted(item.name for item in _SHIPPED.iterdir() if (item / "config.json").is_file()))
            raise ConfigError(
                f"no such drafter: {str(path)!r} is not a directory. Give one with config.json and model.safetensors, "
                f"or one that comes along ({names}); nothing is downloaded"
            )
        path = shipped
    if layer_ids is not None and layer_ids not in CONVENTIONS:
        raise ConfigError(f"the drafter's layer ids are either 'boundary' or 'output', not {layer_ids!r}")
    declared = read_declared(path)
    _check_target(declared, target)
    notes = list(declared.notes)
    boundaries = _boundaries(declared, target, layer_ids, notes)
    tensors = _by_canonical_name(path)
    config = _config(declared, target, boundaries, tensors, notes)
    kept = _checked(config, tensors, notes)
    _check_vocabulary(config, kept, tensors.get(MEMBERS), notes)
    if config.hidden_size != target.hidden_size and EMBEDDING not in kept:
        raise ConfigError(
            f"{path}: tensor {EMBEDDING} is missing; the drafter is {config.hidden_size} wide and its target "
            f"{target.hidden_size}, so it cannot use the target's embedding. Download the weights again"
        )
    if declared.rope_theta != target.rope_theta:
        notes.append(
            f"{declared.path.name} says rope_theta {declared.rope_theta:g} (10000 where it says none), but the "
            f"target's, {target.rope_theta:g}, is used: if few drafts are accepted, the head was trained with its own"
        )
    return LoadedDrafter(config, path, tuple(notes), kept)


def _check_target(declared: DeclaredDrafter, target: ModelConfig) -> None:
    width = declared.target_hidden_size
    if width is not None and width != target.hidden_size:
        raise ConfigError(
            f"{declared.path}: target_hidden_size is {width}, but the target's hidden_size is {target.hidden_size}: "
            "the drafter belongs to another model. Give the one trained for this target"
        )
    if declared.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{declared.path}: vocab_size is {declared.vocab_size}, but the target's is {target.vocab_size}: the "
            "drafter belongs to another tokenizer. Give the one trained for this target"
        )


def _boundaries(
    declared: DeclaredDrafter, target: ModelConfig, override: LayerIds | None, notes: list[str]
) -> tuple[int, int, int]:
    """The tapped boundaries, by this rule: what the caller says; what our own key in the file says; an id of 1 in first
    place means outputs (as SGLang since PR 25454: no trainer taps after the first layer by default, but the default
    taps written as outputs begin with 1); anything else means boundaries (vLLM, speculators, ModelOpt)."""
    layers = target.num_layers
    ids = declared.layer_ids
    if ids is None:
        low, middle, high = 2, layers // 2, layers - 3
        if not low < middle < high:
            raise ConfigError(
                f"{declared.path}: {LAYER_IDS_KEY} is missing, and a target of {layers} layers is too short for the "
                f"usual (2, n // 2, n - 3); add it"
            )
        notes.append(f"No layer ids are given: the target is tapped after layers {low}, {middle} and {high}.")
        return low, middle, high
    if override is not None:
        convention, reason = override, "as asked for"
    elif declared.convention is not None:
        convention, reason = declared.convention, "as config.json says"
    elif ids[0] == 1:
        convention, reason = "output", "as the first is 1"
    else:
        convention, reason = "boundary", "as the first is not 1"
    step = 1 if convention == "output" else 0
    low, middle, high = ids[0] + step, ids[1] + step, ids[2] + step
    if high > layers:
        raise ConfigError(
            f"{declared.path}: {LAYER_IDS_KEY} is {list(ids)}, read as {convention} ids, but the target has {layers} "
            "layers: the drafter belongs to another model, or the ids mean the other convention "
            "(--speculative-draft-layer-ids)"
        )
    notes.append(
        f"Layer ids {list(ids)} are read as {convention} ids, {reason}: the target is tapped after layers {low}, "
        f"{middle} and {high}."
    )
    return low, middle, high


def _by_canonical_name(directory: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    stored = stored_tensors(directory)
    refuse_tensors(directory, (tensor.name for tensor in stored))
    for tensor in stored:
        name = canonical_name(tensor.name)
        if name is None:
            continue
        if name in found:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name} is there twice (as {found[name].name} in "
                f"{found[name].file.name}); delete the weights that do not belong"
            )
        found[name] = tensor
    return found


def _config(
    declared: DeclaredDrafter,
    target: ModelConfig,
    boundaries: tuple[int, int, int],
    tensors: Mapping[str, StoredTensor],
    notes: list[str],
) -> DrafterConfig:
    fusion = tensors.get("fc.weight")
    if fusion is not None and fusion.shape == (declared.hidden_size, 2 * declared.hidden_size):
        raise refusal(fusion.file, f"EAGLE-1 or EAGLE-2, by the shape {fusion.shape} of {fusion.name}")
    draft_vocab_size = declared.draft_vocab_size
    head = tensors.get(HEAD)
    if draft_vocab_size is None:
        draft_vocab_size = declared.vocab_size if head is None or not head.shape else head.shape[0]
        notes.append(f"draft_vocab_size is not said; {draft_vocab_size} is taken, by the rows of {HEAD}.")
    elif head is not None and head.shape[:1] != (draft_vocab_size,):
        raise ConfigError(
            f"{head.file}: tensor {head.name} has shape {head.shape}, but draft_vocab_size in {declared.path.name} is "
            f"{draft_vocab_size}; weights and {declared.path.name} do not belong together"
        )
    try:
        return DrafterConfig(
            hidden_size=declared.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=declared.intermediate_size,
            num_heads=declared.num_heads,
            num_kv_heads=declared.num_kv_heads,
            head_dim=declared.head_dim,
            rms_norm_eps=declared.rms_norm_eps,
            vocab_size=declared.vocab_size,
            draft_vocab_size=draft_vocab_size,
            tap_boundaries=boundaries,
            norm_before_residual=declared.norm_before_residual,
            norm_before_fc=_norm_flag(declared, "norm_before_fc", "input_norm.weight", tensors, notes),
            fc_norm=_norm_flag(declared, "fc_norm", "fc_norm.0.weight", tensors, notes),
            norm_output=declared.norm_output,
        )
    except ConfigError as error:
        raise ConfigError(f"{declared.path}: {error}") from None


def _norm_flag(
    declared: DeclaredDrafter, flag: str, tensor: str, tensors: Mapping[str, StoredTensor], notes: list[str]
) -> bool:
    """The flag as declared; where it is not, whether its tensor is there. A flag that denies its tensor is an error."""
    value: bool | None = getattr(declared, flag)
    stored = tensors.get(tensor)
    if value is None:
        if stored is not None:
            notes.append(f"{flag} is not said; true is taken, as there is a tensor {stored.name}.")
        return stored is not None
    if stored is not None and not value:
        raise ConfigError(
            f"{declared.path}: {flag} is false, but {stored.file.name} has a tensor {stored.name}, which only drafters "
            f"with {flag} use; set it to true, or take the tensor out"
        )
    return value


def _checked(config: DrafterConfig, tensors: Mapping[str, StoredTensor], notes: list[str]) -> dict[str, StoredTensor]:
    """The tensors that are used, each of the right shape and type, in a fixed order."""
    required, optional = drafter_shapes(config), optional_shapes(config)
    directory = next((tensor.file.parent for tensor in tensors.values()), None)
    for name, tensor in tensors.items():
        expected = required.get(name, optional.get(name))
        if expected is None:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name} does not belong to an EAGLE-3 drafter with this config.json; its "
                "drafts would be others without it, so it is not served"
            )
        if tensor.shape != expected:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, but {expected} is expected from "
                f"config.json and the target{_hint(name, config)}"
            )
        types = {OFFSETS: _INTEGER_TYPES, MEMBERS: {"BOOL", "U8"} | _INTEGER_TYPES}.get(name, READABLE_TYPES)
        if tensor.kind not in types:
            raise ConfigError(
                f"{tensor.file}: tensor {tensor.name} is of type {tensor.kind}; {', '.join(sorted(types))} can be read"
            )
    missing = [name for name in required if name not in tensors]
    if missing == [HEAD] and config.draft_vocab_size == config.vocab_size:
        if config.hidden_size != config.target_hidden_size:
            raise ConfigError(
                f"{directory}: tensor {HEAD} is missing; the drafter is {config.hidden_size} wide and its target "
                f"{config.target_hidden_size}, so it cannot use the target's head. Download the weights again"
            )
        notes.append(f"There is no {HEAD}: the target's head is used.")
    elif missing:
        rest = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(
            f"{directory}: tensor {missing[0]} is missing from the weights{rest}; download them again, or correct "
            "config.json (draft_vocab_size, fc_norm, norm_before_fc)"
        )
    order = [*required, *(name for name in optional if name != MEMBERS)]
    return {name: tensors[name] for name in order if name in tensors}


def _hint(name: str, config: DrafterConfig) -> str:
    if name == "fc.weight":
        return (
            f": it fuses three states of the target's hidden_size {config.target_hidden_size} into the drafter's "
            f"{config.hidden_size}. Give the drafter trained for this target"
        )
    if name in (EMBEDDING, MEMBERS):
        return ": its rows are the target's vocabulary, so the drafter belongs to another tokenizer"
    return "; weights and config.json do not belong together"


def _check_vocabulary(
    config: DrafterConfig, tensors: Mapping[str, StoredTensor], members: StoredTensor | None, notes: list[str]
) -> None:
    """`d2t` must lead each draft id to a target id of its own, ascending; without it the vocabularies are the same."""
    stored = tensors.get(OFFSETS)
    if stored is None:
        if config.draft_vocab_size != config.vocab_size:
            any_file = next(iter(tensors.values())).file
            raise ConfigError(
                f"{any_file.parent}: tensor {OFFSETS} is missing; it maps the {config.draft_vocab_size} draft ids to "
                f"the target's {config.vocab_size}. Download the weights again"
            )
        return
    offsets = read_stored([stored])[stored].to(torch.int64)
    targets = torch.arange(len(offsets)) + offsets
    wrong = _first((targets < 0) | (targets >= config.vocab_size))
    problem = None
    if wrong is not None:
        problem = (
            f"leads draft id {wrong} to {int(targets[wrong])}, outside the target's ids 0 to {config.vocab_size - 1}"
        )
    elif (step := _first(targets[1:] <= targets[:-1])) is not None:
        problem = (
            f"leads draft ids {step} and {step + 1} to {int(targets[step])} and {int(targets[step + 1])}, which must "
            "ascend"
        )
    if problem is not None:
        absolute = (
            bool((offsets[1:] > offsets[:-1]).all()) and int(offsets[0]) >= 0 and int(offsets[-1]) < config.vocab_size
        )
        hint = "; it seems to hold target ids instead of offsets (target id - draft id)" if absolute else ""
        raise ConfigError(f"{stored.file}: tensor {stored.name} {problem}{hint}. Download the weights again")
    if members is not None:
        known = read_stored([members])[members].to(torch.bool)
        if int(known.sum()) != len(targets) or not bool(known[targets].all()):
            notes.append(f"{members.name} does not mark the tokens that {stored.name} maps to; it is not used.")


def _first(mask: Tensor) -> int | None:
    found = mask.nonzero()
    return int(found[0]) if len(found) else None
