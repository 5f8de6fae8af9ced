"""An arm whose server the lab starts and stops."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from breakeven.lab.arms import remote
from breakeven.lab.arms.base import Probe, Ready, StartError
from breakeven.lab.arms.http import HttpArm, HttpOptions, HttpServer
from breakeven.lab.arms.logs import LogFacts, read_log
from breakeven.lab.arms.process import (
    ProcessIdentity,
    ServerProcess,
    StopReport,
    answers_at,
    free_port,
    port_is_free,
)

HOST = "127.0.0.1"
PORT = "{port}"
_FAR_SIDE_S = 10.0
_GPU_ELSEWHERE = "not checked: the GPUs are on another machine"


class LaunchedArm(HttpArm):
    """A command line with {port} in it, and the server that it starts.

    URLs among the options that begin with a slash are taken from the server's own address. `files`: what the server
    reads besides, by name; they are written beside the log, and {files} in the command is their folder. `host`: where
    the server listens, {host} in the command; `address`: where it is reached. `ssh`: the machine it is started on.
    """

    def __init__(
        self,
        name: str,
        command: tuple[str, ...],
        options: HttpOptions,
        *,
        port: int | None,
        env: Mapping[str, str | None],
        startup_timeout_s: float,
        stop_timeout_s: float,
        continuous_usage: bool = True,
        host: str = HOST,
        files: Mapping[str, Mapping[str, Any]] | None = None,
        address: str = HOST,
        ssh: str | None = None,
    ) -> None:
        super().__init__(name)
        self.can_reset = options.reset_url is not None
        self.continuous_usage = continuous_usage
        self._command = command
        self._options = options
        self._fixed_port = port
        self._env = env
        self._host = host
        self._files = files or {}
        self._address = address
        self._ssh = ssh
        self._startup_timeout_s = startup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: ServerProcess | None = None

    def command(self) -> tuple[str, ...]:
        return self._command

    def start(self, log_path: Path) -> ProcessIdentity:
        if self._process is not None:
            raise StartError(f"{self.name}: the server is running already")
        port = self._fixed_port or free_port(HOST)
        if self._ssh is None and not port_is_free(port, HOST):
            raise StartError(f"{self.name}: port {port} is in use by another program: end it, or set another port")
        if self._ssh is not None and answers_at(self._address, port):
            raise StartError(
                f"{self.name}: something already answers at {self._address}:{port}, and would be measured instead: end "
                f"it, or set another port"
            )
        folder = log_path.with_suffix(".files").resolve()
        texts = {name: file_text(name, content) for name, content in self._files.items()}
        where = str(folder) if self._ssh is None else remote.remote_folder()
        values = {PORT: str(port), "{host}": self._host, "{files}": where}
        command = [_filled(part, values) for part in self._command]
        try:
            if texts:
                folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            if self._ssh is None:
                self._process = ServerProcess(command, log_path, self._env, port)
            else:
                script = remote.start_script(command, self._env, texts, where, self._stop_timeout_s)
                far = remote.ssh_command(self._ssh, script)
                self._process = ServerProcess(far, log_path, {}, port=None, leash=remote.first_line(self._env))
        except OSError as problem:
            raise StartError(f"{self.name}: the server could not be started: {problem.strerror or problem}") from None
        self._http = HttpServer(self.name, self._resolved(f"http://{self._address}:{port}"))
        return self._process.identity

    def _resolved(self, base: str) -> HttpOptions:
        def whole(url: str | None) -> str | None:
            return base + url if url is not None and url.startswith("/") else url

        given = self._options
        return replace(
            given,
            base_url=base,
            health_url=whole(given.health_url),
            reset_url=whole(given.reset_url),
            metrics_url=whole(given.metrics_url),
        )

    def wait_ready(self, probe: Probe) -> Ready:
        try:
            return self._server().wait_ready(probe, self._startup_timeout_s, self._still_there)
        except StartError as problem:
            if self.alive() and self._process is not None and (words := self._process.last_words()):
                raise StartError(f"{problem}\nthe server's log ends:\n{words}") from None
            raise

    def _still_there(self) -> None:
        if not self.alive():
            raise StartError(f"{self.name}: the server ended before it was ready: {self.obituary()}")

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def obituary(self) -> str:
        if self._process is None:
            return "never started"
        return self._process.obituary()

    def facts(self) -> LogFacts:
        return read_log(self._process.log_text()) if self._process is not None else LogFacts()

    def stop(self) -> StopReport:
        if self._process is None:
            return StopReport(None, False, 0.0)
        if self._ssh is None:
            report = self._process.stop(self._stop_timeout_s)
        else:
            log = self._process.log_text()
            # The far side takes as long as the server may take, and then has a group to kill.
            report = self._process.stop(self._stop_timeout_s + _FAR_SIDE_S)
            report = replace(report, problems=(*report.problems, *self._left_on(self._ssh, log)), gpu=_GPU_ELSEWHERE)
        self._hang_up()
        self._process = None
        return report

    def _left_on(self, destination: str, log: str) -> Iterator[str]:
        """What is not known to be gone on the far side, in plain words."""
        group = remote.process_group(log)
        if group is None:
            return  # it never got as far as that
        deadline = time.monotonic() + _FAR_SIDE_S
        while not (gone := remote.group_is_gone(destination, group)):
            if gone is None:
                yield f"{destination} could not be asked whether the server's process group {group} is gone"
                return
            if time.monotonic() >= deadline:
                yield f"processes of the server's group {group} are left on {destination}"
                return
            time.sleep(0.2)


def file_text(name: str, content: Mapping[str, Any]) -> str:
    """A server's configuration file, as JSON or YAML by the name's ending."""
    if name.endswith(".json"):
        return json.dumps(content, indent=1) + "\n"
    return str(yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True))


def _filled(part: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        part = part.replace(name, value)
    return part
