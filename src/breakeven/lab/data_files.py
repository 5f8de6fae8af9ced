"""The campaign's files of data sets: found, here or at the hub, read, and described so that they can be found again.

A revision that moves, such as the branch `main`, is resolved when a run begins; the commit goes into its record, and
whoever resumes the run gets that commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breakeven.lab.campaign import PromptFile
from breakeven.lab.workload import hub
from breakeven.lab.workload.datasets import Reading, read_records
from breakeven.lab.workload.prompt import Prompt, PromptError

Asked = tuple[str, str, str]  # data set, path and revision, as the campaign has them


@dataclass(frozen=True, slots=True)
class Pin:
    """What a run was begun with. `sha256`: of the file's bytes, hexadecimal."""

    commit: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was read. `commit`: of the hub's data set, None for a local file. `sha256`: of the file's bytes."""

    asked: PromptFile
    commit: str | None
    sha256: str
    size_bytes: int
    reading: Reading

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.reading.prompts

    def record(self) -> dict[str, Any]:
        """As `environment.json` holds it."""
        asked = self.asked
        source = {"hub": asked.hub, "path": asked.path, "revision": _revision(asked), "commit": self.commit}
        return {
            **(source if asked.hub is not None else {"path": asked.path}),
            "sha256": self.sha256,
            "size": self.size_bytes,
            "prompts": len(self.prompts),
            "placeholders": self.reading.placeholders,
        }


def read_data_files(
    files: Iterable[PromptFile],
    pinned: Mapping[Asked, Pin] | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> tuple[DataFile, ...]:
    """All files, in their order. `pinned`: the commits of an earlier start. `say` is told what is fetched.

    A revision is resolved once: a branch that moves meanwhile would mix two states of a data set.

    PromptError for a file that cannot be had or read, or that differs from the pinned one.
    """
    commits: dict[tuple[str, str], str] = {}
    found = []
    for file in files:
        read = _read(file, pinned or {}, commits, say)
        if file.hub is not None and read.commit is not None:
            commits.setdefault((file.hub, _revision(file)), read.commit)
        found.append(read)
    return tuple(found)


def pins(environment: Mapping[str, Any]) -> dict[Asked, Pin]:
    """The commits in a run's `environment.json`, by what the campaign asked for."""
    found = {}
    for entry in environment.get("files") or ():
        if entry.get("hub") is not None:
            key = (str(entry["hub"]), str(entry["path"]), str(entry["revision"]))
            found[key] = Pin(str(entry["commit"]), str(entry["sha256"]))
    return found


def incomplete(environment: Mapping[str, Any]) -> Iterator[str]:
    """Of the files in a run's `environment.json`: those that are not whole, in plain words."""
    files = environment.get("files")
    for entry in files if isinstance(files, list) else ():
        count = entry.get("placeholders") if isinstance(entry, Mapping) else None
        if isinstance(count, int) and count > 0:
            yield (
                f"{_name(entry.get('hub'), str(entry.get('path')))}: {count} records hold a placeholder instead of "
                "their text and are left out; this is not the whole data set, whose own tool must be run to complete it"
            )


def name_of(file: PromptFile) -> str:
    """A file's name in messages."""
    return _name(file.hub, file.path)


def _name(hub: str | None, path: str) -> str:
    return path if hub is None else f"{hub}, {path}"


def _read(
    file: PromptFile,
    pinned: Mapping[Asked, Pin],
    commits: Mapping[tuple[str, str], str],
    say: Callable[[str], None],
) -> DataFile:
    """One file. `commits`: what the revisions of this reading's earlier files stood for, by data set and revision."""
    commit, pin, path = None, None, Path(file.path)
    if file.hub is not None:
        pin = pinned.get((file.hub, file.path, _revision(file)))
        revision = pin.commit if pin else commits.get((file.hub, _revision(file)), _revision(file))
        held = hub.fetch(file.hub, file.path, revision, say)
        path, commit = held.path, held.commit
    # Prompts first: a path that cannot be read gets the reader's message.
    reading = read_records(path, file.format, file.domain, file.limit, data_set=_data_set(file))
    sha256, size = _digest(path)
    if pin is not None and pin.sha256 != sha256:
        raise PromptError(
            f"{name_of(file)}: the file in the cache ({path}) is not the one that the run was begun with: its SHA-256 "
            f"is {sha256}, that of the run {pin.sha256}. Delete {path.resolve()}, so that it is fetched again"
        )
    return DataFile(file, commit, sha256, size, reading)


def _digest(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest(), path.stat().st_size
    except OSError as problem:
        raise PromptError(f"{path}: cannot be read: {problem.strerror or problem}") from None


def _revision(file: PromptFile) -> str:
    return file.revision or hub.DEFAULT_REVISION


def _data_set(file: PromptFile) -> str | None:
    """The data set's name without its owner's."""
    return None if file.hub is None else file.hub.rpartition("/")[2]
