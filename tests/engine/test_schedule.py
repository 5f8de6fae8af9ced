"""Speculation by batch size: which depth at which load, and the same tokens whatever it says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from eagle3_tools import CHAIN3, DEEP_TREE, knowing_drafter, predictable_weights
from engine_tools import CHAIN, GREEDY, TINY, TREE, run_all, sampled
from hypothesis import given
from hypothesis import strategies as st

from breakeven.engine.config import ConfigError, EngineConfig, SpeculationConfig, SpeculationSchedule
from breakeven.engine.control import ScheduledController
from breakeven.engine.engine import Engine
from breakeven.engine.models.load import load_model

BY_LOAD = SpeculationSchedule(((1, 2, 3), (3, 4, 1), (7, 64, 0)))
MIXED = SpeculationSchedule(((1, 3, 3), (4, 4, 0), (5, 8, 2), (9, 64, 0)))


@st.composite
def range_tables(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Ranges as the rules want them: from 1, with gaps or without, in any order."""
    at, table = 1, []
    for _ in range(draw(st.integers(1, 6))):
        last = at + draw(st.integers(0, 5))
        table.append((at, last, draw(st.integers(0, 8))))
        at = last + 1 + draw(st.integers(0, 4))
    return draw(st.permutations(table))


def dense(table: list[tuple[int, int, int]], size: int) -> int:
    """The oracle: every batch size written out; what no range names takes what came before."""
    named = {batch: steps for first, last, steps in table for batch in range(first, last + 1)}
    while size not in named:
        size -= 1
    return named[size]


@given(range_tables(), st.integers(1, 90))
def test_the_depth_is_that_of_the_range_or_of_the_one_before(table: list[tuple[int, int, int]], size: int) -> None:
    schedule = SpeculationSchedule(tuple(table))
    assert schedule.num_steps(size) == dense(table, size)
    assert schedule.num_steps(0) == schedule.num_steps(1)
    assert SpeculationSchedule.parse(json.dumps(table)) == schedule


@given(range_tables(), st.integers(1, 90), st.sampled_from([CHAIN, TREE, CHAIN3, DEEP_TREE]))
def test_the_controller_drafts_as_deep_as_the_schedule_says(
    table: list[tuple[int, int, int]], size: int, shape: SpeculationConfig
) -> None:
    schedule = SpeculationSchedule(tuple(table))
    deepest = dataclasses.replace(shape, num_steps=8, num_draft_tokens=9)
    chosen = ScheduledController(deepest, schedule).choose(size)
    steps = dense(table, size)
    if steps == 0:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.num_steps == steps
    assert (chosen.algorithm, chosen.eagle_topk, chosen.ngram_max) == (
        shape.algorithm, shape.eagle_topk, shape.ngram_max,
    )  # fmt: skip
    assert 2 <= chosen.num_draft_tokens <= deepest.num_draft_tokens
    if shape.eagle_topk == 1:
        assert chosen.num_draft_tokens == steps + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1,4,3]", "is not JSON"),
        ("{}", "not a list of"),
        ("[[1,4]]", "three whole numbers"),
        ("[[1,4,true]]", "three whole numbers"),
        ("[[1,4,2.5]]", "three whole numbers"),
        ("[]", "is empty"),
        ("[[2,4,3]]", "start the first range at 1"),
        ("[[1,4,3],[4,8,1]]", "two things of batch size 4"),
        ("[[1,4,3],[8,5,1]]", "1 <= first <= last"),
        ("[[0,4,3]]", "1 <= first <= last"),
        ("[[1,4,-1]]", "the least is 0"),
    ],
)
def test_a_bad_schedule_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationSchedule.parse(text)


def test_a_schedule_needs_a_speculation_that_is_deep_enough() -> None:
    with pytest.raises(ConfigError, match="needs an algorithm"):
        EngineConfig(schedule=BY_LOAD)
    with pytest.raises(ConfigError, match=r"asks for 3 steps, but speculative num_steps is 2"):
        EngineConfig(schedule=BY_LOAD, speculation=SpeculationConfig("ngram", num_steps=2, num_draft_tokens=3))


@pytest.mark.parametrize("shape", ["ngram tree", "eagle3 chain", "eagle3 tree"])
def test_tokens_do_not_depend_on_the_schedule_and_depths_follow_the_load(
    tiny_llama_dir: Callable[..., Path], shape: str
) -> None:
    """Requests of unlike length, 10 at once: the batch passes every threshold, up and down."""
    model = load_model(str(tiny_llama_dir()))
    speculation = {"ngram tree": TREE, "eagle3 chain": CHAIN3, "eagle3 tree": DEEP_TREE}[shape]
    weights = predictable_weights(model)
    drafter = knowing_drafter(model.config, weights) if "eagle3" in shape else None
    prompts = [[5 + index % 7, 9, 11, 5 + index % 7, 9, 11] * (1 + index % 4) for index in range(18)]
    params = [dataclasses.replace(sampled(i) if i % 2 else GREEDY, max_tokens=4 + i % 23) for i in range(18)]

    def engine(config: EngineConfig) -> Engine:
        return Engine(model.config, model.tokenizer, weights, config, None, drafter)

    plain = run_all(engine(TINY), prompts, params, at_once=10)
    scheduled = engine(dataclasses.replace(TINY, speculation=speculation, schedule=MIXED))
    for at_once in (10, 1):
        drafted = run_all(scheduled, prompts, params, at_once=at_once)
        assert [(r.ids, r.text) for r in drafted] == [(r.ids, r.text) for r in plain]
    stats = scheduled.stats().speculation
    assert 0 < stats.drafts < stats.steps, "the schedule never switched: the test shows nothing"
    assert stats.accepted_tokens > 10, "too little was accepted: the test shows little"


def test_eagle3_drafts_exactly_the_scheduled_depth_at_each_load(tiny_llama_dir: Callable[..., Path]) -> None:
    model = load_model(str(tiny_llama_dir()))
    weights = predictable_weights(model)
    config = dataclasses.replace(TINY, speculation=CHAIN3, schedule=BY_LOAD)
    engine = Engine(model.config, model.tokenizer, weights, config, None, knowing_drafter(model.config, weights))
    for load, depth in ((1, 3), (2, 3), (3, 1), (4, 1), (5, 1), (6, 1), (7, 0), (9, 0), (2, 3)):
        for index in range(load):
            engine.add_request(f"{load}-{index}", [5, 9, 11 + index], dataclasses.replace(GREEDY, max_tokens=30))
        engine.step()  # prefill: nothing decodes yet
        before = engine.stats().speculation
        for _ in range(4):
            assert all(output.finish_reason is None for output in engine.step())
        after = engine.stats().speculation
        assert after.drafts - before.drafts == (4 * load if depth else 0)
        assert after.draft_tokens - before.draft_tokens == 4 * load * depth
        for index in range(load):
            engine.abort(f"{load}-{index}")
    engine.check()
