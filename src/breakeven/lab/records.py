"""What a run looks like on disk (docs/campaign.md has the layout). Everything after the measuring reads only this.

A cell exists whole or not at all: its files are written to a temporary folder, flushed to the disk, and renamed. The
journal is append-only and flushed line by line; a last line that a crash cut short is passed over.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from breakeven.lab.campaign import SENTINEL, Campaign
from breakeven.lab.client.types import Chunk, RequestResult

SCHEMA_VERSION = 1
_TEMPORARY = ".tmp-"
_RESERVE = ".reserve"
_ID = re.compile(r"b\d{2,}-[A-Za-z0-9][A-Za-z0-9._+-]*-c\d{3,}\Z")

_REQUESTS = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("stream", pa.int32(), nullable=False),
        pa.field("intended_send_ns", pa.int64(), nullable=False),
        pa.field("send_ns", pa.int64(), nullable=False),
        pa.field("first_byte_ns", pa.int64()),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("http_status", pa.int32()),
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
        pa.field("cached_tokens", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("speculation", pa.map_(pa.string(), pa.float64())),
    ]
)
_CHUNKS = pa.schema(
    [
        pa.field("request", pa.int32(), nullable=False),  # index into requests.parquet
        pa.field("arrival_ns", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32()),
        pa.field("characters", pa.int32(), nullable=False),
    ]
)


class RecordError(ValueError):
    """A run directory that cannot be used; the message says which file, what is wrong and what to do."""


class DiskFullError(RecordError):
    """No space is left. What was measured before is whole on disk, and the run can be resumed."""


class RunLockedError(RecordError):
    """Another process is running this campaign in this directory."""


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """What a cell is: one arm under one condition at one level (streams, or a rate) in one block (from 0).

    A condition is a prompt domain, or that and a value of each further factor (`Campaign.setting` reads its name).
    """

    block: int
    arm: str
    condition: str
    level: int

    @property
    def id(self) -> str:
        """Unique within a campaign (the plan checks that), and a file name."""
        return f"b{self.block:02d}-{self.arm}-{self.condition}-c{self.level:03d}"


@dataclass(frozen=True, slots=True)
class CellRecord:
    """One cell as measured. Times are nanoseconds of the wall clock.

    `invalid`: reasons in plain words, empty for a valid cell. `counters`: rises of the server's speculation counters
    over the cell (num_drafts, num_draft_tokens, num_accepted_tokens, accepted_pos_0, …), empty if it has none.
    `extra`: anything that JSON holds. No requests: the cell was never measured, because the server did not start.
    """

    key: CellKey
    started_ns: int
    ended_ns: int
    requests: tuple[RequestResult, ...]
    invalid: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    client_cpu_s: float = 0.0
    send_lag_p99_ms: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return bool(self.requests)


class RunDirectory:
    """The directory of one run. Make one with `create` or `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # Making and opening

    @classmethod
    def create(
        cls, path: str | Path, campaign: Campaign, campaign_text: str, environment: Mapping[str, Any]
    ) -> RunDirectory:
        """A new run in a directory that does not exist yet or is empty. RecordError if it holds anything."""
        run = cls(Path(path))
        if cls.is_run(path):
            raise RecordError(f"{path} already holds a run: continue it with --resume, or choose another directory")
        with _disk_errors(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            if any(run.path.iterdir()):
                raise RecordError(f"{path} is not empty and holds no run: choose another directory")
            for folder in (run.cells_path, run.logs_path):
                folder.mkdir()
            _write_atomically(run.path / "campaign.yaml", campaign_text.encode())
            _write_atomically(run.path / "environment.json", _json(environment))
            # Last, because it is what makes the directory a run.
            _write_atomically(run.path / "campaign.json", _json(campaign.model_dump(mode="json")))
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run. RecordError if there is none, or if its campaign cannot be read."""
        run = cls(Path(path))
        if not run.path.is_dir():
            raise RecordError(f"{path} is not a directory: give the directory of a run")
        if not cls.is_run(path):
            raise RecordError(f"{path} holds no run (campaign.json is missing): give the --out directory of a run")
        _ = run.campaign
        return run

    @staticmethod
    def is_run(path: str | Path) -> bool:
        return (Path(path) / "campaign.json").is_file()

    @property
    def cells_path(self) -> Path:
        return self.path / "cells"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    @property
    def journal_path(self) -> Path:
        return self.path / "journal.jsonl"

    def log_path(self, block: int, arm: str) -> Path:
        """The log of an arm's launches in a block; a further launch is appended."""
        return self.logs_path / f"b{block:02d}-{arm}.log"

    @cached_property
    def campaign(self) -> Campaign:
        """The resolved campaign. RecordError if it cannot be read."""
        path = self.path / "campaign.json"
        try:
            return Campaign.model_validate_json(path.read_bytes())
        except OSError as problem:
            raise RecordError(f"{path} cannot be read: {problem.strerror or problem}") from None
        except ValueError as problem:
            first = str(problem).splitlines()[0]
            raise RecordError(f"{path} is not a campaign of this version of breakeven: {first}") from None

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Where and with what it was measured. RecordError if it cannot be read."""
        return self._read_json(self.path / "environment.json")

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_bytes())
        except OSError as problem:
            raise RecordError(f"{path} cannot be read: {problem.strerror or problem}") from None
        except ValueError as problem:
            raise RecordError(f"{path} is not valid JSON: {problem}") from None
        if not isinstance(value, dict):
            raise RecordError(f"{path} must hold a JSON object")
        return value

    # One run at a time

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run against other processes. RunLockedError if one has it.

        The kernel drops the lock with the process that holds it, so a run that was killed leaves none behind.
        """
        path = self.path / "run.lock"
        with _disk_errors(self.path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _try_lock(descriptor):
                holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "another process"
                raise RunLockedError(f"{self.path} is being run by {holder}: wait for it, or end it first")
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            os.close(descriptor)

    # The journal

    def journal(self, event: str, **fields: Any) -> None:
        """Appends one line and flushes it to the disk. DiskFullError if there is no space."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}, ensure_ascii=False, default=str)
        with _disk_errors(self.path):
            descriptor = os.open(self.journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                data = (b"\n" if torn else b"") + line.encode("utf-8", "replace") + b"\n"
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read_journal(self) -> list[dict[str, Any]]:
        """The journal's events, oldest first. Lines that a crash cut short are passed over."""
        try:
            data = self.journal_path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise RecordError(f"{self.journal_path} cannot be read: {problem.strerror or problem}") from None
        events = []
        for line in data.split(b"\n"):
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
        return events

    @property
    def finished(self) -> bool:
        """Whether the run came to its end (nothing was interrupted since)."""
        ends = [e["event"] for e in self.read_journal() if e.get("event") in ("run_started", "run_finished")]
        return ends[-1:] == ["run_finished"]

    # Cells

    def cell_ids(self) -> set[str]:
        """The ids of the cells on disk."""
        try:
            return {entry.name for entry in self.cells_path.iterdir() if _ID.match(entry.name)}
        except FileNotFoundError:
            return set()

    def reserve(self, size: int) -> None:
        """Sets `size` bytes of the disk aside for the next cell, so that what is measured can also be written.

        `write_cell` frees them first. DiskFullError if there is not as much.
        """
        path = self.path / _RESERVE
        with _disk_errors(self.path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(descriptor).st_size < size:
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(descriptor, 0, size)
                    elif shutil.disk_usage(self.path).free < size:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Gives back what `reserve` set aside."""
        with suppress(OSError):
            (self.path / _RESERVE).unlink(missing_ok=True)

    def write_cell(self, record: CellRecord) -> None:
        """Writes a cell; afterwards it is there, whole, whatever happens to the process or the machine.

        A measured cell is never replaced: RecordError. One without requests gives way to a later try. DiskFullError if
        there is no space; nothing of the cell is left then.
        """
        target = self.cells_path / record.key.id
        if target.exists() and self._measured(target):
            raise RecordError(f"the cell {record.key.id} is already there: cells are never measured twice")
        self.release()
        temporary = self.cells_path / (_TEMPORARY + record.key.id)
        with _disk_errors(self.path):
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                self.cells_path.mkdir(exist_ok=True)
                temporary.mkdir()
                _write_table(temporary / "requests.parquet", _requests_table(record.requests))
                _write_table(temporary / "chunks.parquet", _chunks_table(record.requests))
                _write_synced(temporary / "cell.json", _json(_cell_head(record)))
                _sync(temporary)
                if target.exists():
                    shutil.rmtree(target)
                os.replace(temporary, target)
                _sync(self.cells_path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def remove_leftovers(self) -> None:
        """Removes what a killed run left half-written."""
        if self.cells_path.is_dir():
            for entry in self.cells_path.iterdir():
                if entry.name.startswith(_TEMPORARY):
                    shutil.rmtree(entry, ignore_errors=True)
        self.release()

    def measured_ids(self) -> set[str]:
        """The ids of the cells that were measured, validly or not: a resumed run does not repeat them."""
        try:
            return {name for name in self.cell_ids() if self._measured(self.cells_path / name)}
        except RecordError as problem:
            raise RecordError(
                f"{problem}: move its folder away, and the cell is measured again (`breakeven report` reads the others)"
            ) from None

    def _measured(self, path: Path) -> bool:
        return int(self._read_json(path / "cell.json").get("requests", 0)) > 0

    def read_cell(self, cell_id: str) -> CellRecord:
        """Reads a cell back exactly as it was written. RecordError for files that are missing, cut or do not match."""
        path = self.cells_path / cell_id
        head = self._read_json(path / "cell.json")
        requests = _read_table(path / "requests.parquet", _REQUESTS)
        chunks = _read_table(path / "chunks.parquet", _CHUNKS)
        try:
            if head["schema_version"] != SCHEMA_VERSION:
                raise RecordError(
                    f"{path / 'cell.json'} has schema version {head['schema_version']}, and this version of breakeven "
                    f"reads {SCHEMA_VERSION}: use the version that wrote it"
                )
            if (head["requests"], head["chunks"]) != (requests.num_rows, chunks.num_rows):
                raise RecordError(
                    f"{path}: cell.json announces {head['requests']} requests and {head['chunks']} chunks, but the "
                    f"Parquet files hold {requests.num_rows} and {chunks.num_rows}: the files are not of one cell"
                )
            return CellRecord(
                key=CellKey(**head["key"]),
                started_ns=head["started_ns"],
                ended_ns=head["ended_ns"],
                requests=_results(requests, chunks),
                invalid=tuple(head["invalid"]),
                counters=head["counters"],
                client_cpu_s=head["client_cpu_s"],
                send_lag_p99_ms=head["send_lag_p99_ms"],
                extra=head["extra"],
            )
        except RecordError:
            raise
        except (KeyError, TypeError, IndexError, ValueError) as problem:
            raise RecordError(f"{path} is damaged: {type(problem).__name__} {problem}") from None

    def readable_cells(self) -> Iterator[CellRecord]:
        """As `read_cells`, but a cell whose files are damaged comes as an invalid one without requests.

        So one bad file does not hide the rest of a run. RecordError only where even the cell's name tells nothing.
        """
        keys: list[tuple[CellKey, str]] = sorted((self._key_by_name(name), name) for name in self.cell_ids())
        for key, name in keys:
            try:
                record = self.read_cell(name)
                if record.key != key:
                    raise RecordError(f"{self.cells_path / name} holds the cell {record.key.id}: it was renamed")
                yield record
            except RecordError as problem:
                reason = (
                    f"its files are damaged ({problem}): move {self.cells_path / name} away and run `breakeven run"
                    f" --resume --out {self.path}` to measure it again"
                )
                yield CellRecord(key, 0, 0, (), invalid=(reason,))

    def _key_by_name(self, name: str) -> CellKey:
        """The key of a cell from its folder's name, which holds it but for dashes in the names of arms and domains."""
        domains = self.campaign.workload.domains
        known = None if domains is None else set(self.campaign.condition_names((*domains, SENTINEL))) | {SENTINEL}
        block, _, rest = name.partition("-")
        middle, _, level = rest.rpartition("-c")
        found = [
            CellKey(int(block[1:]), arm, middle[len(arm) + 1 :], int(level))
            for arm in self.campaign.arms
            if middle.startswith(arm + "-") and (known is None or middle[len(arm) + 1 :] in known)
        ]
        if len(found) == 1:
            return found[0]
        try:
            return CellKey(**self._read_json(self.cells_path / name / "cell.json")["key"])
        except (KeyError, TypeError):
            raise RecordError(f"{self.cells_path / name} is no cell of this campaign: move it away") from None

    def read_cells(self) -> Iterator[CellRecord]:
        """All cells, in the order of block, arm, condition and level, so that what is made of them never varies.

        RecordError for the first whose files are damaged.
        """
        keys: list[tuple[CellKey, str]] = []
        for name in self.cell_ids():
            head = self._read_json(self.cells_path / name / "cell.json")
            try:
                keys.append((CellKey(**head["key"]), name))
            except (KeyError, TypeError):
                raise RecordError(f"{self.cells_path / name / 'cell.json'} has no usable key") from None
        for _, name in sorted(keys):
            yield self.read_cell(name)


