"""What a campaign's run asks of a load generator, wherever its workers live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from breakeven.lab.client.generator import AHEAD_CONNECTIONS
from breakeven.lab.client.sessions import Messages, Session
from breakeven.lab.client.types import Endpoint, LoadResult, RequestSpec


class LoadBackend(Protocol):
    """What runs loads: processes of this machine (`workers.LoadClient`) or actors on several (`ray_backend.RayClient`).

    Both send the same requests by the same loop and give results of the same form.
    """

    @property
    def workers(self) -> int: ...

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each worker, by name; empty where all are on this machine."""
        ...

    def closed_loop(
        self,
        endpoint: Endpoint,
        requests: Sequence[RequestSpec],
        concurrency: int,
        *,
        timeout_s: float = 600,
        deadline_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> LoadResult:
        """As `generator.run_closed_loop`; raises WorkerError where a worker fails."""
        ...

    def open_loop(
        self,
        endpoint: Endpoint,
        requests: Sequence[RequestSpec],
        *,
        connections: int = AHEAD_CONNECTIONS,
        timeout_s: float = 600,
        deadline_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> LoadResult:
        """As `generator.run_open_loop`; raises WorkerError where a worker fails."""
        ...

    def sessions(
        self,
        endpoint: Endpoint,
        sessions: Sequence[Session],
        concurrency: int,
        body: Callable[[Messages, str], bytes],
        *,
        timeout_s: float = 600,
        on_progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> LoadResult:
        """As `sessions.run_sessions`, on the calling thread."""
        ...

    def close(self) -> None:
        """Ends the workers. Calling it again does nothing."""
        ...
