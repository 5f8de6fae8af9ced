"""The protocol of an arm, and what goes wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from breakeven.lab.arms.logs import LogFacts
from breakeven.lab.arms.process import ProcessIdentity, StopReport
from breakeven.lab.arms.prometheus import Series
from breakeven.lab.client.types import Endpoint


class ArmError(RuntimeError):
    """Something went wrong with a server; the message says what, and quotes its log where that helps."""


class StartError(ArmError):
    """The server could not be started, or never became ready."""


class ResetError(ArmError):
    """The server has a reset of its prefix cache, and it failed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The smallest request of the kind that will be measured. `body` takes the model's name."""

    route: str
    body: Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Ready:
    """What is known of a server once it has produced its first token. `seconds`: since the start of waiting."""

    model: str
    seconds: float
    version: str | None


class Arm(Protocol):
    """One server under test. The order of calls: start, wait_ready, (reset, counters, …), stop; then perhaps again."""

    @property
    def name(self) -> str: ...

    @property
    def can_reset(self) -> bool:
        """Whether its prefix cache can be emptied."""
        ...

    @property
    def continuous_usage(self) -> bool:
        """Whether it takes stream_options.continuous_usage_stats."""
        ...

    def command(self) -> tuple[str, ...]:
        """The command line, with {port} where the port will be; empty for a server that is not ours to start."""
        ...

    def start(self, log_path: Path) -> ProcessIdentity | None:
        """Starts the server, its output appended to the log. StartError if that cannot be."""
        ...

    def wait_ready(self, probe: Probe) -> Ready:
        """Waits for health and a first token. StartError if the server ends, refuses the probe, or takes too long."""
        ...

    def endpoint(self, route: str) -> Endpoint:
        """Where requests to `route` (such as /v1/chat/completions) go."""
        ...

    def reset(self) -> None:
        """Empties the prefix cache. ResetError if that fails; only to be called if `can_reset`."""
        ...

    def counters(self) -> Mapping[Series, float] | None:
        """Counters of speculation and of the engine's own time now, per series; None if no metrics can be read."""
        ...

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """The token ids of a request's rendered prompt, by the server's /tokenize; None where it has no such route."""
        ...

    def alive(self) -> bool:
        """False once a server of ours has ended. One that is not ours counts as alive while it answers."""
        ...

    def obituary(self) -> str:
        """How the server ended, and the last words of its log."""
        ...

    def facts(self) -> LogFacts:
        """What the launch's log says of the server up to now; nothing for one that is not ours."""
        ...

    def stop(self) -> StopReport:
        """Ends the server and proves it gone. Safe to call in any state, and again."""
        ...
