"""A server that is not ours: already running, or brought up and down by commands of the user's own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from breakeven.lab.arms.base import Probe, Ready, ResetError, StartError
from breakeven.lab.arms.http import HttpArm, HttpOptions, HttpServer, authorised, base_url
from breakeven.lab.arms.process import StopReport, last_words
from breakeven.lab.campaign import AttachArm

_SILENCE_S, _POLL_S = 10.0, 0.1


class Attached(HttpArm):
    """The arm for a URL. Without commands to start and stop it, it is only looked at, and left running."""

    def __init__(self, name: str, config: AttachArm) -> None:
        super().__init__(name)
        self.can_reset = config.can_reset
        self.continuous_usage = config.continuous_usage
        self._config = config
        self._log_path: Path | None = None
        self._stop_owed = False

    def command(self) -> tuple[str, ...]:
        return ()

    def start(self, log_path: Path) -> None:
        self._connect(log_path)
        config = self._config
        if config.start_command is None:
            return
        # Only where it would have been stopped: a start_command by itself may be a restart.
        if config.stop_command is not None and self._server().serves():
            raise StartError(
                f"{self.name}: something already answers at {config.url}, and would be measured instead of what "
                f"start_command starts: stop it first"
            )
        self._stop_owed = config.stop_command is not None
        if problem := self._run("start_command", config.start_command):
            raise StartError(f"{self.name}: {problem}")

    def stop_leftover(self, log_path: Path) -> StopReport:
        """Runs stop_command for a launch of an earlier run, which was killed before it could."""
        self._connect(log_path)
        self._stop_owed = True
        return self.stop()

    def _connect(self, log_path: Path) -> None:
        config = self._config
        options = HttpOptions(
            base_url=base_url(config.url),
            model=config.model,
            headers=authorised(config.headers, config.api_key_env, self.name),
            verify_tls=config.verify_tls,
            health_url=config.health_url,
            reset_url=config.reset_url,
            metrics_url=config.metrics_url,
        )
        try:
            self._http = HttpServer(self.name, options)
        except (ValueError, TypeError) as problem:  # a header that cannot be sent
            raise StartError(f"{self.name}: {problem}") from None
        self._log_path = log_path

    def _run(self, what: str, command: tuple[str, ...]) -> str:
        """Runs a command to its end, its output appended to the log; what went wrong, empty if nothing."""
        assert self._log_path is not None
        start = self._log_path.stat().st_size if self._log_path.exists() else 0
        try:
            with self._log_path.open("ab") as log:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=self._config.command_timeout_s,
                ).returncode
        except OSError as problem:
            return f"{what} cannot be run: {command[0]}: {problem.strerror or problem}"
        except subprocess.TimeoutExpired:
            return f"{what} did not end within {self._config.command_timeout_s:g} s (command_timeout_s)"
        words = last_words(self._log_path, start)
        return f"{what} failed with exit status {status}{f': {words}' if words else ''}" if status else ""

    def reset(self) -> None:
        if self._config.reset_command is None:
            super().reset()
        elif problem := self._run("reset_command", self._config.reset_command):
            raise ResetError(f"{self.name}: {problem}")

    def wait_ready(self, probe: Probe) -> Ready:
        return self._server().wait_ready(probe, self._config.startup_timeout_s, lambda: None)

    def alive(self) -> bool:
        return self._http is not None and self._http.answers()

    def obituary(self) -> str:
        return f"{self._config.url} no longer answers"

    def stop(self) -> StopReport:
        began = time.monotonic()
        problems: list[str] = []
        command = self._config.stop_command
        if command is not None and self._stop_owed:
            self._stop_owed = False
            problem = self._run("stop_command", command)
            if problem:
                problems.append(problem)
            elif not self._falls_silent():
                problems.append(f"{self._config.url} still answers {_SILENCE_S:g} s after stop_command")
        self._hang_up()
        return StopReport(None, False, time.monotonic() - began, tuple(problems))

    def _falls_silent(self) -> bool:
        deadline = time.monotonic() + _SILENCE_S
        while not self._server().silent():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True
