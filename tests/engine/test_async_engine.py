"""The bridge between asyncio and the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine, expected_text

from breakeven.engine.async_engine import (
    AsyncEngine,
    EngineUnavailable,
    GenerationRequest,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    RequestStream,
)
from breakeven.engine.config import EngineConfig
from breakeven.engine.request import SamplingParams


@asynccontextmanager
async def running(engine: FakeEngine, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An engine on its thread; afterwards nothing may be left in it."""
    wrapped = AsyncEngine(engine, **options)
    try:
        yield wrapped
    finally:
        engine.gate.set()
        await wrapped.stop()
        assert not wrapped._thread.is_alive()
        assert engine.sequences == {}
        assert wrapped.in_flight == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def text_of(stream: RequestStream) -> str:
    return "".join([output.text async for output in stream])


def small(max_running: int) -> EngineConfig:
    return EngineConfig(max_running_requests=max_running)


def test_concurrent_requests_each_get_their_own_text_in_order() -> None:
    async def main() -> None:
        async with running(FakeEngine(tokens_per_step=3)) as engine:

            async def one(i: int) -> None:
                stream = await engine.generate(f"r{i}", [65 + i], SamplingParams(max_tokens=20 + i))
                assert await text_of(stream) == expected_text(chr(65 + i), 20 + i)

            await asyncio.gather(*(one(i) for i in range(40)))

    asyncio.run(main())


def test_a_batch_yields_the_outputs_of_all_its_requests_and_then_ends() -> None:
    async def main() -> None:
        async with running(FakeEngine()) as engine:
            requests = [GenerationRequest(f"r{i}", [70 + i], SamplingParams(max_tokens=i + 1)) for i in range(3)]
            texts = dict.fromkeys((r.request_id for r in requests), "")
            async for output in await engine.generate_batch(requests):
                texts[output.request_id] += output.text
            assert texts == {f"r{i}": expected_text(chr(70 + i), i + 1) for i in range(3)}

    asyncio.run(main())


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_leaving_a_request_frees_its_kv_before_the_next_step(way: str) -> None:
    async def main() -> None:
        fake = FakeEngine(step_s=0.001)
        async with running(fake) as engine:
            stream = await engine.generate("r", [1, 2, 3], SamplingParams())
            await anext(stream)
            if way == "close":
                await stream.aclose()
            else:

                async def read() -> None:
                    async for _ in stream:
                        pass

                task = asyncio.create_task(read())
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert engine.in_flight == 0
            stats = await engine.stats()
            assert stats is not None
            assert (stats.running, stats.kv_tokens_used) == (0, 0)
            assert fake.aborted == ["r"]
            steps = fake.steps
            await asyncio.sleep(0.02)
            assert fake.steps == steps  # asleep, not spinning
            assert [output.finish_reason async for output in stream if output.finish_reason] == []

    asyncio.run(main())


def test_a_request_cancelled_while_it_is_handed_over_leaves_nothing_behind() -> None:
    async def main() -> None:
        fake = FakeEngine(step_s=0.001)
        endless = SamplingParams(max_tokens=900, ignore_eos=True)  # must not end before the gate closes
        async with running(fake) as engine:
            first = await engine.generate("first", [1], endless)
            await anext(first)
            fake.gate.clear()  # the engine thread stands in step(): the hand-over cannot finish
            await until(fake.held.is_set)
            task = asyncio.create_task(engine.generate("second", [1], SamplingParams()))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.in_flight == 1
            fake.gate.set()
            await engine.stats()
            await until(lambda: "second" not in fake.sequences)
            first.close()

    asyncio.run(main())


def test_a_full_queue_rejects_and_admits_again_once_a_place_is_free() -> None:
    async def main() -> None:
        async with running(FakeEngine(config=small(1), step_s=0.001), max_queue=1, queue_policy="reject") as engine:
            streams = [await engine.generate(f"r{i}", [1], SamplingParams()) for i in range(2)]
            with pytest.raises(QueueFull, match="2 of 2"):
                await engine.generate("r2", [1], SamplingParams())
            streams[0].close()
            again = await engine.generate("r3", [1], SamplingParams(max_tokens=2))
            streams[1].close()
            assert len(await text_of(again)) == 2

    asyncio.run(main())


def test_under_the_wait_policy_requests_are_admitted_in_order_and_the_waiters_are_bounded() -> None:
    async def main() -> None:
        options: dict[str, Any] = {"max_queue": 0, "queue_policy": "wait", "max_waiters": 3}
        async with running(FakeEngine(config=small(1), step_s=0.001), **options) as engine:
            order: list[int] = []

            async def one(i: int) -> None:
                stream = await engine.generate(f"r{i}", [1], SamplingParams(max_tokens=3))
                order.append(i)
                await text_of(stream)

            blocker = await engine.generate("blocker", [1], SamplingParams(ignore_eos=True, max_tokens=4000))
            tasks = []
            for i in range(3):
                tasks.append(asyncio.create_task(one(i)))
                await asyncio.sleep(0)
            assert engine.waiting_for_place == 3
            with pytest.raises(QueueFull):
                await engine.generate("too many", [1], SamplingParams())
            tasks[1].cancel()  # a waiter that leaves gives up its turn and nobody else's
            blocker.close()
            await asyncio.gather(tasks[0], tasks[2])
            assert order == [0, 2]

    asyncio.run(main())


