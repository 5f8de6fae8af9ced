"""Text to tokens and back: nothing lost, nothing invented, and a stream says exactly what the whole says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from breakeven.engine.chat_template import ChatTemplate
from breakeven.engine.config import ConfigError
from breakeven.engine.models.load import LoadedModel
from breakeven.engine.tokenizer import IncrementalDetokenizer, Tokenizer

SOURCE = Path(__file__).read_text(encoding="utf-8")
PROBES = (
    "\tif x:\n\t\treturn  1\n",
    "one\r\ntwo\r\n\r\n",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "שלום עולם",
    "In 2024, 1,234,567.89 people (42%)",
    "  leading and trailing  ",
    "é é ﬁ ½ ²",
    "don't we'll I'm",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    SOURCE,
)


@pytest.fixture(scope="module")
def tiny(tiny_llama_dir: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_directory(tiny_llama_dir(), (2,))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A tokenizer of Llama 2's kind: words begin with U+2581, other characters fall back to bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlnorstw.,"]
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("\u2581", "w"),
        ("\u2581", "hello"),
        ("\u2581", "a"),
    ]
    tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return Tokenizer(backend, (2,))


def stream(tokenizer: Tokenizer, ids: Iterable[int], **options: Any) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


# --- SmolLM2's own tokenizer


@pytest.mark.parametrize("text", PROBES)
def test_smollm2_decodes_what_it_encodes(smol: LoadedModel, text: str) -> None:
    ids = smol.tokenizer.encode(text)
    assert smol.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(smol.tokenizer.token_bytes(token) for token in ids) == text.encode()
    pieces, rest = stream(smol.tokenizer, ids, skip_special_tokens=False)
    assert ("".join(pieces), rest) == (text, "")


def test_smollm2_takes_every_digit_by_itself(smol: LoadedModel) -> None:
    for text in ("x = 1234567", "v2.10.333", "²½12", "a 007"):
        for token in smol.tokenizer.encode(text):
            piece = smol.tokenizer.token_text(token)
            assert len(piece) == 1 or not any(character.isdigit() for character in piece), (text, piece)


def test_smollm2_reads_special_tokens_in_text_and_adds_none(smol: LoadedModel) -> None:
    tokenizer = smol.tokenizer
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>")[0] == 1
    assert tokenizer.encode("hi<|im_end|>")[-1] == 2
    assert tokenizer.encode("hi", add_special_tokens=True) == tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, (2,))
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_bytes_without_a_symbol_become_the_unknown_token_one_by_one(smol: LoadedModel) -> None:
    encode = smol.tokenizer.encode
    for character in "\x04\x06\x13\x14\x16\x1d":
        assert encode(f"a{character}{character}b") == [*encode("a"), 0, 0, *encode("b")]
    assert 0 not in encode("".join(map(chr, {*range(32)} - {4, 6, 0x13, 0x14, 0x16, 0x1D})))


def test_smollm2_chat_prompt_is_its_template(smol: LoadedModel) -> None:
    prompt = smol.tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ValueError, match="content of the kind"):
        smol.tokenizer.render_chat([{"role": "user", "content": None}])
    with pytest.raises(ValueError, match="cannot render"):
        smol.tokenizer.render_chat([{"role": "user"}])


# --- decoding a stream


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 320), max_size=40), skip=st.booleans())
def test_a_byte_level_stream_is_the_whole_whatever_the_tokens(tiny: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces, rest = stream(tiny, ids, skip_special_tokens=skip)
    assert "".join(pieces) + rest == tiny.decode(ids, skip_special_tokens=skip)
    visible = [token for token in ids if not (skip and token in tiny.special_token_ids)]
    assert b"".join(map(tiny.token_bytes, visible)).decode("utf-8", "replace") == "".join(pieces) + rest


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=12))
def test_invalid_utf8_in_a_stream_is_replaced_as_in_the_whole(tiny: Tokenizer, raw: bytes) -> None:
    token_of = {tiny.token_bytes(token): token for token in range(3, 259)}
    ids = [token_of[bytes([byte])] for byte in raw]
    pieces, rest = stream(tiny, ids)
    assert "".join(pieces) + rest == tiny.decode(ids) == raw.decode("utf-8", "replace")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=20))
def test_a_stream_gives_each_character_with_the_token_that_completes_it(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    if any(token in tiny.special_token_ids for token in ids):
        return
    detokenizer = IncrementalDetokenizer(tiny)
    said, seen = "", b""
    for token in ids:
        said += detokenizer.push(token)
        seen += tiny.token_bytes(token)
        assert said == seen.decode("utf-8", "ignore")
    assert (said, detokenizer.flush()) == (text, "")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="abcdehlnorstw., é🙂\u2581", max_size=20))
def test_a_sentencepiece_stream_of_text_is_the_whole(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    pieces, rest = stream(sentencepiece, ids)
    assert "".join(pieces) + rest == sentencepiece.decode(ids)


def test_a_sentencepiece_word_keeps_its_space_after_a_context(sentencepiece: Tokenizer) -> None:
    context, ids = sentencepiece.encode("hello"), sentencepiece.encode("hello world")[1:]
    assert stream(sentencepiece, ids)[0][0] == "w"
    assert stream(sentencepiece, ids, context=context)[0][0] == " w"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 300), max_size=30))
def test_a_sentencepiece_stream_never_holds_back_more_than_a_character(
    sentencepiece: Tokenizer, ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(sentencepiece)
    for token in ids:
        detokenizer.push(token)
        assert len(detokenizer._window) <= 65
    assert len(detokenizer.flush()) <= 4


def test_bytes_of_a_sentencepiece_token(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece._backend.token_to_id(token) for token in ("<0xF0>", "\u2581hello", "</s>")]
    assert [sentencepiece.token_bytes(token) for token in ids] == [b"\xf0", b" hello", b"</s>"]


# --- odd input


def test_text_that_is_not_unicode_is_encoded_with_the_replacement_character(tiny: Tokenizer) -> None:
    assert tiny.encode("a\ud800b") == tiny.encode("a\ufffdb")
    assert tiny.encode("\ud83d\ude00") == tiny.encode("😀")


def test_an_id_without_a_token_has_no_text(tiny: Tokenizer) -> None:
    for token in (-1, tiny.vocab_size, 10**9):
        assert (tiny.token_bytes(token), tiny.token_text(token), tiny.has_token(token)) == (b"", "", False)
    part_of_emoji = tiny._backend.token_to_id("ðŁ")
    assert tiny.token_bytes(part_of_emoji) == "😀".encode()[:2]
    assert tiny.token_text(part_of_emoji) == "\N{REPLACEMENT CHARACTER}"


def test_a_missing_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing; download it"):
        Tokenizer.from_directory(tmp_path)


# --- chat templates


def test_the_template_file_goes_before_the_config_and_a_list_means_its_default(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(tiny_llama_dir(), tmp_path / "model"))
    config = directory / "tokenizer_config.json"
    values = json.loads(config.read_text())

    def rendered() -> str:
        return Tokenizer.from_directory(directory).render_chat([])

    values["chat_template"] = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    values["bos_token"] = {"content": "<s>", "lstrip": False}
    config.write_text(json.dumps(values))
    assert rendered() == "yes"
    (directory / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert rendered() == "file <s>"
    (directory / "chat_template.jinja").unlink()
    config.unlink()
    plain = Tokenizer.from_directory(directory)
    assert not plain.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        plain.render_chat([])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}", "user\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}, {"role": "assistant", "content": ""}]'),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ bos_token }}{{ tools is none }}{{ enable_thinking }}", "<s>TrueFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)  # fmt: skip
def test_templates_have_the_helpers_they_expect(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": ""}]
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(messages, True, enable_thinking=False) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% if %}", r"broken \(line 1\)"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[5].content.x }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_a_template_that_fails_gives_a_value_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], True)


def test_many_texts_are_encoded_as_one_by_one(tiny: Tokenizer) -> None:
    texts = ["", "one two", "a lone surrogate \ud800 inside", "three"]
    assert tiny.encode_many(texts) == [tiny.encode(text) for text in texts]
    assert tiny.encode_many(texts[:2]) == [tiny.encode(text) for text in texts[:2]]
