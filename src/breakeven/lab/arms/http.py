"""What all arms share: an OpenAI-compatible server behind a URL."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from breakeven.lab.arms.base import Probe, Ready, ResetError, StartError
from breakeven.lab.arms.logs import LogFacts
from breakeven.lab.arms.prometheus import Series, engine_time_series, speculation_series, with_rounds
from breakeven.lab.client.generator import run_closed_loop
from breakeven.lab.client.parse import parse_exchange
from breakeven.lab.client.types import Endpoint, RequestResult, RequestSpec

_POLL_S = 0.1
_CONTROL_TIMEOUT_S = 10.0
_RESET_PATIENCE_S = 10.0
_SETTLE_READS = 5
_SETTLE_S = 0.05
# What of a request decides its rendered prompt, by vLLM's and our own /tokenize
PROMPT_FIELDS = ("model", "messages", "prompt", "add_generation_prompt", "add_special_tokens", "chat_template_kwargs")
_VERSIONS = (("/version", "version"), ("/props", "build_info"), ("/server_info", "version"))  # llama.cpp's, SGLang's
_NOTHING_BEHIND = (502, 503, 504)
_NOT_YET = frozenset((408, 425, 429, 500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to talk to a server. URLs are whole; `model` None: the first that /v1/models names.

    `drafted_per_round`: tokens that each round drafts, for servers that count drafted tokens and no rounds.
    """

    base_url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    verify_tls: bool = True
    health_url: str | None = None
    reset_url: str | None = None
    metrics_url: str | None = None
    drafted_per_round: int | None = None


def base_url(url: str) -> str:
    """The server's URL without a trailing slash, /v1 or route, however the user wrote it."""
    return re.sub(r"(/v1)?(/chat)?(/completions)?/*\Z", "", url.rstrip("/"))


def authorised(headers: Mapping[str, str], api_key_env: str | None, arm: str) -> dict[str, str]:
    """The headers, with the key that the environment holds. StartError if it holds none."""
    if api_key_env is None:
        return dict(headers)
    key = os.environ.get(api_key_env)
    if not key:
        raise StartError(f"{arm}: the environment variable {api_key_env}, which should hold the API key, is not set")
    return {**headers, "Authorization": f"Bearer {key}"}


def control_client(headers: Mapping[str, str], verify_tls: bool, urls: Iterable[str | None]) -> httpx.Client:
    """Asks a server for all but measured requests. `urls`: those it may ask. ValueError or TypeError for a header."""
    plain = all(url is None or url.lower().startswith("http:") for url in urls)  # loading certificates takes its time
    return httpx.Client(
        headers=dict(headers), verify=verify_tls and not plain, timeout=_CONTROL_TIMEOUT_S, trust_env=False
    )


