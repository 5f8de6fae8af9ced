"""Reading the server's answers in tests, and driving its application without sockets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(status: int, body: bytes) -> dict[str, Any]:
    """The content of an answer that must be an error in OpenAI's shape."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The response is an error in OpenAI's shape; its content."""
    assert response.status_code == status, response.text
    error = error_of(status, response.content)
    if param is not None:
        assert error["param"] == param
    return error


def events(text: str) -> list[Any]:
    """The data of a stream's events; the final [DONE] as a string."""
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@dataclass
class Answer:
    """What one client received. `status` None: it left before the answer began. `whole`: it got the answer's end."""

    status: int | None = None
    content_type: str = ""
    body: bytes = b""
    whole: bool = False


async def exchange(
    app: ASGIApp, path: str, body: bytes, *, leave_after: int | None = None, breaks: bool = False
) -> Answer:
    """POST `body`. The client leaves after `leave_after` messages of the answer (0: right after sending the body);
    writing to it then fails where `breaks` is true, and is lost in silence otherwise."""
    answer = Answer()
    left = asyncio.Event()
    received = 0
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    def may_leave() -> None:
        if leave_after is not None and received >= leave_after:
            left.set()

    async def receive() -> Message:
        for message in requests:
            may_leave()
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal received
        if left.is_set():
            if breaks:
                raise OSError("the client is gone")
            return
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.content_type = dict(message["headers"]).get(b"content-type", b"").decode()
        else:
            answer.body += message.get("body", b"")
            answer.whole = not message.get("more_body", False)
        received += 1
        may_leave()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "headers": [(b"host", b"test"), (b"content-length", str(len(body)).encode())],
    }  # fmt: skip
    await app(scope, receive, send)
    return answer
