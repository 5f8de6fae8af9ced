"""Small ASGI helpers: read a body within a limit, answer, and stop work when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from breakeven.engine.http.errors import ApiError

T = TypeVar("T")
Headers = Sequence[tuple[bytes, bytes]]

BODY_TIMEOUT_S = 60.0
DISCARD_S = 2.0


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body. 413 as soon as it is known to be longer than `limit` bytes, chunked or not; 408 if it stalls.

    Raises `ClientGoneError` if the client leaves before the end.
    """
    too_large = ApiError(413, f"the request body exceeds this server's limit of {limit} bytes", code="body_too_large")
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            await _discard_rest(receive)
            raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    await _discard_rest(receive)
                    raise too_large
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None


async def _discard_rest(receive: Receive) -> None:
    """Let a client that is still sending come to its end, for a while: closing at once would lose our answer to it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                if not message.get("more_body", False):
                    return


async def send_answer(
    send: Send, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers = ()
) -> None:
    """A whole response."""
    fields = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a whole response. A body we did not read is left behind, so 413 and 408 close the connection."""
    headers = list(error.header_list())
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send_answer(send, error.status, error.json(), headers=headers)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, whose request body has been read; cancel it and raise `ClientGoneError` if the client goes away."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        await _cancel((task,))
        raise ClientGoneError
    finally:
        await _cancel((task, watcher))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
