"""A mock server in a process of its own, so that it does not share the client's interpreter."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

from breakeven.lab.mock.script import MockScript

_START_S = 20.0


class MockProcess:
    """Starts `python -m breakeven.lab.mock` and waits until it listens; a context manager that ends it.

    `cpu` pins it to one core where the system can. Raises RuntimeError if it does not start.
    """

    def __init__(
        self, script: MockScript | None = None, *, host: str = "127.0.0.1", port: int = 0, cpu: int | None = None
    ) -> None:
        command = [sys.executable, "-m", "breakeven.lab.mock", "--host", host, "--port", str(port)]
        command += ["--script", (script or MockScript()).to_json()]
        if cpu is not None:
            command += ["--cpu", str(cpu)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], _START_S)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            self.close()
            raise RuntimeError(f"the mock server did not start (exit status {self.process.returncode})")
        self.url: str = json.loads(line)["url"]

    def get(self, path: str) -> Any:
        """GETs a route and decodes its JSON."""
        with urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, value: Any = None) -> Any:
        request = Request(self.url + path, data=json.dumps(value).encode(), method="POST")
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def play(self, script: MockScript) -> None:
        """Another script from now on; what was recorded is forgotten."""
        with urlopen(Request(self.url + "/mock/script", data=script.to_json().encode(), method="POST"), timeout=60):
            pass
        self.post("/mock/forget")

    def truth(self) -> dict[str, Any]:
        """What the server sent, and when: see `MockServer.truth`."""
        found = self.get("/mock/truth")
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """Ends the process and waits until it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            deadline = time.monotonic() + 5
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            if self.process.poll() is None:
                self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> MockProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
