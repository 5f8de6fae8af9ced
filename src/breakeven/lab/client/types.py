"""What passes between the load generator, the parser and the metrics. Times are nanoseconds of one wall clock.

The generator writes `RawExchange`s: bytes and the time of each read, and nothing else. Everything with a meaning
(chunks, token counts, usage) is derived from them after the cell, by `parse`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go: `url` is the full URL of the completion route."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    verify_tls: bool = True


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request, ready to send. `offset_s`: intended send time after the start (open loop); None in closed loop."""

    request_id: str
    prompt_id: str
    body: bytes
    offset_s: float | None = None


@dataclass(slots=True)
class RawExchange:
    """One request as the wire saw it.

    In open loop the intended send time is the planned one, and `stream` the slot of the connection. In closed loop it
    is the moment the stream's previous exchange ended (for its first: the start of the cell plus the stream's number
    times `generator.STREAM_SPACING_NS`). `reads` holds (time, end offset in `data`) for each read; `data` is everything
    received, headers included. A request that was never sent has its end as `send_ns`.
    """

    request_id: str
    prompt_id: str
    stream: int
    intended_send_ns: int
    send_ns: int  # when the request's bytes were handed to the kernel
    reads: list[tuple[int, int]]
    data: bytes
    end_ns: int
    error: str | None = None  # connection refused, reset, timeout, …; None if the response ended properly


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """A worker's clock on another machine, compared with the driver's before and after a run; in milliseconds.

    `offset_ms`: theirs minus ours. `bound_ms`: how far a time that was mapped to ours can be off. `drift_ms`: how far
    the offset moved during the run.
    """

    worker: int
    node: str
    offset_ms: float
    bound_ms: float
    drift_ms: float


@dataclass(slots=True)
class LoadResult:
    """One run of the load generator."""

    exchanges: list[RawExchange]
    start_ns: int
    end_ns: int
    client_cpu_s: float  # CPU time the generator used while sending and receiving
    clock: str  # e.g. "CLOCK_REALTIME, kernel receive timestamps"
    worker_cpu_s: tuple[float, ...] = ()  # of each process that took part; they sum to client_cpu_s
    clocks: tuple[WorkerClock, ...] = ()  # of workers on other machines, whose times were mapped to this one's clock


@dataclass(frozen=True, slots=True)
class Chunk:
    """One content-bearing server-sent event. `tokens` None: the server does not say per chunk."""

    arrival_ns: int
    tokens: int | None
    characters: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request, parsed. Token counts come from the server's usage and from nowhere else."""

    request_id: str
    prompt_id: str
    stream: int
    intended_send_ns: int
    send_ns: int
    first_byte_ns: int | None
    end_ns: int
    http_status: int | None
    chunks: tuple[Chunk, ...]
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    error: str | None  # anything that makes the request invalid, in plain words
    speculation: Mapping[str, float] | None = None  # the server's own per-request counters, where it sends them


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
        connections: int = 64,
        timeout_s: float = 600,
        deadline_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> LoadResult:
        """As `generator.run_open_loop`; raises WorkerError where a worker fails."""
        ...

    def close(self) -> None:
        """Ends the workers. Calling it again does nothing."""
        ...
