"""The engine as a whole, on small random models: exactness, stops, pre-emption, prefix reuse, aborts, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_tools import CHAIN, GREEDY, TIGHT, TINY, ModeController, run_all, sampled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakeven.engine.config import ConfigError, EngineConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.load import load_model
from breakeven.engine.request import ContextLengthError, RequestError, SamplingParams


def make(directory: Path, config: EngineConfig = TINY, seed: int = 0) -> tuple[Engine, ModeController]:
    controller = ModeController(seed)
    return Engine.from_pretrained(str(directory), config, controller), controller


@pytest.fixture(scope="module")
def tiny(tiny_llama_dir: Callable[..., Path]) -> tuple[Engine, ModeController]:
    return make(tiny_llama_dir())


@pytest.fixture(scope="module")
def tight(tiny_llama_dir: Callable[..., Path]) -> tuple[Engine, ModeController]:
    return make(tiny_llama_dir(), TIGHT)


def some_prompts(count: int, longest: int = 40) -> list[list[int]]:
    """Prompts that repeat themselves, so that n-grams are found."""
    generator = torch.Generator().manual_seed(count)
    prompts = []
    for _ in range(count):
        length = int(torch.randint(1, longest, (1,), generator=generator))
        motif = torch.randint(3, 300, (int(torch.randint(1, 6, (1,), generator=generator)),), generator=generator)
        prompts.append((motif.tolist() * length)[:length])
    return prompts


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("mode", ["chain", "tree", "switching"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_do_not_depend_on_speculation(request: pytest.FixtureRequest, family: str, mode: str, kind: str) -> None:
    directory = request.getfixturevalue(f"tiny_{family}_dir")()
    engine, controller = make(directory)
    prompts = some_prompts(40)
    params = [GREEDY if kind == "greedy" else sampled(seed) for seed in range(len(prompts))]
    plain = run_all(engine, prompts, params)
    controller.mode = mode
    drafted = run_all(engine, prompts, params)
    assert [r.ids for r in drafted] == [r.ids for r in plain]
    assert [r.text for r in drafted] == [r.text for r in plain]
    if kind == "greedy":
        assert engine.stats().speculation.accepted_tokens > 0, "nothing was accepted: the test shows nothing"


@pytest.mark.parametrize("mode", ["off", "chain", "tree", "switching"])
def test_tokens_do_not_depend_on_batch_chunks_or_preemption(
    tiny: tuple[Engine, ModeController], tight: tuple[Engine, ModeController], mode: str
) -> None:
    prompts = some_prompts(30)
    params = [sampled(seed) if seed % 2 else GREEDY for seed in range(len(prompts))]
    engine, controller = tiny
    controller.mode = "off"
    alone = run_all(engine, prompts, params, at_once=1)
    engine, controller = tight
    controller.mode = mode
    before = engine.stats().preemptions
    crowded = run_all(engine, prompts, params)
    assert engine.stats().preemptions > before, "the pool was not tight: the test shows nothing"
    assert [r.ids for r in crowded] == [r.ids for r in alone]


def test_greedy_equals_transformers(request: pytest.FixtureRequest) -> None:
    transformers = pytest.importorskip("transformers")
    for family in ("llama", "qwen2", "qwen3"):
        directory = request.getfixturevalue(f"tiny_{family}_dir")()
        engine, _ = make(directory)
        reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        prompts = some_prompts(10)
        ours = run_all(engine, prompts, [GREEDY] * len(prompts))
        for prompt, result in zip(prompts, ours, strict=True):
            theirs = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None
            )
            assert result.ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["chain", "tree", "switching"])
def test_a_stop_at_any_place_of_an_accepted_run_ends_the_request_there(
    tiny: tuple[Engine, ModeController], mode: str
) -> None:
    engine, controller = tiny
    prompt = [11, 12, 13, 14] * 5
    controller.mode = "off"
    [free] = run_all(engine, [prompt], [GREEDY])
    for length in range(1, 20):
        by_length = dataclasses.replace(GREEDY, max_tokens=length)
        by_id = dataclasses.replace(GREEDY, stop_token_ids=(free.ids[length - 1],))
        outcomes = []
        for current in ("off", mode):
            controller.mode = current
            outcomes.append(run_all(engine, [prompt] * 2, [by_length, by_id]))
        for plain, drafted in zip(*outcomes, strict=True):
            assert plain.last is not None
            assert drafted.last is not None
            assert drafted.ids == plain.ids
            assert (drafted.text, drafted.last.finish_reason) == (plain.text, plain.last.finish_reason)
            assert drafted.last.completion_tokens == len(drafted.ids)
        assert outcomes[1][0].ids == free.ids[:length]


def test_counters_agree_with_tokens_and_steps(tiny: tuple[Engine, ModeController]) -> None:
    engine, controller = tiny
    controller.mode = "tree"
    for result in run_all(engine, some_prompts(20), [GREEDY] * 20):
        assert result.last is not None
        stats = result.last.speculation
        assert stats is not None
        assert stats.steps == result.steps
        assert stats.steps + stats.accepted_tokens == len(result.ids)
        assert sum(stats.accepted_per_position) == stats.accepted_tokens
        assert stats.accepted_tokens <= stats.draft_tokens


def test_logprobs_come_from_the_row_that_emitted_the_token(tiny: tuple[Engine, ModeController]) -> None:
    engine, controller = tiny
    prompts = some_prompts(8)
    params = [dataclasses.replace(GREEDY, logprobs=3)] * 8
    controller.mode = "off"
    plain = run_all(engine, prompts, params)
    controller.mode = "tree"
    for result, expected in zip(run_all(engine, prompts, params), plain, strict=True):
        for token, reference in zip(result.tokens, expected.tokens, strict=True):
            assert token.logprob == pytest.approx(reference.logprob, abs=1e-4)
            assert token.top[0][0] == token.token_id
            assert len(token.top) == 3


def test_the_context_limit_ends_a_request_also_in_the_middle_of_a_round(tiny_llama_dir: Callable[..., Path]) -> None:
    engine, controller = make(tiny_llama_dir(), dataclasses.replace(TINY, max_context=33))
    for mode in ("off", "chain", "tree"):
        controller.mode = mode
        for length in range(20, 33):
            params = SamplingParams(temperature=0, ignore_eos=True)
            [result] = run_all(engine, [([9, 8, 7] * 20)[:length]], [params])
            assert result.last is not None
            assert result.last.finish_reason == "length"
            assert len(result.ids) == 33 - length


def test_a_prefix_is_reused_and_can_be_forgotten(tiny_llama_dir: Callable[..., Path]) -> None:
    engine, _ = make(tiny_llama_dir())
    prompt = list(range(3, 40))
    [cold] = run_all(engine, [prompt], [GREEDY])
    [warm] = run_all(engine, [prompt], [GREEDY])
    engine.reset_prefix_cache()
    [reset] = run_all(engine, [prompt], [GREEDY])
    assert cold.last is not None
    assert warm.last is not None
    assert reset.last is not None
    assert (cold.last.cached_tokens, warm.last.cached_tokens, reset.last.cached_tokens) == (0, 36, 0)
    assert cold.ids == warm.ids == reset.ids


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(abort_at=st.dictionaries(st.integers(0, 7), st.integers(0, 40), max_size=6))
def test_aborts_at_any_time_leak_nothing_and_disturb_nobody(
    tight: tuple[Engine, ModeController], abort_at: dict[int, int]
) -> None:
    engine, controller = tight
    controller.mode = "off"
    prompts = some_prompts(8, longest=20)
    expected = [r.ids for r in run_all(engine, prompts, [GREEDY] * 8, at_once=1)]
    controller.mode = "switching"
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    got: dict[str, list[int]] = {str(index): [] for index in range(8)}
    step = 0
    while engine.has_work():
        for victim, when in abort_at.items():
            if when == step:
                engine.abort(str(victim))
                engine.check()
        for output in engine.step():
            got[output.request_id].extend(token.token_id for token in output.tokens)
        step += 1
    assert engine.stats().kv_tokens_used == 0
    for index in range(8):
        tokens = got[str(index)]
        assert tokens == expected[index][: len(tokens)]
        if index not in abort_at:
            assert tokens == expected[index]


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], GREEDY, "empty"),
        ([300], GREEDY, "outside the model's vocabulary"),
        ([-1], GREEDY, "outside the model's vocabulary"),
        ([5] * 1100, GREEDY, "maximum context length"),
        ([5] * 100, SamplingParams(max_tokens=10_000), "maximum context length"),
        ([5], SamplingParams(logit_bias={999: 1.0}), "logit_bias"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    tiny: tuple[Engine, ModeController], prompt: list[int], params: SamplingParams, words: str
) -> None:
    engine, _ = tiny
    with pytest.raises(RequestError, match=words) as refused:
        engine.add_request("x", prompt, params)
    assert isinstance(refused.value, ContextLengthError) == ("context" in words)
    assert not engine.has_work()


def test_a_configuration_that_cannot_be_served_is_refused(tiny_llama_dir: Callable[..., Path]) -> None:
    directory = str(tiny_llama_dir())
    model = load_model(directory)
    with pytest.raises(ConfigError, match=r"eagle3.*--speculative-draft-model-path"):
        Engine(
            model.config,
            model.tokenizer,
            model.weights(torch.float32),
            EngineConfig(dtype="float32", speculation=SpeculationConfig("eagle3")),
        )
    with pytest.raises(ConfigError, match="max_context"):
        Engine.from_pretrained(directory, EngineConfig(max_context=10**6))


def test_a_bfloat16_engine_serves(tiny_llama_dir: Callable[..., Path]) -> None:
    engine = Engine.from_pretrained(
        str(tiny_llama_dir()), dataclasses.replace(TINY, dtype="bfloat16", speculation=CHAIN)
    )
    results = run_all(engine, some_prompts(12), [GREEDY] * 12)
    assert all(len(result.ids) == 24 for result in results)
