"""What EAGLE-3 drafts, against a slow oracle that knows no cache, pages, slots or batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from eagle3_tools import (
    CHAIN3,
    DEEP_TREE,
    TREE,
    DraftLog,
    Oracle,
    ShapeController,
    drafter_config,
    knowing_drafter,
    predictable_weights,
    random_drafter,
    tiny_engine,
)
from engine_tools import GREEDY, TIGHT, TINY, run_all

from breakeven.engine.config import SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter import DrafterCheckpoint
from breakeven.engine.models.load import LoadedModel, load_model
from breakeven.engine.tree import DraftTree

VARIANTS: dict[str, dict[str, int | bool]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norm_output": {"norm_output": True},
    "own width": {"hidden_size": 48},
    "one head each": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
}


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_llama_dir(num_hidden_layers=4)))


def oracle_of(model: LoadedModel, checkpoint: DrafterCheckpoint) -> Oracle:
    """Its features are the hidden states that transformers reports."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)

    @cache
    def states(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            hidden = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[boundary][0] for boundary in checkpoint.config.tap_boundaries], dim=1)

    embedding = model.weights(torch.float32)["model.embed_tokens.weight"]
    return Oracle(checkpoint, model.config, embedding, lambda tokens: states(tuple(tokens)))


def some_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def run_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prompts: Sequence[Sequence[int]], max_tokens: int = 12
) -> DraftLog:
    log = DraftLog()
    with monkeypatch.context() as patch:
        log.watch(patch)
        run_all(engine, prompts, [dataclasses.replace(GREEDY, max_tokens=max_tokens)] * len(prompts))
    assert log.drafts, "nothing was drafted"
    return log


def assert_equals_oracle(log: DraftLog, oracle: Oracle, shape: SpeculationConfig) -> None:
    @cache
    def expected(tokens: tuple[int, ...]) -> DraftTree:
        return oracle.chain(tokens, shape.num_steps) if shape.eagle_topk == 1 else oracle.tree(tokens, shape)

    for _, tokens, max_depth, tree in log.drafts:
        wanted = expected(tokens).limit(max_depth=max_depth) if max_depth >= 1 else None
        assert tree == wanted, f"after {len(tokens)} tokens"


