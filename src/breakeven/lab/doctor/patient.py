"""The server under examination: how the checks ask it. Streams go through the lab's own client and parser."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

import httpx

from breakeven.lab.arms.http import base_url, control_client
from breakeven.lab.arms.prometheus import Series, speculation_series
from breakeven.lab.client.generator import run_closed_loop
from breakeven.lab.client.parse import parse_exchange
from breakeven.lab.client.types import Endpoint, RequestResult, RequestSpec

ANSWER_TOKENS = 24
QUESTION = "Write a short story about a lighthouse keeper who finds a strange machine."
_SETTLE_S = 0.1  # some servers raise their counters after the last token


class UnreachableError(ConnectionError):
    """No OpenAI-compatible server answers; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user says of the server. URLs are whole. `template_arguments`: chat_template_kwargs to try."""

    url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    verify_tls: bool = True
    chat: bool = True
    timeout_s: float = 20.0
    reset_url: str | None = None
    metrics_url: str | None = None
    expect_speculation: bool | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that was not streamed. `message` is empty unless it is a JSON object."""

    status: int
    message: Mapping[str, Any]
    words: str

    @property
    def prompt_tokens(self) -> int | None:
        usage = self.message.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) else None

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's token ids, where the server sends them (return_token_ids)."""
        choices = self.message.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        for place in (self.message, choice):
            ids = place.get("prompt_token_ids")
            if isinstance(ids, list) and ids:
                return ids
        return None


class Patient:
    """One server. A context manager. UnreachableError if nothing useful answers at the URL."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.url = base_url(options.url)
        headers = {"Content-Type": "application/json", **options.headers}
        try:
            self._http = control_client(headers, options.verify_tls, (self.url, options.reset_url, options.metrics_url))
        except (ValueError, TypeError) as problem:
            raise UnreachableError(f"a header cannot be sent: {problem}") from None
        self._asked = 0
        self.models: Mapping[str, Mapping[str, Any]] = {}
        try:
            self.models = self._find_models()
        except BaseException:
            self._http.close()
            raise
        self.model = options.model or next(iter(self.models))

    def __enter__(self) -> Patient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def _find_models(self) -> Mapping[str, Mapping[str, Any]]:
        url = self.url + "/v1/models"
        try:
            answer = self._http.get(url)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as problem:
            raise UnreachableError(
                f"{url} does not answer ({str(problem) or type(problem).__name__}): is the server running, and is this "
                f"its address?"
            ) from None
        if answer.status_code in (401, 403):
            raise UnreachableError(
                f"{url} refuses access (status {answer.status_code}): give --api-key-env or --header"
            )
        try:
            listed = {str(entry["id"]): entry for entry in answer.json()["data"]}
        except (ValueError, LookupError, TypeError):
            listed = {}
        if not listed and self.options.model is None:
            raise UnreachableError(
                f"{url} names no model (status {answer.status_code}): is this an OpenAI-compatible server? Give "
                f"--model "
                f"if it has no such route"
            )
        return listed

    # Asking

    @property
    def route(self) -> str:
        return "/v1/chat/completions" if self.options.chat else "/v1/completions"

    def body(self, text: str, **fields: Any) -> dict[str, Any]:
        """A body with the prompt in the place that the route has for it. Fields that are None are left out."""
        asked: dict[str, Any] = {"model": self.model}
        asked |= {"messages": [{"role": "user", "content": text}]} if self.options.chat else {"prompt": text}
        given = {"max_tokens": ANSWER_TOKENS, "temperature": 0, **fields}
        return asked | {name: value for name, value in given.items() if value is not None}

    def stream(self, text: str = QUESTION, **fields: Any) -> RequestResult:
        """A streamed answer, with its chunks. What went wrong is in its `error`."""
        self._asked += 1
        asked = self.body(text, **fields)
        asked["stream"] = True
        asked.setdefault("stream_options", {"include_usage": True, "continuous_usage_stats": True})
        spec = RequestSpec(f"doctor-{self._asked}", "doctor", json.dumps(asked).encode())
        endpoint = Endpoint(self.url + self.route, dict(self.options.headers), self.options.verify_tls)
        load = run_closed_loop(endpoint, [spec], 1, timeout_s=self.options.timeout_s)
        return parse_exchange(load.exchanges[0])

    def whole(self, text: str = QUESTION, **fields: Any) -> Whole:
        """An answer that is not streamed; status 0 if none came."""
        try:
            answer = self._http.post(
                self.url + self.route, json=self.body(text, **fields), timeout=self.options.timeout_s
            )
        except httpx.HTTPError as problem:
            return Whole(0, {}, str(problem) or type(problem).__name__)
        try:
            message = answer.json()
        except ValueError:
            message = {}
        return Whole(answer.status_code, message if isinstance(message, dict) else {}, answer.text[:300].strip())

    def get(self, path: str) -> httpx.Response | None:
        """GET; None if nothing answers."""
        try:
            return self._http.get(path if "://" in path else self.url + path)
        except (httpx.HTTPError, httpx.InvalidURL):
            return None

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """The token ids of a prompt by the server's own /tokenize; None if it has no such route."""
        try:
            answer = self._http.post(self.url + "/tokenize", json=dict(body))
            ids = answer.json().get("tokens") if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return ids if isinstance(ids, list) and all(isinstance(item, int) for item in ids) else None

    def reset(self) -> httpx.Response | None:
        """POST to the route that empties the prefix cache; None if nothing answers."""
        try:
            return self._http.post(self.options.reset_url or self.url + "/reset_prefix_cache")
        except (httpx.HTTPError, httpx.InvalidURL):
            return None

    def counters(self) -> dict[Series, float] | None:
        """The speculation counters, a moment after the last answer; None without metrics."""
        time.sleep(_SETTLE_S)
        answer = self.get(self.options.metrics_url or "/metrics")
        return speculation_series(answer.text) if answer is not None and answer.status_code == 200 else None

    # What several checks look at

    @cached_property
    def greedy(self) -> RequestResult:
        """A greedy answer of at most ANSWER_TOKENS tokens."""
        return self.stream()

    @cached_property
    def seed_is_honoured(self) -> bool:
        """Whether one seed gives one text at temperature 1."""
        first, second = (self.stream(temperature=1, seed=11) for _ in range(2))
        return bool(first.text) and first.text == second.text

    @cached_property
    def context_limit(self) -> int | None:
        """The context limit that /v1/models tells."""
        entry = self.models.get(self.model, {})
        meta = entry.get("meta")
        for place in (entry, meta if isinstance(meta, dict) else {}):
            for name in ("max_model_len", "context_length", "context_window", "n_ctx"):
                if isinstance(place.get(name), int):
                    return int(place[name])
        return None
