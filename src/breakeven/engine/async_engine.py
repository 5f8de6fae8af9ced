"""The bridge between asyncio and the synchronous engine, which lives on one thread of its own.

Requests cross to the engine thread as commands, which run between two steps; outputs cross back in one hand-over per
step, whatever the number of requests. The engine thread sleeps on a condition variable while there is nothing to do.
Everything that is not marked otherwise is called on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from breakeven.engine.config import EngineConfig
from breakeven.engine.request import RequestError, RequestOutput, SamplingParams, SpeculationStats

logger = logging.getLogger(__name__)

QueuePolicy = Literal["reject", "wait"]
T = TypeVar("T")


class TokenizerProtocol(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def has_chat_template(self) -> bool: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def token_text(self, token_id: int, /) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def render_chat(
        self, messages: Sequence[Any], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str: ...


class EngineStatsProtocol(Protocol):
    """Gauges and running totals of an engine. Token counts unless named otherwise."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_tokens_used(self) -> int: ...
    @property
    def kv_tokens_total(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def speculation(self) -> SpeculationStats: ...


class EngineProtocol(Protocol):
    """The synchronous engine. Its methods are called on the engine thread only; its attributes are constants."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> TokenizerProtocol: ...
    @property
    def max_context(self) -> int: ...
    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None: ...
    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_work(self) -> bool: ...
    def reset_prefix_cache(self) -> bool: ...
    def stats(self) -> EngineStatsProtocol: ...


class InvalidRequest(ValueError):  # noqa: N818
    """The engine cannot serve this request; the message says why, and `code` what OpenAI's API calls it."""

    def __init__(self, message: str, code: str = RequestError.code) -> None:
        super().__init__(message)
        self.code = code


class QueueFull(RuntimeError):  # noqa: N818
    """No place in the queue. `retry_after_s` is a hint for the client."""

    retry_after_s = 1


class EngineUnavailable(RuntimeError):  # noqa: N818
    """The engine takes no requests: it is draining, stopped, or has failed."""


class RequestFailed(RuntimeError):  # noqa: N818
    """An admitted request ended without its result: the engine failed, or it was cut off by a shutdown."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams


class RequestStream:
    """The outputs of one or several requests, in the order in which the engine produced them.

    Ends when all of them have finished. `close()`, `aclose()` and cancellation while waiting abort what is left.
    """

    __slots__ = ("_engine", "_error", "_open", "_outputs", "_waiter")

    def __init__(self, engine: AsyncEngine, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._open = set(request_ids)
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def close(self) -> None:
        """Abort what has not finished. Idempotent."""
        if self._open:
            self._engine._abort(self)

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()

    def _push(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Runs an engine on its own thread and shares it among coroutines.

    At most `engine.config.max_running_requests + max_queue` sequences are in flight. Beyond that, policy "reject"
    raises `QueueFull`; policy "wait" waits for a place, first come first served, with at most `max_waiters` waiting.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        *,
        max_queue: int = 1024,
        queue_policy: QueuePolicy = "reject",
        max_waiters: int = 4096,
    ) -> None:
        if max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, got {max_queue}")
        self.engine = engine
        self.capacity = engine.config.max_running_requests + max_queue
        self.failure: str | None = None  # why the engine is unhealthy
        self._queue_policy = queue_policy
        self._max_waiters = max_waiters
        self._in_flight = 0
        self._streams: dict[str, RequestStream] = {}
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        # shared with the engine thread, under the condition's lock
        self._condition = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopping = False
        self._stopped = False
        self._last_stats: EngineStatsProtocol | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="breakeven-engine", daemon=True)
        self._thread.start()

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self.failure is None

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def in_flight(self) -> int:
        """Sequences handed to the engine and not finished."""
        return self._in_flight

    @property
    def waiting_for_place(self) -> int:
        """Sequences that wait to be handed to the engine (queue policy "wait")."""
        return sum(count for count, _ in self._waiters)

    # ---- requests ----------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> RequestStream:
        """Admit one request; see `generate_batch`."""
        return await self.generate_batch([GenerationRequest(request_id, prompt_ids, params)])

    async def generate_batch(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        """Admit all of `requests` or none, and return the stream of their outputs.

        Raises `InvalidRequest` if the engine cannot serve one of them, `QueueFull` if there is no place,
        `EngineUnavailable` if it takes no requests. Cancelling the call withdraws the requests.
        """
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids) or any(request_id in self._streams for request_id in ids):
            raise InvalidRequest("a request id must be unique among the requests in flight")
        await self._take_places(len(requests))
        stream = RequestStream(self, ids)
        for request_id in ids:
            self._streams[request_id] = stream
        self._idle.clear()
        try:
            await self._call(lambda: self._add(requests))
        except BaseException:
            stream.close()
            raise
        return stream

    def _add(self, requests: Sequence[GenerationRequest]) -> None:
        """On the engine thread: validate all, then add all."""
        if self._stopped:
            raise EngineUnavailable("the engine is not running")
        try:
            for request in requests:
                self.engine.validate(request.prompt_ids, request.params)
            for request in requests:
                self.engine.add_request(request.request_id, request.prompt_ids, request.params)
        except ValueError as error:
            raise InvalidRequest(str(error), getattr(error, "code", RequestError.code)) from error

    def _abort(self, stream: RequestStream) -> None:
        """Withdraw a stream's unfinished requests. The engine frees their KV before its next step."""
        ids = [request_id for request_id in stream._open if self._streams.pop(request_id, None) is not None]
        stream._open.clear()
        stream._wake()
        if not ids:
            return

        def abort() -> None:
            for request_id in ids:
                self.engine.abort(request_id)

        self._post(abort)
        self._free_places(len(ids))

    # ---- admission ---------------------------------------------------------------------------------------------

    async def _take_places(self, count: int) -> None:
        if count > self.capacity:
            raise InvalidRequest(
                f"the request asks for {count} sequences, but this server holds at most {self.capacity} at once; "
                "send fewer prompts or a smaller n"
            )
        self._require_available()
        if not self._waiters and self._in_flight + count <= self.capacity:
            self._in_flight += count
            return
        if self._queue_policy == "reject" or len(self._waiters) >= self._max_waiters:
            raise QueueFull(f"the queue is full ({self._in_flight} of {self.capacity} places taken); retry later")
        granted: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((count, granted))
        try:
            await granted
            self._require_available()
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._free_places(count)
            else:
                with contextlib.suppress(ValueError):
                    self._waiters.remove((count, granted))
                self._grant_places()
            raise

    def _free_places(self, count: int) -> None:
        self._in_flight -= count
        self._grant_places()
        if not self._streams:
            self._idle.set()

    def _grant_places(self) -> None:
        while self._waiters:
            count, granted = self._waiters[0]
            if granted.done():
                self._waiters.popleft()
            elif self._in_flight + count <= self.capacity:
                self._waiters.popleft()
                self._in_flight += count
                granted.set_result(None)
            else:
                return

    def _require_available(self) -> None:
        if self.failure is not None:
            raise EngineUnavailable(f"the engine has failed and must be restarted: {self.failure}")
        if self._draining:
            raise EngineUnavailable("the server is shutting down and takes no new requests")

    # ---- the rest of the engine's interface --------------------------------------------------------------------

    async def stats(self) -> EngineStatsProtocol | None:
        """A snapshot between two steps; the last one known if the engine has failed (None if there is none)."""
        with contextlib.suppress(EngineUnavailable):
            self._last_stats = await self._call(self.engine.stats)
        return self._last_stats

    async def reset_prefix_cache(self) -> bool:
        """Forget all reusable prefixes. False if the engine could not."""
        return await self._call(self.engine.reset_prefix_cache)

    async def drain(self, timeout_s: float) -> bool:
        """Stop admitting, let what is in flight finish for `timeout_s`, then abort the rest.

        True if everything finished in time. Waiters for a place are turned away at once.
        """
        self._draining = True
        self._turn_away_waiters(EngineUnavailable("the server is shutting down and takes no new requests"))
        if not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        unfinished = set(self._streams.values())
        for stream in unfinished:
            stream.close()
            stream._fail(RequestFailed("the server shut down before the request finished"))
        return not unfinished

    async def stop(self) -> None:
        """Abort everything and end the thread. Idempotent."""
        await self.drain(0)
        with self._condition:
            self._stopping = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join, 30)

    def _turn_away_waiters(self, error: Exception) -> None:
        for _, granted in self._waiters:
            if not granted.done():
                granted.set_exception(error)
        self._waiters.clear()

    # ---- crossing the threads ----------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine thread; False if it has ended. The command must not raise."""
        with self._condition:
            if self._stopped:
                return False
            self._commands.append(command)
            self._condition.notify()
            return True

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread, between two steps, and return its result."""
        reply: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if reply.done():
                return
            if error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(result)  # type: ignore[arg-type]

        def command() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except Exception as error:
                if not isinstance(error, ValueError):
                    logger.exception("a call to the engine failed")
                failure = error
            self._to_loop(settle, result, failure)

        if not self._post(command):
            raise EngineUnavailable(f"the engine is not running: {self.failure or 'it was stopped'}")
        return await reply

    def _to_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        """On the engine thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        """The engine thread."""
        engine, condition = self.engine, self._condition
        try:
            busy = False
            while True:
                with condition:
                    while not busy and not self._commands and not self._stopping:
                        condition.wait()
                    if self._stopping:
                        break
                    commands, self._commands = self._commands, []
                for command in commands:
                    command()
                busy = engine.has_work()
                if busy:
                    outputs = engine.step()
                    if outputs:
                        self._to_loop(self._deliver, outputs)
                    busy = engine.has_work()
        except BaseException as error:
            logger.exception("the engine failed; running requests are lost")
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = ""
        with condition:
            self._stopped = True
            commands, self._commands = self._commands, []
        for request_id in list(self._streams):
            with contextlib.suppress(Exception):
                engine.abort(request_id)
        with contextlib.suppress(Exception):
            self._last_stats = engine.stats()
        for command in commands:  # aborts and calls that raced with the end; a failed engine may refuse them
            with contextlib.suppress(Exception):
                command()
        if reason:
            self._to_loop(self._deliver_failure, reason)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        streams = self._streams
        finished = 0
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # aborted while the step ran
            if output.finish_reason is not None:
                del streams[output.request_id]
                stream._open.discard(output.request_id)
                finished += 1
            stream._push(output)
        if finished:
            self._free_places(finished)

    def _deliver_failure(self, reason: str) -> None:
        self.failure = reason
        self._turn_away_waiters(EngineUnavailable(f"the engine has failed and must be restarted: {reason}"))
        streams = set(self._streams.values())
        self._in_flight -= len(self._streams)
        self._streams.clear()
        for stream in streams:
            stream._fail(RequestFailed(f"the engine failed while serving this request: {reason}"))
        self._idle.set()
