"""No request body gives a 500, hangs, or leaves anything behind: over the fake engine, and over the real one.

BREAKEVEN_FUZZ_EXAMPLES sets the number of examples of each test.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from engine_tools import ModeController
from fake_engine import FakeEngine
from fuzz_bodies import ANY_BODIES, well_formed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_tools import CHAT, COMPLETIONS, Answer, error_of, events, exchange

from breakeven.engine.async_engine import AsyncEngine
from breakeven.engine.config import EngineConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.http.app import ServerState, create_app

T = TypeVar("T")
CONTEXT, VOCAB = 48, 300  # of the tiny model behind the real engine
EXAMPLES = os.environ.get("BREAKEVEN_FUZZ_EXAMPLES")
PATIENCE_S = 60


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=int(EXAMPLES) if EXAMPLES else examples,
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.large_base_example,
            HealthCheck.data_too_large,
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class Client:
    """A request, and when its sender goes away (None: it stays to the end)."""

    path: str
    body: bytes
    leave_after: int | None = None
    breaks: bool = False


class Server:
    """One engine and one application for all examples."""

    def __init__(self, engine: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.state = ServerState(model_names=("fake",))
        self.app = create_app(self.state)

        async def start() -> AsyncEngine:
            return AsyncEngine(engine, queue_policy="wait")

        self.state.engine = self.engine = self.run(start())

    def run(self, work: Awaitable[T]) -> T:
        async def in_time() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return self.loop.run_until_complete(in_time())

    def send(self, clients: Sequence[Client]) -> list[Answer]:
        """All at once; returns when the engine has seen every abort."""

        async def all_of_them() -> list[Answer]:
            answers = await asyncio.gather(
                *(exchange(self.app, c.path, c.body, leave_after=c.leave_after, breaks=c.breaks) for c in clients)
            )
            await self.engine.stats()
            return answers

        return self.run(all_of_them())

    def close(self) -> None:
        self.run(self.engine.stop())
        self.loop.close()


def check_answer(client: Client, answer: Answer) -> None:
    """Whole, and either an answer or a 400 or 404 in OpenAI's shape; of a client that left, what it saw is no 500."""
    assert answer.status in (200, 400, 404) or (answer.status is None and client.leave_after is not None)
    if not answer.whole:
        assert client.leave_after is not None
        assert b'"error"' not in answer.body
    elif answer.status != 200:
        assert answer.status is not None
        error_of(answer.status, answer.body)
    elif answer.content_type.startswith("text/event-stream"):
        *chunks, done = events(answer.body.decode())
        assert done == "[DONE]"
        assert all("error" not in chunk for chunk in chunks)
    else:
        assert json.loads(answer.body)["choices"]


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Server]:
    config = EngineConfig(speculation=SpeculationConfig("ngram", num_steps=3))
    server = Server(FakeEngine(config=config, tokens_per_step=2, natural_length=30))
    yield server
    server.close()


@fuzz(300)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), body=ANY_BODIES)
def test_no_body_gives_500_hangs_or_leaves_anything_in_the_engine(fake_server: Server, path: str, body: bytes) -> None:
    client = Client(path, body)
    (answer,) = fake_server.send([client])
    check_answer(client, answer)
    assert fake_server.engine.engine.sequences == {}  # type: ignore[attr-defined]
    assert fake_server.engine.in_flight == 0
    assert fake_server.engine.healthy


# ---- the real engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_server(tiny_llama_dir: Callable[..., Path]) -> Iterator[Server]:
    """A random tiny Llama, so little KV that requests are pre-empted, and another kind of speculation at every step."""
    config = EngineConfig(
        dtype="float32", page_size=4, kv_cache_tokens=96, max_context=CONTEXT, prefill_chunk=7, max_running_requests=6,
        debug_checks=True,
    )  # fmt: skip
    controller = ModeController()
    controller.mode = "switching"
    server = Server(Engine.from_pretrained(str(tiny_llama_dir()), config, controller))
    yield server
    server.close()


@st.composite
def _client(draw: st.DrawFn) -> Client:
    if draw(st.integers(0, 4)) == 0:
        path, body = draw(st.sampled_from([COMPLETIONS, CHAT])), draw(ANY_BODIES)
    else:
        path, value = draw(well_formed(VOCAB, CONTEXT))
        body = json.dumps(value).encode()
    leave_after = draw(st.none() | st.integers(0, 6))
    return Client(path, body, leave_after, breaks=leave_after is not None and draw(st.booleans()))


def check_real(server: Server, clients: Sequence[Client]) -> list[Answer]:
    """Sends them, and checks the answers and that nothing is left; the answers."""
    answers = server.send(clients)
    for client, answer in zip(clients, answers, strict=True):
        check_answer(client, answer)
    engine = server.engine.engine
    assert isinstance(engine, Engine)
    assert server.engine.healthy, server.engine.failure
    assert server.engine.in_flight == 0
    assert not engine.has_work()
    engine.check()
    assert engine.stats().kv_tokens_used == 0, "KV pages leaked"
    return answers


@fuzz(100)
@given(clients=st.lists(_client(), min_size=1, max_size=4))
def test_the_real_engine_answers_or_refuses_and_no_kv_leaks(real_server: Server, clients: list[Client]) -> None:
    for client, answer in zip(clients, check_real(real_server, clients), strict=True):
        if answer.status == 200 and answer.whole and not answer.content_type.startswith("text/event-stream"):
            usage = json.loads(answer.body)["usage"]
            asked = json.loads(client.body)
            assert usage["completion_tokens"] <= len(json.loads(answer.body)["choices"]) * CONTEXT
            if asked.get("max_tokens") and "max_completion_tokens" not in asked:
                sequences = len(json.loads(answer.body)["choices"])
                assert usage["completion_tokens"] <= sequences * asked["max_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, {"prompt": [5] * CONTEXT}, f"the prompt has {CONTEXT} tokens"),
        (COMPLETIONS, {"prompt": [[5], [5] * (CONTEXT + 9)]}, f"the prompt has {CONTEXT + 9} tokens"),
        (COMPLETIONS, {"prompt": [5] * (CONTEXT - 2), "max_tokens": 3}, "exceed this server's maximum context"),
        (CHAT, {"messages": [{"role": "user", "content": "7 " * CONTEXT}]}, "maximum context length"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_a_400_and_takes_no_kv(
    real_server: Server, path: str, body: dict[str, Any], words: str, stream: bool
) -> None:
    client = Client(path, json.dumps({"model": "fake", "stream": stream, **body}).encode())
    (answer,) = check_real(real_server, [client])
    assert answer.status == 400
    error = error_of(400, answer.body)
    assert words in error["message"]
    assert f"maximum context length of {CONTEXT}" in error["message"] or f"is {CONTEXT} tokens" in error["message"]
    assert error["type"] == "invalid_request_error"
