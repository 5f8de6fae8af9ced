"""Writes the folder `shapes/`: an 8B Llama and an EAGLE-3 head as configurations without weights, and a tokenizer.

    python examples/synthetic-acceptance/make_shapes.py

vLLM fills them with random numbers (`--load-format dummy`), so nothing needs to be downloaded. The shapes are those of
Llama-3.1-8B and of the heads published for it. The tokenizer takes text byte by byte and gives every other number of
the vocabulary a made-up word, so that whatever random weights choose can be written out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, POSITIONS = 4096, 128_256, 32_000, 131_072
BEGIN, END = VOCABULARY - 2, VOCABULARY - 1
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCABULARY,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TARGET = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
DRAFTER = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "target_hidden_size": HIDDEN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29], "use_aux_hidden_state": True},
}


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself if it can be seen, else one from 256 on (GPT-2)."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: no merges, so a byte is a token."""
    words = [*byte_letters(), *(f"w{number}" for number in range(256, BEGIN))]
    special = {"<begin>": BEGIN, "<end>": END}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, number in special.items()
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {**{word: i for i, word in enumerate(words)}, **special}, "merges": []},
    }


def write(folder: Path) -> None:
    """Both shapes, below `folder`."""
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}
    for name, config in (("llama-8b", TARGET), ("eagle3", DRAFTER)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "llama-8b" / "tokenizer.json").write_text(json.dumps(tokenizer()))
    limits = {"model_max_length": POSITIONS, "clean_up_tokenization_spaces": False}
    (folder / "llama-8b" / "tokenizer_config.json").write_text(json.dumps({**told, **limits}, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(__file__).resolve().parent / "shapes")
