"""The load generator over several processes, for loads beyond one core: the same requests, streams and clock.

Each worker runs the very loop of `generator` for its share of the streams. What they share:

- the start: a moment of CLOCK_REALTIME a little ahead, fixed once every worker has opened its connections;
- the queue (closed loop): one counter, so that the order of sending is that of `requests` over all streams;
- the schedule (open loop): worker w of N sends the requests w, w + N, … at their own moments.

So a result has the same form whatever the number of workers, and merging is joining: every exchange was made by one
worker, the streams' numbers are distinct, CPU times add up.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NoReturn

from breakeven.lab.client.generator import (
    AHEAD_CONNECTIONS,
    CALLBACK_S,
    ClosedLoop,
    OpenLoop,
    run_closed_loop,
    run_open_loop,
)
from breakeven.lab.client.types import Endpoint, LoadResult, RawExchange, RequestSpec

START_AHEAD_NS = 20_000_000  # from fixing the start until it comes: every worker must have heard of it
_START_S = 60.0  # for a worker process to come up
_STOP_S = 5.0


class WorkerError(RuntimeError):
    """A worker process failed or ended; the message says which and why."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One run for one worker. `streams` None: open loop."""

    endpoint: Endpoint
    requests: Sequence[RequestSpec]
    streams: Sequence[int] | None
    connections: int
    timeout_s: float
    deadline_s: float | None


def merge(results: Sequence[LoadResult]) -> LoadResult:
    """One result of several workers' over the same time: exchanges joined in order of their ends, CPU times added."""
    if not results:
        raise ValueError("there are no results to merge")
    exchanges: list[RawExchange] = sorted((e for r in results for e in r.exchanges), key=lambda e: e.end_ns)
    return LoadResult(
        exchanges=exchanges,
        start_ns=min(r.start_ns for r in results),
        end_ns=max(r.end_ns for r in results),
        client_cpu_s=sum(r.client_cpu_s for r in results),
        clock=" / ".join(sorted({r.clock for r in results})),
        worker_cpu_s=tuple(cpu for r in results for cpu in (r.worker_cpu_s or (r.client_cpu_s,))),
        clocks=tuple(clock for r in results for clock in r.clocks),
    )


