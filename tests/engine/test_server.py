"""The HTTP server over the fake engine: OpenAI's shapes, limits, disconnects, signals."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fake_engine import FakeEngine, expected_text
from server_tools import CHAT, COMPLETIONS, assert_error, events

from breakeven import __version__
from breakeven.engine.async_engine import AsyncEngine
from breakeven.engine.config import ConfigError, EngineConfig, SpeculationConfig
from breakeven.engine.http.app import ServerState, create_app
from breakeven.engine.openai_schema import CompletionBody, parse_body
from breakeven.engine.server import bind

SPECULATIVE = EngineConfig(speculation=SpeculationConfig("ngram", num_steps=3))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def client_of(
    fake: FakeEngine, *, max_queue: int = 64, policy: Any = "reject", **state_options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ServerState]]:
    """A client wired to the application without sockets; afterwards the engine must be empty."""
    state = ServerState(model_names=("fake", "alias"), **state_options)
    state.engine = AsyncEngine(fake, max_queue=max_queue, queue_policy=policy)
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client, state
    fake.gate.set()
    await state.engine.stop()
    assert fake.sequences == {}
    assert state.engine.in_flight == 0


def post(fake: FakeEngine, path: str, body: Any, **options: Any) -> httpx.Response:
    """One request to a fresh server."""

    async def main() -> httpx.Response:
        async with client_of(fake, **options) as (client, _):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content)

    return asyncio.run(main())


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, **fields}


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hi", ["hi"]),
        (list(b"hi"), ["hi"]),
        (["hi", "ho"], ["hi", "ho"]),
        ([list(b"hi"), list(b"yo!")], ["hi", "yo!"]),
    ],
)
def test_every_form_of_prompt_is_answered_in_order(prompt: Any, texts: list[str]) -> None:
    answer = post(FakeEngine(), COMPLETIONS, completion(prompt, max_tokens=5)).json()
    assert [choice["text"] for choice in answer["choices"]] == [expected_text(text, 5) for text in texts]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    prompt_tokens = sum(map(len, texts))
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 5 * len(texts)
    assert answer["usage"]["total_tokens"] == prompt_tokens + 5 * len(texts)


def test_chat_renders_the_template_with_its_arguments() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(parts, max_tokens=4, chat_template_kwargs={"thinking": False}, add_generation_prompt=False)
    answer = post(FakeEngine(), CHAT, body).json()
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == expected_text("<user>a\nb[thinking=False]", 4)
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    answer = post(FakeEngine(), CHAT, chat(max_tokens=4, max_completion_tokens=7)).json()
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_end_after_sixteen_tokens_unless_told_otherwise() -> None:
    assert post(FakeEngine(), COMPLETIONS, completion()).json()["usage"]["completion_tokens"] == 16


def test_a_stop_string_and_eos_are_told_apart_by_the_stop_reason() -> None:
    stopped = post(FakeEngine(), COMPLETIONS, completion("a", stop="z")).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "z")
    assert "z" not in stopped["text"]
    ended = post(FakeEngine(natural_length=3), COMPLETIONS, completion()).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)


def test_the_first_of_n_choices_is_the_answer_of_n_equal_one_and_the_prompt_counts_once() -> None:
    one = post(FakeEngine(), COMPLETIONS, completion("hey", seed=5)).json()
    three = post(FakeEngine(), COMPLETIONS, completion("hey", seed=5, n=3)).json()
    texts = [choice["text"] for choice in three["choices"]]
    assert texts[0] == one["choices"][0]["text"]
    assert len(set(texts)) == 3
    assert three["usage"]["prompt_tokens"] == 3
    assert three["usage"]["completion_tokens"] == 48


def test_derived_seeds_stay_in_range_for_every_seed() -> None:
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        body = parse_body(CompletionBody, json.dumps(completion(seed=seed)).encode())
        seeds = [body.sampling(choice).seed for choice in range(4)]
        assert len(set(seeds)) == 4
        assert all(value is not None and 0 <= value < 2**63 for value in seeds)


def test_logprobs_come_in_both_styles_and_minus_infinity_stays_json() -> None:
    value = post(FakeEngine(), COMPLETIONS, completion(logprobs=2, max_tokens=3)).json()["choices"][0]["logprobs"]
    first = expected_text("hi", 1)
    assert value["tokens"] == list(expected_text("hi", 3))
    assert value["token_logprobs"] == [-0.5] * 3
    assert value["top_logprobs"][0] == {first: -0.5, "\x00": -9999.0}
    assert value["text_offset"] == [0, 1, 2]
    body = chat(logprobs=True, top_logprobs=1, max_tokens=3)
    content = post(FakeEngine(), CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == [content[0]["token"]]


def test_streamed_logprobs_carry_their_offset_across_events() -> None:
    fake = FakeEngine(tokens_per_step=2)
    chunks = events(post(fake, COMPLETIONS, completion(logprobs=0, max_tokens=4, stream=True)).text)[:-1]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 1], [2, 3]]


def test_token_ids_are_returned_where_asked_for_whole_and_streamed() -> None:
    body = completion(return_token_ids=True, max_tokens=4)
    choice = post(FakeEngine(), COMPLETIONS, body).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(b"hi")
    assert choice["token_ids"] == list(expected_text("hi", 4).encode())
    chunks = events(post(FakeEngine(tokens_per_step=3), COMPLETIONS, body | {"stream": True}).text)[:-1]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [choice["token_ids"][:3], choice["token_ids"][3:]]
    assert ["prompt_token_ids" in chunk["choices"][0] for chunk in chunks] == [True, False]


def test_a_stream_has_one_event_per_engine_step_and_the_role_comes_with_the_first_text() -> None:
    fake = FakeEngine(tokens_per_step=4)
    data = events(post(fake, CHAT, chat(max_tokens=10, stream=True)).text)
    assert data[-1] == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in data[:-1]]
    assert [len(delta["content"]) for delta in deltas] == [4, 4, 2]
    assert ["role" in delta for delta in deltas] == [True, False, False]
    assert [chunk["choices"][0]["finish_reason"] for chunk in data[:-1]] == [None, None, "length"]
    assert all("usage" not in chunk for chunk in data[:-1])


def test_usage_comes_in_a_last_event_without_choices_and_null_before() -> None:
    body = completion(max_tokens=3, stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(post(FakeEngine(), COMPLETIONS, body).text)
    assert done == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_continuous_usage_counts_the_tokens_of_each_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(max_tokens=10, stream=True, stream_options=options)
    *chunks, last, _ = events(post(FakeEngine(tokens_per_step=4), CHAT, body).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [4, 8, 10]
    assert last["usage"] == chunks[-1]["usage"]


def test_several_streamed_choices_are_told_apart_by_their_index() -> None:
    body = completion(["hi", "ho"], n=2, seed=1, max_tokens=3, stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = events(post(FakeEngine(), COMPLETIONS, body).text)
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts[0] == expected_text("hi", 3, seed=1)
    assert texts[2] == expected_text("ho", 3, seed=1)
    assert last["usage"]["prompt_tokens"] == 4
    assert last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_speculation_counters_of_the_request_come_where_asked_for(stream: bool) -> None:
    fake = FakeEngine(config=SPECULATIVE, tokens_per_step=4)
    response = post(fake, COMPLETIONS, completion(max_tokens=8, return_speculation=True, stream=stream))
    carrier = events(response.text)[-2] if stream else response.json()
    assert carrier["metrics"]["speculative_decoding"] == {
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [2, 2, 2],
        "num_steps": 2,
    }


def test_a_body_is_read_as_json_whatever_its_content_type_says() -> None:
    async def main() -> None:
        async with client_of(FakeEngine()) as (client, _):
            for kind in ("text/plain", "application/x-www-form-urlencoded", "garbage"):
                response = await client.post(
                    COMPLETIONS, content=json.dumps(completion()), headers={"Content-Type": kind}
                )
                assert response.status_code == 200

    asyncio.run(main())


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"model": "fake"}, "prompt"),
        (COMPLETIONS, completion(prompt=3), "prompt"),
        (COMPLETIONS, completion(prompt=[]), "prompt"),
        (COMPLETIONS, completion(prompt=["a", 1]), "prompt"),
        (COMPLETIONS, completion(prompt=[1, True]), "prompt"),
        (COMPLETIONS, completion(prompt=[-1]), "prompt"),
        (COMPLETIONS, completion(prompt=[257]), "prompt"),
        (COMPLETIONS, completion(prompt=[10**30]), "prompt"),
        (COMPLETIONS, completion(temperature=-1), "temperature"),
        (COMPLETIONS, completion(temperature="hot"), "temperature"),
        (COMPLETIONS, completion(temperature=math.nan), "temperature"),
        (COMPLETIONS, completion(top_p=0), "top_p"),
        (COMPLETIONS, completion(top_k=-2), "top_k"),
        (COMPLETIONS, completion(top_k=10**12), "top_k"),
        (COMPLETIONS, completion(max_tokens=0), "max_tokens"),
        (COMPLETIONS, completion(max_tokens=2.5), "max_tokens"),
        (COMPLETIONS, completion(min_tokens=17), "min_tokens"),
        (COMPLETIONS, completion(n=0), "n"),
        (COMPLETIONS, completion(n=129), "n"),
        (COMPLETIONS, completion(seed=2**64), "seed"),
        (COMPLETIONS, completion(stop=["ok", ""]), "stop"),
        (COMPLETIONS, completion(stop_token_ids=[257]), "stop_token_ids"),
        (COMPLETIONS, completion(logit_bias={"x": 1}), "logit_bias"),
        (COMPLETIONS, completion(logit_bias={"9999": 1}), "logit_bias"),
        (COMPLETIONS, completion(logit_bias={"1": math.inf}), "logit_bias"),
        (COMPLETIONS, completion(logprobs=21), "logprobs"),
        (COMPLETIONS, completion(stream_options={"include_usage": True}), "stream_options"),
        (COMPLETIONS, completion(stream=True, stream_options=7), "stream_options"),
        (COMPLETIONS, completion(echo=True), "echo"),
        (COMPLETIONS, completion(suffix="x"), "suffix"),
        (COMPLETIONS, completion(best_of=2), "best_of"),
        (COMPLETIONS, completion(guided_json={}), "guided_json"),
        (CHAT, {"model": "fake"}, "messages"),
        (CHAT, {"model": "fake", "messages": []}, "messages"),
        (CHAT, chat(content=None), "messages[0].content"),
        (CHAT, chat(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
        (CHAT, chat(top_logprobs=2), "top_logprobs"),
        (CHAT, chat(chat_template_kwargs={"messages": []}), "messages"),
        (CHAT, chat(chat_template_kwargs={"x": [math.nan]}), "chat_template_kwargs"),
    ],
)
def test_a_bad_field_gives_400_and_its_name(path: str, body: Any, param: str) -> None:
    error = assert_error(post(FakeEngine(), path, body), 400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"n": %s}' % (b"9" * 5000),
    ],
)
def test_what_is_not_a_json_object_gives_400(body: bytes) -> None:
    assert_error(post(FakeEngine(), COMPLETIONS, body), 400)


def test_values_that_change_nothing_are_accepted() -> None:
    body = chat(
        tools=[], tool_choice="none", response_format={"type": "text"}, echo=False, n=1, top_k=-1, stop=None,
        logit_bias=None, stream=False, stream_options=None, user="x", unknown_field=[1], max_tokens=2,
    )  # fmt: skip
    assert post(FakeEngine(), CHAT, body).status_code == 200


def test_what_the_engine_refuses_is_a_400_with_its_reason() -> None:
    error = assert_error(post(FakeEngine(), COMPLETIONS, completion("x" * 5000)), 400)
    assert "context is 4096" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert "empty" in assert_error(post(FakeEngine(), COMPLETIONS, completion("")), 400)["message"]
    assert "sequences" in assert_error(
        post(FakeEngine(config=EngineConfig(max_running_requests=2)), COMPLETIONS, completion(n=5), max_queue=1), 400
    )["message"]  # fmt: skip


def test_unknown_models_routes_and_methods_answer_in_openais_shape() -> None:
    async def main() -> None:
        async with client_of(FakeEngine()) as (client, _):
            error = assert_error(await client.post(COMPLETIONS, json=completion(model="gpt-4")), 404, "model")
            assert error["code"] == "model_not_found"
            assert_error(await client.get("/v2/anything"), 404)
            assert_error(await client.post(COMPLETIONS + "/", json=completion()), 404)
            wrong = await client.get(COMPLETIONS)
            assert_error(wrong, 405)
            assert "POST" in wrong.headers["allow"]
            assert (await client.post(COMPLETIONS, json=completion(model="alias"))).json()["model"] == "alias"

    asyncio.run(main())


def test_the_key_opens_everything_and_health_and_version_need_none() -> None:
    async def main() -> None:
        async with client_of(FakeEngine(), api_key="sésame") as (client, _):
            wrong = [None, "Bearer wrong", "Basic sésame", "Bearer", "sésame"]
            for path in ("/v1/models", "/metrics", "/nowhere"):
                for value in wrong:
                    headers = {} if value is None else {"Authorization": value.encode()}
                    error = assert_error(await client.get(path, headers=headers), 401)
                    assert error["code"] == "invalid_api_key"
            good = {"Authorization": "Bearer sésame".encode()}
            assert (await client.get("/v1/models", headers=good)).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/version")).json() == {"version": __version__}

    asyncio.run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_while_it_is_read(chunked: bool) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async def main() -> None:
        async with client_of(FakeEngine(), max_body_bytes=1000) as (client, _):
            content = body() if chunked else b"x" * 2000
            assert_error(await client.post(COMPLETIONS, content=content), 413)
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200

    asyncio.run(main())


def test_a_full_queue_answers_429_and_when_to_retry() -> None:
    async def main() -> None:
        fake = FakeEngine(config=EngineConfig(max_running_requests=1))
        async with client_of(fake, max_queue=0) as (client, state):
            fake.gate.clear()
            first = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=3)))
            assert state.engine is not None
            await until(fake.held.is_set)
            response = await client.post(COMPLETIONS, json=completion())
            assert assert_error(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
            fake.gate.set()
            assert (await first).status_code == 200

    asyncio.run(main())


def test_requests_beyond_the_connection_limit_get_503_and_probes_still_answer() -> None:
    async def main() -> None:
        fake = FakeEngine()
        async with client_of(fake, max_connections=1) as (client, _):
            fake.gate.clear()
            first = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=1)))
            await until(fake.held.is_set)
            assert_error(await client.post(COMPLETIONS, json=completion()), 503)
            assert (await client.get("/health")).status_code == 200
            fake.gate.set()
            assert (await first).status_code == 200

    asyncio.run(main())


def test_the_server_is_ready_only_between_loading_and_draining() -> None:
    async def main() -> None:
        async with client_of(FakeEngine()) as (client, state):
            engine, state.engine = state.engine, None
            assert assert_error(await client.get("/health"), 503)["code"] == "loading"
            for path in ("/v1/models", "/metrics"):
                assert_error(await client.get(path), 503)
            assert_error(await client.post(COMPLETIONS, json=completion()), 503)
            state.engine = engine
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert engine is not None
            await engine.drain(1)
            assert assert_error(await client.get("/health"), 503)["code"] == "shutting_down"
            assert_error(await client.post(COMPLETIONS, json=completion()), 503)

    asyncio.run(main())


def test_a_failing_engine_gives_500_then_an_unhealthy_server_with_readable_counters() -> None:
    async def main() -> None:
        async with client_of(FakeEngine(failing_step=3)) as (client, _):
            error = assert_error(await client.post(COMPLETIONS, json=completion()), 500)
            assert "a kernel fell over" in error["message"]
            assert assert_error(await client.get("/health"), 503)["code"] == "unhealthy"
            assert_error(await client.post(COMPLETIONS, json=completion()), 503)
            assert "breakeven:generation_tokens_total" in (await client.get("/metrics")).text

    asyncio.run(main())


def test_a_stream_that_fails_midway_ends_with_an_error_event_and_without_done() -> None:
    data = events(post(FakeEngine(failing_step=3), COMPLETIONS, completion(stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in data[:-1]] == list(expected_text("hi", 2))
    assert "a kernel fell over" in data[-1]["error"]["message"]


# ---- the other routes ------------------------------------------------------------------------------------------------


def test_metrics_carry_vllms_names_after_our_prefix_and_start_from_zero() -> None:
    async def main() -> None:
        async with client_of(FakeEngine(config=SPECULATIVE, tokens_per_step=4)) as (client, _):
            prefix = 'breakeven:spec_decode_num_accepted_tokens_per_pos_total{model_name="fake",position='
            before = (await client.get("/metrics")).text.splitlines()
            assert [line for line in before if line.startswith(prefix)] == [f'{prefix}"{i}"}} 0' for i in range(3)]
            await client.post(COMPLETIONS, json=completion(max_tokens=8))
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain")
            lines = response.text.splitlines()
            samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
            label = '{model_name="fake"}'
            assert samples[f"breakeven:spec_decode_num_drafts_total{label}"] == 2
            assert samples[f"breakeven:spec_decode_num_draft_tokens_total{label}"] == 6
            assert samples[f"breakeven:spec_decode_num_accepted_tokens_total{label}"] == 6
            assert samples[f'{prefix}"2"}}'] == 2
            assert samples[f"breakeven:prompt_tokens_total{label}"] == 2
            assert samples[f"breakeven:generation_tokens_total{label}"] == 8
            assert samples[f"breakeven:num_requests_running{label}"] == 0
            assert not any("_total_total" in line for line in lines)

    asyncio.run(main())


def test_without_speculation_there_are_no_speculation_counters() -> None:
    async def main() -> None:
        async with client_of(FakeEngine()) as (client, _):
            assert "spec_decode" not in (await client.get("/metrics")).text

    asyncio.run(main())


def test_the_prefix_cache_is_reset_or_says_that_it_was_not() -> None:
    async def main() -> None:
        fake = FakeEngine(step_s=0.001)
        async with client_of(fake) as (client, _):
            assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
            assert fake.resets == 1
            running = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=200)))
            await until(lambda: fake.steps > 0)
            assert_error(await client.post("/reset_prefix_cache"), 409)
            assert (await running).status_code == 200

    asyncio.run(main())


def test_models_lists_every_served_name() -> None:
    async def main() -> None:
        async with client_of(FakeEngine()) as (client, _):
            listed = (await client.get("/v1/models")).json()
            assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("fake", 4096), ("alias", 4096)]
            assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
            assert_error(await client.get("/v1/models/other"), 404)

    asyncio.run(main())


# ---- over real sockets -----------------------------------------------------------------------------------------------


class LiveServer:
    """uvicorn on a free port, in a thread."""

    def __init__(self, fake: FakeEngine, **engine_options: Any) -> None:
        self.fake = fake
        self.engine_options = engine_options
        self.state = ServerState(model_names=("fake",), max_body_bytes=100_000)
        self.listener = bind("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(create_app(self.state), log_config=None, lifespan="off"))
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self.state.engine = AsyncEngine(self.fake, **self.engine_options)
        await self.server.serve(sockets=[self.listener])
        self.fake.gate.set()
        await self.state.engine.stop()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it did not happen within 10 s"
            time.sleep(0.005)


@contextmanager
def live(fake: FakeEngine, **engine_options: Any) -> Iterator[LiveServer]:
    server = LiveServer(fake, **engine_options)
    server.thread.start()
    server.wait_for(lambda: server.server.started)
    try:
        yield server
    finally:
        fake.gate.set()
        server.server.should_exit = True
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert fake.sequences == {}
        assert server.state.engine is not None
        assert server.state.engine.in_flight == 0


def test_the_openai_client_works_streaming_and_not() -> None:
    with live(FakeEngine(tokens_per_step=3)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["fake"]
        whole = client.completions.create(model="fake", prompt="hi", max_tokens=7)
        assert whole.choices[0].text == expected_text("hi", 7)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 7
        stream = client.completions.create(
            model="fake", prompt="hi", max_tokens=7, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected_text("hi", 7)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 9
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=7, logprobs=True, top_logprobs=2, n=2, seed=1
        )
        text = answer.choices[0].message.content
        assert text == expected_text("<user>hi<assistant>", 7, seed=1)
        assert len(answer.choices) == 2
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.content or []) == 7
        pieces = client.chat.completions.create(model="fake", messages=messages, max_tokens=7, seed=1, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            client.chat.completions.create(model="fake", messages=messages, temperature=9)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4", messages=messages)


def raw_request(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Send a completion request and leave the connection open."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_kv_at_once(stream: bool) -> None:
    fake = FakeEngine(step_s=0.002, natural_length=10**6)
    with live(fake) as server:
        connection = raw_request(server, completion(max_tokens=4000, stream=stream, n=2))
        server.wait_for(lambda: len(fake.sequences) == 2 and fake.steps > 3)
        connection.close()
        server.wait_for(lambda: fake.sequences == {})
        assert len(fake.aborted) == 2
        assert fake.kv_held() == 0


def test_a_client_that_goes_away_while_waiting_for_a_place_gives_it_up() -> None:
    fake = FakeEngine(config=EngineConfig(max_running_requests=1), step_s=0.002, natural_length=10**6)
    with live(fake, max_queue=0, queue_policy="wait") as server:
        engine = server.state.engine
        assert engine is not None
        running = raw_request(server, completion(max_tokens=4000))
        server.wait_for(lambda: fake.steps > 0)
        waiting = raw_request(server, completion())
        server.wait_for(lambda: engine.waiting_for_place == 1)
        waiting.close()
        server.wait_for(lambda: engine.waiting_for_place == 0)
        running.close()
        server.wait_for(lambda: fake.sequences == {})


def test_a_chunked_body_without_a_length_is_cut_off_at_the_limit() -> None:
    def body() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    with live(FakeEngine()) as server:
        assert_error(httpx.post(server.url + COMPLETIONS, content=body()), 413)


def test_many_streams_at_once_all_come_through_whole() -> None:
    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as client:

            async def one(i: int) -> None:
                body = completion(f"prompt {i}", max_tokens=20, stream=True)
                response = await client.post(COMPLETIONS, json=body)
                text = "".join(chunk["choices"][0]["text"] for chunk in events(response.text)[:-1])
                assert text == expected_text(f"prompt {i}", 20)

            await asyncio.gather(*(one(i) for i in range(60)))

    with live(FakeEngine()) as server:
        asyncio.run(main(server.url))


# ---- the process -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from breakeven.engine.config import ConfigError
from breakeven.engine.server import ServerOptions, bind, serve

def load():
    time.sleep({load_s})
    {load}

listener = bind("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
sys.exit(serve(load, ServerOptions(model_names=("fake",), drain_timeout_s={drain_s}), listener))
"""


