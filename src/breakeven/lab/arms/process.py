"""A server's process: started in a session of its own, ended for certain, and proved gone."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from breakeven.lab.arms import guard
from breakeven.lab.arms.gpu_memory import GpuMemory, visible
from breakeven.lab.arms.logs import MAX_BYTES, errors_of

_KILL_WAIT_S = 10.0
_PORT_WAIT_S = 5.0
_CONNECT_S, _HANG_UP_S = 3.0, 1.0
_MEMORY_SLACK = 256 * 2**20
_LAST_WORDS = 2000  # bytes of a log that a message looks at


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Enough to recognise a process later: its number may have been given to another one by then."""

    pid: int
    created: float


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a server ended. `problems`: what is not as it was before its start, in plain words; empty if all is.

    `gpu`: whether the GPUs' memory was looked at, and what came of it; empty for a server that is not ours.
    """

    exit_status: int | None
    killed: bool
    seconds: float
    problems: tuple[str, ...] = ()
    gpu: str = ""


class ServerProcess:
    """One server, running from its construction until `stop`; if the interpreter ends in between, it is killed.

    `env`: changes to the environment; None takes a variable away. The log is appended to. `port`: the one that must be
    free again afterwards. `leash`: its standard input is a pipe, which gets these bytes, and whose end tells it to
    stop; it is then a connection to another machine, and this one's GPUs are none of its. Raises OSError if no process
    can be made.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str | None],
        port: int | None,
        *,
        leash: bytes | None = None,
    ) -> None:
        self._port = port
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
        self._gpu_memory = GpuMemory(visible(variables.get("CUDA_VISIBLE_DEVICES")) if leash is None else ())
        self._available_before = psutil.virtual_memory().available
        self.log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        arguments = [sys.executable, "-I", guard.__file__, str(os.getpid()), *command]
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL if leash is None else subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,
            )
        atexit.register(self._kill_all)
        self.identity = ProcessIdentity(self._popen.pid, _created(self._popen.pid))
        if leash and self._popen.stdin is not None:
            with suppress(OSError):  # it has ended already, and its log says why
                self._popen.stdin.write(leash)
                self._popen.stdin.flush()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def how_it_ended(self) -> str:
        """`exit status 2` or `killed by SIGKILL`; for a message."""
        status = self._popen.poll()
        if status is None:
            return "still running"
        if status < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def last_words(self) -> str:
        """The last lines of this launch's log; empty if it wrote nothing."""
        return last_words(self.log_path, self._log_start)

    def log_text(self) -> str:
        """This launch's log up to now, cut in its middle where it is very long."""
        return log_text(self.log_path, self._log_start)

    def obituary(self) -> str:
        """How it ended, the errors that its log tells, and the log's last words."""
        words, ending = self.last_words(), self.how_it_ended()
        if not words:
            return f"{ending}; it wrote nothing to its log"
        errors = [error for error in errors_of(self.log_text()) if error not in words]
        told = f"; its log tells of:\n{chr(10).join(errors)}\nand" if errors else "; its log"
        return f"{ending}{told} ends:\n{words}"

    def stop(self, timeout_s: float) -> StopReport:
        """SIGTERM, after `timeout_s` SIGKILL to all that is left, then the proof. Safe to call again."""
        began = time.monotonic()
        family = self._family()
        killed = False
        try:
            if self.alive():
                self._ask_to_stop()
                with suppress(subprocess.TimeoutExpired):
                    self._popen.wait(timeout_s)
            killed = self.alive()
        finally:  # also for a Ctrl-C that comes while waiting
            left = self._kill_all(family)
            atexit.unregister(self._kill_all)
        problems = [f"process {process.pid} of the server would not end" for process in left]
        if self._port is not None and not _wait_for_port(self._port):
            problems.append(f"port {self._port} is still in use {_PORT_WAIT_S:g} s after the server ended")
        missing = self._available_before - psutil.virtual_memory().available
        if missing > max(_MEMORY_SLACK, 0.05 * psutil.virtual_memory().total):
            problems.append(
                f"{missing / 2**20:.0f} MiB less memory is free than before the server started (other programs count)"
            )
        problem, gpu = self._gpu_memory.returned()
        if problem:
            problems.append(problem)
        return StopReport(self._popen.poll(), killed, time.monotonic() - began, tuple(problems), gpu)

    def _ask_to_stop(self) -> None:
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()
        else:
            with suppress(ProcessLookupError):
                self._popen.terminate()

    def _family(self) -> list[psutil.Process]:
        """The server's descendants, and whoever else lives in its session."""
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.Error):
            for child in psutil.Process(self._popen.pid).children(recursive=True):
                found[child.pid] = child
        for process in _session_members(self._popen.pid):
            found[process.pid] = process
        found.pop(self._popen.pid, None)
        return list(found.values())

    def _kill_all(self, family: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
        if self.alive():
            with suppress(ProcessLookupError):
                self._popen.kill()
        everyone = {p.pid: p for p in (*family, *self._family())}
        for process in everyone.values():
            with suppress(psutil.Error):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_KILL_WAIT_S)
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()
        _, left = psutil.wait_procs(list(everyone.values()), timeout=_KILL_WAIT_S)
        return [p for p in left if _is_running(p)]


def kill_leftover(identity: ProcessIdentity) -> bool:
    """Kills a server, with its session, that an earlier run was killed away from; False if it is gone already."""
    with suppress(psutil.Error):
        process = psutil.Process(identity.pid)
        if abs(process.create_time() - identity.created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE:
            members = [process, *process.children(recursive=True), *_session_members(identity.pid)]
            for member in members:
                with suppress(psutil.Error):
                    member.kill()
            psutil.wait_procs(members, timeout=_KILL_WAIT_S)
            return True
    return False


def last_words(log_path: Path, start: int = 0, lines: int = 8) -> str:
    """The last lines of a log from byte `start` on; empty if there are none."""
    try:
        with log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - _LAST_WORDS))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    kept = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in kept[-lines:])


def log_text(log_path: Path, start: int = 0) -> str:
    """A log from byte `start` on; of a very long one its beginning and its end. Empty if there is none."""
    try:
        with log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END) - start
            log.seek(start)
            if size <= MAX_BYTES:
                data = log.read(max(0, size))
            else:
                data = log.read(MAX_BYTES // 2) + b"\n"
                log.seek(-(MAX_BYTES // 2), os.SEEK_END)
                data += log.read(MAX_BYTES // 2)
    except OSError:
        return ""
    return data.decode("utf-8", "replace")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now. Connections that are merely winding down do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def answers_at(address: str, port: int) -> bool:
    """Whether a server listens there. A forwarded port whose far end is not there hangs up at once, and is none."""
    try:
        probe = socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError:
        return False
    with probe:
        probe.settimeout(_HANG_UP_S)
        try:
            return bool(probe.recv(1))
        except TimeoutError:
            return True  # it waits to be asked something
        except OSError:
            return False


def _wait_for_port(port: int) -> bool:
    deadline = time.monotonic() + _PORT_WAIT_S
    while not port_is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _created(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _session_members(session: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.pid != os.getpid():
                members.append(process)
    return members
