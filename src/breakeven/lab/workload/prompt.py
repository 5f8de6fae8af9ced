"""Prompts and suites as values: what they hold, how they are checked and how they are hashed. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

DEFAULT_DOMAIN = "custom"
ROLES = ("system", "user", "assistant")

# Ids and domains become parts of file names and report rows.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


class PromptError(ValueError):
    """A prompt that cannot be used; the message says what was wrong, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be continued. Each message has the keys `role` and `content`, both strings.

    An optional system message comes first, then user and assistant take turns, and the last word is the user's.
    """

    id: str
    domain: str
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """A named set of prompts, sorted by id. `sha256` is that of `canonical_sha256`."""

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str


def make_suite(name: str, prompts: Iterable[Prompt]) -> Suite:
    """Sorts the prompts by id and hashes them. PromptError if there are none, or if two share an id."""
    ordered = sorted(prompts, key=lambda prompt: prompt.id)
    if not ordered:
        raise PromptError(f"suite {name!r} holds no prompts: add at least one")
    for before, after in pairwise(ordered):
        if before.id == after.id:
            raise PromptError(f"suite {name!r} has two prompts with the id {after.id!r}: give each its own")
    return Suite(name, tuple(ordered), canonical_sha256(ordered))


def canonical_sha256(prompts: Iterable[Prompt]) -> str:
    """SHA-256 (hex) of what the prompts say, whatever the order or the layout of the file they came from.

    One line per prompt, in order of id: JSON with the keys domain, id, messages (each role and content), keys sorted,
    no spaces, UTF-8 without escapes, each line ended by a newline.
    """
    digest = hashlib.sha256()
    for prompt in sorted(prompts, key=lambda prompt: prompt.id):
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt.messages]
        record = {"id": prompt.id, "domain": prompt.domain, "messages": messages}
        line = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def salted(prompt: Prompt, salt: str) -> Prompt:
    """The same prompt, id included, with a short line of salt at the head of its first message.

    For servers whose prefix cache cannot be reset: with another salt for each cell, no cell finds an earlier one's
    prompts in the cache. What a chat template writes before the first message (a default system message, for example)
    stays shared. Use one salt for all arms of a block, so that they get the same prompts.
    """
    if not salt or len(salt) > 64 or not salt.isprintable():
        raise PromptError(f"salt {salt!r} must be 1 to 64 printable characters on one line")
    first, *rest = prompt.messages
    marked = {"role": first["role"], "content": f"(reference {salt})\n{first['content']}"}
    return replace(prompt, messages=(marked, *rest))


def prompt_from_record(record: Any, default_domain: str = DEFAULT_DOMAIN) -> Prompt:
    """A prompt from one decoded JSON object: `id`, optional `domain`, and either `messages` or `prompt`.

    `prompt` (a string) is short for one user message. Other keys are refused, so that a misspelt one is noticed.
    PromptError names the key at fault; the caller adds where the record stands.
    """
    if not isinstance(record, dict):
        raise PromptError(f"expected a JSON object, found {_kind(record)}")
    unknown = sorted(set(record) - {"id", "domain", "messages", "prompt"})
    if unknown:
        raise PromptError(f"unknown key {unknown[0]!r}: only id, domain, messages and prompt are read")
    if "id" not in record:
        raise PromptError("'id' is missing: give each prompt an id of its own")
    if ("messages" in record) == ("prompt" in record):
        raise PromptError("give either 'messages' or 'prompt', and not both")
    identifier = _name(record["id"], "id")
    domain = _name(record.get("domain", default_domain), "domain")
    if "prompt" in record:
        messages: Any = [{"role": "user", "content": record["prompt"]}]
        if not isinstance(record["prompt"], str):
            raise PromptError(f"'prompt' must be a string, not {_kind(record['prompt'])}")
    else:
        messages = record["messages"]
    return Prompt(identifier, domain, _messages(messages))


def _name(value: Any, key: str) -> str:
    if not isinstance(value, str) or not _NAME.match(value):
        raise PromptError(
            f"{key!r} must be 1 to 100 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit, "
            f"found {value!r}"
        )
    return value


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"'messages' must be a list with at least one message, found {_kind(value)}")
    messages = tuple(_message(index, message) for index, message in enumerate(value))
    _check_turns([message["role"] for message in messages])
    return messages


def _message(index: int, value: Any) -> Mapping[str, str]:
    where = f"messages[{index}]"
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise PromptError(f"{where} must be an object with exactly the keys role and content")
    role, content = value["role"], value["content"]
    if role not in ROLES:
        raise PromptError(f"{where} has the role {role!r}: use {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise PromptError(f"{where} has no text: 'content' must be a string that is not blank")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{where} has half of a surrogate pair, which is not valid Unicode text") from None
    return {"role": role, "content": content}


def _check_turns(roles: Sequence[str]) -> None:
    turns = list(roles[1:] if roles[0] == "system" else roles)
    for index, role in enumerate(turns):
        expected = "user" if index % 2 == 0 else "assistant"
        if role != expected:
            raise PromptError(
                f"messages[{index + len(roles) - len(turns)}] should be the {expected}'s, found {role!r}: after an "
                f"optional system message, user and assistant must take turns, the user first"
            )
    if not turns or turns[-1] != "user":
        raise PromptError("the last message must be the user's: there is nothing to answer otherwise")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    kind = names.get(type(value), type(value).__name__)
    return f"an empty {kind.split()[-1]}" if value in ({}, [], "") else kind
