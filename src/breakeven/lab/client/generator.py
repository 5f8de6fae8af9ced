"""The load generator: one thread, one epoll loop, and nothing in the loop that can wait until afterwards.

In closed loop a stream sends its next request when its last has ended; in open loop every request has its own moment,
whatever the server does (Schroeder, Wierman & Harchol-Balter, "Open versus closed: a cautionary tale", NSDI 2006).

How it keeps its own lag out of what it measures (docs/client.md has the figures):

- connections are opened before the clock starts, so a burst of N requests is N `send` calls;
- each read becomes bytes and one timestamp, the kernel's where it gives one; parsing happens after the cell;
- the end of a response is found by skipping from chunk size to chunk size, not by looking at the content;
- at most `STARTS_PER_POLL` requests are started between two looks at the sockets;
- the garbage collector is off while measuring.
"""

from __future__ import annotations

import gc
import select
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count
from math import inf
from time import monotonic, thread_time, time_ns

from breakeven.lab.client.connection import READ_BYTES, Address, Connection, Phase, explain, resolve, tls_context
from breakeven.lab.client.http1 import HttpError, ResponseFramer, finish_request, parse_url, request_head
from breakeven.lab.client.poller import READ, WRITE, Poller, make_poller
from breakeven.lab.client.timestamps import (
    ANCILLARY_BYTES,
    KERNEL_CLOCK,
    TIMESPEC,
    USER_CLOCK,
    kernel_timestamps_available,
)
from breakeven.lab.client.types import Endpoint, LoadResult, RawExchange, RequestSpec

STARTS_PER_POLL = 8
LEAD_NS = 200_000  # the start lies this far ahead when it is fixed, so that the first request is not already late
STREAM_SPACING_NS = 15_000  # between the planned starts of two streams: see `run_closed_loop`
PREPARE_S = 10.0  # how long opening the connections may take before the clock starts
CALLBACK_S = 0.1  # how often `should_stop` and `on_progress` are called at most
AHEAD_CONNECTIONS = 64  # opened before an open loop begins, unless said otherwise
_SPIN_NS = 80_000  # the last stretch before a planned send is waited out awake: a sleep may end this much late

TakeNext = Callable[[], int]


