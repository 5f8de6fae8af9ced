"""Text to token ids and back, over the `tokenizers` library; the decoding of a stream token by token.

Special tokens written out in a text (`<|im_end|>`) are read as such, in chat and in plain completions alike, as
llama.cpp and vLLM do. Text that is not Unicode (lone surrogates, which JSON can carry) is encoded with U+FFFD in their
place. Bytes for which a vocabulary has no symbol become its unknown token, where it names one.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from breakeven.engine.chat_template import ChatTemplate
from breakeven.engine.config import ConfigError
from breakeven.engine.models.config_hf import read_json

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template. Immutable after construction; safe to use from several threads."""

    def __init__(
        self, backend: Backend, eos_token_ids: Sequence[int] = (), chat_template: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        decoder_kinds = _decoder_kinds(backend)
        self.is_byte_level = decoder_kinds == ["ByteLevel"]
        self._bytes: list[bytes | None] = self._token_bytes_table(added, "ByteLevel" in decoder_kinds)

    @classmethod
    def from_directory(cls, directory: Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
        """From tokenizer.json, with the template of chat_template.jinja or else of tokenizer_config.json.

        ConfigError if tokenizer.json is missing or cannot be read, or the other files are malformed.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing; download it with the model (a model that ships only tokenizer.model can be "
                "converted by transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ConfigError(f"{path} cannot be read: {error}; download it again") from None
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, eos_token_ids, _chat_template(directory))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: what the tokenizer itself adds, such as BOS; not for chat prompts,
        whose template writes it."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of every text, on all cores where TOKENIZERS_PARALLELISM allows it."""
        try:
            found = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):  # a lone surrogate in one of them
            return [self.encode(text, add_special_tokens) for text in texts]
        return [item.ids for item in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD. Ids without a token are left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token stands for, special tokens included; b"" for an id without a token."""
        value = self._bytes[token_id] if 0 <= token_id < len(self._bytes) else None
        return b"" if value is None else value

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for people, with U+FFFD for what is not UTF-8 by itself."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def has_token(self, token_id: int) -> bool:
        """Whether the id stands for a token; models may have more rows of logits than their tokenizer has tokens."""
        return 0 <= token_id < len(self._bytes) and self._bytes[token_id] is not None

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`.

        ValueError, with a message for the caller, if there is no template or it cannot render these messages.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template; send the prompt to /v1/completions instead")
        return self._chat_template.render(messages, add_generation_prompt, **template_kwargs)

    def _token_bytes_table(self, added: Mapping[int, Any], byte_symbols: bool) -> list[bytes | None]:
        vocab = self._backend.get_vocab(with_added_tokens=True)
        table: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
        symbols = _byte_of_symbol()
        for token, index in vocab.items():
            if byte_symbols:
                # as tokenizers' own decoder: a token with any other character in it stands for itself
                if all(character in symbols for character in token):
                    table[index] = bytes(symbols[character] for character in token)
                else:
                    table[index] = token.encode()
            elif index in added:
                table[index] = token.encode()
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[index] = bytes.fromhex(token[3:5])
            else:
                table[index] = token.replace("\u2581", " ").encode()
        return table


class IncrementalDetokenizer:
    """Text from a stream of tokens; each piece is final when it is returned.

    For byte-level BPE the pieces and the flush together are exactly `tokenizer.decode` of all tokens, whatever the
    tokens, at a cost per token that does not grow. For other decoders (SentencePiece with byte fallback) a window of
    the last tokens is decoded again, which is exact but for runs of byte tokens that are not UTF-8.

    `context`: token ids that come before (the prompt's end), so that a SentencePiece word after them keeps its space.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        # the window: tokens from which text is decoded, of which the first `_settled` have their text returned
        self._window = [token for token in context if self._visible(token)][-_CONTEXT_TOKENS:]
        self._settled = len(self._window)
        self._fragments = 0  # tokens at the window's end that are parts of a character

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        if not self._visible(token_id):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._window.append(token_id)
        before, text = self._decode_window()
        self._fragments = self._fragments + 1 if self._is_fragment(token_id) else 0
        incomplete = text.endswith(_REPLACEMENT) and 0 < self._fragments < _LONGEST_CHARACTER
        if incomplete or len(text) <= len(before):
            if len(self._window) > _LONGEST_WINDOW:  # tokens without text; keep the cost bounded
                del self._window[self._settled : -_LONGEST_CHARACTER]
            return ""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._fragments = 0
        return text[len(before) :]

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character. The stream is over."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        before, text = self._decode_window()
        self._window, self._settled = [], 0
        return text[len(before) :]

    def _visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.has_token(token_id)

    def _is_fragment(self, token_id: int) -> bool:
        try:
            self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return True
        return False

    def _decode_window(self) -> tuple[str, str]:
        settled = self._tokenizer.decode(self._window[: self._settled], skip_special_tokens=False)
        return settled, self._tokenizer.decode(self._window, skip_special_tokens=False)


_CONTEXT_TOKENS = 6
_LONGEST_CHARACTER = 4  # byte tokens in one character
_LONGEST_WINDOW = 64


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte in a byte-level vocabulary, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _decoder_kinds(backend: Backend) -> list[str]:
    """Types of the decoder's steps, read from its JSON form; [] without a decoder."""
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [step["type"] for step in steps if step]


def _chat_template(directory: Path) -> ChatTemplate | None:
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    special_tokens = {}
    for role in _ROLES:
        token = settings.get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            special_tokens[role] = token
    source = settings.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
    if source is not None and not isinstance(source, str):
        raise ConfigError(f"{path}: chat_template must be a string, got {type(source).__name__}")
    return None if source is None else ChatTemplate(source, special_tokens)
