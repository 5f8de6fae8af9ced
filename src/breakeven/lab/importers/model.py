"""What a reader of a foreign file hands over: runs, with as much of their requests as the file holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["json", "jsonl", "csv"]


class ImportFileError(ValueError):
    """A file that cannot be imported; the message says which, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file, parsed. `values`: the JSON value (one), the lines' values (JSONL), or the rows as mappings (CSV).

    `stem`: the file's name without its extension; `folder`: the name of the directory that holds it. `names`: what the
    user called the arm on the command line, if anything. `beside`: AIPerf's summary next to its records, if there.
    """

    file: str
    stem: str
    folder: str
    kind: Kind
    values: tuple[Any, ...]
    names: tuple[str, ...] = ()
    beside: Mapping[str, Any] | None = None

    def problem(self, text: str, where: str = "") -> ImportFileError:
        """An error that names the file, and the place in it."""
        return ImportFileError(f"{self.file}{f', {where}' if where else ''}: {text}")


@dataclass(frozen=True, slots=True)
class ImportedRequest:
    """One request as another tool saw it. Times in milliseconds from its send; None: not in the file.

    `start_s`: the send, in seconds of any one clock. `gaps_ms`: between successive chunks, after the first.
    """

    start_s: float | None
    ttft_ms: float | None
    latency_ms: float | None
    gaps_ms: tuple[float, ...] | None
    tpot_ms: float | None
    output_tokens: int | None
    input_tokens: int | None
    text: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Stated:
    """A time's statistics as the file states them, in milliseconds."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One run of one arm at one level.

    `names`: the arm's possible names, best first. `block`: the repetition if the file says; None: in the order read.
    `counters`: as a cell's (num_drafts, num_draft_tokens, num_accepted_tokens, accepted_pos_0, …). `natural`: False if
    the text is known not to be real or EOS not respected. `started_s`: seconds since the epoch.
    """

    file: str
    tool: str
    names: tuple[str, ...]
    level: int
    condition: str
    throughput_tok_s: float | None
    block: int | None = None
    stated: Mapping[str, Stated] = field(default_factory=dict)  # ttft, tpot, inter_chunk, latency
    requests: tuple[ImportedRequest, ...] = ()
    completed: int | None = None
    failed: int = 0
    duration_s: float | None = None
    output_tokens: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    acceptance_length: float | None = None
    natural: bool = True
    started_s: float | None = None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def number(document: Document, values: Mapping[str, Any], name: str) -> float | None:
    """A finite number, or None where the file has none. ImportFileError for anything else."""
    value = values.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise document.problem(f"{name} must be a number, and is {value!r:.80}")
    return float(value) if math.isfinite(value) else None


def count(document: Document, values: Mapping[str, Any], name: str) -> int | None:
    """A whole number that is not negative, or None."""
    value = number(document, values, name)
    if value is None:
        return None
    if value < 0 or value != int(value):
        raise document.problem(f"{name} must be a whole number of 0 or more, and is {value:g}")
    return int(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def texts(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
