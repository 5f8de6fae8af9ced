"""The load generator as Ray actors on several machines: for loads beyond one machine's cores or network card.

Each actor runs the very loop of `generator` for its share (`partition`) and notes times by its own machine's clock.
The driver compares the clocks before and after each run (`clocks`), gives every actor the start in its own time, and
maps what comes back to its own; then the results are joined as those of local processes are (`workers.merge`).

Ray is an optional extra, breakeven[ray], and is imported only here, when a client is made. Every node needs the same
breakeven. An actor that dies is not replaced within a run: the run raises WorkerError, which says which and why.
"""

from __future__ import annotations

import importlib
import ipaddress
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from breakeven import __version__
from breakeven.lab.client.clocks import ClockMap, Offset, RoundTrip, estimate
from breakeven.lab.client.generator import (
    AHEAD_CONNECTIONS,
    CALLBACK_S,
    ClosedLoop,
    OpenLoop,
    check_closed_loop,
    check_open_loop,
)
from breakeven.lab.client.partition import closed_shares, open_shares, place
from breakeven.lab.client.types import Endpoint, LoadResult, RequestSpec
from breakeven.lab.client.workers import WorkerError, merge

ROUND_TRIPS = 8  # of which the quickest tells the offset
_START_AHEAD_NS = 100_000_000  # from fixing the start until it comes, at least: a call to an actor takes milliseconds
_START_S = 120.0  # for Ray to start an actor's process on a node
_PREPARE_S = 60.0
_ANSWER_S = 30.0
_PROGRESS_S = 0.5
_KNOCK_S = 10.0
_WORDS = 300


@dataclass(frozen=True, slots=True)
class Job:
    """One run for one actor. `streams` None: open loop, with the first stream's number and the step to the next."""

    endpoint: Endpoint
    requests: tuple[RequestSpec, ...]
    streams: tuple[int, ...] | None
    connections: int
    first_stream: int
    step: int
    timeout_s: float