@contextmanager
def process(
    load: str = "return FakeEngine(step_s=0.01, natural_length=10**6)", load_s: float = 0, drain_s: float = 20
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    script = SCRIPT.format(tests=str(Path(__file__).parent), load=load, load_s=load_s, drain_s=drain_s)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        assert child.stdout is not None
        yield child, f"http://127.0.0.1:{int(child.stdout.readline())}"
    finally:
        child.kill()
        child.communicate()


def wait_ready(url: str) -> list[int]:
    """Poll /health until 200; the statuses seen."""
    seen: list[int] = []
    deadline = time.monotonic() + 20
    while not seen or seen[-1] != 200:
        assert time.monotonic() < deadline, "the server did not become ready"
        seen.append(httpx.get(url + "/health", timeout=20).status_code)
        time.sleep(0.02)
    return seen


def test_health_is_503_while_the_model_loads_and_200_after() -> None:
    with process(load_s=0.5) as (_, url):
        seen = wait_ready(url)
        assert seen[0] == 503
        assert set(seen) == {200, 503}


def test_sigterm_lets_running_requests_finish_refuses_new_ones_and_exits_with_zero() -> None:
    with process() as (child, url):
        wait_ready(url)
        with httpx.stream("POST", url + COMPLETIONS, json=completion(max_tokens=200, stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            while httpx.get(url + "/health").status_code != 503:
                time.sleep(0.01)
            assert_error(httpx.post(url + COMPLETIONS, json=completion()), 503)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 200
        assert child.wait(10) == 0


def test_a_request_that_outlives_the_drain_timeout_is_cut_off_with_an_error() -> None:
    with process(drain_s=0.1) as (child, url):
        wait_ready(url)
        with httpx.stream("POST", url + COMPLETIONS, json=completion(max_tokens=4000, stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert "shut down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert child.wait(10) == 0


def test_a_second_signal_ends_the_process_at_once() -> None:
    with process() as (child, url):
        wait_ready(url)
        with httpx.stream("POST", url + COMPLETIONS, json=completion(max_tokens=4000, stream=True)) as response:
            lines = response.iter_lines()  # kept: a reader that is collected closes the connection
            next(lines)
            child.send_signal(signal.SIGTERM)
            while httpx.get(url + "/health").status_code != 503:
                time.sleep(0.01)
            child.send_signal(signal.SIGTERM)
            assert child.wait(5) == 128 + signal.SIGTERM


def test_sigterm_while_loading_exits_with_zero() -> None:
    with process(load_s=30) as (child, url):
        assert httpx.get(url + "/health").status_code == 503
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0


@pytest.mark.parametrize(
    ("load", "code", "message"),
    [
        ("raise ConfigError('hidden_act is tanh; this engine serves silu')", 2, "hidden_act is tanh"),
        ("raise FileNotFoundError(2, 'no such directory', 'nowhere')", 2, "nowhere"),
        ("raise ZeroDivisionError('oops')", 1, "ZeroDivisionError: oops"),
    ],
)
def test_a_model_that_does_not_load_is_one_clear_line_and_an_exit_code(load: str, code: int, message: str) -> None:
    with process(load) as (child, _):
        assert child.wait(20) == code
        assert child.stderr is not None
        errors = child.stderr.read()
        assert message in errors
        assert "Traceback" not in errors


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)


def test_tokenize_tells_the_ids_that_a_request_is_generated_from() -> None:
    told = post(FakeEngine(), "/tokenize", chat(chat_template_kwargs={"think": True})).json()
    answered = post(FakeEngine(), CHAT, chat(chat_template_kwargs={"think": True}, return_token_ids=True)).json()
    assert told["tokens"] == answered["choices"][0]["prompt_token_ids"]
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 4096)
    assert post(FakeEngine(), "/tokenize", {"prompt": "abc"}).json()["tokens"] == [97, 98, 99]
    assert (
        "one prompt at a time" in assert_error(post(FakeEngine(), "/tokenize", {"prompt": ["a", "b"]}), 400)["message"]
    )
    assert_error(post(FakeEngine(), "/tokenize", {}), 400)
    assert_error(post(FakeEngine(), "/tokenize", {"prompt": "a", "model": "another"}), 404)
