"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from breakeven.engine.async_engine import EngineUnavailable, InvalidRequest, QueueFull, RequestFailed
from breakeven.engine.openai_schema import ParameterError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        return json.dumps(self.body()).encode()

    def header_list(self) -> Sequence[tuple[bytes, bytes]]:
        return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]


def api_error(error: Exception) -> ApiError | None:
    """The answer to an error that has one; None for a defect of ours."""
    match error:
        case ApiError():
            return error
        case ParameterError():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case InvalidRequest():
            return ApiError(400, str(error), code=error.code)
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after_s)})
        case EngineUnavailable():
            return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "1"})
        case RequestFailed():
            return ApiError(500, str(error), code="request_failed")
    return None


def answer_to(error: Exception, what: str) -> ApiError:
    """The answer to any error; a defect of ours is logged (`what` failed) and told as no more than a 500."""
    answer = api_error(error)
    if answer is None:
        logger.error("%s failed", what, exc_info=error)
        answer = ApiError(500, "internal error; the server's log has the details")
    return answer
