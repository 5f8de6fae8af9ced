"""Reading text files that people hand in: compressed or not, with errors that name the file."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from breakeven.lab.workload.prompt import PromptError

MAX_BYTES = 2_000_000_000


def read_text(path: Path) -> str:
    """A file's text, decompressed where it is gzip. PromptError if it cannot be read or is not UTF-8."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else path.open("rb") as source:
            data = source.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise PromptError(f"{path}: the gzip file is cut short or damaged") from None
    except OSError as problem:
        raise PromptError(f"{path}: cannot be read: {problem.strerror or problem}") from None
    if len(data) > MAX_BYTES:
        raise PromptError(f"{path}: is larger than {MAX_BYTES // 10**9} GB: cut it down to what will be asked")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise PromptError(f"{path}: not UTF-8 (byte {problem.start}): save the file as UTF-8") from None