@pytest.mark.parametrize("shape", [CHAIN3, TREE, DEEP_TREE], ids=["chain", "tree", "deep tree"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_what_the_formulas_say(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, variant: str, shape: SpeculationConfig
) -> None:
    checkpoint = random_drafter(drafter_config(model.config, (1, 2, 3), **VARIANTS[variant]))
    engine = tiny_engine(model, checkpoint, TINY, ShapeController(lambda step: shape))
    log = run_logged(engine, monkeypatch, some_prompts(4, 20), max_tokens=6)
    assert_equals_oracle(log, oracle_of(model, checkpoint), shape)


@pytest.mark.parametrize("shape", [CHAIN3, DEEP_TREE], ids=["chain", "deep tree"])
def test_drafts_are_right_after_chunked_prefill_preemption_and_prefix_hits(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, shape: SpeculationConfig
) -> None:
    checkpoint = random_drafter(drafter_config(model.config, (1, 2, 3)))
    tight = dataclasses.replace(TIGHT, kv_cache_tokens=96)
    engine = tiny_engine(model, checkpoint, tight, ShapeController(lambda step: shape))
    common = some_prompts(1, 40, seed=5)[0] * 3
    prompts = [common[:length] + tail for length, tail in zip(range(6, 30, 2), some_prompts(12, 9), strict=True)]
    prompts += [common[:24], common[:25]]  # nothing but the prefix: the hit ends right before the last token
    log = run_logged(engine, monkeypatch, prompts, max_tokens=20)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    engine.reset_prefix_cache()
    log.drafts += run_logged(engine, monkeypatch, prompts[-4:]).drafts
    assert_equals_oracle(log, oracle_of(model, checkpoint), shape)


def test_an_empty_tail_of_context_is_no_bar(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of one token, and pages of one token."""
    checkpoint = random_drafter(drafter_config(model.config, (1, 2, 3)))
    config = dataclasses.replace(TINY, page_size=1, kv_cache_tokens=256)
    engine = tiny_engine(model, checkpoint, config, ShapeController(lambda step: DEEP_TREE if step % 2 else None))
    log = run_logged(engine, monkeypatch, [[7], [9, 9], [7], [9, 9, 3]])
    assert_equals_oracle(log, oracle_of(model, checkpoint), DEEP_TREE)


def test_a_tree_of_top_one_is_the_chain(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from breakeven.engine.proposers import eagle3

    checkpoint = random_drafter(drafter_config(model.config, (1, 2, 3)))
    engine = tiny_engine(model, checkpoint, TINY, ShapeController(lambda step: CHAIN3))
    chains = run_logged(engine, monkeypatch, some_prompts(5, 20))
    with monkeypatch.context() as patch:
        patch.setattr(eagle3.Eagle3Proposer, "_draft", _draft_as_tree)
        trees = run_logged(engine, monkeypatch, some_prompts(5, 20))
    assert trees.drafts == chains.drafts


def _draft_as_tree(proposer, contexts):  # type: ignore[no-untyped-def]
    from breakeven.engine.proposers import eagle3

    with torch.inference_mode():
        round_ = eagle3._Round(proposer._drafter, proposer._store, contexts, proposer._levels, 1)
        return eagle3._tree(round_, proposer._drafter, proposer._levels, 1, proposer._max_nodes)


def test_off_for_any_number_of_steps_then_on_drafts_as_if_always_on(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = random_drafter(drafter_config(model.config, (1, 2, 3)))
    controller = ShapeController(lambda step: DEEP_TREE)
    engine = tiny_engine(model, checkpoint, TINY, controller)
    prompts = some_prompts(3, 12, seed=3)
    always = run_logged(engine, monkeypatch, prompts, max_tokens=48).by_tokens()
    for off in range(1, 41):
        engine.reset_prefix_cache()
        controller.restart(lambda step, off=off: DEEP_TREE if not 1 <= step < 1 + off else None)  # type: ignore[misc]
        drafts = run_logged(engine, monkeypatch, prompts, max_tokens=off + 5).drafts
        compared = 0
        for _, tokens, max_depth, tree in drafts:
            if tree is not None and tokens in always:
                expected = always[tokens]
                assert expected is not None
                assert tree == expected.limit(max_depth=max_depth), f"off for {off} steps, {len(tokens)} tokens"
                compared += 1
        assert compared >= 3


def test_accepted_runs_and_off_phases_leave_the_drafts_right(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a drafter that is often right: features come from accepted rows of trees, and pages fill within runs."""
    weights = predictable_weights(model)
    checkpoint = knowing_drafter(model.config, weights)
    # Attention that matters, so that a wrong or missing KV row would be seen in the drafts.
    mixed = dict(checkpoint.weights)
    mixed["midlayer.self_attn.o_proj.weight"] = 0.05 * torch.randn(
        mixed["midlayer.self_attn.o_proj.weight"].shape, generator=torch.Generator().manual_seed(1)
    )
    checkpoint = dataclasses.replace(checkpoint, weights=mixed)
    controller = ShapeController(lambda step: DEEP_TREE if step % 7 < 4 else None)
    engine = tiny_engine(model, checkpoint, TINY, controller, weights)
    log = run_logged(engine, monkeypatch, some_prompts(6, 20), max_tokens=30)
    assert engine.stats().speculation.accepted_tokens > 20
    # The reference model has other weights than this engine: the features come from a plain engine's own taps.
    oracle = Oracle(checkpoint, model.config, weights["model.embed_tokens.weight"], _features_of(model, weights))
    assert_equals_oracle(log, oracle, DEEP_TREE)


def _features_of(model: LoadedModel, weights: dict[str, torch.Tensor]) -> Callable[[Sequence[int]], torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    reference.load_state_dict(weights)

    @cache
    def states(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            hidden = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[boundary][0] for boundary in (0, 1, 2)], dim=1)

    return lambda tokens: states(tuple(tokens))
