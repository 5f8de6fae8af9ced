"""A mock OpenAI server of known truth: one thread, one poller, one heap of due writes.

It notes the clock (CLOCK_REALTIME) right before every write, and the kernel's receive timestamp of every request where
there is one, so that a client's figures can be compared with what really happened. Bytes are built once per shape of
request; a write that is due costs a heap operation and a `send`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from email.utils import formatdate
from heapq import heappop, heappush, heapreplace
from time import time_ns
from typing import Any

from breakeven.lab.client.poller import READ, WRITE, make_poller
from breakeven.lab.client.timestamps import (
    ANCILLARY_BYTES,
    TIMESPEC,
    enable_kernel_timestamps,
    kernel_timestamps_available,
)
from breakeven.lab.mock.lifelike import Lifelike, prompt_ids
from breakeven.lab.mock.plan import Ending, Plan, RequestShape, build_plan
from breakeven.lab.mock.script import MockScript

_READ_BYTES = 262144
_BATCH = 64  # due writes between two looks at the sockets
_SPIN_NS = 80_000  # the last stretch before a due time is waited out awake: a sleep may end this much late


class _Connection:
    __slots__ = ("buffer", "closed", "fd", "interest", "response", "send", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.send = sock.send
        self.buffer = bytearray()
        self.unsent = bytearray()
        self.interest = READ
        self.response: _Response | None = None
        self.closed = False


class _Response:
    """One streamed or whole answer under way, and afterwards its record."""

    __slots__ = (
        "connection", "next_write", "number", "opening", "path", "plan", "received_ns", "request_id", "times", "user",
    )  # fmt: skip

    def __init__(
        self,
        connection: _Connection | None,
        number: int,
        path: str,
        user: str | None,
        request_id: str | None,
        received_ns: int,
        plan: Plan,
    ) -> None:
        self.connection = connection
        self.number = number
        self.path = path
        self.user = user
        self.request_id = request_id
        self.received_ns = received_ns
        self.plan = plan
        self.next_write = 0
        self.times: list[int] = []
        self.opening = plan.head + b"X-Mock-Request: %d\r\n\r\n" % number

    def truth(self) -> dict[str, Any]:
        sent = [(t, n) for t, n in zip(self.times, self.plan.tokens, strict=False) if n]
        return {
            "number": self.number,
            "path": self.path,
            "user": self.user,
            "request_id": self.request_id,
            "received_ns": self.received_ns,
            "chunk_ns": [t for t, _ in sent],
            "tokens": [n for _, n in sent],
            "finished": len(self.times) == len(self.plan.writes),
        }


class MockServer:
    """Listens at once; `serve` runs until `stop` (from any thread). Port 0 takes a free one: see `url`.

    Beside the completion routes, /health, /v1/models, /metrics, /version, /reset_prefix_cache and /tokenize:

    - GET /mock/truth: what was sent when, per request (`user` from the body, `request_id` from X-Request-ID);
      POST /mock/forget clears it
    - POST /mock/script: another script, for the requests that come from now on
    - POST /mock/counters: sets speculation counters ({"num_drafts": 10, "accepted_pos_0": 7, …})
    """

    def __init__(self, script: MockScript | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self._script = script or MockScript()
        self._began_ns = time_ns()
        self._kernel_timestamps = kernel_timestamps_available()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
        except OSError:
            self._listener.close()
            raise
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._waker, self._wake = socket.socketpair()
        self._poller = make_poller()
        self._poller.register(self._listener.fileno(), READ)
        self._poller.register(self._waker.fileno(), READ)
        self._connections: dict[int, _Connection] = {}
        self._heap: list[tuple[int, int, _Response]] = []  # due time, tie-breaker, response
        self._sequence = 0
        self._plans: dict[tuple[RequestShape, bool], Plan] = {}
        self._records: list[_Response] = []
        self._requests = 0
        self._streaming = 0
        self._counters: dict[str, float] = {}
        self._engine_s = 0.0  # by the engine's own clock, of…
        self._ended_well = 0  # …so many requests
        self._cache_resets = 0
        self._metrics_reads = 0
        self._metrics_reads_while_busy = 0
        self._life = Lifelike()
        self._stopping = False
        self._routes: dict[tuple[str, str], Callable[[_Connection, bytes], None]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): lambda c, _: self._json(c, {"version": "mock"}),
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/mock/truth"): lambda c, _: self._json(c, self.truth()),
            ("POST", "/mock/forget"): self._forget,
            ("POST", "/mock/script"): self._new_script,
            ("POST", "/mock/counters"): self._set_counters,
        }

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def truth(self) -> dict[str, Any]:
        """What was sent, and when (ns of CLOCK_REALTIME, right before each write)."""
        return {
            "requests": [record.truth() for record in self._records],
            "prefix_cache_resets": self._cache_resets,
            "metrics_reads": self._metrics_reads,
            "metrics_reads_while_busy": self._metrics_reads_while_busy,
            "received_clock": "kernel receive timestamps" if self._kernel_timestamps else "read by the server",
        }

    def stop(self) -> None:
        """Ends `serve`. May be called from any thread, and more than once."""
        self._stopping = True
        with contextlib.suppress(OSError):  # already ended
            self._wake.send(b"x")

    def serve(self) -> None:
        """Runs until `stop`; closes everything when it ends, however it ends."""
        try:
            while not self._stopping:
                self._send_due()
                for fd, mask in self._news():
                    if fd == self._listener.fileno():
                        self._accept()
                    elif fd != self._waker.fileno():
                        self._event(fd, mask)
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            for sock in (self._listener, self._waker, self._wake):
                sock.close()
            self._poller.close()

    # Time

    def _news(self) -> Sequence[tuple[int, int]]:
        """What the sockets have to say, waiting for it until a write is nearly due.

        epoll counts its time-out in whole milliseconds; `select` on the epoll object itself counts finer.
        """
        wait_ns = self._heap[0][0] - time_ns() - _SPIN_NS if self._heap else 1_000_000_000
        if wait_ns <= 0:
            return self._poller.poll(0)
        fileno = getattr(self._poller, "fileno", None)
        if fileno is None:
            return self._poller.poll(wait_ns / 1e9)
        select.select([fileno()], [], [], wait_ns / 1e9)
        return self._poller.poll(0)

    def _send_due(self) -> None:
        heap = self._heap
        slowing = self._script.gap_per_stream_s
        for _ in range(_BATCH):
            if not heap:
                return
            due, order, response = heap[0]
            if due > time_ns():
                return
            connection = response.connection
            if connection is None:  # its client has gone
                heappop(heap)
                continue
            plan, index = response.plan, response.next_write
            writes = plan.writes
            if index >= len(writes):  # a plan without a write
                heappop(heap)
                self._ended(response, connection)
                continue
            data = response.opening + writes[0] if index == 0 and response.opening else writes[index]
            response.next_write = index + 1
            response.times.append(time_ns())
            if connection.unsent:
                connection.unsent += data
            else:
                try:
                    sent = connection.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    heappop(heap)
                    self._close(connection)
                    continue
                if sent < len(data):
                    self._keep_unsent(connection, data[sent:])
            if index + 1 < len(writes):
                gap = plan.gaps_ns[index]
                if slowing:
                    gap += round(slowing * 1e9 * self._streaming)
                heapreplace(heap, (due + gap, order, response))
            else:
                heappop(heap)
                self._ended(response, connection)

    def _ended(self, response: _Response, connection: _Connection) -> None:
        """All of a plan is sent: what becomes of the connection."""
        plan = response.plan
        if plan.ending is Ending.STALL:
            return  # until the client gives up
        if plan.ending is Ending.EXIT:
            os._exit(1)
        if plan.ending is Ending.RESET:
            # Zero linger turns the close into a reset.
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if plan.ending is Ending.FINISHED:
            if self._script.engine_gap_s is not None and plan.texts:
                self._engine_s += self._script.first_chunk_s + self._script.engine_gap_s * (len(plan.texts) - 1)
                self._ended_well += 1
            if "counters_of_one_rank" not in self._script.faults or response.number % 2 == 0:
                for name, rise in plan.counters.items():
                    self._counters[name] = self._counters.get(name, 0) + rise
            if plan.keep_alive:
                self._release(connection)
                if connection.buffer:
                    self._requests_in(connection, response.times[-1])
                return
            if connection.unsent:  # close once the rest is out
                self._release(connection)
                connection.sock.setblocking(True)
                connection.sock.settimeout(5)
                with contextlib.suppress(OSError):
                    connection.sock.sendall(connection.unsent)
        self._close(connection)

    # Sockets

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._kernel_timestamps:
                enable_kernel_timestamps(sock)
            connection = _Connection(sock)
            self._connections[connection.fd] = connection
            self._poller.register(connection.fd, READ)

    def _event(self, fd: int, mask: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            return
        if mask & WRITE:
            self._flush(connection)
        if mask & ~WRITE and not connection.closed:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            if self._kernel_timestamps:
                data, ancillary, _, _ = connection.sock.recvmsg(_READ_BYTES, ANCILLARY_BYTES)
            else:
                data, ancillary = connection.sock.recv(_READ_BYTES), []
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._close(connection)
            return
        received = time_ns()
        if ancillary:
            seconds, nanoseconds = TIMESPEC.unpack(ancillary[0][2])
            received = seconds * 1_000_000_000 + nanoseconds
        connection.buffer += data
        if connection.response is None:
            self._requests_in(connection, received)

    def _requests_in(self, connection: _Connection, received_ns: int) -> None:
        """Answers the requests that are whole, one after the other."""
        buffer = connection.buffer
        while connection.response is None and not connection.closed:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            first, *lines = bytes(buffer[:end]).decode("latin-1").split("\r\n")
            headers = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
            size = int(headers.get("content-length") or 0)
            if len(buffer) < end + 4 + size:
                return
            body = bytes(buffer[end + 4 : end + 4 + size])
            del buffer[: end + 4 + size]
            method, path, *_ = [*first.split(), "", ""]
            path = path.partition("?")[0]
            if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
                self._completion(connection, path, body, headers.get("x-request-id"), received_ns)
                continue
            route = self._routes.get((method, path))
            if route is None:
                self._json(connection, {"error": {"message": f"the mock has no {method} {path}"}}, 404)
            else:
                route(connection, body)

    def _release(self, connection: _Connection) -> None:
        if connection.response is not None:
            connection.response.connection = None
            connection.response = None
            self._streaming -= 1

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._release(connection)
        self._poller.unregister(connection.fd)
        del self._connections[connection.fd]
        connection.sock.close()

    def _keep_unsent(self, connection: _Connection, data: bytes) -> None:
        connection.unsent += data
        if not connection.interest & WRITE:
            connection.interest = READ | WRITE
            self._poller.modify(connection.fd, connection.interest)

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.send(connection.unsent)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        del connection.unsent[:sent]
        if not connection.unsent:
            connection.interest = READ
            self._poller.modify(connection.fd, READ)

    def _write(self, connection: _Connection, data: bytes) -> None:
        if connection.unsent:
            connection.unsent += data
            return
        try:
            sent = connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        if sent < len(data):
            self._keep_unsent(connection, data[sent:])

    # Routes

    def _completion(
        self, connection: _Connection, path: str, body: bytes, request_id: str | None, received_ns: int
    ) -> None:
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise ValueError("the body is not a JSON object")
        except ValueError as problem:
            self._json(connection, {"error": {"message": str(problem), "type": "invalid_request_error"}}, 400)
            return
        script = self._script
        number = self._requests
        self._requests += 1
        faulty = number >= script.fault_from and (number - script.fault_from) % script.fault_every == 0
        played = script if faulty else script.without_faults()
        chat = "chat" in path
        if script.lifelike:
            shape = RequestShape.of(chat, asked, self._life.turn(played, chat, asked))
            plan = build_plan(played, shape)
        else:
            shape = RequestShape.of(chat, asked)
            plan = self._plans.get((shape, faulty)) or self._plans.setdefault(
                (shape, faulty), build_plan(played, shape)
            )
        user = asked.get("user")
        user = user if isinstance(user, str) else None
        response = _Response(connection, number, path, user, request_id, received_ns, plan)
        self._records.append(response)
        connection.response = response
        self._streaming += 1
        if script.early_head and shape.stream:
            self._write(connection, response.opening)
            response.opening = b""
        wait = script.first_chunk_s
        if (not shape.stream or "buffered" in script.faults) and len(plan.texts) > 1:
            wait += script.gap_s * (len(plan.texts) - 1)
        if number < script.slow_first_requests:
            wait += script.slow_first_s
        if shape.turn:
            wait += script.prefill_s_per_token * shape.turn.uncached
        self._sequence += 1
        heappush(self._heap, (received_ns + round(wait * 1e9), self._sequence, response))

    def _health(self, connection: _Connection, _: bytes) -> None:
        age = (time_ns() - self._began_ns) / 1e9
        ready = not self._script.never_ready and age >= self._script.ready_after_s
        self._json(connection, {"ready": ready}, 200 if ready else 503)

    def _models(self, connection: _Connection, _: bytes) -> None:
        model: dict[str, Any] = {"id": self._script.model, "object": "model", "created": 0, "owned_by": "mock"}
        if self._script.lifelike:
            model["max_model_len"] = self._script.context_limit
        self._json(connection, {"object": "list", "data": [model]})

    def _metrics(self, connection: _Connection, _: bytes) -> None:
        """vLLM's counters in Prometheus's text format; of speculation, as there, only where there is some."""
        self._metrics_reads += 1
        self._metrics_reads_while_busy += self._streaming > 0
        faults = self._script.faults
        if "metrics_missing" in faults:
            self._json(connection, {"error": {"message": "the mock has no GET /metrics"}}, 404)
            return
        prefix = f"{self._script.metrics_prefix}:spec_decode_"
        lines: list[str] = []
        positions: list[str] = []
        for name, value in sorted(self._counters.items()) if "counters_missing" not in faults else ():
            if name.startswith("accepted_pos_"):
                position = name.removeprefix("accepted_pos_")
                positions.append(f'{prefix}num_accepted_tokens_per_pos_total{{position="{position}"}} {value}')
            else:
                lines += [f"# TYPE {prefix}{name}_total counter", f"{prefix}{name}_total {value}"]
        if positions:
            lines += [f"# TYPE {prefix}num_accepted_tokens_per_pos_total counter", *positions]
        if self._script.engine_gap_s is not None:
            for name, seconds in (("queue", 0.0), ("inference", self._engine_s)):
                whole = f"{self._script.metrics_prefix}:request_{name}_time_seconds"
                lines += [f"# TYPE {whole} histogram", f"{whole}_sum {seconds}", f"{whole}_count {self._ended_well}"]
        self._reply(
            connection, 200, "text/plain; version=0.0.4; charset=utf-8", "".join(f"{x}\n" for x in lines).encode()
        )

    def _reset_prefix_cache(self, connection: _Connection, _: bytes) -> None:
        if "cache_without_reset" in self._script.faults:
            self._json(connection, {"error": {"message": "the mock has no POST /reset_prefix_cache"}}, 404)
            return
        self._cache_resets += 1
        if "cache_kept" not in self._script.faults:
            self._life.reset_cache()
        self._json(connection, {})

    def _tokenize(self, connection: _Connection, body: bytes) -> None:
        """The prompt's token ids, by a lifelike server: only that one has tokens."""
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if not self._script.lifelike or not isinstance(asked, dict):
            self._json(connection, {"error": {"message": "the mock has no POST /tokenize"}}, 404)
            return
        ids = prompt_ids(self._script, "messages" in asked, asked)
        self._json(connection, {"count": len(ids), "max_model_len": self._script.context_limit, "tokens": list(ids)})

    def _forget(self, connection: _Connection, _: bytes) -> None:
        self._records = [c.response for c in self._connections.values() if c.response is not None]
        self._json(connection, {})

    def _new_script(self, connection: _Connection, body: bytes) -> None:
        try:
            self._script = MockScript.from_json(body)
        except ValueError as problem:
            self._json(connection, {"error": {"message": str(problem)}}, 400)
            return
        self._plans.clear()
        self._requests = 0
        self._json(connection, {})

    def _set_counters(self, connection: _Connection, body: bytes) -> None:
        try:
            self._counters.update({str(name): float(value) for name, value in json.loads(body).items()})
        except (ValueError, TypeError, AttributeError):
            self._json(connection, {"error": {"message": "counters must be a JSON object of numbers"}}, 400)
            return
        self._json(connection, {})

    def _json(self, connection: _Connection, value: Any, status: int = 200) -> None:
        self._reply(connection, status, "application/json", json.dumps(value).encode())

    def _reply(self, connection: _Connection, status: int, kind: str, body: bytes) -> None:
        skew = 3600 if "clock_skewed" in self._script.faults else 0
        date = formatdate(time_ns() / 1e9 - skew, usegmt=True)
        head = f"HTTP/1.1 {status} Mock\r\nDate: {date}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        self._write(connection, head.encode() + b"\r\n" + body)
