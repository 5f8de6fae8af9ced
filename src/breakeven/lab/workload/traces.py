"""Recorded arrival times from local files: Mooncake, BurstGPT and Azure traces, or a plain list of times.

Only the timing is taken. A trace without text has no acceptance, so what is asked comes from prompts.

| format | how it is recognised | times |
|---|---|---|
| Mooncake | JSON lines with `timestamp` | milliseconds |
| BurstGPT | CSV with a column `Timestamp` | seconds |
| Azure LLM inference | CSV with a column `TIMESTAMP` (or `arrival_timestamp`) | date and time |
| plain | one number a line | seconds |
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from breakeven.lab.workload.prompt import PromptError


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrival times in seconds from the first, in order. `sha256`: of these times, so that a run can be recognised."""

    name: str
    format: str
    times_s: tuple[float, ...]
    sha256: str

    @property
    def rate(self) -> float:
        """Mean arrivals per second."""
        return (len(self.times_s) - 1) / self.times_s[-1]


def read_trace(path: str | Path) -> Trace:
    """Reads a trace, gzip-compressed or not. PromptError, with the line, for anything that is none."""
    from breakeven.lab.workload.files import read_text

    path = Path(path)
    text = read_text(path)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not first:
        raise PromptError(f"{path}: holds no arrivals")
    if first.startswith("{"):
        kind, times = "mooncake", list(_json_lines(text, path))
    elif _number(first) is not None:
        kind, times = "plain", list(_plain(text, path))
    else:
        kind, times = _csv(text, path)
    return _trace(path, kind, times)


def _trace(path: Path, kind: str, times: Sequence[float]) -> Trace:
    if len(times) < 2:
        raise PromptError(f"{path}: holds {len(times)} arrivals, and a trace needs at least two")
    ordered = sorted(times)
    if ordered[-1] <= ordered[0]:
        raise PromptError(f"{path}: all arrivals are at the same time")
    offsets = tuple(round(t - ordered[0], 9) for t in ordered)
    return Trace(path.name, kind, offsets, hashlib.sha256(json.dumps(offsets).encode()).hexdigest())


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _json_lines(text: str, path: Path) -> Iterator[float]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise PromptError(f"{path}, line {number}: not JSON") from None
        stamp = record.get("timestamp") if isinstance(record, dict) else None
        if not isinstance(stamp, (int, float)) or isinstance(stamp, bool) or not math.isfinite(stamp):
            raise PromptError(f"{path}, line {number}: 'timestamp' (milliseconds) is missing or not a number")
        yield stamp / 1000


def _plain(text: str, path: Path) -> Iterator[float]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        value = _number(line.strip())
        if value is None:
            raise PromptError(f"{path}, line {number}: {line.strip()[:40]!r} is not a number of seconds")
        yield value


def _csv(text: str, path: Path) -> tuple[str, list[float]]:
    reader = csv.reader(text.splitlines())
    header = next(reader)
    names = {name.strip().lower(): index for index, name in enumerate(header)}
    column = next(
        (names[n] for n in ("timestamp", "arrival_timestamp", "arrival_time", "arrived_at") if n in names), -1
    )
    if column < 0:
        raise PromptError(
            f"{path}, line 1: no column 'timestamp': Mooncake (JSON lines), BurstGPT and Azure (CSV) are read, and one "
            f"number of seconds a line"
        )
    times: list[float] = []
    dates = 0
    for row in reader:
        if not any(cell.strip() for cell in row):
            continue
        cell = row[column].strip() if column < len(row) else ""
        value = _number(cell)
        if value is None:
            value = _date(cell)
            dates += 1
        if value is None:
            raise PromptError(f"{path}, line {reader.line_num}: {cell[:40]!r} is neither seconds nor a date and time")
        times.append(value)
    if dates not in (0, len(times)):
        raise PromptError(f"{path}: some times are numbers and some are dates")
    return ("azure" if dates else "burstgpt"), times


def _date(text: str) -> float | None:
    """Seconds of a date and time; digits of a second beyond the sixth are kept, which `fromisoformat` would not."""
    whole, dot, fraction = text.partition(".")
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))] if dot else ""
    try:
        moment = datetime.fromisoformat(whole + fraction[len(digits) :])
    except ValueError:
        return None
    days = (moment.toordinal() - 738_000) * 86400.0  # from 2021 on, so that a double keeps fractions of a microsecond
    offset = moment.utcoffset()
    seconds = moment.hour * 3600 + moment.minute * 60 + moment.second - (offset.total_seconds() if offset else 0.0)
    return days + seconds + (int(digits) / 10 ** len(digits) if digits else 0.0)