# Files


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """OSErrors in plain words. A full disk has its own exception."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no space is left on the disk of {path}: free some, then continue with --resume (every cell that was "
                f"finished is whole on disk)"
            ) from problem
        where = problem.filename or path
        raise RecordError(f"{where}: {problem.strerror or problem}") from problem


def _try_lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two runs in one directory are then up to the user
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode("utf-8", "replace")


def _sync(folder: Path) -> None:
    with suppress(OSError):  # some file systems have no fsync of folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(_TEMPORARY + path.name)
    try:
        _write_synced(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _write_table(path: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    _write_synced(path, sink.getvalue().to_pybytes())


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        return pq.read_table(path, schema=schema, page_checksum_verification=True)
    except FileNotFoundError:
        raise RecordError(f"{path} is missing") from None
    except (pa.ArrowException, OSError, ValueError) as problem:
        words = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise RecordError(f"{path} is cut short or damaged: {words}") from None


# Rows


def _cell_head(record: CellRecord) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "key": asdict(record.key),
        "started_ns": record.started_ns,
        "ended_ns": record.ended_ns,
        "requests": len(record.requests),
        "chunks": sum(len(r.chunks) for r in record.requests),
        "invalid": list(record.invalid),
        "counters": dict(record.counters),
        "client_cpu_s": record.client_cpu_s,
        "send_lag_p99_ms": record.send_lag_p99_ms,
        "extra": dict(record.extra),
    }


def _requests_table(requests: tuple[RequestResult, ...]) -> pa.Table:
    def column(name: str) -> list[Any]:
        values = [getattr(r, name) for r in requests]
        if name == "speculation":
            return [None if v is None else list(v.items()) for v in values]
        return values

    return pa.table({f.name: pa.array(column(f.name), f.type) for f in _REQUESTS}, schema=_REQUESTS)


def _chunks_table(requests: tuple[RequestResult, ...]) -> pa.Table:
    rows = [(i, c.arrival_ns, c.tokens, c.characters) for i, r in enumerate(requests) for c in r.chunks]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(_CHUNKS)
    return pa.table(
        {f.name: pa.array(values, f.type) for f, values in zip(_CHUNKS, columns, strict=True)}, schema=_CHUNKS
    )


def _results(requests: pa.Table, chunks: pa.Table) -> tuple[RequestResult, ...]:
    of_request: list[list[Chunk]] = [[] for _ in range(requests.num_rows)]
    columns = (chunks[name].to_pylist() for name in ("request", "arrival_ns", "tokens", "characters"))
    for index, arrival, tokens, characters in zip(*columns, strict=True):
        of_request[index].append(Chunk(arrival, tokens, characters))
    results = []
    for row, own in zip(requests.to_pylist(), of_request, strict=True):
        speculation = row.pop("speculation")
        results.append(
            RequestResult(**row, chunks=tuple(own), speculation=None if speculation is None else dict(speculation))
        )
    return tuple(results)
