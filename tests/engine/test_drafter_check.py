"""The self-test of a drafter: its figure, its warning, and that it leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from fake_engine import FakeEngine, FakeStats

from breakeven.engine.config import EngineConfig, SpeculationConfig
from breakeven.engine.drafter_check import ANSWER_TOKENS, PROMPTS, check_drafter, log_drafter_check
from breakeven.engine.engine import Engine
from breakeven.engine.models.load import load_model
from breakeven.engine.request import RequestOutput, SamplingParams, SpeculationStats


class DraftingEngine(FakeEngine):
    """Every request reports `drafts` rounds, `accepted` of them right at the first position."""

    def __init__(self, drafts: int, accepted: int, max_context: int = 4096) -> None:
        super().__init__()
        self.rounds = SpeculationStats(drafts, drafts, accepted, [accepted] if accepted else [], drafts)
        self.max_context = max_context
        self.params: list[SamplingParams] = []

    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        super().add_request(request_id, prompt_ids, params)
        self.params.append(params)

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        for output in outputs:
            if output.finish_reason is not None:
                object.__setattr__(output, "speculation", self.rounds)
        return outputs

    def reset_stats(self) -> None:
        self.totals = FakeStats()


@pytest.mark.parametrize(("accepted", "warns"), [(0, True), (2, True), (3, False), (10, False)])
def test_the_first_positions_share_is_reported_and_a_low_one_is_warned_of(accepted: int, warns: bool) -> None:
    found = check_drafter(DraftingEngine(10, accepted))
    assert (found.drafts, found.first_accepted) == (10 * len(PROMPTS), accepted * len(PROMPTS))
    assert found.first_position == pytest.approx(accepted / 10)
    assert found.generated_tokens == ANSWER_TOKENS * len(PROMPTS)
    assert (found.warning is not None) is warns
    if found.warning is not None:
        assert f"only {10 * accepted}%" in found.warning
        for cause in ("--speculative-draft-layer-ids", "norm_output", "tokenizer"):
            assert cause in found.warning


def test_the_prompts_are_answered_greedily() -> None:
    engine = DraftingEngine(10, 5)
    check_drafter(engine)
    assert {(params.temperature, params.max_tokens) for params in engine.params} == {(0.0, ANSWER_TOKENS)}


def test_the_self_test_leaves_no_counts_and_no_prefixes() -> None:
    engine = DraftingEngine(10, 5)
    check_drafter(engine)
    assert engine.totals == FakeStats()
    assert engine.resets == 1
    assert not engine.has_work()


def test_a_step_that_fails_leaves_nothing_in_flight() -> None:
    engine = DraftingEngine(10, 5)
    engine.failing_step = 2
    with pytest.raises(RuntimeError, match="a kernel fell over"):
        check_drafter(engine)
    assert not engine.has_work()


def test_a_context_too_short_for_the_prompts_gives_no_figure_and_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = log_drafter_check(DraftingEngine(10, 0, max_context=20))
    assert (found.first_position, found.warning) == (None, None)
    assert "nothing was drafted" in caplog.text


def test_figure_and_warning_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_drafter_check(DraftingEngine(10, 1))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO, logging.WARNING]
    assert "10% of first drafts accepted (6 of 60) on 6 prompts" in caplog.text


def test_a_real_engine_counts_from_nothing_after_the_self_test(tiny_llama_dir) -> None:  # type: ignore[no-untyped-def]
    model = load_model(str(tiny_llama_dir()))
    import torch

    speculation = SpeculationConfig("ngram", ngram_min=1)
    config = EngineConfig(dtype="float32", kv_cache_tokens=4096, speculation=speculation, debug_checks=True)
    engine = Engine(model.config, model.tokenizer, model.weights(torch.float32), config)
    before = engine.stats()
    found = check_drafter(engine)
    assert found.drafts > 0
    assert engine.stats() == before
