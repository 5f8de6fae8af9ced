"""Drafter checkpoints: every format says the same, and what is wrong with one is said in its own words."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import TARGET, TINY, random_weights, written
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from breakeven.engine.config import ConfigError
from breakeven.engine.models import drafter_load
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.drafter_config_json import CONVENTION_KEY, LAYER_IDS_KEY
from breakeven.engine.models.drafter_load import default_drafter, load_drafter
from breakeven.engine.models.drafter_save import prune_vocabulary, save_drafter

FORMATS = ("official", "vllm", "speculators")
Change = Callable[[dict[str, Tensor]], object]


# What is saved is what is loaded


@st.composite
def drafters(draw: st.DrawFn) -> DrafterConfig:
    kv_heads, low = draw(st.integers(1, 2)), draw(st.integers(0, 8))
    middle = draw(st.integers(low + 1, 10))
    norm = draw(st.sampled_from(["none", "before_fc", "fc_norm"]))
    return DrafterConfig(
        hidden_size=TARGET.hidden_size,
        target_hidden_size=TARGET.hidden_size,
        intermediate_size=draw(st.integers(1, 40)),
        num_heads=kv_heads * draw(st.integers(1, 2)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 8])),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        vocab_size=TARGET.vocab_size,
        draft_vocab_size=draw(st.integers(1, TARGET.vocab_size)),
        tap_boundaries=(low, middle, draw(st.integers(middle + 1, TARGET.num_layers))),
        norm_before_residual=draw(st.booleans()),
        norm_before_fc=norm == "before_fc",
        fc_norm=norm == "fc_norm",
        norm_output=draw(st.booleans()),
    )


@given(drafters(), st.sampled_from(FORMATS), st.booleans(), st.booleans(), st.sampled_from([None, 6000]))
@settings(max_examples=40, deadline=None)
def test_a_drafter_saved_in_any_format_is_loaded_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    config: DrafterConfig,
    format: Any,
    embedding: bool,
    half: bool,
    shard: int | None,
) -> None:
    weights = random_weights(config, embedding=embedding)
    dtype = torch.bfloat16 if half else torch.float32
    path = tmp_path_factory.mktemp("drafter")
    save_drafter(path, config, TARGET, weights, format=format, dtype=dtype, max_shard_bytes=shard)
    assert shard is None or max(file.stat().st_size for file in path.glob("*.safetensors")) <= shard
    loaded = load_drafter(path, TARGET)
    assert loaded.config == config
    found = loaded.weights(torch.float32)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor if name == "d2t" else tensor.to(dtype).float())
        assert found[name].dtype == (torch.int64 if name == "d2t" else torch.float32)


def test_saving_anew_leaves_no_older_weights_behind(tmp_path: Path) -> None:
    written(tmp_path, max_shard_bytes=6000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    written(tmp_path)
    assert [file.name for file in tmp_path.glob("*safetensors*")] == ["model.safetensors"]


def test_the_marks_of_the_draft_vocabulary_are_saved_beside_its_map(tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path) / "model.safetensors")
    assert tensors["t2d"].nonzero().flatten().tolist() == (tensors["d2t"] + torch.arange(20)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_any_float_type_are_given_in_the_wanted_one(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load_drafter(written(tmp_path, dtype=dtype), TARGET)
    expected = random_weights(TINY)["fc.weight"].to(dtype).to(torch.bfloat16)
    assert torch.equal(loaded.weights(torch.bfloat16)["fc.weight"], expected)


def test_an_official_checkpoint_of_pickled_tensors_is_read(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    written(tmp_path, json_changes={"architectures": ["LlamaForCausalLM"]})
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    found = load_drafter(tmp_path, TARGET).weights(torch.float32)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    written(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is damaged, or holds more than tensors"):
        load_drafter(tmp_path, TARGET)
    assert not (tmp_path / "sprung").exists()


# Conventions


@pytest.mark.parametrize(
    ("changes", "layer_ids", "boundaries", "note"),
    [
        ({LAYER_IDS_KEY: None, CONVENTION_KEY: None}, None, (2, 6, 9), "No layer ids are given"),
        ({LAYER_IDS_KEY: [2, 6, 9], CONVENTION_KEY: None}, None, (2, 6, 9), "boundary ids, as the first is not 1"),
        ({LAYER_IDS_KEY: [1, 5, 8], CONVENTION_KEY: None}, None, (2, 6, 9), "output ids, as the first is 1"),
        ({LAYER_IDS_KEY: [1, 5, 8], CONVENTION_KEY: None}, "boundary", (1, 5, 8), "boundary ids, as asked for"),
        ({LAYER_IDS_KEY: [2, 6, 9], CONVENTION_KEY: None}, "output", (3, 7, 10), "output ids, as asked for"),
        ({LAYER_IDS_KEY: [1, 5, 8]}, None, (1, 5, 8), "boundary ids, as config.json says"),
        (
            {LAYER_IDS_KEY: None, CONVENTION_KEY: None, "eagle_config": {LAYER_IDS_KEY: [1, 5, 8]}},
            None,
            (2, 6, 9),
            "output ids",
        ),
        ({LAYER_IDS_KEY: None, CONVENTION_KEY: None}, "output", (2, 6, 9), "No layer ids are given"),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_layer_ids_are_read_by_one_rule_which_the_notes_state(
    tmp_path: Path, changes: dict[str, Any], layer_ids: Any, boundaries: tuple[int, ...], note: str, format: Any
) -> None:
    loaded = load_drafter(written(tmp_path, json_changes=changes, format=format), TARGET, layer_ids=layer_ids)
    assert loaded.config.tap_boundaries == boundaries
    assert any(note in text for text in loaded.notes), loaded.notes


@pytest.mark.parametrize(("format", "expected"), [("official", False), ("vllm", False), ("speculators", True)])
def test_the_residual_is_normed_by_default_in_the_speculators_format_only(
    tmp_path: Path, format: Any, expected: bool
) -> None:
    loaded = load_drafter(written(tmp_path, json_changes={"norm_before_residual": None}, format=format), TARGET)
    assert loaded.config.norm_before_residual is expected


def test_speculators_leaves_out_what_equals_llamas_defaults(tmp_path: Path) -> None:
    target = replace(TARGET, vocab_size=32_000)
    config = replace(TINY, vocab_size=32_000, num_heads=32, num_kv_heads=32, head_dim=2)
    written(tmp_path, config=config, target=target, format="speculators")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads"):
        del values["transformer_layer_config"][key]
    path.write_text(json.dumps(values))
    assert load_drafter(tmp_path, target).config == config


def test_norms_that_config_json_does_not_mention_are_seen_by_their_tensors(tmp_path: Path) -> None:
    config = replace(TINY, fc_norm=True)
    loaded = load_drafter(written(tmp_path, config=config, json_changes={"fc_norm": None}), TARGET)
    assert loaded.config.fc_norm
    assert any("fc_norm is not said" in note for note in loaded.notes)


def test_the_norm_output_of_older_spec_forge_heads_is_pointed_out(tmp_path: Path) -> None:
    loaded = load_drafter(written(tmp_path, config=replace(TINY, norm_output=True)), TARGET)
    assert loaded.config.norm_output
    assert any("SpecForge" in note for note in loaded.notes)


def test_a_rotary_base_that_is_not_the_targets_is_pointed_out(tmp_path: Path) -> None:
    assert not any("rope_theta" in note for note in load_drafter(written(tmp_path), TARGET).notes)
    loaded = load_drafter(written(tmp_path, json_changes={"rope_theta": None}), TARGET)
    assert any("rope_theta 10000" in note for note in loaded.notes)


# Head, embedding and vocabulary


def _full_vocabulary(tmp_path: Path, *without: str) -> Path:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in without:
            del tensors[name]

    return written(tmp_path, config=replace(TINY, draft_vocab_size=50), tensor_change=change)


def test_a_drafter_without_a_head_uses_the_targets(tmp_path: Path) -> None:
    loaded = load_drafter(_full_vocabulary(tmp_path, "lm_head.weight", "d2t", "t2d"), TARGET)
    assert loaded.uses_target_head
    embedding, head = torch.randn(50, 16), torch.randn(50, 16)
    tied = loaded.weights(torch.float32, {"model.embed_tokens.weight": embedding})
    untied = loaded.weights(torch.float32, {"model.embed_tokens.weight": embedding, "lm_head.weight": head})
    assert torch.equal(tied["lm_head.weight"], embedding)
    assert torch.equal(untied["lm_head.weight"], head)
    assert torch.equal(tied["d2t"], torch.zeros(50, dtype=torch.int64))
    assert "lm_head.weight" not in loaded.weights(torch.float32)


def test_an_embedding_is_kept_only_where_it_is_not_the_targets(tmp_path: Path) -> None:
    weights = random_weights(TINY, embedding=True)
    loaded = load_drafter(written(tmp_path, weights=weights, dtype=torch.float32), TARGET)
    own = weights["embed_tokens.weight"]
    assert "embed_tokens.weight" in loaded.weights(torch.float32)
    assert "embed_tokens.weight" in loaded.weights(torch.float32, {"model.embed_tokens.weight": own + 1})
    assert "embed_tokens.weight" not in loaded.weights(torch.float32, {"model.embed_tokens.weight": own})


def test_a_drafter_of_another_width_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    config = replace(TINY, hidden_size=8)
    weights = random_weights(config, embedding=True)
    assert load_drafter(written(tmp_path, config=config, weights=weights), TARGET).config == config
    del weights["embed_tokens.weight"]
    with pytest.raises(ConfigError, match=r"embed_tokens.weight is missing; the drafter is 8 wide"):
        load_drafter(written(tmp_path, config=config, weights=weights), TARGET)


def test_the_draft_vocabulary_is_that_of_the_head_where_config_json_is_silent(tmp_path: Path) -> None:
    loaded = load_drafter(written(tmp_path, json_changes={"draft_vocab_size": None}), TARGET)
    assert loaded.config.draft_vocab_size == 20


@given(st.sets(st.integers(0, 19), min_size=1), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_pruning_changes_only_the_heads_rows_and_the_map(rows: set[int], random: Any) -> None:
    weights = random_weights(TINY)
    targets = (weights["d2t"] + torch.arange(20)).tolist()
    keep = [targets[row] for row in rows]
    random.shuffle(keep)
    pruned, config = prune_vocabulary(weights, TINY, keep)
    assert config == replace(TINY, draft_vocab_size=len(rows))
    assert pruned["lm_head.weight"].shape[0] == len(rows)
    for row, token in enumerate((pruned["d2t"] + torch.arange(len(rows))).tolist()):
        assert token in keep
        assert torch.equal(pruned["lm_head.weight"][row], weights["lm_head.weight"][targets.index(token)])
    assert all(torch.equal(pruned[name], weights[name]) for name in pruned if name not in ("lm_head.weight", "d2t"))
    assert pruned.keys() == weights.keys()


def test_a_token_outside_the_draft_vocabulary_cannot_be_kept() -> None:
    weights = random_weights(TINY)
    outside = next(iter(set(range(50)) - set((weights["d2t"] + torch.arange(20)).tolist())))
    with pytest.raises(ConfigError, match=f"target id {outside} is not in the drafter's vocabulary"):
        prune_vocabulary(weights, TINY, [outside])
    with pytest.raises(ConfigError, match="at least one token"):
        prune_vocabulary(weights, TINY, [])


def test_the_drafter_in_the_box_is_found_by_the_models_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_load, "_SHIPPED", tmp_path)
    assert default_drafter("tiny") is None
    written(tmp_path / "tiny")
    assert default_drafter("Tiny") == tmp_path / "tiny"
    assert default_drafter("../" + tmp_path.name + "/tiny") is None
    assert load_drafter("tiny", TARGET).config == load_drafter(tmp_path / "tiny", TARGET).config
    with pytest.raises(ConfigError, match=r"'small' is not a directory.*comes along \(tiny\)"):
        load_drafter("small", TARGET)


# Errors


def _set(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, value)


def _without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def _d2t(first: int, value: int) -> Change:
    return lambda tensors: tensors["d2t"].__setitem__(first, value - first)


@pytest.mark.parametrize(
    ("json_changes", "message"),
    [
        ({"target_hidden_size": 32}, "target_hidden_size is 32, but the target's hidden_size is 16"),
        ({"vocab_size": 51}, "vocab_size is 51, but the target's is 50: the drafter belongs to another tokenizer"),
        ({LAYER_IDS_KEY: [2, 6, 13]}, r"\[2, 6, 13\], read as boundary ids, but the target has 12 layers"),
        ({LAYER_IDS_KEY: [1, 6, 12], CONVENTION_KEY: None}, "read as output ids, but the target has 12 layers"),
        ({LAYER_IDS_KEY: [6, 2, 9]}, "must ascend from 0 or more"),
        ({LAYER_IDS_KEY: [2, 6]}, "must hold three whole numbers"),
        ({LAYER_IDS_KEY: ["2", 6, 9]}, "must hold three whole numbers"),
        ({CONVENTION_KEY: "input"}, "must be 'boundary' or 'output', got 'input'"),
        ({"draft_vocab_size": 21}, r"lm_head.weight has shape \(20, 16\), but draft_vocab_size in config.json is 21"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be a positive whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": 25}, r"mlp.\w+.weight has shape .*24.*, but .*25.* is expected"),
        ({"num_key_value_heads": 2}, r"k_proj.weight has shape \(8, 32\), but \(16, 32\) is expected"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"fc_norm": True}, "tensor fc_norm.0.weight is missing from the weights"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"fc_norm": "yes"}, "fc_norm must be true or false"),
        ({"attention_bias": True}, "drafters with biases are not served"),
        ({"hidden_act": "gelu"}, "only silu is served"),
        ({"quantization_config": {"bits": 4}}, "quantised drafters are not served"),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"architectures": None}, "must name one architecture"),
    ],
)
def test_a_config_that_does_not_fit_is_an_error_naming_file_and_field(
    tmp_path: Path, json_changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_drafter(written(tmp_path, json_changes=json_changes), TARGET)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("midlayer.hidden_norm.weight"), "tensor midlayer.hidden_norm.weight is missing from the weights;"),
        (_without("lm_head.weight"), "tensor lm_head.weight is missing from the weights"),
        (_without("d2t"), "tensor d2t is missing; it maps the 20 draft ids to the target's 50"),
        (_set("norm.weight", torch.ones(15)), r"norm.weight has shape \(15,\), but \(16,\) is expected"),
        (
            _set("fc.weight", torch.ones(16, 96)),
            r"\(16, 96\), but \(16, 48\).*three states of the target's hidden_size",
        ),
        (_set("fc.weight", torch.ones(16, 48).to(torch.int8)), "fc.weight is of type I8"),
        (_set("d2t", torch.zeros(20)), "d2t is of type F32"),
        (_set("d2t", torch.zeros(19, dtype=torch.int64)), r"d2t has shape \(19,\), but \(20,\)"),
        (_d2t(19, 50), "d2t leads draft id 19 to 50, outside the target's ids 0 to 49"),
        (_d2t(0, -1), "d2t leads draft id 0 to -1, outside"),
        (_d2t(0, 49), "d2t leads draft ids 0 and 1 to 49 and .*, which must ascend"),
        (_set("d2t", torch.arange(20) * 2), "it seems to hold target ids instead of offsets"),
        (_set("embed_tokens.weight", torch.ones(51, 16)), "the drafter belongs to another tokenizer"),
        (_set("t2d", torch.ones(51, dtype=torch.bool)), "the drafter belongs to another tokenizer"),
        (_set("midlayer.mlp.gate.weight", torch.ones(4)), "midlayer.mlp.gate.weight does not belong"),
        (_set("layers.0.hidden_norm.weight", torch.ones(16)), "hidden_norm.weight is there twice"),
        (_set("fc_norm.0.weight", torch.ones(16)), "fc_norm is false, but model.safetensors has a tensor fc_norm.0"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error_naming_file_and_tensor(
    tmp_path: Path, change: Change, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_drafter(written(tmp_path, tensor_change=change), TARGET)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("json_changes", "kind"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}, "multi-head latent attention"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"model_type": "deepseek_v3"}, "multi-head latent attention"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE-1 or EAGLE-2"),
        ({"speculators_model_type": "eagle"}, "EAGLE-1 or EAGLE-2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1-like"),
        ({"architectures": ["MedusaModel"]}, "Medusa"),
        ({"model_type": "mlp_speculator"}, "an MLP speculator"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "P-EAGLE"),
        ({"parallel_drafting": True}, "P-EAGLE"),
        ({"pard_token": 3}, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"architectures": ["DeepSeekMTPModel"]}, r"MTP \(multi-token prediction\)"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "Qwen3 layer"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"architectures": ["BertModel"]}, "'BertModel'"),
    ],
)
def test_a_drafter_of_another_kind_is_named_by_its_config(
    tmp_path: Path, json_changes: dict[str, Any], kind: str
) -> None:
    with pytest.raises(ConfigError, match=f"{kind}.*this engine serves EAGLE-3 drafters of one Llama layer"):
        load_drafter(written(tmp_path, json_changes=json_changes), TARGET)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_set("fc.weight", torch.ones(16, 32)), "EAGLE-1 or EAGLE-2"),
        (_set("mask_hidden", torch.ones(1, 48)), "P-EAGLE"),
        (_set("midlayer.self_attn.kv_a_proj_with_mqa.weight", torch.ones(4, 4)), "multi-head latent attention"),
        (_set("midlayer.self_attn.q_norm.weight", torch.ones(8)), "Qwen3 layer"),
        (_set("layers.1.input_layernorm.weight", torch.ones(16)), "of several layers"),
        (_set("medusa_head.0.0.linear.weight", torch.ones(4, 4)), "Medusa"),
    ],
)
def test_a_drafter_of_another_kind_is_named_by_its_tensors(tmp_path: Path, change: Change, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind}.*this engine serves EAGLE-3"):
        load_drafter(written(tmp_path, tensor_change=change), TARGET)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data(), st.sampled_from(FORMATS))
@settings(max_examples=150, deadline=None)
def test_nothing_in_config_json_gives_more_than_an_error_of_configuration(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, format: Any
) -> None:
    path = written(tmp_path_factory.mktemp("drafter"), format=format) / "config.json"
    values = json.loads(path.read_text())
    part = data.draw(st.sampled_from([part for part in (values, values.get("transformer_layer_config")) if part]))
    part[data.draw(st.sampled_from([*sorted(part), "eagle_config", "dflash_config", "rope_parameters"]))] = data.draw(
        JSON
    )
    path.write_text(json.dumps(values))
    with contextlib.suppress(ConfigError):
        load_drafter(path.parent, TARGET)


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_nothing_in_the_weights_gives_more_than_an_error_of_configuration(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, place: int
) -> None:
    file = written(tmp_path_factory.mktemp("drafter")) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:place] + junk + content[place + len(junk) :])
    with contextlib.suppress(ConfigError):
        load_drafter(file.parent, TARGET).weights(torch.float32)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = written(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))} is damaged"):
        load_drafter(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read as JSON"):
        load_drafter(tmp_path, TARGET)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    gone = sorted(written(tmp_path, max_shard_bytes=6000).glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(ConfigError, match=f"{gone.name} is missing"):
        load_drafter(tmp_path, TARGET)


def test_weights_that_changed_after_loading_are_an_error(tmp_path: Path) -> None:
    loaded = load_drafter(written(tmp_path), TARGET)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors"):
        loaded.weights(torch.float32)


def test_a_target_too_short_for_the_usual_taps_asks_for_layer_ids(tmp_path: Path) -> None:
    short = replace(TARGET, num_layers=4)
    path = written(tmp_path, json_changes={LAYER_IDS_KEY: None, CONVENTION_KEY: None})
    with pytest.raises(ConfigError, match=r"a target of 4 layers is too short .* add it"):
        load_drafter(path, short)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_what_is_no_directory_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        load_drafter(tmp_path / name, TARGET)


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    weights = random_weights(TINY)

    def save(changed: dict[str, Tensor], **options: Any) -> None:
        save_drafter(tmp_path / "drafter", TINY, TARGET, changed, **options)

    with pytest.raises(ConfigError, match=r"lack fc.weight"):
        save({name: tensor for name, tensor in weights.items() if name != "fc.weight"})
    with pytest.raises(ConfigError, match=r"lack d2t"):
        save({name: tensor for name, tensor in weights.items() if name != "d2t"})
    with pytest.raises(ConfigError, match=r"norm.weight has shape \(3,\)"):
        save(weights | {"norm.weight": torch.ones(3)})
    with pytest.raises(ConfigError, match="no drafter with this config has"):
        save(weights | {"fc_norm.0.weight": torch.ones(16)})
    with pytest.raises(ConfigError, match="ascending target ids"):
        save(weights | {"d2t": weights["d2t"].flip(0)})
    with pytest.raises(ConfigError, match=r"no place for fc.bias"):
        save(weights | {"fc.bias": torch.ones(16)}, format="vllm")
    with pytest.raises(ConfigError, match=r"fc.weight alone takes"):
        save(weights, max_shard_bytes=1000)
    (tmp_path / "drafter").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(weights)
