"""The server process: early listening socket, loading in the background, signals, draining, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType

import uvicorn

from breakeven.engine.async_engine import AsyncEngine, EngineProtocol, QueuePolicy
from breakeven.engine.config import ConfigError
from breakeven.engine.http.app import ServerState, create_app

logger = logging.getLogger("breakeven.server")

BACKLOG = 2048  # connections the kernel holds for us: a burst of streams must not be refused
SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may hold the interpreter while the engine thread waits for it after each tensor operation.

Python's default of 5 ms makes the engine crawl while hundreds of stream events are written.
"""
EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the HTTP side needs. `drain_timeout_s`: how long running requests may go on after SIGTERM."""

    model_names: tuple[str, ...]
    api_key: str | None = None
    max_queued_requests: int = 1024
    queue_policy: QueuePolicy = "reject"
    max_connections: int = 4096
    max_body_bytes: int = 16 * 2**20
    drain_timeout_s: float = 30.0
    log_level: str = "info"


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `ConfigError` if the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn, with our signals: the first SIGTERM or SIGINT drains, the second ends the process at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, options: ServerOptions) -> None:
        super().__init__(config)
        self._serving_state = state
        self._options = options
        self._drain: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._event_loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._serving_state.shutting_down:
            os._exit(128 + sig)
        self._serving_state.shutting_down = True
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        engine = self._serving_state.engine
        if engine is not None:
            timeout_s = self._options.drain_timeout_s
            logger.info("draining: %d requests in flight, at most %g s", engine.in_flight, timeout_s)
            if not await engine.drain(timeout_s):
                logger.warning("some requests did not finish in time and were aborted")
        self.should_exit = True


def serve(load: Callable[[], EngineProtocol], options: ServerOptions, listener: socket.socket) -> int:
    """Serve on `listener` until a signal; the process' exit code.

    `load` runs on a thread of its own while the server already answers (/health: 503 until it is done). An error of
    `load` ends the server: `ConfigError` with exit code 2, others with 1.
    """
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    state = ServerState(
        model_names=options.model_names,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        max_connections=options.max_connections,
    )
    config = uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        server_header=False,
        date_header=False,
    )
    return asyncio.run(_serve(load, options, state, _Server(config, state, options), listener))


async def _serve(
    load: Callable[[], EngineProtocol],
    options: ServerOptions,
    state: ServerState,
    server: _Server,
    listener: socket.socket,
) -> int:
    loop = asyncio.get_running_loop()
    failure: list[BaseException] = []
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def loaded(engine: EngineProtocol) -> None:
        if state.shutting_down:
            return
        state.engine = AsyncEngine(
            engine,
            max_queue=options.max_queued_requests,
            queue_policy=options.queue_policy,
            max_waiters=options.max_connections,
        )
        logger.info("ready: %s on %s", options.model_names[0], url)

    def failed(error: BaseException) -> None:
        failure.append(error)
        server.should_exit = True

    def load_in_background() -> None:
        with contextlib.suppress(RuntimeError):  # of a closed loop: the server was told to stop while loading
            try:
                engine = load()
            except BaseException as error:
                loop.call_soon_threadsafe(failed, error)
            else:
                loop.call_soon_threadsafe(loaded, engine)

    loader = threading.Thread(target=load_in_background, name="breakeven-load", daemon=True)
    loader.start()
    logger.info("listening on %s; loading %s", url, options.model_names[0])
    await server.serve(sockets=[listener])
    if failure:
        return _report(failure[0])
    if state.engine is not None:
        await state.engine.stop()
    if loader.is_alive():  # told to stop while loading: native code cannot be interrupted, so do not wait for it
        logging.shutdown()
        os._exit(EXIT_OK)
    logger.info("stopped")
    return EXIT_OK


def _report(error: BaseException) -> int:
    """Say in one line why the model did not load; the exit code."""
    usage = isinstance(error, (ConfigError, OSError))
    detail = str(error) if usage else f"{type(error).__name__}: {error}"
    print(f"breakeven serve: {detail}", file=sys.stderr)
    logger.debug("the model did not load", exc_info=error)
    return EXIT_USAGE if usage else EXIT_FAILURE