class LoadClient:
    """Runs loads, over `workers` processes of its own or (1, the default) on the calling thread. A context manager.

    The processes are started once and serve every run until `close`. `cpus` pins worker i to the i-th of them, in turn.
    Raises WorkerError if one cannot be started or fails; ValueError for arguments that cannot be right.
    """

    def __init__(self, workers: int = 1, cpus: Sequence[int] = ()) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.workers = workers
        self.nodes: tuple[str, ...] = ()  # all on this machine
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        if workers == 1:
            return
        # Spawned, not forked: the caller may have threads, and a fork copies their locks as they happen to be.
        context = multiprocessing.get_context("spawn")
        self._next = context.Value("q", 0)
        self._stop = context.Value("b", 0)
        self._counts = context.Array("q", 2 * workers, lock=False)  # done and failed, of each worker
        try:
            for number in range(workers):
                ours, theirs = context.Pipe()
                cpu = cpus[number % len(cpus)] if cpus else None
                process = context.Process(
                    target=_serve,
                    args=(theirs, number, workers, self._next, self._stop, self._counts, cpu),
                    daemon=True,  # ends with its parent, however that ends
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            for number in range(workers):
                self._receive(number, _START_S)
        except BaseException:
            self.close()
            raise

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
        """As `generator.run_closed_loop`."""
        if self.workers == 1 or concurrency <= 1 or len(requests) <= 1:
            return run_closed_loop(
                endpoint,
                requests,
                concurrency,
                timeout_s=timeout_s,
                deadline_s=deadline_s,
                on_progress=on_progress,
                should_stop=should_stop,
            )
        streams = min(concurrency, len(requests))
        jobs = [
            _Job(endpoint, requests, range(number, streams, self.workers), 0, timeout_s, deadline_s)
            for number in range(self.workers)
        ]
        return self._run(jobs, on_progress, should_stop)

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
        if self.workers == 1 or len(requests) <= 1:
            return run_open_loop(
                endpoint,
                requests,
                connections=connections,
                timeout_s=timeout_s,
                deadline_s=deadline_s,
                on_progress=on_progress,
                should_stop=should_stop,
            )
        each = -(-connections // self.workers)
        jobs = [
            _Job(endpoint, requests[number :: self.workers], None, each, timeout_s, deadline_s)
            for number in range(self.workers)
        ]
        return self._run(jobs, on_progress, should_stop)

    def _run(
        self,
        jobs: Sequence[_Job],
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> LoadResult:
        self._next.value = 0
        self._stop.value = 0
        self._counts[:] = [0] * len(self._counts)
        for number, job in enumerate(jobs):
            self._send(number, job)
        for number in range(self.workers):
            self._receive(number)
        start_ns = time.time_ns() + START_AHEAD_NS
        for number in range(self.workers):
            self._send(number, start_ns)
        waiting = set(range(self.workers))
        results: dict[int, LoadResult] = {}
        reported = (0, 0)
        try:
            while waiting:
                answered = wait([self._pipes[number] for number in waiting], CALLBACK_S)
                for number in [n for n in waiting if self._pipes[n] in answered]:
                    waiting.remove(number)
                    results[number] = self._receive(number)
                if should_stop is not None and not self._stop.value and should_stop():
                    self._stop.value = 1
                now = (sum(self._counts[0::2]), sum(self._counts[1::2]))
                if on_progress is not None and now != reported:
                    reported = now
                    on_progress(*now)
        except KeyboardInterrupt:
            self.close()  # what the workers still send must not be taken for the answer to a later run
            raise
        return merge([results[number] for number in sorted(results)])

    def _send(self, number: int, message: Any) -> None:
        try:
            self._pipes[number].send(message)
        except OSError:
            self._ended(number)

    def _ended(self, number: int) -> NoReturn:
        process = self._processes[number]
        process.join(_STOP_S)
        self.close()
        raise WorkerError(f"client process {number} ended (exit status {process.exitcode})") from None

    def _receive(self, number: int, timeout_s: float | None = None) -> Any:
        """The next message of a worker. WorkerError if it is an exception, or if the worker has ended."""
        pipe = self._pipes[number]
        try:
            if not pipe.poll(timeout_s):
                raise WorkerError(f"client process {number} did not answer within {timeout_s:g} s")
            message = pipe.recv()
        except (EOFError, OSError):
            self._ended(number)
        if isinstance(message, Exception):
            self.close()
            raise message if isinstance(message, ValueError) else WorkerError(f"client process {number}: {message!r}")
        return message

    def close(self) -> None:
        """Ends the worker processes. Calling it again does nothing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.terminate()
                process.join(_STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []

    def __enter__(self) -> LoadClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(
    pipe: Connection, number: int, workers: int, following: Any, stop: Any, counts: Any, cpu: int | None
) -> None:
    """The worker's process: one job after another, until the pipe closes."""
    import os
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to deal with
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})

    def take_next() -> int:
        with following.get_lock():
            index: int = following.value
            following.value = index + 1
        return index

    def progress(done: int, failed: int) -> None:
        counts[2 * number], counts[2 * number + 1] = done, failed

    try:
        pipe.send("ready")
        while True:
            job: _Job = pipe.recv()
            try:
                pipe.send(_work(pipe, job, number, workers, take_next, progress, lambda: bool(stop.value)))
            except Exception as problem:  # told to the parent, which raises it there
                pipe.send(problem)
    except (EOFError, OSError):
        return


def _work(
    pipe: Connection,
    job: _Job,
    number: int,
    workers: int,
    take_next: Callable[[], int],
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> LoadResult:
    loop: ClosedLoop | OpenLoop
    if job.streams is None:
        loop = OpenLoop(job.endpoint, job.requests, job.connections, job.timeout_s, number, workers)
    else:
        loop = ClosedLoop(job.endpoint, job.requests, job.streams, job.timeout_s, take_next)
    try:
        loop.prepare()
        pipe.send("ready")
        return loop.run(pipe.recv(), job.deadline_s, progress, should_stop)
    finally:
        loop.close()
