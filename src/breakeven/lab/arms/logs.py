"""What a log says of its server: version, resolved arguments, captured graphs, warnings, and what went wrong. Pure.

The dialects are those of vLLM (`(EngineCore pid=7) WARNING 11-30 11:48:07 [cpu.py:224] …`), SGLang
(`[2026-05-08 14:34:34 TP0] …`), llama.cpp (`0.00.005.134 W …`), TensorRT-LLM (`[11/22/2025-11:19:23] [TRT-LLM] [W] …`)
and Python's own exceptions. All are tried on every log, so one that a command of the user's own wrote is read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 2_000_000  # of a log that are looked at
_MOST_WARNINGS, _MOST_ERRORS = 40, 4
_LONGEST = 500  # characters of one warning, error or argument

_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:\([\w-]+(?: [\w=. -]*)?pid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ "
        r"\[[^\]]*\] ?",
        r"\([\w-]+(?: [\w=. -]*)?pid=\d+\) (?P<level>)",
        r"\[\d{4}-\d\d-\d\d [\d:]+(?: [A-Z]+\d+)*\] (?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+:\d+: )?",
        r"\d+\.\d\d\.\d{3}\.\d{3} (?P<level>[DIWE]) ",
        r"\[\d\d/\d\d/\d{4}-[\d:]+\] \[TRT-LLM\] \[(?P<level>[VIWE])\] ",
        r"\[TensorRT-LLM\]\[(?P<level>INFO|WARNING|ERROR)\] ",
    )
)
_WARNING = ("WARNING", "W")
_VERSIONS = (
    re.compile(r"Initializing a V1 LLM engine \(v([^)\s]+)\)"),
    re.compile(r"▄[^\n]*\bversion (\d\S*)"),
    re.compile(r"TensorRT[- ]LLM version: (\S+)"),
    re.compile(r"\bbuild: (\d+ \([0-9a-f]+\))"),
    re.compile(r"\bsglang(?: version|==)[ :=]*(\d[\w.+]*)", re.I),
)
_ARGUMENTS = (
    re.compile(r"non-default args: (?=\{)"),
    re.compile(r"Initializing a V1 LLM engine \(v[^)]*\) with config: "),
    re.compile(r"server_args=ServerArgs(?=\()"),
)
_FACTS = re.compile(r"\b(n_slots|n_ctx_slot|n_threads|kv_unified|max_total_num_tokens) ?= ?'?([\w.]+)'?")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_GRAPHS = (
    re.compile(r"Capture cuda graph bs \[([\d, ]+)\]"),
    re.compile(r"'cudagraph_capture_sizes': \[([\d, ]+)\]"),
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit)(?: \[[^\]]*\])?: \S")
_SAID = re.compile(r"(?:\S+: )?(?:fatal )?error: \S", re.I)
_DIED = re.compile(r"\bdied unexpectedly\b|\bscheduler is dead\b")  # vLLM and SGLang, of a process of theirs
_HARMLESS = re.compile(r"this warning is normal")  # in an engine's own words
_SYMPTOM = re.compile(
    r"EngineDeadError|stack trace|root cause|RuntimeError: cancelled\Z|scheduler is dead"
)  # what follows from an error that was told before


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a log says. `graph_sizes`: of captured CUDA graphs, as the engine counts (SGLang requests, vLLM tokens).

    `errors`: the first that were told, without their consequences.
    """

    version: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    graph_sizes: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the journal; what is empty is left out."""
        found: dict[str, Any] = {
            "version": self.version,
            "arguments": dict(self.arguments),
            "graph_sizes": list(self.graph_sizes),
            "warnings": list(self.warnings),
            "errors": list(self.errors),
        }
        return {name: value for name, value in found.items() if value}


def read_log(text: str) -> LogFacts:
    """The facts of one launch's log."""
    return LogFacts(
        version=next((m[1] for pattern in _VERSIONS for m in [pattern.search(text)] if m), None),
        arguments=_arguments(text),
        graph_sizes=_graphs(text),
        warnings=tuple(_distinct(_of_level(text, _WARNING), _MOST_WARNINGS)),
        errors=errors_of(text),
    )


