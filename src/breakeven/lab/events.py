"""What the runner tells of its progress, as it happens."""

from __future__ import annotations

from dataclasses import dataclass

from breakeven.lab.records import CellKey


@dataclass(frozen=True, slots=True)
class RunBegan:
    """`done`: cells that an earlier start of this run has measured already."""

    cells: int
    done: int
    launches_left: int


@dataclass(frozen=True, slots=True)
class LaunchBegan:
    block: int
    arm: str
    cells: int
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchReady:
    """The server has produced its first token, `seconds` after its start."""

    block: int
    arm: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """The server did not start, or ended before its time."""

    block: int
    arm: str
    message: str


@dataclass(frozen=True, slots=True)
class LaunchEnded:
    """The server is gone. `seconds`: what the launch took besides its cells. `problems`: what it left behind."""

    block: int
    arm: str
    seconds: float
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellBegan:
    key: CellKey
    requests: int


@dataclass(frozen=True, slots=True)
class CellProgress:
    key: CellKey
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class CellEnded:
    """A cell is on disk. `tokens`: completion tokens that the server reported."""

    key: CellKey
    seconds: float
    requests: int
    tokens: int
    invalid: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth a line that stops nothing."""

    message: str


Event = (
    RunBegan | LaunchBegan | LaunchReady | LaunchFailed | LaunchEnded | CellBegan | CellProgress | CellEnded | Notice
)
