"""The ASGI application: routes, authentication, limits, and the state that says whether the server is ready."""

from __future__ import annotations

import hmac
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from breakeven import __version__
from breakeven.engine.async_engine import AsyncEngine, EngineUnavailable
from breakeven.engine.http.errors import ApiError, api_error
from breakeven.engine.http.generation import GenerationEndpoint
from breakeven.engine.http.metrics import CONTENT_TYPE, render_metrics
from breakeven.engine.http.tokenize import TokenizeEndpoint
from breakeven.engine.http.wire import send_error
from breakeven.engine.openai_schema import ChatBody, CompletionBody

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/version"})  # no key needed: probes rarely carry one
UNCOUNTED_PATHS = OPEN_PATHS | {"/metrics"}  # must answer when the server is at its limit, too


@dataclass(slots=True)
class ServerState:
    """What the routes share. `engine` is None until the model is loaded. `model_names`: the first is shown."""

    model_names: tuple[str, ...]
    api_key: str | None = None
    max_body_bytes: int = 16 * 2**20
    max_connections: int = 4096
    engine: AsyncEngine | None = None
    shutting_down: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def unavailable(self) -> ApiError | None:
        """Why the server is not ready; None if it is."""
        if self.shutting_down or (self.engine is not None and self.engine.draining):
            return ApiError(503, "the server is shutting down", code="shutting_down")
        if self.engine is None:
            return ApiError(503, "the model is still loading", code="loading", headers={"Retry-After": "1"})
        if not self.engine.healthy:
            return ApiError(503, f"the engine has failed: {self.engine.failure}", code="unhealthy")
        return None

    def require_engine(self) -> AsyncEngine:
        error = self.unavailable()
        if error is not None:
            raise error
        assert self.engine is not None
        return self.engine

    def loaded_engine(self) -> AsyncEngine:
        """The engine even while it drains or after it failed; 503 only before it is loaded."""
        if self.engine is None:
            raise ApiError(503, "the model is still loading", code="loading", headers={"Retry-After": "1"})
        return self.engine

    def model_name(self, requested: str | None) -> str:
        """The name to answer with. 404 for a model that is not served here."""
        if requested is None:
            return self.model_names[0]
        if requested not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"the model '{requested}' is not served here (served: {served})",
                param="model",
                code="model_not_found",
            )
        return requested


class Gate:
    """Turns away requests without the key, and those beyond the limit of concurrent requests."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._state.api_key is not None and path not in OPEN_PATHS and not self._authorised(scope):
            error = ApiError(
                401,
                "missing or wrong API key; send 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await send_error(send, error)
            return
        if path in UNCOUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        if self._active >= self._state.max_connections:
            message = f"the server is at its limit of {self._state.max_connections} concurrent requests; retry later"
            await send_error(send, ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"}))
            return
        self._active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._active -= 1

    def _authorised(self, scope: Scope) -> bool:
        assert self._state.api_key is not None
        expected = self._state.api_key.encode()
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected)
        return False


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def _error_response(error: ApiError) -> Response:
    return Response(error.json(), error.status, error.headers, media_type="application/json")


def create_app(state: ServerState) -> Starlette:
    """The application over `state`; the caller sets `state.engine` once the model is loaded."""

    async def health(request: Request) -> Response:
        error = state.unavailable()
        return _json({"status": "ok"}) if error is None else _error_response(error)

    async def version(request: Request) -> Response:
        return _json({"version": __version__})

    def model_card(name: str, engine: AsyncEngine) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "breakeven",
            "max_model_len": engine.engine.max_context,
        }

    async def models(request: Request) -> Response:
        engine = state.loaded_engine()
        return _json({"object": "list", "data": [model_card(name, engine) for name in state.model_names]})

    async def model(request: Request) -> Response:
        return _json(model_card(state.model_name(request.path_params["name"]), state.loaded_engine()))

    async def metrics(request: Request) -> Response:
        engine = state.loaded_engine()
        stats = await engine.stats()
        if stats is None:
            raise ApiError(503, "the engine has failed and left no statistics", code="unhealthy")
        body = render_metrics(stats, engine.engine.config.speculation, state.model_names[0], engine.waiting_for_place)
        return Response(body, headers={"content-type": CONTENT_TYPE.decode()})

    async def reset_prefix_cache(request: Request) -> Response:
        engine = state.require_engine()
        if engine.engine.config.prefix_cache and not await engine.reset_prefix_cache():
            message = "the prefix cache could not be reset while requests are using it; retry when they are done"
            raise ApiError(409, message, code="prefix_cache_in_use")
        return _json({"success": True})

    async def http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = {404: f"no such route: {path}", 405: f"{request.method} is not allowed on {path}"}.get(
            error.status_code, error.detail
        )
        return _error_response(ApiError(error.status_code, message, headers=error.headers))

    async def known_exception(request: Request, error: Exception) -> Response:
        answer = api_error(error)
        if answer is None:
            answer = ApiError(500, "internal error; the server's log has the details")
        return _error_response(answer)

    def generating(body_type: type[CompletionBody] | type[ChatBody]) -> GenerationEndpoint:
        return GenerationEndpoint(body_type, state.require_engine, state.model_name, state.max_body_bytes)

    app = Starlette(
        routes=[
            Route("/v1/completions", generating(CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", generating(ChatBody), methods=["POST"]),
            Route(
                "/tokenize",
                TokenizeEndpoint(state.require_engine, state.model_name, state.max_body_bytes),
                methods=["POST"],
            ),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/version", version),
        ],
        middleware=[Middleware(Gate, state=state)],
        exception_handlers={
            HTTPException: http_exception,
            ApiError: known_exception,
            EngineUnavailable: known_exception,
            Exception: known_exception,
        },
    )
    app.router.redirect_slashes = False  # a redirect of a POST loses its body with some clients; say 404 instead
    return app