def errors_of(text: str) -> tuple[str, ...]:
    """What went wrong first, in the log's own words: exceptions, and errors that a program told."""
    found = list(_distinct((error for error in _errors(text) if not _HARMLESS.search(error)), 50))
    causes = [error for error in found if not _SYMPTOM.search(error)]
    return tuple((causes or found)[:_MOST_ERRORS])


def _errors(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for index, line in enumerate(lines):
        level, message = _split(line)
        message = message.strip()
        if _EXCEPTION.match(message) or _SAID.match(message) or _DIED.search(message):
            after = _split(lines[index + 1])[1] if index + 1 < len(lines) else ""
            more = after.strip() if after.startswith(" ") and re.search(r"validation errors? for", message) else ""
            yield f"{message} {more}".strip()
        elif level == "E" and message:  # engines that print no exceptions
            yield message


def _of_level(text: str, levels: tuple[str, ...]) -> Iterator[str]:
    for line in text.splitlines():
        level, message = _split(line)
        if level in levels and message.strip():
            yield message.strip()


def _split(line: str) -> tuple[str, str]:
    """(level, message) of a log line; no level where it states none."""
    for prefix in _PREFIXES:
        match = prefix.match(line)
        if match:
            return match["level"] or "", line[match.end() :]
    return "", line


def _distinct(found: Iterator[str], most: int) -> Iterator[str]:
    seen: set[str] = set()
    for message in found:
        shown = _shown(message)
        if shown not in seen:
            seen.add(shown)
            yield shown
        if len(seen) >= most:
            return


def _shown(text: str) -> str:
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= _LONGEST else clean[:_LONGEST] + "…"


def _arguments(text: str) -> dict[str, str]:
    """Resolved arguments by name, as text; what an engine tells first and briefly wins over what it tells later."""
    found: dict[str, str] = {}
    for pattern in _ARGUMENTS:
        match = pattern.search(text)
        if match:
            end = text.find("\n", match.end())
            listing = text[match.end() : end if end >= 0 else len(text)]
            for name, value in pairs(listing):
                found.setdefault(name, _shown(value))
    for match in _FACTS.finditer(text):
        found.setdefault(match[1], match[2])
    match = _KV_TOKENS.search(text)
    if match:
        found.setdefault("kv_cache_tokens", match[1].replace(",", ""))
    return found


def pairs(listing: str) -> Iterator[tuple[str, str]]:
    """Names and values of `a=1, b=[2, 3]`, `(a=1)` or `{'a': 1}`; commas within brackets and quotes are values."""
    listing = listing.strip()
    if listing[:1] in ("{", "("):
        listing = listing[1 : _closing(listing)]
    for part in _at_commas(listing):
        match = re.match(r"\s*'?([A-Za-z_]\w*)'?\s*[=:]\s*(.*)\Z", part, re.S)
        if match:
            yield match[1], match[2].strip().strip("'")


def _closing(text: str) -> int:
    """Where the bracket that opens the text is closed; the end of the text if it is not."""
    return next((at for at, depth, quoted in _walk(text) if depth == 0 and not quoted), len(text))


def _at_commas(text: str) -> Iterator[str]:
    start = 0
    for at, depth, quoted in _walk(text):
        if text[at] == "," and depth == 0 and not quoted:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def _walk(text: str) -> Iterator[tuple[int, int, bool]]:
    """Each position with its depth of brackets after it, and whether it is within quotes."""
    depth, quote = 0, ""
    escaped = False
    for at, character in enumerate(text):
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        yield at, depth, bool(quote)


def _graphs(text: str) -> tuple[int, ...]:
    for pattern in _GRAPHS:
        match = pattern.search(text)
        if match:
            return tuple(int(size) for size in match[1].split(",") if size.strip())
    return ()
