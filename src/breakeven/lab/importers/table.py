"""A plain CSV: `arm,level,throughput_tok_s`, and where there are several `condition` and `block`.

Optional columns: `ttft_ms`, `tpot_ms`, `latency_ms` (means), `latency_p99_ms`, `acceptance_length`, `source`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from breakeven.lab.importers.model import Document, ImportedRun, Stated

REQUIRED = ("arm", "level", "throughput_tok_s")
OPTIONAL = (
    "condition", "block", "ttft_ms", "tpot_ms", "latency_ms", "ttft_p99_ms", "tpot_p99_ms", "latency_p99_ms",
    "acceptance_length", "source",
)  # fmt: skip


def recognises(document: Document) -> bool:
    """A header with the three columns that are needed."""
    return document.kind == "csv" and bool(document.values) and set(REQUIRED) <= set(document.values[0])


def read(document: Document) -> list[ImportedRun]:
    """One run per row. ImportFileError, with the line, for what is missing or no number."""
    unknown = [name for name in document.values[0] if name not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        raise document.problem(
            f"unknown column {str(unknown[0])!r}: the columns are {', '.join(REQUIRED)} and, if wanted,"
            f" {', '.join(OPTIONAL)}"
        )
    return [_run(document, row, f"line {index + 2}") for index, row in enumerate(document.values)]


def _run(document: Document, row: Mapping[str, str | None], where: str) -> ImportedRun:
    arm = (row.get("arm") or "").strip()
    if not arm:
        raise document.problem("the arm is missing", where)
    times = {}
    for name in ("ttft", "tpot", "latency"):
        times[name] = Stated(
            mean=_number(document, row, f"{name}_ms", where), p99=_number(document, row, f"{name}_p99_ms", where)
        )
    rate = _number(document, row, "throughput_tok_s", where)
    if rate is None:
        raise document.problem("throughput_tok_s is missing", where)
    source = (row.get("source") or "").strip()
    return ImportedRun(
        file=document.file,
        tool="CSV",
        names=(arm,),
        level=_whole(document, row, "level", where, least=1) or 1,
        condition=(row.get("condition") or "").strip() or "unstated",
        throughput_tok_s=rate,
        block=_whole(document, row, "block", where, least=0),
        stated=times,
        acceptance_length=_number(document, row, "acceptance_length", where),
        facts={"source": source} if source else {},
    )


def _number(document: Document, row: Mapping[str, str | None], name: str, where: str) -> float | None:
    text = (row.get(name) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise document.problem(f"{name} must be a number, and is {text!r:.60}", where) from None
    if not math.isfinite(value) or value <= 0:
        raise document.problem(f"{name} must be above 0, and is {text!r:.60}", where)
    return value


def _whole(document: Document, row: Mapping[str, str | None], name: str, where: str, least: int) -> int | None:
    text = (row.get(name) or "").strip()
    if not text:
        if name == "level":
            raise document.problem("the level is missing", where)
        return None
    if not text.isdecimal() or int(text) < least:
        raise document.problem(f"{name} must be a whole number of {least} or more, and is {text!r:.60}", where)
    return int(text)
