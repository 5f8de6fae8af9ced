"""Files that exist whole or not at all, JSON lines (plain or gzip) in shards, and the manifest of finished stages."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from breakeven.engine.config import ConfigError


def write_bytes(path: Path, data: bytes) -> None:
    """Write under another name, flush, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Pretty JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write_gzip(path: Path, text: str) -> None:
    """Without a timestamp, so that equal rows give equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=5, mtime=0) as file:
        file.write(text.encode("utf-8", "replace"))
    write_bytes(path, buffer.getvalue())


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl or .jsonl.gz file. ConfigError, with the line's number, where it is not that."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: must be an object, got {type(row).__name__}")
        yield row


class ShardWriter:
    """Rows into files `stem-00000.jsonl.gz`, `stem-00001…` of about `megabytes` uncompressed each.

    A shard exists only when it is whole. Compression runs beside the caller; `close` writes the rest and waits.
    """

    def __init__(self, folder: Path, stem: str, megabytes: float, first: int = 0) -> None:
        self._folder, self._stem, self._limit = folder, stem, int(megabytes * 2**20)
        self._lines: list[str] = []
        self._size = 0
        self._index = first
        self._pool = ThreadPoolExecutor(1)
        self._writes: list[Future[None]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
        self._lines.append(line)
        self._size += len(line)
        if self._size >= self._limit:
            self._flush()

    def close(self) -> None:
        """Write what is left, and raise what went wrong with earlier shards."""
        self._flush()
        self._pool.shutdown(wait=True)
        for write in self._writes:
            write.result()

    def _flush(self) -> None:
        if self._lines:
            path = self._folder / f"{self._stem}-{self._index:05d}.jsonl.gz"
            self._writes.append(self._pool.submit(_write_gzip, path, "".join(self._lines)))
            self._lines, self._size = [], 0
            self._index += 1


def shards(folder: Path, stem: str) -> list[Path]:
    """The shards written so far, in order."""
    return sorted(folder.glob(f"{stem}-*.jsonl.gz"))


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One finished stage: the hash of everything its result depends on, and what it reported."""

    hash: str
    seconds: float
    summary: dict[str, Any]


class Manifest:
    """`manifest.json` of a run's directory: which stages are finished, and under which settings."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "manifest.json"
        self.stages: dict[str, StageRecord] = {}
        if self._path.is_file():
            try:
                raw = json.loads(self._path.read_text(encoding="utf-8"))
                self.stages = {name: StageRecord(**value) for name, value in raw["stages"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self._path} is damaged ({error}); delete it to run all stages again, files already there are "
                    "used where they fit"
                ) from None

    def finished(self, stage: str, digest: str) -> bool:
        """Whether the stage is done under these settings."""
        return stage in self.stages and self.stages[stage].hash == digest

    def finish(self, stage: str, digest: str, seconds: float, summary: dict[str, Any]) -> None:
        """Record a stage."""
        self.stages[stage] = StageRecord(digest, round(seconds, 2), summary)
        write_json(self._path, {"stages": {name: asdict(record) for name, record in self.stages.items()}})
