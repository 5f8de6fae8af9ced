"""EAGLE-3 in the whole engine: the same tokens as without, in every shape and through every interruption."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eagle3_tools import (
    CHAIN3,
    DEEP_TREE,
    TREE,
    DraftLog,
    ShapeController,
    drafter_config,
    knowing_drafter,
    predictable_weights,
    random_drafter,
    tiny_engine,
)
from engine_tools import CHAIN as NGRAM
from engine_tools import GREEDY, TIGHT, TINY, Finished, run_all, sampled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakeven.engine.config import ConfigError, EngineConfig, SpeculationConfig
from breakeven.engine.drafter_check import check_drafter
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter import Drafter, DrafterCheckpoint
from breakeven.engine.models.drafter_save import save_drafter
from breakeven.engine.models.load import LoadedModel, load_model
from breakeven.engine.request import SamplingParams

SMALLER = dataclasses.replace(TIGHT, kv_cache_tokens=128)
SHAPES: dict[str, list[SpeculationConfig | None]] = {
    "off": [None],
    "chain": [CHAIN3],
    "tree": [TREE],
    "deep tree": [DEEP_TREE],
    "switching": [None, CHAIN3, TREE, DEEP_TREE, NGRAM],
}


def use(controller: ShapeController, name: str) -> None:
    generator = random.Random(1)
    controller.restart(lambda step: generator.choice(SHAPES[name]))


def some_prompts(count: int, longest: int = 40) -> list[list[int]]:
    """Half of them begin alike, so that prefixes are found."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randint(3, 300, (longest,), generator=generator).tolist()
    prompts = []
    for index in range(count):
        length = int(torch.randint(1, longest, (1,), generator=generator))
        own = torch.randint(3, 300, (length,), generator=generator).tolist()
        prompts.append(common[: length // 2] + own[length // 2 :] if index % 2 else own)
    return prompts


Rig = tuple[Engine, ShapeController]


def rig(model: LoadedModel, config: EngineConfig, *, knowing: bool) -> Rig:
    controller = ShapeController(lambda step: None)
    if not knowing:
        return tiny_engine(model, random_drafter(drafter_config(model.config)), config, controller), controller
    weights = predictable_weights(model)
    return tiny_engine(model, knowing_drafter(model.config, weights), config, controller, weights), controller


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_llama_dir()))


@pytest.fixture(scope="module")
def knowing(model: LoadedModel) -> Rig:
    return rig(model, TINY, knowing=True)


@pytest.fixture(scope="module")
def knowing_tight(model: LoadedModel) -> Rig:
    return rig(model, SMALLER, knowing=True)


def tokens_of(results: list[Finished]) -> list[tuple[list[int], str]]:
    return [(result.ids, result.text) for result in results]


@pytest.mark.parametrize("name", ["chain", "tree", "deep tree", "switching"])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_do_not_depend_on_eagle3(knowing: Rig, name: str, kind: str) -> None:
    engine, controller = knowing
    prompts = some_prompts(30)
    params = [GREEDY if kind == "greedy" else sampled(seed) for seed in range(len(prompts))]
    use(controller, "off")
    plain = run_all(engine, prompts, params)
    engine.reset_prefix_cache()
    use(controller, name)
    before = engine.stats().speculation
    drafted = run_all(engine, prompts, params)
    after = engine.stats().speculation
    assert tokens_of(drafted) == tokens_of(plain)
    accepted, drafts = after.accepted_tokens - before.accepted_tokens, after.drafts - before.drafts
    assert accepted > drafts / (3 if kind == "greedy" else 10), "too little was accepted: the test shows little"
    assert after.accepted_per_position[1] > 10, "no runs were accepted: the test shows little"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_do_not_depend_on_a_drafter_that_is_never_right(request: pytest.FixtureRequest, family: str) -> None:
    engine, controller = rig(load_model(str(request.getfixturevalue(f"tiny_{family}_dir")())), TINY, knowing=False)
    prompts = some_prompts(16)
    params = [sampled(seed) if seed % 2 else GREEDY for seed in range(len(prompts))]
    plain = tokens_of(run_all(engine, prompts, params))
    for name in ("chain", "tree", "switching"):
        use(controller, name)
        assert tokens_of(run_all(engine, prompts, params)) == plain


@pytest.mark.parametrize("name", ["off", "chain", "tree", "deep tree", "switching"])
def test_tokens_do_not_depend_on_batch_chunks_prefix_hits_or_preemption(
    knowing: Rig, knowing_tight: Rig, name: str
) -> None:
    prompts = some_prompts(24)
    params = [sampled(seed) if seed % 2 else GREEDY for seed in range(len(prompts))]
    engine, controller = knowing
    use(controller, "off")
    alone = run_all(engine, prompts, params, at_once=1)
    engine, controller = knowing_tight
    use(controller, name)
    before = engine.stats()
    crowded = run_all(engine, prompts, params)
    after = engine.stats()
    assert after.preemptions > before.preemptions, "the pool was not tight: the test shows nothing"
    assert after.prefix_hit_tokens > before.prefix_hit_tokens
    assert [r.ids for r in crowded] == [r.ids for r in alone]


