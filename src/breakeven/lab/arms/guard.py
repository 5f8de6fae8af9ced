"""Becomes a server's command, and asks the kernel to end it should the lab be killed: `guard.py PARENT COMMAND…`.

Run as a script in the new process, before the command takes its place, because nothing may run between fork and exec
in a process that has threads. Where the kernel has no such call (it is Linux's prctl), the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as a shell has it


def main(arguments: list[str]) -> int:
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel was asked
            return 128 + signal.SIGTERM
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print(f"{command[0]}: there is no such command", file=sys.stderr)
        return _NOT_FOUND
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr)
        return _NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