def test_a_waiter_cancelled_in_the_moment_it_is_admitted_gives_its_place_on() -> None:
    async def main() -> None:
        async with running(FakeEngine(config=small(1), step_s=0.001), max_queue=0, queue_policy="wait") as engine:
            blocker = await engine.generate("blocker", [1], SamplingParams())
            first = asyncio.create_task(engine.generate("first", [1], SamplingParams()))
            second = asyncio.create_task(engine.generate("second", [1], SamplingParams(max_tokens=2)))
            await asyncio.sleep(0)
            blocker.close()  # grants first's place …
            first.cancel()  # … before first has run again
            with pytest.raises(asyncio.CancelledError):
                await first
            assert len(await text_of(await second)) == 2

    asyncio.run(main())


def test_a_batch_is_admitted_whole_or_not_at_all() -> None:
    async def main() -> None:
        fake = FakeEngine(config=small(2))
        async with running(fake, max_queue=1) as engine:
            requests = [GenerationRequest(f"r{i}", [1], SamplingParams()) for i in range(4)]
            with pytest.raises(InvalidRequest, match="at most 3"):
                await engine.generate_batch(requests)
            requests[2] = GenerationRequest("bad", [], SamplingParams())
            with pytest.raises(InvalidRequest, match="empty"):
                await engine.generate_batch(requests[:3])
            assert engine.in_flight == 0
            assert fake.sequences == {}

    asyncio.run(main())


def test_a_refused_request_says_why_and_harms_nobody() -> None:
    async def main() -> None:
        async with running(FakeEngine()) as engine:
            good = await engine.generate("good", [1], SamplingParams(max_tokens=50))
            with pytest.raises(InvalidRequest, match="context is 4096"):
                await engine.generate("long", [1] * 5000, SamplingParams())
            with pytest.raises(InvalidRequest, match="unique"):
                await asyncio.gather(*(engine.generate("same", [1], SamplingParams()) for _ in range(2)))
            assert len(await text_of(good)) == 50
            assert engine.healthy
            await engine.drain(0)

    asyncio.run(main())


def test_a_failing_step_fails_every_request_and_marks_the_engine_unhealthy() -> None:
    async def main() -> None:
        fake = FakeEngine(config=small(2), failing_step=5)
        async with running(fake, max_queue=0, queue_policy="wait") as engine:
            fake.gate.clear()
            stream = await engine.generate_batch([GenerationRequest(f"r{i}", [1], SamplingParams()) for i in range(2)])
            waiter = asyncio.create_task(engine.generate("waiter", [1], SamplingParams()))
            await asyncio.sleep(0)
            fake.gate.set()
            with pytest.raises(RequestFailed, match="a kernel fell over"):
                await text_of(stream)
            with pytest.raises(EngineUnavailable, match="kernel"):
                await waiter
            with pytest.raises(EngineUnavailable, match="kernel"):
                await engine.generate("late", [1], SamplingParams())
            assert not engine.healthy
            stats = await engine.stats()
            assert stats is not None
            assert stats.generated_tokens == 2 * 4  # the counters of a dead engine can still be read

    asyncio.run(main())


def test_draining_finishes_what_runs_and_turns_away_the_rest() -> None:
    async def main() -> None:
        async with running(FakeEngine(config=small(1), step_s=0.001), max_queue=0, queue_policy="wait") as engine:
            stream = await engine.generate("r", [1], SamplingParams(max_tokens=30))
            waiter = asyncio.create_task(engine.generate("waiter", [1], SamplingParams()))
            await asyncio.sleep(0)
            drain = asyncio.create_task(engine.drain(20))
            await asyncio.sleep(0)
            for refused in (waiter, asyncio.create_task(engine.generate("late", [1], SamplingParams()))):
                with pytest.raises(EngineUnavailable, match="shutting down"):
                    await refused
            assert len(await text_of(stream)) == 30
            assert await drain is True

    asyncio.run(main())


def test_draining_aborts_what_outlives_its_timeout() -> None:
    async def main() -> None:
        fake = FakeEngine(step_s=0.001)
        async with running(fake) as engine:
            stream = await engine.generate("r", [1], SamplingParams())
            assert await engine.drain(0.02) is False
            with pytest.raises(RequestFailed, match="shut down"):
                await text_of(stream)
            await until(lambda: fake.aborted == ["r"])

    asyncio.run(main())


def test_one_step_costs_one_hand_over_whatever_the_number_of_requests() -> None:
    async def main() -> None:
        fake = FakeEngine()
        async with running(fake) as engine:
            fake.gate.clear()
            first = await engine.generate("first", [1], SamplingParams(max_tokens=1))
            requests = [GenerationRequest(f"r{i}", [1], SamplingParams(max_tokens=10)) for i in range(100)]
            batch = asyncio.create_task(engine.generate_batch(requests))
            await asyncio.sleep(0)
            crossings: list[str] = []
            original = engine._to_loop
            engine._to_loop = lambda callback, *a: (crossings.append(callback.__name__), original(callback, *a))[1]  # type: ignore[method-assign]
            fake.gate.set()
            outputs = [output async for output in await batch]
            await text_of(first)
            assert len(outputs) == 1000
            assert crossings.count("_deliver") == fake.steps <= 12

    asyncio.run(main())


def test_an_idle_engine_thread_sleeps_instead_of_polling() -> None:
    async def main() -> None:
        fake = FakeEngine()
        async with running(fake) as engine:
            await text_of(await engine.generate("r", [1], SamplingParams(max_tokens=3)))
            await engine.stats()
            await asyncio.sleep(0.02)
            polls = fake.polls
            await asyncio.sleep(0.1)
            assert fake.polls == polls

    asyncio.run(main())
