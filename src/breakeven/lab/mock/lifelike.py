"""What a mock server with `lifelike` set makes of a request: a text that depends on prompt, seed and sampling, counted
tokens, stop strings, a context limit and a prefix cache. A word is a token.

It is lifelike enough for a check of the kind "does the seed count?" to have a true answer, and no more than that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from breakeven.lab.mock.script import MockScript

BOS = 1
_PAGE = 16  # the prefix cache keeps whole pages of this many tokens
_SYLLABLES = ("ka", "lo", "mi", "ren", "sta", "vo", "ti", "un")
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `words`: its tokens; the last may be cut by a stop string. `limited`: max_tokens ended it.

    `refusal`: a 400 with this message instead. `uncached`: prompt tokens that have to be prefilled.
    """

    words: tuple[str, ...]
    limited: bool
    prompt_ids: tuple[int, ...]
    cached_tokens: int | None
    uncached: int
    show_ids: bool = False
    refusal: str = ""


class Lifelike:
    """The memory of a lifelike server: its prefix cache, and how many requests it has seen."""

    def __init__(self) -> None:
        self._pages: set[tuple[int, ...]] = set()
        self._seen = 0

    def reset_cache(self) -> None:
        self._pages.clear()

    def turn(self, script: MockScript, chat: bool, body: Mapping[str, Any]) -> Turn:
        """Decides an answer, and remembers the prompt. The same server state and body give the same answer."""
        self._seen += 1
        faults = script.faults
        ids = prompt_ids(script, chat, body)
        if len(ids) >= script.context_limit:
            if "context_unchecked" not in faults:
                message = f"the prompt has {len(ids)} tokens, and the context is {script.context_limit}"
                if "context_uncoded" in faults:
                    message = "bad request"
                return Turn((), False, ids, None, 0, refusal=message)
            ids = ids[: script.context_limit - 1]
        pages = [ids[:end] for end in range(_PAGE, len(ids), _PAGE)]
        cached = _PAGE * sum(page in self._pages for page in pages)
        self._pages.update(pages)
        words, limited = self._words(script, ids, body)
        reported = None if "cache_unreported" in faults else cached
        return Turn(words, limited, ids, reported, len(ids) - cached, bool(body.get("return_token_ids")))

    def _words(self, script: MockScript, ids: tuple[int, ...], body: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
        faults = script.faults
        source: list[Any] = [ids]
        temperature = float(body.get("temperature", 1.0))
        if temperature and "greedy_forced" not in faults:
            source += [temperature, *(_neutral(name, body.get(name)) for name in _SAMPLING)]
            if "defaults_changed" in faults:
                source.append([name for name in _SAMPLING if body.get(name) is None])
            seed = body.get("seed")
            source.append(self._seen if seed is None or "seed_ignored" in faults else seed)
        elif "greedy_unsteady" in faults:
            source.append(self._seen)
        if "text_changed" in faults:
            source.append("changed")
        natural = sum(script.token_pattern[i % len(script.token_pattern)] for i in range(script.chunks))
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if limit is not None and "max_tokens_ignored" in faults:
            limit += 3
        endless = limit is not None and ("eos_ignored" in faults or body.get("ignore_eos"))
        count = limit if endless else natural if limit is None else min(limit, natural)
        words = [_word(source, position) for position in range(count)]
        cut = None if "stop_ignored" in faults else _stop("".join(words), body.get("stop"))
        if cut is None:
            return tuple(words), limit is not None and count == limit
        kept: list[str] = []
        for word in words:
            if cut <= 0:
                break
            kept.append(word[:cut])
            cut -= len(word)
        return tuple(kept), False


def prompt_ids(script: MockScript, chat: bool, body: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of a rendered prompt: BOS, a role and its words for each message, and the answer's opening."""
    faults = script.faults
    words: list[str] = []
    if chat:
        for message in body.get("messages") or ():
            words += [f"<{message.get('role')}>", *str(message.get("content")).split()]
        arguments = body.get("chat_template_kwargs") or {}
        obeys = "template_ignored" not in faults
        if not obeys or body.get("add_generation_prompt") is not False:
            words.append("<assistant>")
        if obeys and arguments.get("enable_thinking"):
            words.append("<think>")
    else:
        words += str(body.get("prompt")).split()
    bos = (BOS, BOS) if "bos_doubled" in faults else (0,) if "bos_other" in faults else (BOS,)
    return (*bos, *(2 + _number(word) % 50_000 for word in words))


def _neutral(name: str, value: Any) -> Any:
    """A value that changes nothing is the same as none."""
    neutral = {"top_p": (1, 1.0), "top_k": (0, -1), "repetition_penalty": (1, 1.0)}.get(name, (0, 0.0))
    return None if value in neutral else value


def _stop(text: str, stop: Any) -> int | None:
    stops = [stop] if isinstance(stop, str) else stop or []
    return min((at for s in stops if (at := text.find(s)) >= 0), default=None)


def _word(source: Any, position: int) -> str:
    number = _number([source, position])
    return "".join(_SYLLABLES[number >> shift & 7] for shift in (0, 3, 6)) + " "


def _number(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=6).digest(), "big")
