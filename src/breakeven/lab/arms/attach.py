"""A server that is already running: measured, never started or stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from breakeven.lab.arms.base import Probe, Ready, StartError
from breakeven.lab.arms.http import HttpOptions, HttpServer, authorised, base_url
from breakeven.lab.arms.process import StopReport
from breakeven.lab.arms.prometheus import Series
from breakeven.lab.campaign import AttachArm
from breakeven.lab.client.types import Endpoint


class Attached:
    """The arm for a URL. `start` only looks whether the key is there; `stop` leaves the server running."""

    def __init__(self, name: str, config: AttachArm) -> None:
        self.name = name
        self.can_reset = config.can_reset
        self.continuous_usage = config.continuous_usage
        self._config = config
        self._http: HttpServer | None = None

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

    def _server(self) -> HttpServer:
        if self._http is None:
            raise StartError(f"{self.name}: not started")
        return self._http

    def endpoint(self, route: str) -> Endpoint:
        return self._server().endpoint(route)

    def reset(self) -> None:
        self._server().reset()

    def counters(self) -> Mapping[Series, float] | None:
        return self._server().counters()

    def alive(self) -> bool:
        return self._http is not None and self._http.answers()

    def obituary(self) -> str:
        return f"{self._config.url} no longer answers"

    def stop(self) -> StopReport:
        if self._http is not None:
            self._http.close()
            self._http = None
        return StopReport(None, False, 0.0)