class LoadActor:
    """The actor. Its calls run on threads of one process: `run` on one, short questions on another."""

    def __init__(self) -> None:
        self._loop: ClosedLoop | OpenLoop | None = None
        self._counts = (0, 0)
        self._stopped = False

    def hello(self) -> dict[str, str]:
        """What must agree between the nodes."""
        return {"breakeven": __version__, "python": platform.python_version()}

    def clock(self) -> tuple[int, int]:
        """The wall clock at hearing and at answering."""
        heard_ns = time.time_ns()
        return heard_ns, time.time_ns()

    def prepare(self, job: Job) -> None:
        """Opens the connections of a run."""
        self._counts, self._stopped = (0, 0), False
        if job.streams is None:
            self._loop = OpenLoop(
                job.endpoint, job.requests, job.connections, job.timeout_s, job.first_stream, job.step
            )
        else:
            self._loop = ClosedLoop(job.endpoint, job.requests, job.streams, job.timeout_s)
        self._loop.prepare()

    def run(self, start_ns: int, deadline_s: float | None) -> LoadResult:
        """Runs what was prepared, from a moment of this machine's clock on."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("nothing was prepared")
        try:
            return loop.run(start_ns, deadline_s, self._progressed, lambda: self._stopped)
        finally:
            self._loop = None
            loop.close()

    def _progressed(self, done: int, failed: int) -> None:
        self._counts = (done, failed)

    def progress(self) -> tuple[int, int]:
        """Requests done, and failed ones among them, so far."""
        return self._counts

    def stop(self) -> None:
        """No further request is begun."""
        self._stopped = True


@dataclass(slots=True)
class _Worker:
    handle: Any
    node: str
    trips: tuple[RoundTrip, ...] = ()


class RayClient:
    """Runs loads over `workers` actors, in turn on the nodes of a Ray cluster. A context manager.

    `address`: HOST:PORT of the cluster's head; None: the cluster that this machine belongs to. Each actor takes one
    core, and nodes are chosen by all the cores that they have: one whose cores are held by other work does not answer.
    Raises WorkerError if Ray or a cluster is missing, the nodes have too few cores, their breakeven differs, or an
    actor fails; ValueError for arguments that cannot be right.
    """

    def __init__(self, workers: int = 1, address: str | None = None) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.workers = workers
        self.nodes: tuple[str, ...] = ()
        self._actors: list[_Worker] = []
        self._ray = _import_ray()
        self._ours = not self._ray.is_initialized()
        self._here = ""
        self._elsewhere = False
        try:
            if self._ours:
                self._connect(address or "auto")
            self._start()
        except BaseException:
            self.close()
            raise

    # Starting

    def _connect(self, address: str) -> None:
        with _signals_kept():
            try:
                if address != "auto":
                    _knock(address)  # Ray itself would try for minutes
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="breakeven")
            except (OSError, OverflowError, RuntimeError, ValueError) as problem:
                raise WorkerError(
                    f"no Ray cluster was reached at {address} ({_first_words(problem)}): start one with `ray start "
                    f"--head` and join the other machines with `ray start --address=HEAD:6379`, or set client.address"
                ) from None

    def _start(self) -> None:
        ray = self._ray
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        self._here = ray.util.get_node_ip_address()
        try:
            chosen = place(self.workers, [int(node["Resources"]["CPU"]) for node in alive])
        except ValueError as problem:
            raise WorkerError(f"the Ray cluster is too small: {problem}") from None
        self._elsewhere = any(alive[index]["NodeManagerAddress"] != self._here for index in chosen)
        actor = ray.remote(LoadActor)
        for index in chosen:
            node = alive[index]
            handle = actor.options(
                num_cpus=1,
                max_concurrency=2,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=affinity(node["NodeID"], soft=False),
            ).remote()
            self._actors.append(_Worker(handle, f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"))
        self.nodes = tuple(worker.node for worker in self._actors)
        expected = {"breakeven": __version__, "python": platform.python_version()}
        questions = [worker.handle.hello.remote() for worker in self._actors]
        for number, question in enumerate(questions):
            hint = "; other work may hold its node's cores (`ray status` tells): end that, or ask for fewer workers"
            found = self._answer(number, question, _START_S, hint)
            if found != expected:
                raise WorkerError(
                    f"{self._name(number)} has {_versions(found)}, and this machine {_versions(expected)}: install the "
                    f"same on every node"
                )

    # Running

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
        """As `generator.run_closed_loop`, but every actor has a queue of its own: see `partition.closed_shares`."""
        check_closed_loop(requests, concurrency, timeout_s)
        target = self._reachable(endpoint)
        jobs = [
            Job(target, tuple(requests[i] for i in share.requests), tuple(share.streams), 0, 0, 1, timeout_s)
            for share in closed_shares(len(requests), concurrency, self.workers)
        ]
        return self._run(jobs, deadline_s, on_progress, should_stop)

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
        """As `generator.run_open_loop`."""
        check_open_loop(connections, timeout_s)
        target = self._reachable(endpoint)
        shares = open_shares(len(requests), self.workers)
        each = -(-connections // max(1, len(shares)))
        jobs = [
            Job(target, tuple(requests[i] for i in share), None, each, number, len(shares), timeout_s)
            for number, share in enumerate(shares)
        ]
        return self._run(jobs, deadline_s, on_progress, should_stop)

    def _reachable(self, endpoint: Endpoint) -> Endpoint:
        return reachable(endpoint, self._here) if self._elsewhere else endpoint

    def _run(
        self,
        jobs: Sequence[Job],
        deadline_s: float | None,
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> LoadResult:
        if not self._actors:
            raise WorkerError("the client's actors were ended: make a new client")
        if not jobs:
            now = time.time_ns()
            return LoadResult([], now, now, 0.0, "no requests", (0.0,))
        try:
            for number, ready in enumerate([self._actors[n].handle.prepare.remote(job) for n, job in enumerate(jobs)]):
                self._answer(number, ready, _PREPARE_S)
            before = [self._compare_clock(number) for number in range(len(jobs))]
            ahead_ns = max(_START_AHEAD_NS, 20 * max(offset.bound_ns for offset in before))
            start_ns = time.time_ns() + ahead_ns
            runs = [
                self._actors[number].handle.run.remote(start_ns + before[number].offset_ns, deadline_s)
                for number in range(len(jobs))
            ]
            found = self._await(runs, on_progress, should_stop)
            after = [self._compare_clock(number) for number in range(len(jobs))]
        except KeyboardInterrupt:
            self.close()
            raise
        mapped = [
            ClockMap(before[number], after[number]).result(found[number], number, self._actors[number].node)
            for number in range(len(jobs))
        ]
        joined = merge(mapped)
        if on_progress is not None:
            on_progress(len(joined.exchanges), sum(exchange.error is not None for exchange in joined.exchanges))
        return replace(joined, start_ns=start_ns, clock=f"{joined.clock}, of each node, mapped to the driver's")

    def _await(
        self,
        runs: Sequence[Any],
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> list[LoadResult]:
        ray = self._ray
        waiting = list(runs)
        counts = [(0, 0)] * len(runs)
        asked: list[Any] = []
        next_question = time.monotonic() + _PROGRESS_S
        stopping = False
        while waiting:
            done, waiting = ray.wait(waiting, timeout=CALLBACK_S)
            for run in done:  # a failure ends the run at once, not after the others
                self._answer(runs.index(run), run, _ANSWER_S)
            if should_stop is not None and not stopping and should_stop():
                stopping = True
                for worker in self._actors[: len(runs)]:
                    worker.handle.stop.remote()
            if on_progress is None or time.monotonic() < next_question:
                continue
            if not asked:
                asked = [worker.handle.progress.remote() for worker in self._actors[: len(runs)]]
            elif len(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) == len(asked):
                with suppress(ray.exceptions.RayError):  # told by the run's own answer
                    counts = ray.get(asked)
                    on_progress(sum(n for n, _ in counts), sum(failed for _, failed in counts))
                asked = []
                next_question = time.monotonic() + _PROGRESS_S
        return [self._answer(number, run, _ANSWER_S) for number, run in enumerate(runs)]

    def _compare_clock(self, number: int) -> Offset:
        trips = []
        for _ in range(ROUND_TRIPS):
            sent_ns = time.time_ns()
            heard_ns, answered_ns = self._answer(number, self._actors[number].handle.clock.remote(), _ANSWER_S)
            trips.append(RoundTrip(sent_ns, heard_ns, answered_ns, time.time_ns()))
        try:
            return estimate(trips)
        except ValueError as problem:
            raise self._failed(f"{self._name(number)}: {problem}") from None

    # Failing and ending

    def _answer(self, number: int, reference: Any, timeout_s: float, hint: str = "") -> Any:
        """An actor's answer. WorkerError (ValueError, if it is one) where it failed; no actor is left then."""
        ray = self._ray
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise self._failed(f"{self._name(number)} did not answer within {timeout_s:g} s{hint}") from None
        except ray.exceptions.RayActorError as problem:
            raise self._failed(f"{self._name(number)} ended: {_first_words(problem)}") from None
        except ray.exceptions.RayTaskError as problem:
            cause = getattr(problem, "cause", None)
            if isinstance(cause, ValueError):
                self.close()
                raise cause from None
            raise self._failed(f"{self._name(number)} failed: {cause!r}") from None
        except ray.exceptions.RayError as problem:
            raise self._failed(f"{self._name(number)} failed: {_first_words(problem)}") from None

    def _failed(self, message: str) -> WorkerError:
        self.close()  # the others must not go on sending into whatever is measured next
        return WorkerError(message)

    def _name(self, number: int) -> str:
        return f"client actor {number} on {self._actors[number].node}" if self._actors else f"client actor {number}"

    def close(self) -> None:
        """Ends the actors, and the connection to the cluster if this client made it."""
        ray = self._ray
        actors, self._actors = self._actors, []
        for worker in actors:
            with suppress(Exception):  # one that is dead already is what is wanted
                ray.kill(worker.handle, no_restart=True)
        if self._ours and ray.is_initialized():
            with _signals_kept():
                ray.shutdown()

    def __enter__(self) -> RayClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reachable(endpoint: Endpoint, here: str) -> Endpoint:
    """The endpoint as other machines reach it: a loopback address in it becomes `here`, this machine's on the cluster.

    The server must then listen on all addresses.
    """
    parts = urlsplit(endpoint.url)
    host = parts.hostname or ""
    here_only = host == "localhost"
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        here_only = address.is_loopback or address.is_unspecified
    if not here_only:
        return endpoint
    name = f"[{here}]" if ":" in here else here
    netloc = name if parts.port is None else f"{name}:{parts.port}"
    return replace(endpoint, url=parts._replace(netloc=netloc).geturl())


def _knock(address: str) -> None:
    """OSError unless something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise WorkerError(
            "client.backend is ray, and Ray is not installed here: pip install 'breakeven[ray]', on every node"
        ) from None


def _versions(found: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in sorted(found.items()))


def _first_words(problem: BaseException) -> str:
    """What Ray's long messages say: the first line, and the line that gives the cause."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [repr(problem)]
    reasons = [line for line in lines[1:] if "because" in line or "Error" in line or "exit" in line.lower()]
    return " ".join([lines[0], *reasons[:1]])[:_WORDS]


@contextmanager
def _signals_kept() -> Any:
    """Ray sets handlers of its own while it connects; the run's, which end servers in order, are put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)
