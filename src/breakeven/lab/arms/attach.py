"""A server that is already running: measured, never started or stopped."""

from __future__ import annotations

from pathlib import Path

from breakeven.lab.arms.base import Probe, Ready, StartError
from breakeven.lab.arms.http import HttpArm, HttpOptions, HttpServer, authorised, base_url
from breakeven.lab.arms.process import StopReport
from breakeven.lab.campaign import AttachArm


class Attached(HttpArm):
    """The arm for a URL. `start` only looks whether the key is there; `stop` leaves the server running."""

    def __init__(self, name: str, config: AttachArm) -> None:
        super().__init__(name)
        self.can_reset = config.can_reset
        self.continuous_usage = config.continuous_usage
        self._config = config

    def command(self) -> tuple[str, ...]:
        return ()

    def start(self, log_path: Path) -> None:
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

    def wait_ready(self, probe: Probe) -> Ready:
        return self._server().wait_ready(probe, self._config.startup_timeout_s, lambda: None)

    def alive(self) -> bool:
        return self._http is not None and self._http.answers()

    def obituary(self) -> str:
        return f"{self._config.url} no longer answers"

    def stop(self) -> StopReport:
        self._hang_up()
        return StopReport(None, False, 0.0)