class HttpServer:
    """Readiness, reset and counters of one server. `still_there` raises once there is no point in waiting."""

    def __init__(self, arm: str, options: HttpOptions) -> None:
        self._arm = arm
        self.options = options
        urls = (options.base_url, options.health_url, options.reset_url, options.metrics_url)
        self._client = control_client(options.headers, options.verify_tls, urls)

    def close(self) -> None:
        self._client.close()

    def endpoint(self, route: str) -> Endpoint:
        return Endpoint(self.options.base_url + route, dict(self.options.headers), self.options.verify_tls)

    # Readiness

    def wait_ready(self, probe: Probe, timeout_s: float, still_there: Callable[[], None]) -> Ready:
        """Polls health, finds the model's name, and asks for a first token, until `timeout_s` is over."""
        began = time.monotonic()
        deadline = began + timeout_s
        obstacle = "nothing was tried"
        while True:
            still_there()
            obstacle = self._health()
            if not obstacle:
                model, obstacle = self._model()
                if model is not None:
                    obstacle = self._first_token(probe, model, max(1.0, deadline - time.monotonic()))
                    if not obstacle:
                        still_there()  # what answered could be another server on the same port
                        return Ready(model, time.monotonic() - began, self._version())
            if time.monotonic() >= deadline:
                still_there()
                raise StartError(
                    f"{self._arm}: the server was not ready within {timeout_s:g} s (startup_timeout_s): {obstacle}"
                )
            time.sleep(_POLL_S)

    def _health(self) -> str:
        """Empty if the server is healthy, or has no such route; else what stands in the way."""
        url = self.options.health_url or self.options.base_url + "/health"
        try:
            status = self._client.get(url).status_code
        except httpx.HTTPError as problem:
            return f"{url} does not answer ({_reason(problem)})"
        except (httpx.InvalidURL, ValueError) as problem:
            raise StartError(f"{self._arm}: {url} cannot be asked: {problem}") from None
        if status < 300 or (self.options.health_url is None and status in (401, 403, 404, 405)):
            return ""
        return f"{url} answers with status {status}"

    def _model(self) -> tuple[str | None, str]:
        if self.options.model is not None:
            return self.options.model, ""
        url = self.options.base_url + "/v1/models"
        try:
            answer = self._client.get(url)
            if answer.status_code in (401, 403):
                raise StartError(f"{self._arm}: {url} refuses access (status {answer.status_code}): set api_key_env")
            return str(answer.json()["data"][0]["id"]), ""
        except httpx.HTTPError as problem:
            return None, f"{url} does not answer ({_reason(problem)})"
        except (ValueError, LookupError, TypeError):
            return None, f"{url} names no model: set the arm's model"

    def _first_token(self, probe: Probe, model: str, timeout_s: float) -> str:
        spec = RequestSpec("ready", "ready", probe.body(model))
        try:
            load = run_closed_loop(self.endpoint(probe.route), [spec], 1, timeout_s=timeout_s)
        except ValueError as problem:  # an endpoint that cannot be
            raise StartError(f"{self._arm}: {problem}") from None
        result = parse_exchange(load.exchanges[0])
        if result.error is None:
            return ""
        status = result.http_status
        if status is not None and 400 <= status < 500 and status not in _NOT_YET:
            raise StartError(f"{self._arm}: the server refuses a small request like the measured ones: {result.error}")
        return f"a first request failed: {_first_words(result)}"

    def _version(self) -> str | None:
        for route, name in _VERSIONS:
            try:
                answer = self._client.get(self.options.base_url + route)
                version = answer.json().get(name) if answer.status_code == 200 else None
            except (httpx.HTTPError, ValueError, AttributeError):
                continue
            if version is not None:
                return str(version)
        return None

    # Between cells

    def reset(self) -> None:
        """Empties the prefix cache; a server that is still busy with it is given a moment."""
        url = self.options.reset_url
        assert url is not None
        deadline = time.monotonic() + _RESET_PATIENCE_S
        while True:
            try:
                answer = self._client.post(url)
            except httpx.HTTPError as problem:
                raise ResetError(f"{self._arm}: {url} does not answer ({_reason(problem)})") from None
            if 200 <= answer.status_code < 300:
                if _says_no(answer):
                    raise ResetError(f"{self._arm}: {url} says that it failed: {answer.text[:200]}")
                return
            if answer.status_code not in (409, 429, 503) or time.monotonic() >= deadline:
                raise ResetError(
                    f"{self._arm}: resetting the prefix cache failed, {url} answers with status {answer.status_code}: "
                    f"{answer.text[:200].strip()}"
                )
            time.sleep(_POLL_S)

    def counters(self) -> dict[Series, float] | None:
        """The counters once they stand still (some servers update them after the last token)."""
        before = self._scrape()
        for _ in range(_SETTLE_READS):
            if not before:  # no metrics, or none that are read
                return before
            time.sleep(_SETTLE_S)
            after = self._scrape()
            if after is None or after == before:  # what was read once is not lost
                return before
            before = after
        return before

    def _scrape(self) -> dict[Series, float] | None:
        url = self.options.metrics_url or self.options.base_url + "/metrics"
        try:
            answer = self._client.get(url)
        except httpx.HTTPError:
            return None
        if answer.status_code != 200:
            return None
        found = speculation_series(answer.text)
        if self.options.drafted_per_round:
            found = with_rounds(found, self.options.drafted_per_round)
        return {**found, **engine_time_series(answer.text)}

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """The token ids of a request's rendered prompt; None where the server has no /tokenize that knows the body."""
        asked = {name: body[name] for name in PROMPT_FIELDS if name in body}
        try:
            answer = self._client.post(self.options.base_url + "/tokenize", json=asked)
            ids = answer.json().get("tokens") if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return ids if isinstance(ids, list) and all(isinstance(item, int) for item in ids) else None

    def status(self, route: str | None = None) -> int | None:
        """The status with which a route (None: that of health) answers; None if nothing does."""
        options = self.options
        url = options.base_url + route if route is not None else options.health_url or options.base_url + "/health"
        try:
            return self._client.get(url).status_code
        except (httpx.HTTPError, httpx.InvalidURL):
            return None

    def answers(self) -> bool:
        """Whether anything at all answers at the URL."""
        return self.status() is not None

    def silent(self) -> bool:
        """Whether no server is there: nothing answers, or a proxy that says that there is nothing behind it."""
        return self.status() in (None, *_NOTHING_BEHIND)

    def serves(self) -> bool:
        """Whether a server is there and healthy; a proxy's "not found" is no server."""
        return any((status := self.status(route)) is not None and status < 300 for route in (None, "/v1/models"))


class HttpArm:
    """What every arm does over HTTP once `start` has made its `_http`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._http: HttpServer | None = None

    def _server(self) -> HttpServer:
        if self._http is None:
            raise StartError(f"{self.name}: the server has not been started")
        return self._http

    def endpoint(self, route: str) -> Endpoint:
        return self._server().endpoint(route)

    def reset(self) -> None:
        self._server().reset()

    def counters(self) -> Mapping[Series, float] | None:
        return self._server().counters()

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        return self._server().tokenize(body)

    def facts(self) -> LogFacts:
        return LogFacts()

    def _hang_up(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None


def _says_no(answer: httpx.Response) -> bool:
    try:
        body: Any = answer.json()
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("success") is False


def _first_words(result: RequestResult) -> str:
    return (result.error or "").splitlines()[0][:300]


def _reason(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
