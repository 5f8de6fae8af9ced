"""From the names in foreign files to names of arms, conditions and levels. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from breakeven.lab.importers.model import Document, ImportedRun

_LEVEL = re.compile(
    r"(?:^|[-_.])(?:c|cc|conc|concurrency|bs|batch|streams|max_concurrency)[-_=]?(\d{1,5})(?=$|[-_.])", re.I
)
_REPEAT = re.compile(r"(?:^|[-_.])(?:r|run|rep|repeat|block|b|trial|seed|launch)[-_=]?\d{1,4}(?=$|[-_.])", re.I)
_UNTELLING = re.compile(r"(profile[-_]export.*|benchmarks?|results?|output|report)\Z", re.I)
_LIMIT = 40


def slug(name: str) -> str:
    """A name as campaigns allow it: 1 to 40 letters, digits, dots, dashes and underscores."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    return cleaned[:_LIMIT].rstrip("-._") or "unnamed"


def level_in_name(document: Document) -> int | None:
    """The level that the file's or folder's name tells: `off-c10.json`, `…-concurrency10/…`."""
    for name in (document.stem, document.folder):
        if found := _LEVEL.search(name):
            return int(found.group(1)) or None
    return None


def names_of_file(document: Document, *stated: object) -> tuple[str, ...]:
    """The arm's possible names, best first: the command line's, those in the file, the file's own without its level."""
    own = [_bare(document.stem), document.stem]
    if _UNTELLING.match(own[0]) and document.folder:
        own = [_bare(document.folder), document.folder, *own]
    given = [*document.names, *(s for s in stated if isinstance(s, str) and s.strip()), *own]
    return tuple(dict.fromkeys(name for name in given if name))


def _bare(stem: str) -> str:
    return _REPEAT.sub("", _LEVEL.sub("", stem)).strip("-_. ") or stem


def is_baseline(run: ImportedRun, baseline: str) -> bool:
    """Whether one of the run's names is the baseline's, as written or as it becomes an arm's name."""
    return any(baseline in (name, slug(name)) or slug(baseline) == slug(name) for name in run.names)


def distinct(names: Sequence[str]) -> dict[str, str]:
    """Each name's slug; names whose slugs would be the same (case ignored) get a number."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for name in names:
        if name in found:
            continue
        candidate, number = slug(name), 1
        while candidate.lower() in used:
            number += 1
            candidate = f"{slug(name)[: _LIMIT - 4]}-{number}"
        used.add(candidate.lower())
        found[name] = candidate
    return found
