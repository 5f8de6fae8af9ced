"""From a file on disk to a parsed document. The only module here that reads."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breakeven.lab.importers.model import Document, ImportFileError, Kind

MAX_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Loaded:
    """A document and what identifies its file."""

    document: Document
    sha256: str
    size: int


def load(argument: str) -> Loaded:
    """`FILE`, or `ARM=FILE` to name the arm. ImportFileError if it cannot be read or parsed."""
    path, names = Path(argument), ()
    given: tuple[str, ...] = names
    if "=" in argument and not path.exists():
        name, _, rest = argument.partition("=")
        if not name.strip() or not rest:
            raise ImportFileError(f"{argument!r}: write FILE or ARM=FILE")
        path, given = Path(rest), (name.strip(),)
    try:
        if path.is_dir():
            raise ImportFileError(f"{path} is a directory: give the files in it")
        if path.stat().st_size > MAX_BYTES:
            raise ImportFileError(f"{path} is larger than {MAX_BYTES // 2**30} GiB: that is no result file")
        data = path.read_bytes()
    except OSError as problem:
        raise ImportFileError(f"cannot read {path}: {problem.strerror or problem}") from None
    kind, values = parse(data, str(path))
    return Loaded(
        Document(
            file=str(path),
            stem=path.name.split(".")[0] if path.name.endswith(".jsonl.json") else path.stem,
            folder=path.resolve().parent.name,
            kind=kind,
            values=tuple(values),
            names=given,
            beside=_beside(path),
        ),
        hashlib.sha256(data).hexdigest(),
        len(data),
    )


def parse(data: bytes, name: str) -> tuple[Kind, Sequence[Any]]:
    """JSON, one JSON value per line, or CSV, told apart by content. ImportFileError says where it breaks."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ImportFileError(f"{name} is not UTF-8 text: give the tool's JSON, JSONL or CSV file") from None
    if not text.strip():
        raise ImportFileError(f"{name} is empty")
    if text.lstrip()[0] in "{[":
        return _json(text, name)
    return "csv", _csv(text, name)


def _json(text: str, name: str) -> tuple[Kind, Sequence[Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as whole:
        lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        values = []
        for number, line in lines:
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError) as problem:
                if number == lines[0][0]:  # not one value per line: the whole file's error is the telling one
                    raise ImportFileError(f"{name} is not valid JSON ({whole}): is it cut off?") from None
                raise ImportFileError(f"{name}, line {number} is not valid JSON ({problem}): is it cut off?") from None
        return "jsonl", values
    return ("jsonl", value) if isinstance(value, list) else ("json", [value])


def _csv(text: str, name: str) -> list[Mapping[str, Any]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(lines)), strict=True)
    try:
        reader.fieldnames = [field.strip() for field in reader.fieldnames or ()]
        rows: list[Mapping[str, Any]] = list(reader)
    except csv.Error as problem:
        raise ImportFileError(f"{name} is not valid CSV: {problem}") from None
    for index, row in enumerate(rows):
        if None in row:
            raise ImportFileError(f"{name}, line {index + 2} has more fields than the header")
    if not rows:
        raise ImportFileError(f"{name} has a header at most, and no row")
    return rows


def _beside(path: Path) -> Mapping[str, Any] | None:
    """AIPerf's summary next to its records; None if there is none or it cannot be read."""
    if not path.name.startswith("profile_export") or path.suffix != ".jsonl":
        return None
    try:
        value = json.loads((path.parent / "profile_export_aiperf.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None
