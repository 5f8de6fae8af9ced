"""The prompt suites as a measuring instrument, prompt files of the user's own, and request bodies."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.workload import suite as suite_module
from breakeven.lab.workload.prompt import (
    ROLES,
    Prompt,
    PromptError,
    canonical_sha256,
    make_suite,
    prompt_from_record,
    salted,
)
from breakeven.lab.workload.request import SAMPLING_FIELDS, chat_body, completion_body, plain_text
from breakeven.lab.workload.retrieval import BANDS, CHARACTERS_PER_TOKEN, chronicle
from breakeven.lab.workload.suite import domains, load_suite, read_prompts_file, recorded_hashes, stored_domains

DOMAINS = ("agentic", "chat", "coding", "encyclopedic", "mathematics")
# The suites as they first were: their prompts keep their ids and their words.
FIRST = {
    "agentic": (72, "bc657a308118b0a9d85a6b473f787de4fbd40bac184bce77a020d43db7404fec"),
    "chat": (74, "502d39fe18bb110bb409399e879805775648c532e2c76e8607b47e62356826f6"),
    "coding": (69, "35e87c43c0243ca4316d0f978539560ba659a8d7db8b237744f2e7e6c2f0f9e1"),
    "encyclopedic": (78, "ff2c2e81e12da4f7fcb9d4c7eab5644e29515ea8c506ccfd84684c261d7a2876"),
}


def _text(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in prompt.messages)


def _trigrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def _all_prompts() -> list[Prompt]:
    return [prompt for domain in stored_domains() for prompt in load_suite(domain).prompts]


# The suites


def test_the_domains_are_there() -> None:
    assert stored_domains() == list(DOMAINS)
    assert domains() == [*DOMAINS, *(f"retrieval-{band}" for band in BANDS)]


@pytest.mark.parametrize("domain", FIRST)
def test_prompts_that_were_there_before_have_kept_their_ids_and_words(domain: str) -> None:
    count, sha256 = FIRST[domain]
    assert canonical_sha256(load_suite(domain).prompts[:count]) == sha256


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_suite_holds_at_least_two_hundred_prompts_of_its_domain(domain: str) -> None:
    suite = load_suite(domain)
    assert suite.name == domain
    assert len(suite.prompts) >= 200
    assert {prompt.domain for prompt in suite.prompts} == {domain}


@pytest.mark.parametrize("domain", DOMAINS)
def test_ids_count_up_from_one_so_that_records_of_old_runs_keep_their_meaning(domain: str) -> None:
    prompts = load_suite(domain).prompts
    assert [prompt.id for prompt in prompts] == [f"{domain}-{n:03d}" for n in range(1, len(prompts) + 1)]


@pytest.mark.parametrize("domain", [*DOMAINS, "retrieval-1k", "retrieval-8k"])
def test_no_prompt_changes_without_its_hash_on_record(domain: str) -> None:
    found, recorded = load_suite(domain).sha256, recorded_hashes()[domain]
    assert found == recorded, "prompts have changed: if on purpose, run the module with --write-hashes"


def test_hashes_are_on_record_for_the_suites_and_for_nothing_else() -> None:
    assert list(recorded_hashes()) == domains()


def test_the_documented_counts_and_hashes_are_those_of_the_suites() -> None:
    page = (Path(__file__).parents[2] / "docs" / "workload.md").read_text(encoding="utf-8")
    for domain, sha256 in recorded_hashes().items():
        assert f"| `{domain}` | `{sha256}` |" in page
    for domain in DOMAINS:
        assert f"| `{domain}` | {len(load_suite(domain).prompts)} |" in page


def _alike(prompts: list[Prompt], limit: float) -> list[tuple[str, str]]:
    """Pairs whose word trigrams have a Jaccard similarity above the limit, by an index of which prompts share which."""
    shingles = [_trigrams(_text(prompt)) for prompt in prompts]
    holders: dict[tuple[str, ...], list[int]] = {}
    for number, own in enumerate(shingles):
        for shingle in own:
            holders.setdefault(shingle, []).append(number)
    shared = Counter(pair for numbers in holders.values() for pair in combinations(numbers, 2))
    return [
        (prompts[a].id, prompts[b].id)
        for (a, b), count in shared.items()
        if count > limit * (len(shingles[a]) + len(shingles[b]) - count)
    ]


def test_no_two_prompts_are_near_duplicates() -> None:
    assert _alike(_all_prompts(), 0.61) == []
    written = [prompt for prompt in _all_prompts() if prompt.domain != "mathematics"]
    assert _alike(written, 0.4) == []


def test_the_search_for_near_duplicates_finds_one() -> None:
    one, two = (prompt_from_record({"id": i, "prompt": f"Please tell me how to {w} in winter at sea."}) for i, w in
                (("a", "knit socks"), ("b", "knit gloves")))  # fmt: skip
    assert _alike([one, two], 0.2) == [("a", "b")]
    assert _alike([one, two], 0.9) == []


def test_no_two_prompts_have_the_same_text() -> None:
    texts = [" ".join(_text(prompt).split()).lower() for prompt in _all_prompts()]
    assert len(set(texts)) == len(texts)


def test_no_prompt_carries_the_marks_of_a_public_benchmark() -> None:
    marks = (
        "METADATA = {",
        "def check(candidate)",
        "Write a response that appropriately completes the request",
        "Below is an instruction that describes a task",
    )
    found = [(prompt.id, mark) for prompt in _all_prompts() for mark in marks if mark in _text(prompt)]
    assert found == []


@pytest.mark.parametrize("domain", DOMAINS)
def test_lengths_vary_and_stay_within_what_a_small_model_takes(domain: str) -> None:
    words = sorted(len(_text(prompt).split()) for prompt in load_suite(domain).prompts)
    assert words[0] <= 40
    assert (40 if domain == "mathematics" else 150) <= words[-1] <= 400
    assert max(len(_text(prompt)) for prompt in load_suite(domain).prompts) <= 2400  # about 600 tokens


def test_agentic_prompts_have_a_system_message_and_many_go_over_several_turns() -> None:
    prompts = load_suite("agentic").prompts
    assert all(prompt.messages[0]["role"] == "system" for prompt in prompts)
    assert sum(len(prompt.messages) > 2 for prompt in prompts) > 0.4 * len(prompts)


def test_coding_prompts_often_carry_code_to_work_on() -> None:
    prompts = load_suite("coding").prompts
    assert sum("```" in _text(prompt) for prompt in prompts) > len(prompts) // 3


def test_suites_hold_some_text_that_is_not_ascii() -> None:
    assert all(any(not _text(prompt).isascii() for prompt in load_suite(domain).prompts) for domain in DOMAINS)


def test_an_unknown_domain_is_refused_with_the_choices() -> None:
    with pytest.raises(PromptError, match="choose from agentic, chat, coding, encyclopedic, mathematics, retrieval-1k"):
        load_suite("poetry")


def test_writing_hashes_records_what_load_suite_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suites").mkdir()
    monkeypatch.setattr(suite_module, "__file__", str(tmp_path / "suite.py"))
    monkeypatch.setattr(suite_module, "BANDS", {"1k": 1024})  # the longer ones take seconds
    suite_module._main(["--write-hashes"])
    monkeypatch.setattr(suite_module, "_folder", lambda: tmp_path / "suites")
    assert recorded_hashes() == {line.split()[1]: line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]}


# Long prompts


@pytest.mark.parametrize("band", ["1k", "4k", "16k"])
def test_a_band_bounds_the_length_and_its_prompts_fill_most_of_it(band: str) -> None:
    limit = BANDS[band] * CHARACTERS_PER_TOKEN
    lengths = [len(_text(prompt)) for prompt in load_suite(f"retrieval-{band}").prompts]
    assert len(lengths) == 200
    assert max(lengths) < limit
    assert min(lengths) > 0.7 * limit


def test_long_prompts_differ_and_their_questions_point_into_the_text() -> None:
    assert _alike(list(load_suite("retrieval-1k").prompts), 0.4) == []
    for index in range(40):
        _, entries, question = chronicle("2k", index)
        assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
        numbers = {int(n) for n in re.findall(r"entr(?:y|ies) (\d+)", question)}
        assert numbers <= {entry.number for entry in entries}
        named = [e for e in entries if e.person in question or e.other in question or e.place in question]
        assert numbers or named


# Hashing and salting

_names = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
_content = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(str.strip)


@st.composite
def _prompts(draw: st.DrawFn) -> Prompt:
    system = draw(st.booleans())
    turns = 2 * draw(st.integers(0, 2)) + 1
    roles = ["system"] * system + ["user" if i % 2 == 0 else "assistant" for i in range(turns)]
    messages = tuple({"role": role, "content": draw(_content)} for role in roles)
    return Prompt(draw(_names), draw(_names), messages)


def _record(prompt: Prompt) -> dict[str, Any]:
    return {"id": prompt.id, "domain": prompt.domain, "messages": [dict(m) for m in prompt.messages]}


@given(st.lists(_prompts(), min_size=1, max_size=6, unique_by=lambda p: p.id), st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order_of_prompts_or_keys(prompts: list[Prompt], random: Any) -> None:
    shuffled = [Prompt(p.id, p.domain, tuple(dict(reversed(list(m.items()))) for m in p.messages)) for p in prompts]
    random.shuffle(shuffled)
    one, other = make_suite("s", prompts), make_suite("s", shuffled)
    assert one.sha256 == other.sha256
    assert one.prompts == other.prompts


@given(_prompts(), _content)
def test_the_hash_changes_with_any_word_role_id_or_domain(prompt: Prompt, content: str) -> None:
    first, *rest = prompt.messages
    others = [
        Prompt(prompt.id + "x", prompt.domain, prompt.messages),
        Prompt(prompt.id, prompt.domain + "x", prompt.messages),
        Prompt(prompt.id, prompt.domain, ({**first, "content": first["content"] + content}, *rest)),
        Prompt(prompt.id, prompt.domain, ({**first, "role": first["role"] + "x"}, *rest)),
        Prompt(prompt.id, prompt.domain, (*prompt.messages, {"role": "user", "content": content})),
    ]
    assert canonical_sha256([prompt]) not in {canonical_sha256([other]) for other in others}


def test_the_hash_is_the_documented_one() -> None:
    prompt = Prompt("a-1", "custom", ({"role": "user", "content": "Grüß dich"},))
    line = '{"domain":"custom","id":"a-1","messages":[{"content":"Grüß dich","role":"user"}]}\n'
    assert canonical_sha256([prompt]) == hashlib.sha256(line.encode()).hexdigest()


@given(_prompts())
def test_a_salt_changes_the_head_of_the_first_message_and_nothing_else(prompt: Prompt) -> None:
    before = _record(prompt)
    one, other = salted(prompt, "b01-c005"), salted(prompt, "b02-c005")
    assert _record(prompt) == before
    assert (one.id, one.domain, one.messages[1:]) == (prompt.id, prompt.domain, prompt.messages[1:])
    assert one.messages[0]["content"] == "(reference b01-c005)\n" + prompt.messages[0]["content"]
    assert one.messages[0]["content"] != other.messages[0]["content"]
    assert salted(prompt, "b01-c005") == one


@pytest.mark.parametrize("salt", ["", "two\nlines", "x" * 65, "tab\t"])
def test_a_salt_that_is_not_one_short_line_is_refused(salt: str) -> None:
    with pytest.raises(PromptError, match="1 to 64 printable characters"):
        salted(Prompt("a", "b", ({"role": "user", "content": "hello"},)), salt)


# Prompt files


@given(st.lists(_prompts(), min_size=1, max_size=5, unique_by=lambda p: p.id))
def test_what_is_written_as_jsonl_is_read_back(tmp_path_factory: pytest.TempPathFactory, prompts: list[Prompt]) -> None:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = (json.dumps(_record(prompt), ensure_ascii=False) for prompt in prompts)
    path.write_bytes("".join(line + "\r\n\n" for line in lines).encode())
    suite = read_prompts_file(path)
    assert suite.name == "mine"
    assert suite.prompts == tuple(sorted(prompts, key=lambda p: p.id))
    assert suite.sha256 == canonical_sha256(prompts)


def test_a_prompt_is_short_for_one_user_message_and_the_domain_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('\ufeff{"id": "q1", "prompt": "Why?"}\n', encoding="utf-8")
    assert read_prompts_file(path).prompts == (Prompt("q1", "custom", ({"role": "user", "content": "Why?"},)),)


def test_line_separators_inside_a_string_do_not_split_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "q1", "prompt": "one\u2028two\x85three"}\n', encoding="utf-8")
    assert read_prompts_file(path).prompts[0].messages[0]["content"] == "one\u2028two\x85three"


_GOOD = '{"id": "ok", "prompt": "fine"}'
_BAD_LINES = {
    "not json": ("{id: 1}", "not JSON"),
    "not an object": ('["a"]', "expected a JSON object, found a list"),
    "no id": ('{"prompt": "x"}', "'id' is missing"),
    "id not a name": ('{"id": "a/b", "prompt": "x"}', "'id' must be 1 to 100"),
    "id a number": ('{"id": 7, "prompt": "x"}', "'id' must be 1 to 100"),
    "domain not a name": ('{"id": "a", "domain": "", "prompt": "x"}', "'domain' must be 1 to 100"),
    "neither prompt nor messages": ('{"id": "a"}', "either 'messages' or 'prompt'"),
    "both": ('{"id": "a", "prompt": "x", "messages": []}', "either 'messages' or 'prompt'"),
    "misspelt key": ('{"id": "a", "promt": "x"}', "unknown key 'promt'"),
    "key twice": ('{"id": "a", "prompt": "x", "prompt": "y"}', "'prompt' occurs twice"),
    "prompt not text": ('{"id": "a", "prompt": 5}', "'prompt' must be a string, not a number"),
    "prompt blank": ('{"id": "a", "prompt": "  "}', r"messages\[0\] has no text"),
    "no messages": ('{"id": "a", "messages": []}', "at least one message, found an empty list"),
    "message without role": ('{"id": "a", "messages": [{"content": "x"}]}', r"messages\[0\] must be an object"),
    "unknown role": ('{"id": "a", "messages": [{"role": "tool", "content": "x"}]}', "has the role 'tool'"),
    "content in parts": ('{"id": "a", "messages": [{"role": "user", "content": [{}]}]}', r"messages\[0\] has no text"),
    "system only": ('{"id": "a", "messages": [{"role": "system", "content": "x"}]}', "last message must be the user's"),
    "half a surrogate": ('{"id": "a", "prompt": "\\ud800"}', "surrogate"),
    "id used before": (_GOOD, "already used on line 1"),
    "nested too deep": ("[" * 100_000, "line 3: "),
    "an endless number": ('{"id": ' + "9" * 5000 + "}", "line 3: "),
}


@pytest.mark.parametrize("line, message", _BAD_LINES.values(), ids=_BAD_LINES.keys())
def test_a_bad_line_is_named_by_file_number_and_fault(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{_GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(PromptError, match=message) as caught:
        read_prompts_file(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    "roles, faulty",
    [
        (["assistant", "user"], 0),
        (["user", "user"], 1),
        (["system", "assistant", "user"], 1),
        (["user", "system", "user"], 1),
        (["system", "system", "user"], 1),
    ],
)
def test_roles_out_of_turn_are_named_by_position(roles: list[str], faulty: int) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(PromptError, match=rf"messages\[{faulty}\] should be"):
        prompt_from_record({"id": "a", "messages": messages})


def test_a_conversation_must_not_end_with_the_assistant() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(PromptError, match="last message must be the user's"):
        prompt_from_record({"id": "a", "messages": messages})


@given(st.lists(st.sampled_from(ROLES), max_size=6))
def test_exactly_the_conversations_that_a_chat_template_takes_are_accepted(roles: list[str]) -> None:
    good = re.fullmatch(r"s?u(au)*", "".join(role[0] for role in roles)) is not None
    record = {"id": "a", "messages": [{"role": role, "content": "x"} for role in roles]}
    if good:
        assert [m["role"] for m in prompt_from_record(record).messages] == roles
    else:
        with pytest.raises(PromptError):
            prompt_from_record(record)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional={"id": _json, "domain": _json, "prompt": _json, "messages": _json}) | _json)
def test_any_json_is_either_a_prompt_or_a_prompt_error(record: Any) -> None:
    try:
        prompt = prompt_from_record(record)
    except PromptError:
        return
    assert prompt.messages[-1]["role"] == "user"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"missing\.jsonl: cannot be read"):
        read_prompts_file(tmp_path / "missing.jsonl")
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts_file(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(PromptError, match="holds no prompts"):
        read_prompts_file(empty)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"id": "a", "prompt": "Grüße"}'.encode("latin-1"))
    with pytest.raises(PromptError, match="not UTF-8"):
        read_prompts_file(latin)


# Request bodies

_PROMPT = Prompt("a", "b", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß dich ☃"}))

_sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.none() | st.floats(0, 2),
        "top_p": st.none() | st.floats(0.01, 1),
        "top_k": st.none() | st.integers(0, 100),
        "presence_penalty": st.none() | st.floats(-2, 2),
        "stop": st.none() | st.lists(st.text(max_size=4), max_size=2),
        "ignore_eos": st.none() | st.booleans(),
        "logit_bias": st.none() | st.dictionaries(st.text(string.digits, min_size=1, max_size=3), st.floats(-9, 9)),
    },
)
_extra = st.dictionaries(st.text(max_size=6).map(lambda name: "x_" + name), st.integers() | st.text(max_size=4))


@given(
    _prompts(), _sampling, st.none() | st.integers(1, 4096), st.none() | st.integers(0, 2**63), _extra, st.booleans()
)
def test_bodies_say_what_was_asked_and_nothing_else(
    prompt: Prompt,
    sampling: dict[str, Any],
    max_tokens: int | None,
    seed: int | None,
    extra: dict[str, Any],
    continuous: bool,
) -> None:
    chat = chat_body(prompt, "m", sampling, max_tokens, seed, extra, continuous_usage=continuous)
    completion = completion_body(prompt, "m", sampling, max_tokens, seed, extra, continuous_usage=continuous)
    optional = {**sampling, "max_tokens": max_tokens, "seed": seed}
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if continuous else {})
    shared = {name: value for name, value in optional.items() if value is not None} | extra
    shared |= {"model": "m", "stream": True, "stream_options": options}
    assert json.loads(chat) == shared | {"messages": [dict(m) for m in prompt.messages]}
    assert json.loads(completion) == shared | {"prompt": plain_text(prompt)}


@given(_sampling, _extra, st.randoms(use_true_random=False))
def test_the_order_of_arguments_does_not_change_the_bytes(
    sampling: dict[str, Any], extra: dict[str, Any], random: Any
) -> None:
    pairs, others = list(sampling.items()), list(extra.items())
    random.shuffle(pairs)
    random.shuffle(others)
    one = chat_body(_PROMPT, "m", sampling, 8, 1, extra)
    assert chat_body(_PROMPT, "m", dict(pairs), 8, 1, dict(others)) == one


def test_a_body_is_pinned_to_the_byte() -> None:
    body = chat_body(_PROMPT, "m", {"top_p": 0.9, "temperature": 0, "top_k": None}, 64, 7, {"z": 1, "k": [True]})
    assert body.decode() == (
        '{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Grüß dich ☃"}],'
        '"max_tokens":64,"temperature":0,"top_p":0.9,"seed":7,"stream":true,'
        '"stream_options":{"include_usage":true,"continuous_usage_stats":true},"k":[true],"z":1}'
    )


def test_a_completion_takes_text_or_token_ids_as_they_are() -> None:
    assert json.loads(completion_body("Once", "m", {}, 4))["prompt"] == "Once"
    assert json.loads(completion_body((1, 22, 333), "m", {}, 4))["prompt"] == [1, 22, 333]


def test_a_conversation_as_text_is_a_transcript_and_a_lone_message_is_itself() -> None:
    assert plain_text(Prompt("a", "b", ({"role": "user", "content": "Why?"},))) == "Why?"
    assert plain_text(_PROMPT) == "System: Be brief.\n\nUser: Grüß dich ☃\n\nAssistant:"


def test_a_misspelt_sampling_parameter_is_refused_and_not_left_to_the_server() -> None:
    with pytest.raises(ValueError, match="unknown parameter 'top-p'"):
        chat_body(_PROMPT, "m", {"top-p": 0.9}, 8)


@pytest.mark.parametrize("name", ["messages", "stream", "seed", "max_completion_tokens", *SAMPLING_FIELDS])
def test_extra_fields_cannot_override_what_the_lab_sets(name: str) -> None:
    with pytest.raises(ValueError, match=f"extra field '{name}'"):
        chat_body(_PROMPT, "m", {}, 8, extra={name: 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, "\ud800"])
def test_a_value_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        chat_body(_PROMPT, "m", {"temperature": value}, 8)
