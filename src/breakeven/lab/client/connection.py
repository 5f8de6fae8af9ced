"""One non-blocking connection of the load generator: plain TCP, or TLS through memory BIOs.

TLS runs over memory BIOs rather than an `SSLSocket`, because then it is still we who read the socket and the kernel's
receive timestamps are not lost: decrypted bytes carry the time of the read that completed their record.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from dataclasses import dataclass
from enum import Enum
from time import time_ns
from typing import Any

from breakeven.lab.client.http1 import Target
from breakeven.lab.client.timestamps import ANCILLARY_BYTES, TIMESPEC, enable_kernel_timestamps

READ_BYTES = 65536


class Phase(Enum):
    CONNECTING = 0
    HANDSHAKE = 1
    IDLE = 2
    ACTIVE = 3
    CLOSED = 4


@dataclass(frozen=True, slots=True)
class Address:
    """One address that the server's name resolves to."""

    family: int
    sockaddr: Any  # as getaddrinfo gives it

    def __str__(self) -> str:
        host, port = self.sockaddr[:2]
        return f"[{host}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"


def resolve(target: Target) -> list[Address]:
    """The server's addresses, in the order the system prefers. Raises OSError, in plain words, if it has none."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise OSError(f"the host {target.host!r} cannot be resolved: {reason}") from None
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]


def explain(problem: OSError, address: Address) -> str:
    """A socket's error in plain words."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        return f"TLS: the certificate of {address} is not trusted: {problem.verify_message}"
    if isinstance(problem, ssl.SSLError):
        return f"TLS with {address} failed: {problem.reason or problem}"
    if isinstance(problem, ConnectionRefusedError):
        return f"connection refused by {address}: no server listens there"
    if isinstance(problem, ConnectionResetError):
        return f"connection reset by {address}"
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files: raise the limit (ulimit -n) above the number of streams"
    return f"connection to {address} failed: {problem.strerror or problem}"


class Connection:
    """A socket and what is going on with it. The generator owns the event loop; nothing here waits."""

    __slots__ = ("_tls", "address_index", "exchange", "fd", "interest", "phase", "recvmsg", "sock", "stream", "unsent")

    def __init__(self, address: Address, address_index: int, stream: int, kernel_timestamps: bool) -> None:
        """Begins to connect. Raises OSError if that fails at once."""
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if kernel_timestamps:
                enable_kernel_timestamps(sock)
            code = sock.connect_ex(address.sockaddr)
            if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        self.sock = sock
        self.fd = sock.fileno()
        self.recvmsg = sock.recvmsg if kernel_timestamps else None
        self.address_index = address_index
        self.stream = stream
        self.phase = Phase.CONNECTING
        self.interest = 0
        self.unsent: memoryview | None = None
        self.exchange: Any = None  # the generator's record of the request under way
        self._tls: _Tls | None = None

    @property
    def secure(self) -> bool:
        return self._tls is not None

    def connect_result(self) -> None:
        """Raises OSError if the connection attempt failed."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        self._tls = _Tls(context, host)

    def handshake(self, data: bytes) -> bool:
        """Continues the TLS handshake with what was read; True once it is over. Raises ssl.SSLError."""
        assert self._tls is not None
        try:
            return self._tls.handshake(data)
        finally:
            self._queue_tls_output()

    def queue(self, data: bytes) -> None:
        """Hands over bytes to be sent; `send` sends them."""
        if self._tls is None:
            self.unsent = memoryview(data)
        else:
            self._tls.endpoint.write(data)
            self._queue_tls_output()

    def _queue_tls_output(self) -> None:
        assert self._tls is not None
        data = self._tls.outgoing.read()
        if data:
            self.unsent = memoryview(bytes(self.unsent) + data if self.unsent else data)

    def send(self) -> bool:
        """Sends what it can of the queued bytes; True if none are left. Raises OSError if the connection is gone."""
        if self.unsent is None:
            return True
        try:
            sent = self.sock.send(self.unsent)
        except BlockingIOError:
            return False
        if sent < len(self.unsent):
            self.unsent = self.unsent[sent:]
            return False
        self.unsent = None
        return True

    def receive(self) -> tuple[bytes, int]:
        """One read of the socket: (bytes, arrival in ns); no bytes mean that the server has closed.

        Raises BlockingIOError if nothing is there, and other OSErrors if the connection is gone.
        """
        if self.recvmsg is None:
            data = self.sock.recv(READ_BYTES)
            return data, time_ns()
        data, ancillary, _, _ = self.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        if not ancillary:
            return data, time_ns()
        seconds, nanoseconds = TIMESPEC.unpack(ancillary[0][2])
        return data, seconds * 1_000_000_000 + nanoseconds

    def decrypt(self, data: bytes) -> tuple[bytes, bool]:
        """The plain bytes that `data` completes, and whether the TLS session is at its end. Raises ssl.SSLError."""
        assert self._tls is not None
        plain, ended = self._tls.decrypt(data)
        self._queue_tls_output()
        return plain, ended

    def close(self) -> None:
        self.phase = Phase.CLOSED
        self.unsent = None
        self.sock.close()


class _Tls:
    __slots__ = ("endpoint", "incoming", "outgoing")

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.endpoint = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)

    def handshake(self, data: bytes) -> bool:
        if data:
            self.incoming.write(data)
        try:
            self.endpoint.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self, data: bytes) -> tuple[bytes, bool]:
        if data:
            self.incoming.write(data)
        else:
            self.incoming.write_eof()
        parts: list[bytes] = []
        while True:
            try:
                part = self.endpoint.read(READ_BYTES)
            except ssl.SSLWantReadError:
                return b"".join(parts), False
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b"".join(parts), True
            if not part:
                return b"".join(parts), True
            parts.append(part)


def tls_context(verify: bool) -> ssl.SSLContext:
    """The system's trust store; without verification any certificate is accepted, also one for another name."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
