"""When did the bytes arrive? The kernel knows (SO_TIMESTAMPNS); where it does not tell, the clock is read at the read.

A kernel timestamp is set when the packet comes in, so the lag of the reading process is not in it. It is of
CLOCK_REALTIME, as `time.time_ns()` is, and the two can be mixed.
"""

from __future__ import annotations

import platform
import socket
import struct
import sys

# Linux's asm-generic number, which Python's socket module does not name; a few old architectures use others.
_SO_TIMESTAMPNS = 35
_GENERIC_MACHINES = frozenset({"x86_64", "amd64", "aarch64", "arm64", "riscv64", "ppc64le", "s390x", "loongarch64"})

TIMESPEC = struct.Struct("@qq")  # seconds, nanoseconds, on a 64-bit machine
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0

KERNEL_CLOCK = "CLOCK_REALTIME, kernel receive timestamps"
USER_CLOCK = "CLOCK_REALTIME, read by the client after each read"


def kernel_timestamps_available() -> bool:
    """Whether this system's kernel can stamp what a TCP socket receives."""
    if sys.platform != "linux" or platform.machine().lower() not in _GENERIC_MACHINES or sys.maxsize < 2**32:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return enable_kernel_timestamps(probe)


def enable_kernel_timestamps(sock: socket.socket) -> bool:
    """Asks for timestamps on one socket; False if the kernel declines. Call only where they are available."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True