def run_closed_loop(
    endpoint: Endpoint,
    requests: Sequence[RequestSpec],
    concurrency: int,
    *,
    timeout_s: float = 600,
    deadline_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> LoadResult:
    """Sends `requests` over `concurrency` streams; each stream sends its next when its last has ended.

    A stream takes the next request from the one shared queue, so the order of `requests` is the order of sending. The
    intended send time of a request is the end of its stream's previous one. Stream number i begins, by plan, i times
    `STREAM_SPACING_NS` after the start: a kernel takes 5 to 10 µs for one send, so requests cannot all leave in one
    instant, and what is impossible should not be planned and then counted as the server's time. A client that falls
    behind this plan shows it in `send_ns - intended_send_ns`, as at any other time.

    `timeout_s` cuts a single request. After `deadline_s` (seconds since the start), or once `should_stop()` is true,
    no request is begun, and those in flight are awaited. `on_progress(done, failed)` and `should_stop()` are called on
    this thread at most ten times a second: what they take is the client's lag.

    A request fails in its own record and never raises: refused, reset, timed out, cut short, HTTP errors. A request
    is sent a second time only if its connection had been open before and was closed without a byte of an answer, as
    a server does to idle connections; its times still count from the first intention.

    Raises ValueError for an endpoint or arguments that cannot be right. Whatever ends the run, no socket stays open.
    """
    check_closed_loop(requests, concurrency, timeout_s)
    loop = ClosedLoop(endpoint, requests, range(min(concurrency, max(1, len(requests)))), timeout_s)
    return loop.run_alone(deadline_s, on_progress, should_stop)


def run_open_loop(
    endpoint: Endpoint,
    requests: Sequence[RequestSpec],
    *,
    connections: int = AHEAD_CONNECTIONS,
    timeout_s: float = 600,
    deadline_s: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> LoadResult:
    """Sends each request `offset_s` seconds after the start, on an absolute schedule, however slow the server is.

    The intended send time is the planned one, so a late client shows as send lag and a queueing server as latency, and
    neither thins the load out. There is no limit to the streams in flight: `connections` only says how many are opened
    before the clock starts; further ones are opened when none is idle, at the cost of a connection set-up in that
    request's latency. `stream` is then the number of the connection's slot, the one used last being taken first.

    The other arguments, and how a request may fail, are as in `run_closed_loop`. Raises ValueError for a request
    without `offset_s`, or with a negative or infinite one.
    """
    check_open_loop(connections, timeout_s)
    loop = OpenLoop(endpoint, requests, min(connections, len(requests)), timeout_s)
    return loop.run_alone(deadline_s, on_progress, should_stop)


def check_closed_loop(requests: Sequence[RequestSpec], concurrency: int, timeout_s: float) -> None:
    """ValueError for what no closed loop can be asked to do."""
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    _check_timeout(timeout_s)
    for spec in requests:
        if spec.offset_s is not None:
            raise ValueError(f"request {spec.request_id!r} has a planned send time, which a closed loop cannot keep")


def check_open_loop(connections: int, timeout_s: float) -> None:
    """ValueError for what no open loop can be asked to do; `OpenLoop` looks at the planned times."""
    _check_timeout(timeout_s)
    if connections < 0:
        raise ValueError(f"connections must not be negative, and is {connections}")


def _check_timeout(timeout_s: float) -> None:
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, not {timeout_s}")


class _Exchange:
    """One request under way: what becomes a RawExchange."""

    __slots__ = (
        "deadline",
        "end_ns",
        "error",
        "framer",
        "intended_ns",
        "message",
        "over",
        "pieces",
        "retried",
        "reused",
        "send_ns",
        "spec",
        "stream",
        "times",
    )

    def __init__(self, spec: RequestSpec, message: bytes) -> None:
        self.spec = spec
        self.message = message  # the request's bytes
        self.stream = 0
        self.intended_ns = 0
        self.deadline = 0.0
        self.send_ns = 0  # 0: nothing was sent
        self.pieces: list[bytes] = []
        self.times: list[int] = []
        self.framer = ResponseFramer()
        self.end_ns = 0
        self.error: str | None = None
        self.over = False
        self.reused = False  # sent on a connection that had been open before
        self.retried = False

    def raw(self) -> RawExchange:
        return RawExchange(
            request_id=self.spec.request_id,
            prompt_id=self.spec.prompt_id,
            stream=self.stream,
            intended_send_ns=self.intended_ns,
            send_ns=self.send_ns or self.end_ns,
            reads=list(zip(self.times, accumulate(map(len, self.pieces)), strict=True)),
            data=b"".join(self.pieces),
            end_ns=self.end_ns,
            error=self.error,
        )


def _fine_sleep(poller: Poller) -> Callable[[float], object]:
    """Waits until a socket has news or so many seconds have passed, counted finer than epoll's milliseconds."""
    fileno = getattr(poller, "fileno", None)
    if fileno is None:
        return lambda seconds: None  # no such handle: the planned moment is waited out awake
    descriptor = fileno()
    if hasattr(select, "poll") and descriptor >= 1024:  # beyond what `select` takes
        return lambda seconds: None
    return lambda seconds: select.select((descriptor,), (), (), seconds)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Loop:
    """What both kinds of load share: connections, requests under way, time-outs and the loop itself."""

    def __init__(
        self, endpoint: Endpoint, requests: Sequence[RequestSpec], streams: Sequence[int], timeout_s: float
    ) -> None:
        self._target = parse_url(endpoint.url)
        self._head = request_head(self._target, endpoint.headers)
        self._context = tls_context(endpoint.verify_tls) if self._target.scheme == "https" else None
        self._requests = requests
        self._streams = streams  # the numbers of the streams, which may be a share of all
        self._timeout_s = timeout_s
        self._kernel_timestamps = kernel_timestamps_available()
        self._addresses: list[Address] = []
        self._unresolved: str | None = None
        self._good_address = 0  # the one that connections last worked with
        self._poller: Poller = make_poller()
        self._connections: dict[int, Connection] = {}
        self._idle: dict[int, Connection | None] = dict.fromkeys(streams)
        self._prepared: dict[int, _Exchange] = {}  # built before the clock starts, by the number of the request
        self._finished: list[_Exchange] = []
        self._failed = 0
        self._in_flight = 0
        # A stream (closed loop) or a request's number (open loop), the intended time, a request to retry; by time
        self._ready: deque[tuple[int, int, _Exchange | None]] = deque()
        self._deadlines: deque[_Exchange] = deque()  # in order, since every request has the same time-out

    # The run

    def prepare(self) -> None:
        """Opens one connection a stream; then `run` may begin at once. One that fails is tried again by its request."""
        try:
            self._addresses = resolve(self._target)
        except OSError as problem:
            self._unresolved = str(problem)
            return
        give_up = monotonic() + min(PREPARE_S, self._timeout_s)
        wanted = iter(self._streams)
        more = True
        while True:
            for _ in range(STARTS_PER_POLL):
                stream = next(wanted, None)
                if stream is None:
                    more = False
                    break
                self._open(stream, None, self._good_address)
            opening = [c for c in self._connections.values() if c.phase in (Phase.CONNECTING, Phase.HANDSHAKE)]
            remaining = give_up - monotonic()
            if remaining <= 0:
                for connection in opening:
                    self._drop(connection)
                return
            if not opening and not more:
                return
            for fd, mask in self._poller.poll(0 if more else min(remaining, 1.0)):
                self._event(fd, mask)

    def _plan(self, start_ns: int) -> None:
        """Fills `_ready` with what is to begin when, in order."""
        raise NotImplementedError

    def _take(self, planned: int, intended_ns: int) -> tuple[int, int] | None:
        """The stream and the request of an entry of `_ready`; None if there is nothing left to send."""
        raise NotImplementedError

    def _freed(self, stream: int, end_ns: int) -> None:
        """A stream's request has ended."""
        raise NotImplementedError

    def run_alone(
        self,
        deadline_s: float | None,
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> LoadResult:
        """Prepares, measures and closes, in this process alone."""
        try:
            self.prepare()
            return self.run(None, deadline_s, on_progress, should_stop)
        finally:
            self.close()

    def run(
        self,
        start_ns: int | None,
        deadline_s: float | None,
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> LoadResult:
        """Measures. `start_ns`: the common start of several processes; None: right away."""
        with _no_garbage_collection():
            cpu = thread_time()
            if start_ns is None:
                start_ns = time_ns() + LEAD_NS
            self._plan(start_ns)
            stop_at = None if deadline_s is None else monotonic() + deadline_s
            self._measure(stop_at, on_progress, should_stop)
            end_ns = time_ns()
            cpu = thread_time() - cpu
        return LoadResult(
            exchanges=[exchange.raw() for exchange in self._finished],
            start_ns=start_ns,
            end_ns=max(end_ns, start_ns),
            client_cpu_s=cpu,
            clock=KERNEL_CLOCK if self._kernel_timestamps else USER_CLOCK,
            worker_cpu_s=(cpu,),
        )

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._poller.close()

    def _measure(
        self,
        stop_at: float | None,
        on_progress: Callable[[int, int], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        connections, ready, deadlines = self._connections, self._ready, self._deadlines
        poll, unpack, active = self._poller.poll, TIMESPEC.unpack, Phase.ACTIVE
        sleep = _fine_sleep(self._poller)
        longest_wait = CALLBACK_S if on_progress or should_stop else 1.0
        next_callback = 0.0
        reported = 0
        stopping = False
        while True:
            now = monotonic()
            if not stopping and stop_at is not None and now >= stop_at:
                stopping = self._stop()
            if now >= next_callback:
                next_callback = now + CALLBACK_S
                if not stopping and should_stop is not None and should_stop():
                    stopping = self._stop()
                if on_progress is not None and len(self._finished) != reported:
                    reported = len(self._finished)
                    on_progress(reported, self._failed)
            while deadlines and (deadlines[0].over or deadlines[0].deadline <= now):
                overdue = deadlines.popleft()
                if not overdue.over:
                    self._time_out(overdue)
            for _ in range(min(STARTS_PER_POLL, len(ready))):
                if ready[0][1] > time_ns():
                    break
                self._start(*ready.popleft(), stopping)
            if not self._in_flight and not ready:
                break
            wait = longest_wait
            if ready:
                ahead_ns = ready[0][1] - time_ns() - _SPIN_NS
                if ahead_ns <= 0:
                    wait = 0.0
                else:  # epoll counts its time-out in whole milliseconds, which is too coarse for a planned send
                    sleep(min(longest_wait, ahead_ns / 1e9, self._until_deadline()))
                    wait = 0.0
            elif deadlines:
                wait = min(wait, self._until_deadline())
            for fd, mask in poll(wait):
                connection = connections.get(fd)
                if connection is None:
                    continue
                recvmsg = connection.recvmsg
                if mask != READ or connection.phase is not active or recvmsg is None or connection.secure:
                    self._event(fd, mask)
                    continue
                # What follows is `_readable` for the case that matters, without its calls.
                try:
                    data, ancillary, _, _ = recvmsg(READ_BYTES, ANCILLARY_BYTES)
                except BlockingIOError:
                    continue
                except OSError as problem:
                    self._lost(connection, problem)
                    continue
                if ancillary:
                    seconds, nanoseconds = unpack(ancillary[0][2])
                    arrival = seconds * 1_000_000_000 + nanoseconds
                else:
                    arrival = time_ns()
                self._received(connection, data, arrival)
        if on_progress is not None and len(self._finished) != reported:
            on_progress(len(self._finished), self._failed)

    def _until_deadline(self) -> float:
        return max(0.0, self._deadlines[0].deadline - monotonic()) if self._deadlines else CALLBACK_S * 10

    def _stop(self) -> bool:
        """Nothing more is begun, except what waits for its second try."""
        waiting = [entry for entry in self._ready if entry[2] is not None]
        self._ready.clear()
        self._ready.extend(waiting)
        return True

    # Beginning and ending a request

    def _new_exchange(self, index: int) -> _Exchange:
        spec = self._requests[index]
        return _Exchange(spec, finish_request(self._head, spec.body))

    def _start(self, planned: int, intended_ns: int, exchange: _Exchange | None, stopping: bool) -> None:
        if exchange is not None and exchange.over:
            return  # timed out while it waited for its second try; its stream has gone on
        if exchange is None:
            taken = None if stopping else self._take(planned, intended_ns)
            if taken is None:
                return
            stream, index = taken
            exchange = self._prepared.pop(index, None) or self._new_exchange(index)
            exchange.stream = stream
            exchange.intended_ns = intended_ns
            exchange.deadline = monotonic() + self._timeout_s
            self._deadlines.append(exchange)
            self._in_flight += 1
        stream = exchange.stream
        if self._unresolved is not None:
            self._fail(exchange, self._unresolved)
            return
        connection = self._idle[stream]
        if connection is None:
            self._open(stream, exchange, self._good_address)
            return
        self._idle[stream] = None
        exchange.reused = True
        self._send_request(connection, exchange)

    def _send_request(self, connection: Connection, exchange: _Exchange) -> None:
        connection.exchange = exchange
        connection.phase = Phase.ACTIVE
        try:
            connection.queue(exchange.message)
        except ssl.SSLError as problem:
            self._lost(connection, problem)
            return
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        exchange = connection.exchange
        if exchange is not None and connection.phase is Phase.ACTIVE and connection.unsent is not None:
            exchange.send_ns = time_ns()  # the last of several partial sends counts
        try:
            finished = connection.send()
        except OSError:
            # The server has closed. It may have answered before (413, 401): the next read tells.
            connection.unsent = None
            finished = True
        self._watch(connection, READ if finished else READ | WRITE)

    def _watch(self, connection: Connection, interest: int) -> None:
        if connection.interest == interest:
            return
        if connection.interest:
            self._poller.modify(connection.fd, interest)
        else:
            self._poller.register(connection.fd, interest)
        connection.interest = interest

    def _finish(self, exchange: _Exchange, end_ns: int, error: str | None) -> None:
        exchange.end_ns = end_ns
        exchange.error = error
        exchange.over = True
        exchange.message = b""
        self._finished.append(exchange)
        self._in_flight -= 1
        status = exchange.framer.status
        if error is not None or status is None or not 200 <= status < 300:
            self._failed += 1
        self._freed(exchange.stream, end_ns)

    def _fail(self, exchange: _Exchange, error: str) -> None:
        self._finish(exchange, time_ns(), error)

    def _time_out(self, exchange: _Exchange) -> None:
        for connection in list(self._connections.values()):
            if connection.exchange is exchange:
                self._drop(connection)
        if exchange.times:
            seen = f"{sum(map(len, exchange.pieces))} bytes of an answer had come"
        elif exchange.send_ns:
            seen = "no byte of an answer had come"
        else:
            seen = "no connection had come about"
        self._fail(exchange, f"no end of the answer within {self._timeout_s:g} s (time-out); {seen}")

    # Connections

    def _open(self, stream: int, exchange: _Exchange | None, address_index: int) -> None:
        """Begins a connection, for a request or (None) ahead of one."""
        if exchange is not None:
            exchange.reused = False
        address = self._addresses[address_index % len(self._addresses)]
        try:
            connection = Connection(address, address_index, stream, self._kernel_timestamps)
        except OSError as problem:
            self._not_connected(stream, exchange, address_index, problem)
            return
        connection.exchange = exchange
        self._connections[connection.fd] = connection
        self._watch(connection, WRITE)

    def _not_connected(self, stream: int, exchange: _Exchange | None, address_index: int, problem: OSError) -> None:
        """Tries the next address of the host, or gives up."""
        tried = address_index - self._good_address + 1
        if 0 < tried < len(self._addresses):
            self._open(stream, exchange, address_index + 1)
        elif exchange is not None:
            self._fail(exchange, explain(problem, self._addresses[address_index % len(self._addresses)]))

    def _drop(self, connection: Connection) -> None:
        if connection.phase is Phase.CLOSED:
            return
        if connection.interest:
            self._poller.unregister(connection.fd)
            connection.interest = 0
        del self._connections[connection.fd]
        if self._idle[connection.stream] is connection:
            self._idle[connection.stream] = None
        connection.exchange = None
        connection.close()

    def _event(self, fd: int, mask: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            return
        if connection.phase is Phase.CONNECTING:
            self._connected(connection)
            return
        if mask & WRITE and connection.unsent is not None:
            self._send(connection)
        if mask & ~WRITE and connection.phase is not Phase.CLOSED:
            self._readable(connection)

    def _connected(self, connection: Connection) -> None:
        exchange, stream, index = connection.exchange, connection.stream, connection.address_index
        try:
            connection.connect_result()
        except OSError as problem:
            self._drop(connection)
            self._not_connected(stream, exchange, index, problem)
            return
        self._good_address = index % len(self._addresses)
        if self._context is None:
            self._established(connection)
            return
        connection.phase = Phase.HANDSHAKE
        connection.start_tls(self._context, self._target.host)
        self._shake_hands(connection, b"")

    def _shake_hands(self, connection: Connection, data: bytes) -> None:
        try:
            finished = connection.handshake(data)
        except ssl.SSLError as problem:
            self._lost(connection, problem)
            return
        self._send(connection)
        if finished:
            self._established(connection)

    def _established(self, connection: Connection) -> None:
        exchange = connection.exchange
        if exchange is not None:
            self._send_request(connection, exchange)
            return
        connection.phase = Phase.IDLE
        self._idle[connection.stream] = connection
        if connection.unsent is None:
            self._watch(connection, READ)

    def _readable(self, connection: Connection) -> None:
        try:
            data, arrival = connection.receive()
        except BlockingIOError:
            return
        except OSError as problem:
            self._lost(connection, problem)
            return
        if not connection.secure:
            self._received(connection, data, arrival)
            return
        if connection.phase is Phase.HANDSHAKE:
            if data:
                self._shake_hands(connection, data)
            else:
                self._lost(connection, None)
            return
        try:
            plain, ended = connection.decrypt(data)
        except ssl.SSLError as problem:
            self._lost(connection, problem)
            return
        if connection.unsent is not None:
            self._send(connection)
        if plain:
            self._received(connection, plain, arrival)
        if ended and connection.phase is not Phase.CLOSED:
            self._received(connection, b"", arrival)

    def _received(self, connection: Connection, data: bytes, arrival: int) -> None:
        """Bytes of an answer, or (none) the end of the connection."""
        exchange = connection.exchange
        if exchange is None:
            self._drop(connection)  # an idle connection was closed, or said something that nobody asked
            return
        framer: ResponseFramer = exchange.framer
        if not data:
            if framer.end_of_connection():
                self._drop(connection)
                self._finish(exchange, arrival, None)
            else:
                self._lost(connection, None)
            return
        exchange.pieces.append(data)
        exchange.times.append(arrival)
        try:
            over = framer.feed(data)
        except HttpError as problem:
            self._drop(connection)
            self._finish(exchange, arrival, str(problem))
            return
        if not over:
            return
        if framer.surplus:
            exchange.pieces[-1] = data[: len(data) - framer.surplus]
        if framer.reusable and connection.unsent is None:
            connection.exchange = None
            connection.phase = Phase.IDLE
            self._idle[connection.stream] = connection
        else:
            self._drop(connection)
        self._finish(exchange, arrival, None)

    def _lost(self, connection: Connection, problem: OSError | None) -> None:
        """The connection ended (problem None: it was closed in order) before its request did."""
        exchange = connection.exchange
        connecting = connection.phase is Phase.HANDSHAKE
        address = self._addresses[connection.address_index % len(self._addresses)]
        self._drop(connection)
        if exchange is None:
            return
        if exchange.reused and not exchange.times and not exchange.retried:
            exchange.retried = True
            self._ready.appendleft((exchange.stream, exchange.intended_ns, exchange))  # it is overdue already
            return
        words = f"connection closed by {address}" if problem is None else explain(problem, address)
        if connecting:
            self._fail(exchange, words if problem is not None else f"{words} during the TLS handshake")
        elif exchange.times:
            self._fail(exchange, f"{words} before the end of its answer")
        else:
            self._fail(exchange, f"{words} before it answered")


class ClosedLoop(_Loop):
    """Streams that each send their next request when their last has ended.

    `streams` are the numbers of this loop's streams, which fix when each begins. `take_next` hands out the numbers of
    the requests in order, and may be shared with loops in other processes; by default the loop counts by itself.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[RequestSpec],
        streams: Sequence[int],
        timeout_s: float,
        take_next: TakeNext | None = None,
    ) -> None:
        super().__init__(endpoint, requests, streams, timeout_s)
        self._take_next = take_next or count().__next__

    def prepare(self) -> None:
        super().prepare()
        first = max(self._streams, default=-1) + 1
        self._prepared = {index: self._new_exchange(index) for index in range(min(first, len(self._requests)))}

    def _plan(self, start_ns: int) -> None:
        self._ready.extend((stream, start_ns + stream * STREAM_SPACING_NS, None) for stream in self._streams)

    def _take(self, planned: int, intended_ns: int) -> tuple[int, int] | None:
        index = self._take_next()
        return (planned, index) if index < len(self._requests) else None

    def _freed(self, stream: int, end_ns: int) -> None:
        self._ready.append((stream, end_ns, None))


class OpenLoop(_Loop):
    """Requests that are sent at their planned moments. `requests` may be a share of all; `first_stream`, `step`: the
    numbers of the slots are first_stream, first_stream + step, …, so that those of several processes differ.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[RequestSpec],
        connections: int,
        timeout_s: float,
        first_stream: int = 0,
        step: int = 1,
    ) -> None:
        for spec in requests:
            if spec.offset_s is None or not 0 <= spec.offset_s < inf:
                raise ValueError(f"request {spec.request_id!r} has no planned send time, which an open loop needs")
        slots = [first_stream + step * number for number in range(connections)]
        super().__init__(endpoint, requests, slots, timeout_s)
        self._first, self._step = first_stream, step
        self._free = list(reversed(slots))
        self._slots = connections

    def prepare(self) -> None:
        super().prepare()
        self._prepared = {index: self._new_exchange(index) for index in range(len(self._requests))}

    def _plan(self, start_ns: int) -> None:
        due = sorted((round((spec.offset_s or 0.0) * 1e9), number) for number, spec in enumerate(self._requests))
        self._ready.extend((number, start_ns + offset, None) for offset, number in due)

    def _take(self, planned: int, intended_ns: int) -> tuple[int, int] | None:
        if self._free:
            return self._free.pop(), planned
        stream = self._first + self._step * self._slots
        self._slots += 1
        self._idle[stream] = None
        return stream, planned

    def _freed(self, stream: int, end_ns: int) -> None:
        self._free.append(stream)