@pytest.mark.parametrize("name", ["chain", "deep tree", "switching"])
def test_a_stop_at_any_place_of_an_accepted_run_ends_the_request_there(knowing: Rig, name: str) -> None:
    engine, controller = knowing
    prompt = [11, 12, 13, 14, 200]
    use(controller, "off")
    [free] = run_all(engine, [prompt], [GREEDY])
    for length in range(1, 18):
        by_length = dataclasses.replace(GREEDY, max_tokens=length)
        by_id = dataclasses.replace(GREEDY, stop_token_ids=(free.ids[length - 1],))
        outcomes = []
        for current in ("off", name):
            use(controller, current)
            outcomes.append(run_all(engine, [prompt] * 2, [by_length, by_id]))
        for plain, drafted in zip(*outcomes, strict=True):
            assert plain.last is not None
            assert drafted.last is not None
            assert drafted.ids == plain.ids
            assert (drafted.text, drafted.last.finish_reason) == (plain.text, plain.last.finish_reason)
            assert drafted.last.completion_tokens == len(drafted.ids)
        assert outcomes[1][0].ids == free.ids[:length]


def test_an_end_of_sequence_inside_an_accepted_run_ends_the_request(model: LoadedModel) -> None:
    """The model's own EOS, drafted and accepted, with tokens after it in the same run."""
    engine, controller = rig(model, TINY, knowing=True)
    [free] = run_all(engine, [[11, 12, 13]], [GREEDY])
    for place in range(2, 12):
        if free.ids[place] in free.ids[:place]:
            continue
        engine.tokenizer = _WithEos(model, free.ids[place])  # type: ignore[assignment]
        outcomes = []
        for current in ("off", "chain", "deep tree"):
            use(controller, current)
            [result] = run_all(engine, [[11, 12, 13]], [dataclasses.replace(GREEDY, ignore_eos=False)])
            assert result.last is not None
            outcomes.append((result.ids, result.text, result.last.finish_reason))
        assert outcomes[0][2] == "stop"
        assert outcomes.count(outcomes[0]) == 3


class _WithEos:
    """The model's tokenizer with another end of sequence."""

    def __init__(self, model: LoadedModel, token: int) -> None:
        self._tokenizer = model.tokenizer
        self.eos_token_ids = (token,)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("name", ["chain", "deep tree"])
def test_the_context_limit_is_reached_mid_round_and_never_passed(model: LoadedModel, name: str) -> None:
    short = load_model_with_limit(model, 40)
    engine, controller = rig(short, TINY, knowing=True)
    prompts = [list(range(3, 3 + length)) for length in range(20, 39)]
    params = [SamplingParams(temperature=0, ignore_eos=True)] * len(prompts)
    plain = tokens_of(run_all(engine, prompts, params))
    use(controller, name)
    assert tokens_of(run_all(engine, prompts, params)) == plain
    assert all(len(prompt) + len(ids) == 40 for prompt, (ids, _) in zip(prompts, plain, strict=True))


def load_model_with_limit(model: LoadedModel, limit: int) -> LoadedModel:
    return dataclasses.replace(model, config=dataclasses.replace(model.config, max_position=limit))


def test_counters_agree_with_tokens_and_steps(knowing: Rig) -> None:
    engine, controller = knowing
    for name in ("chain", "deep tree", "switching"):
        use(controller, name)
        before = engine.stats().speculation
        total = 0
        for result in run_all(engine, some_prompts(20), [GREEDY] * 20):
            assert result.last is not None
            stats = result.last.speculation
            assert stats is not None
            assert stats.steps == result.steps
            assert stats.steps + stats.accepted_tokens == len(result.ids)
            assert sum(stats.accepted_per_position) == stats.accepted_tokens
            assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
            assert stats.drafts <= stats.steps
            total += stats.accepted_tokens
        assert engine.stats().speculation.accepted_tokens - before.accepted_tokens == total > 0


