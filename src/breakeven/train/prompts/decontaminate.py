"""Keeping held-out prompts out of the training set: by hash of the normalised text, and by shared runs of words."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

RUN = 13  # words in a row that must not be shared: GPT-3's length, also used for HumanEval elsewhere
_WORD = re.compile(r"[a-z0-9_]+")


def words(text: str) -> list[str]:
    """Lower-case words and numbers; everything else is ignored."""
    return _WORD.findall(text.lower())


def _digest(parts: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).digest()


def _run_digests(found: Sequence[str]) -> Iterator[bytes]:
    return (_digest(found[start : start + RUN]) for start in range(len(found) - RUN + 1))


class HeldOut:
    """Texts that must not be trained on."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: set[bytes] = set()
        self._runs: set[bytes] = set()
        for text in texts:
            found = words(text)
            self._whole.add(_digest(found))
            self._runs.update(_run_digests(found))

    def contains(self, text: str) -> bool:
        """Whether the text is a held-out one, or shares a run of words with one. Texts shorter than a run are compared
        whole."""
        found = words(text)
        if _digest(found) in self._whole:
            return True
        return any(digest in self._runs for digest in _run_digests(found))


def measurement_prompts() -> list[str]:
    """The texts of the suites that ship with breakeven: they measure, so they are never trained on."""
    folder = files("breakeven").joinpath("lab", "workload", "suites")
    texts = []
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.strip():
                    texts += [message["content"] for message in json.loads(line)["messages"]]
    return texts
