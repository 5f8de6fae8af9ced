"""The load generator over loopback: closed loop, honest times, and every way in which a server can fail."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from breakeven.lab.client import Endpoint, LoadResult, RequestSpec, generator, parse_exchange, run_closed_loop
from breakeven.lab.client.poller import SelectorPoller
from breakeven.lab.client.timestamps import USER_CLOCK
from breakeven.lab.mock import MockScript, MockServer

QUICK = MockScript(first_chunk_s=0.01, gap_s=0.004, chunks=4, tokens_per_chunk=(1, 3), bytes_per_chunk=0)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def mock(script: MockScript, host: str = "127.0.0.1") -> Iterator[MockServer]:
    server = MockServer(script, host)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)
        assert not thread.is_alive()


def specs(count: int, padding: int = 0, **body: Any) -> list[RequestSpec]:
    asked = {"prompt": "x" * padding, "stream": True, "stream_options": {"include_usage": True}, **body}
    return [RequestSpec(f"r{i}", f"p{i}", json.dumps({**asked, "user": f"r{i}"}).encode()) for i in range(count)]


def load(server: MockServer, requests: list[RequestSpec], concurrency: int, **options: Any) -> LoadResult:
    return run_closed_loop(Endpoint(f"{server.url}/v1/completions"), requests, concurrency, **options)


def errors(result: LoadResult) -> list[str | None]:
    return [parse_exchange(exchange).error for exchange in result.exchanges]


@contextmanager
def raw_server(handle: Callable[[socket.socket, int], None], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that does to every connection what `handle(connection, number)` says; yields its host:port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.02)
    over = threading.Event()

    def serve() -> None:
        number = 0
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(2)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                if context is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                handle(connection, number)
            except OSError:
                pass
            finally:
                number += 1
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join(5)
        listener.close()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split(b":")[1])
    while len(body) < length:
        body += connection.recv(65536)
    return body


# The closed loop


def test_each_stream_has_one_request_in_flight_and_takes_the_next_of_the_queue() -> None:
    with mock(QUICK) as server:
        result = load(server, specs(13), 4)
    assert errors(result) == [None] * 13
    assert sorted(e.request_id for e in result.exchanges) == sorted(f"r{i}" for i in range(13))
    began = sorted(result.exchanges, key=lambda e: e.send_ns)
    assert [e.request_id for e in began] == [f"r{i}" for i in range(13)]
    edges = sorted([(e.send_ns, 1) for e in began] + [(e.end_ns, -1) for e in began])
    running = peak = 0
    for _, step in edges:
        running += step
        peak = max(peak, running)
    assert peak == 4
    assert {e.stream for e in began} == {0, 1, 2, 3}


def test_a_request_is_intended_for_the_end_of_its_streams_last_one() -> None:
    with mock(QUICK) as server:
        result = load(server, specs(9), 3)
    for stream in range(3):
        own = sorted((e for e in result.exchanges if e.stream == stream), key=lambda e: e.send_ns)
        assert own[0].intended_send_ns == result.start_ns + stream * generator.STREAM_SPACING_NS
        for before, after in pairwise(own):
            assert after.intended_send_ns == before.end_ns
    for exchange in result.exchanges:
        times = [exchange.intended_send_ns, exchange.send_ns, *(t for t, _ in exchange.reads)]
        assert times == sorted(times)
        assert exchange.end_ns == exchange.reads[-1][0] <= result.end_ns
        assert exchange.reads[-1][1] == len(exchange.data)


def test_arrivals_follow_what_the_server_says_it_sent() -> None:
    with mock(QUICK) as server:
        result = load(server, specs(6, stream_options={"continuous_usage_stats": True}), 3)
        truth = {request["user"]: request for request in server.truth()["requests"]}
    for parsed in map(parse_exchange, result.exchanges):
        sent = truth[parsed.request_id]
        assert [c.tokens for c in parsed.chunks] == sent["tokens"] == [1, 3, 1, 3]
        assert all(c.arrival_ns >= t for c, t in zip(parsed.chunks, sent["chunk_ns"], strict=True))
        assert parsed.send_ns <= sent["received_ns"] <= sent["chunk_ns"][0]


def test_streams_keep_their_connections() -> None:
    accepted: list[int] = []

    def handle(connection: socket.socket, number: int) -> None:
        accepted.append(number)
        while read_request(connection):
            connection.sendall(OK)

    with raw_server(handle) as address:
        result = run_closed_loop(Endpoint(f"http://{address}/x"), specs(5), 1)
    assert [e.data for e in result.exchanges] == [OK] * 5
    assert accepted == [0]


@pytest.mark.parametrize(
    "script", [{"http10": True}, {"closing": "announced"}, {"chunked": False}, {"closing": "silent"}]
)
def test_a_server_that_closes_after_each_answer_gets_a_new_connection_each_time(script: dict[str, Any]) -> None:
    with mock(MockScript(first_chunk_s=0.0, gap_s=0.001, chunks=2, **script)) as server:
        result = load(server, specs(6), 2)
        assert len(server.truth()["requests"]) == 6
    assert errors(result) == [None] * 6


def test_other_pollers_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "make_poller", SelectorPoller)
    monkeypatch.setattr(generator, "kernel_timestamps_available", lambda: False)
    with mock(QUICK) as server:
        result = load(server, specs(7), 3)
    assert errors(result) == [None] * 7
    assert result.clock == USER_CLOCK


def test_ipv6_and_names_with_several_addresses_work() -> None:
    try:
        server = mock(QUICK, "::1")
        with server as listening:
            assert errors(load(listening, specs(2), 2)) == [None] * 2
            url = f"http://localhost:{listening.port}/v1/completions"
            result = run_closed_loop(Endpoint(url), specs(2), 2)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    # "localhost" may resolve to 127.0.0.1 alone, where nobody listens; a result is then a plain refusal.
    assert all(e is None or "refused" in e for e in errors(result))


def test_the_next_address_is_tried_where_the_first_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock(QUICK) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = closed.getsockname()
        closed.close()
        addresses = [generator.Address(socket.AF_INET, a) for a in (refusing, ("127.0.0.1", server.port))]
        monkeypatch.setattr(generator, "resolve", lambda target: addresses)
        assert errors(load(server, specs(4), 2)) == [None] * 4


def test_a_large_body_is_sent_whole_in_parts() -> None:
    size = 8_000_000
    received: list[int] = []

    def handle(connection: socket.socket, number: int) -> None:
        time.sleep(0.05)  # lets the client's send buffer fill
        received.append(len(read_request(connection)))
        connection.sendall(OK)

    with raw_server(handle) as address:
        requests = specs(1, padding=size)
        result = run_closed_loop(Endpoint(f"http://{address}/x"), requests, 1)
    assert result.exchanges[0].error is None
    assert received == [len(requests[0].body)]


# Stopping


def test_after_the_deadline_nothing_begins_and_what_is_in_flight_is_awaited() -> None:
    with mock(QUICK) as server:
        result = load(server, specs(1000), 2, deadline_s=0.06)
    assert 2 <= len(result.exchanges) < 100
    assert errors(result) == [None] * len(result.exchanges)


def test_should_stop_ends_the_run_and_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    with mock(QUICK) as server:
        result = load(
            server,
            specs(1000),
            2,
            should_stop=lambda: bool(seen),
            on_progress=lambda done, failed: seen.append((done, failed)),
        )
    assert seen[-1] == (len(result.exchanges), 0)
    assert len(result.exchanges) < 1000


def test_an_interrupt_leaves_no_socket_and_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[generator.Connection] = []

    class Noted(generator.Connection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    def interrupt(done: int, failed: int) -> None:
        assert not gc.isenabled()
        raise KeyboardInterrupt

    monkeypatch.setattr(generator, "Connection", Noted)
    with mock(QUICK) as server, pytest.raises(KeyboardInterrupt):
        load(server, specs(100), 5, on_progress=interrupt)
    assert len(made) == 5
    assert all(connection.sock.fileno() == -1 for connection in made)
    assert gc.isenabled()


def test_no_requests_are_no_work() -> None:
    with mock(QUICK) as server:
        assert load(server, [], 3).exchanges == []


@pytest.mark.parametrize(
    "options, words",
    [({"concurrency": 0}, "concurrency"), ({"concurrency": 1, "timeout_s": 0}, "timeout_s")],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_closed_loop(Endpoint("http://127.0.0.1:1/"), [], **options)


def test_a_planned_send_time_is_refused_in_a_closed_loop() -> None:
    with pytest.raises(ValueError, match="planned send time"):
        run_closed_loop(Endpoint("http://127.0.0.1:1/"), [RequestSpec("r", "p", b"", 1.0)], 1)


# Failures: recorded, never raised


def test_a_refused_connection_fails_every_request_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    seen: list[tuple[int, int]] = []
    result = run_closed_loop(
        Endpoint(f"http://127.0.0.1:{port}/"), specs(5), 2, on_progress=lambda *counts: seen.append(counts)
    )
    assert errors(result) == [f"connection refused by 127.0.0.1:{port}: no server listens there"] * 5
    assert seen[-1] == (5, 5)


def test_a_host_that_does_not_exist_is_named() -> None:
    result = run_closed_loop(Endpoint("http://no-such-host.invalid/"), specs(2), 1)
    assert all(e is not None and "'no-such-host.invalid' cannot be resolved" in e for e in errors(result))


@pytest.mark.parametrize(
    "fault, words",
    [
        ({"die_after": 2}, "connection reset by"),
        ({"die_after": 2, "death": "close"}, "before the end of its answer"),
        ({"die_after": 0, "death": "close"}, "before it answered"),
        ({"die_after": 0}, "connection reset by"),
        ({"malformed_at": 1}, "not valid JSON"),
        ({"cut_after": 2}, "stream was cut"),
        ({"error_event_at": 1}, "the mock broke off"),
        ({"http_status": 503}, "HTTP 503: the mock was told to fail"),
    ],
)
def test_a_fault_fails_its_own_request_and_no_other(fault: dict[str, Any], words: str) -> None:
    script = MockScript(first_chunk_s=0.005, gap_s=0.002, chunks=4, fault_from=1, fault_every=100, **fault)
    with mock(script) as server:
        result = load(server, specs(4), 1)
    found = [e for e in errors(result) if e is not None]
    if fault.get("die_after") == 0:
        # The connection had been open and gave no byte: the request is sent once more, and succeeds.
        assert found == []
    else:
        assert len(found) == 1
        assert words in found[0]
    assert len(result.exchanges) == 4


def test_a_request_is_sent_again_once_only_and_counts_from_its_first_intention() -> None:
    attempts: list[bytes] = []

    def handle(connection: socket.socket, number: int) -> None:
        attempts.append(read_request(connection))
        if len(attempts) > 2:
            connection.sendall(OK)
        else:
            time.sleep(0.02)

    with raw_server(handle) as address:
        result = run_closed_loop(Endpoint(f"http://{address}/x"), specs(2), 1)
    first, second = result.exchanges
    assert first.error is not None
    assert "before it answered" in first.error
    assert first.send_ns - first.intended_send_ns >= 15_000_000
    assert second.error is None
    assert [json.loads(a)["user"] for a in attempts] == ["r0", "r0", "r1"]


def test_nothing_is_sent_again_once_a_byte_has_come() -> None:
    attempts: list[bytes] = []

    def handle(connection: socket.socket, number: int) -> None:
        attempts.append(read_request(connection))
        connection.sendall(b"HTTP/1.1 2")

    with raw_server(handle) as address:
        result = run_closed_loop(Endpoint(f"http://{address}/x"), specs(1), 1)
    assert len(attempts) == 1
    assert result.exchanges[0].error is not None


def test_a_stalled_request_is_cut_at_its_time_out_and_its_stream_goes_on() -> None:
    script = MockScript(first_chunk_s=0.0, gap_s=0.002, chunks=3, stall_after=2, fault_every=100)
    with mock(script) as server:
        result = load(server, specs(3), 1, timeout_s=0.3)
    first, *others = errors(result)
    assert first is not None
    assert "within 0.3 s (time-out)" in first
    assert others == [None, None]
    assert parse_exchange(result.exchanges[0]).chunks != ()


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not HTTP/1.x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not a chunk size"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", "before the end of its answer"),
    ],
)
def test_an_answer_that_breaks_http_is_an_error_of_its_request(answer: bytes, words: str) -> None:
    def handle(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(answer)

    with raw_server(handle) as address:
        (error,) = errors(run_closed_loop(Endpoint(f"http://{address}/x"), specs(1), 1))
    assert error is not None
    assert words in error


def test_bytes_glued_to_the_end_are_not_the_responses_and_end_the_connections_use() -> None:
    connections: list[int] = []

    def handle(connection: socket.socket, number: int) -> None:
        connections.append(number)
        read_request(connection)
        connection.sendall(OK + b"HTTP/1.1 408 Request Timeout\r\n\r\n")

    with raw_server(handle) as address:
        result = run_closed_loop(Endpoint(f"http://{address}/x"), specs(2), 1)
    assert [(e.data, e.error) for e in result.exchanges] == [(OK, None)] * 2
    assert result.exchanges[0].reads[-1][1] == len(OK)
    assert connections == [0, 1]


def test_an_answer_before_the_whole_request_is_sent_is_kept() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"

    def handle(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(refusal)
        time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with raw_server(handle) as address:
        result = run_closed_loop(Endpoint(f"http://{address}/x"), specs(1, padding=20_000_000), 1)
    assert parse_exchange(result.exchanges[0]).http_status == 413


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate to test https with")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def tls_server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize("padding", [0, 3_000_000])
def test_https_streams_over_one_kept_connection(certificate: Path, padding: int) -> None:
    bodies: list[bytes] = []

    def handle(connection: socket.socket, number: int) -> None:
        while body := read_request(connection):
            bodies.append(body)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for words in ("é", "b", ""):
                event = {"choices": [{"text": words, "finish_reason": None if words else "stop"}]}
                payload = b"data: %b\n\n" % json.dumps(event).encode()
                connection.sendall(b"%x\r\n%b\r\n" % (len(payload), payload))
                time.sleep(0.01)
            connection.sendall(b"0\r\n\r\n")

    requests = specs(3, padding=padding)
    with raw_server(handle, tls_server_context(certificate)) as address:
        result = run_closed_loop(Endpoint(f"https://{address}/x", verify_tls=False), requests, 1)
    parsed = [parse_exchange(e) for e in result.exchanges]
    assert [(p.error, p.text, len(p.chunks)) for p in parsed] == [(None, "éb", 2)] * 3
    for p in parsed:
        assert p.intended_send_ns <= p.send_ns < p.chunks[0].arrival_ns < p.chunks[1].arrival_ns
    assert bodies == [spec.body for spec in requests]


def test_a_certificate_that_is_not_trusted_is_said(certificate: Path) -> None:
    with raw_server(lambda *_: None, tls_server_context(certificate)) as address:
        (error,) = errors(run_closed_loop(Endpoint(f"https://{address}/x"), specs(1), 1))
    assert error is not None
    assert "certificate" in error
    assert "not trusted" in error


def test_https_to_a_server_that_speaks_http_is_said() -> None:
    def handle(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    with raw_server(handle) as address:
        (error,) = errors(run_closed_loop(Endpoint(f"https://{address}/x", verify_tls=False), specs(1), 1))
    assert error is not None
    assert "TLS" in error