def test_drafts_do_not_reach_beyond_what_may_be_emitted(knowing: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, controller = knowing
    use(controller, "deep tree")
    log = DraftLog()
    log.watch(monkeypatch)
    run_all(engine, some_prompts(6), [dataclasses.replace(GREEDY, max_tokens=5)] * 6)
    assert {max_depth for _, _, max_depth, _ in log.drafts} >= {0, 1, 3}
    for _, _, max_depth, tree in log.drafts:
        assert (tree is None) if max_depth < 1 else (tree is not None and tree.max_depth <= max_depth)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_aborts_arrivals_and_cache_resets_at_any_time_leak_nothing(knowing_tight: Rig, seed: int) -> None:
    engine, controller = knowing_tight
    use(controller, "switching")
    generator = random.Random(seed)
    prompts = some_prompts(16)
    alive: set[str] = set()
    for index in range(60):
        if index < 16:
            engine.add_request(f"{seed}-{index}", prompts[index], sampled(index))
            alive.add(f"{seed}-{index}")
        if alive and generator.random() < 0.15:
            engine.abort(generator.choice(sorted(alive)))
        if generator.random() < 0.05:
            engine.reset_prefix_cache()
        engine.step()
    while engine.has_work():
        engine.step()
    engine.check()
    assert engine.stats().kv_tokens_used == 0
    assert engine._features is not None
    assert not engine._features._requests, "the drafter still remembers requests that are gone"


def test_without_a_drafter_a_controller_that_asks_for_eagle3_is_told(model: LoadedModel) -> None:
    engine = tiny_engine(model, None, TINY, ShapeController(lambda step: CHAIN3))
    engine.add_request("x", [5, 6, 7], GREEDY)
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        engine.step()


def test_a_bfloat16_engine_drafts(model: LoadedModel) -> None:
    config = dataclasses.replace(TINY, dtype="bfloat16", speculation=TREE)
    engine = Engine(
        model.config,
        model.tokenizer,
        model.weights(torch.bfloat16),
        config,
        drafter=random_drafter(drafter_config(model.config)),
    )
    assert len(run_all(engine, [[5, 6, 7]], [GREEDY])[0].ids) == 24
    assert engine.stats().speculation.drafts > 20


def _broken(checkpoint: DrafterCheckpoint, **weights: torch.Tensor | None) -> DrafterCheckpoint:
    named = {name.replace("__", "."): tensor for name, tensor in weights.items()}
    merged = {**checkpoint.weights, **named}
    return dataclasses.replace(checkpoint, weights={k: v for k, v in merged.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "weights", "words"),
    [
        ({}, {"fc__weight": None}, "fc.weight"),
        ({}, {"d2t": None}, "d2t"),
        ({}, {"d2t": torch.full((200,), 300)}, "d2t"),
        ({}, {"d2t": -torch.arange(200)}, "distinct"),
        ({}, {"d2t": torch.zeros(7, dtype=torch.int64)}, "d2t"),
        ({}, {"lm_head__weight": None}, "lm_head.weight"),
        ({"hidden_size": 48}, {"embed_tokens__weight": None}, "embed_tokens.weight"),
        ({"target_hidden_size": 32}, {}, "hidden_size"),
        ({"vocab_size": 400}, {}, "vocab_size"),
        ({"tap_boundaries": (0, 1, 3)}, {}, "layers"),
    ],
)
def test_a_drafter_that_cannot_belong_to_the_target_is_refused(
    model: LoadedModel, changes: dict[str, object], weights: dict[str, torch.Tensor | None], words: str
) -> None:
    config = dataclasses.replace(drafter_config(model.config), **changes)  # type: ignore[arg-type]
    checkpoint = _broken(random_drafter(config), **weights)
    with pytest.raises(ConfigError, match=words):
        Drafter(
            config,
            model.config,
            checkpoint.weights,
            model.weights(torch.float32)["model.embed_tokens.weight"],
            torch.device("cpu"),
            model.weights(torch.float32)["lm_head.weight"],
        )


def test_a_drafter_is_loaded_from_its_directory_and_self_tested(model: LoadedModel, tmp_path: Path) -> None:
    weights = predictable_weights(model)
    checkpoint = knowing_drafter(model.config, weights)
    save_drafter(tmp_path, checkpoint.config, model.config, checkpoint.weights)
    speculation = dataclasses.replace(CHAIN3, draft_model_path=str(tmp_path))
    config = dataclasses.replace(TINY, speculation=speculation)
    engine = Engine.from_pretrained(str(model.directory), config)
    [result] = run_all(engine, [[11, 12, 13]], [GREEDY])
    given_directly = Engine(model.config, model.tokenizer, model.weights(torch.float32), config, drafter=checkpoint)
    [expected] = run_all(given_directly, [[11, 12, 13]], [GREEDY])
    assert result.ids == expected.ids
    assert result.last is not None
    assert expected.last is not None
    assert result.last.speculation == expected.last.speculation
    assert check_drafter(engine).drafts > 50


def test_without_a_drafter_in_the_box_one_must_be_named(model: LoadedModel) -> None:
    config = dataclasses.replace(TINY, speculation=SpeculationConfig("eagle3"))
    with pytest.raises(ConfigError, match=r"eagle3.*no drafter in the box.*--speculative-draft-model-path"):
        Engine.from_pretrained(str(model.directory), config)
