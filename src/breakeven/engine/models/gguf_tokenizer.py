"""The tokenizer that a GGUF's metadata describe, as a `tokenizers` tokenizer.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) without spelling it out, so only those known here are served.
SmolLM's splits every digit off before the byte-level split; a tokenizer without that step (transformers builds such a
one) encodes numbers differently from how the model was trained.

SmolLM2's vocabulary lacks 21 of the 256 byte symbols (0x04, 06, 13, 14, 16, 1D, C0, C1, F1, F2, F5-FF): six control
characters, the code points from U+40000 to U+BFFFF, and bytes that no UTF-8 text has. Left alone, BPE drops them in
silence. Here each becomes the vocabulary's unknown token, so that nothing of a prompt vanishes unseen.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from breakeven.engine.config import ConfigError
from breakeven.engine.models.gguf import GGUFModel

_CONTROL, _USER_DEFINED = 3, 4  # of llama.cpp's token types


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """The tokenizer; ConfigError naming the metadata field that is missing or of a kind not served."""
    kind = model.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ConfigError(
            f"{model.path}: tokenizer.ggml.model is {kind!r}; only gpt2 (byte-level BPE) is served from GGUF. Use the "
            "model's Hugging Face directory, whose tokenizer.json is read as it is"
        )
    tokens = model.require("tokenizer.ggml.tokens", list)
    merges = model.require("tokenizer.ggml.merges", list)
    types = model.require("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise ConfigError(f"{model.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    unknown = model.optional("tokenizer.ggml.unknown_token_id", int)
    try:
        backend = Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[tuple(merge.split(" ")) for merge in merges],
                unk_token=None if unknown is None else tokens[unknown],
                fuse_unk=False,
            )
        )
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ConfigError(
            f"{model.path}: tokenizer.ggml's tokens, merges and unknown_token_id do not fit together: {error}"
        ) from None
    backend.pre_tokenizer = _pre_tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, of in zip(tokens, types, strict=True) if of == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, of in zip(tokens, types, strict=True) if of == _USER_DEFINED]
    )
    if model.get("tokenizer.ggml.add_bos_token"):
        bos = model.require("tokenizer.ggml.bos_token_id", int)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def tokenizer_settings(model: GGUFModel, max_position: int) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by role, and the chat template if there is one.

    `tokenizer_class` makes transformers take tokenizer.json as it is; its Llama class would build its own.
    """
    tokens = model.require("tokenizer.ggml.tokens", list)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    for role, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = model.optional(f"tokenizer.ggml.{field}_token_id", int)
        if token_id is not None and 0 <= token_id < len(tokens):
            settings[f"{role}_token"] = tokens[token_id]
    if template := model.optional("tokenizer.chat_template", str):
        settings["chat_template"] = template
    return settings


def _pre_tokenizer(model: GGUFModel) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    name = model.require("tokenizer.ggml.pre", str)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    raise ConfigError(
        f"{model.path}: tokenizer.ggml.pre is {name!r}; smollm and gpt-2 are served from GGUF. Use the model's Hugging "
        "Face directory, whose tokenizer.json is read as it is"
    )
