"""The fast generator gives the engine's own greedy tokens, and samples from the right distribution."""

from __future__ import annotations

import pytest
import torch
from train_tools import TINY, tiny_model

from breakeven.engine.config import EngineConfig, ModelConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.llama import LlamaModel
from breakeven.engine.models.load import LoadedModel, load_model
from breakeven.engine.request import SamplingParams
from breakeven.train.fast_generate import FastGenerator, Generated, GenerationJob
from breakeven.train.target import target_states


def jobs(config: ModelConfig, count: int, temperature: float = 0.0, max_tokens: int = 20) -> list[GenerationJob]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for key in range(count):
        size = int(torch.randint(1, 60, (1,), generator=generator))
        prompt = torch.randint(3, config.vocab_size, (size,), generator=generator).tolist()
        made.append(GenerationJob(key, tuple(prompt), temperature, 1 + (key * 7) % max_tokens))
    return made


def by_key(answers: list[Generated]) -> dict[int, Generated]:
    found = {answer.job.key: answer for answer in answers}
    assert len(found) == len(answers)
    return found


@pytest.mark.parametrize("slots,steps", [(3, 1), (5, 4), (64, 16)])
def test_greedy_answers_are_the_engines_whatever_the_slots(tiny_llama_dir, slots: int, steps: int) -> None:  # type: ignore[no-untyped-def]
    loaded: LoadedModel = load_model(str(tiny_llama_dir()))
    weights = loaded.weights(torch.float32)
    engine = Engine(loaded.config, loaded.tokenizer, weights, EngineConfig(dtype="float32", kv_cache_tokens=8192))
    work = jobs(loaded.config, 24)
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for job in work:
        engine.add_request(str(job.key), job.prompt, SamplingParams(temperature=0, max_tokens=job.max_tokens))
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    fast = FastGenerator(
        LlamaModel(loaded.config, weights, torch.device("cpu")),
        loaded.tokenizer.eos_token_ids,
        slots=slots,
        max_length=96,
        max_new_tokens=20,
        steps_per_sync=steps,
    )
    answers = by_key(list(fast.run(work)))
    assert set(answers) == set(range(24))
    for job in work:
        assert list(answers[job.key].tokens) == tokens[str(job.key)]
        assert answers[job.key].stopped == (reasons[str(job.key)] == "stop")


def test_sampled_tokens_follow_the_targets_distribution_at_the_temperature() -> None:
    model = tiny_model()
    prompt = (5, 9, 13)
    fast = FastGenerator(model, (2,), slots=200, max_length=64, max_new_tokens=2, steps_per_sync=1, seed=1)
    work = [GenerationJob(key, prompt, 0.7, 2) for key in range(4000)]
    counts = torch.zeros(TINY.vocab_size)
    for answer in fast.run(work):
        counts[answer.tokens[0]] += 1
    states = target_states(model, torch.tensor([prompt]), ())
    expected = ((states.hidden[-1] @ model.head.weight.T) / 0.7).softmax(-1) * 4000
    likely = expected > 5
    chi_square = ((counts - expected).square() / expected)[likely].sum().item()
    degrees = int(likely.sum())
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_it_stops_starting_when_told_and_can_be_used_again() -> None:
    fast = FastGenerator(tiny_model(), (2,), slots=2, max_length=96, max_new_tokens=20, steps_per_sync=2)
    left = iter([True, True, False])
    cut = list(fast.run(jobs(TINY, 30), lambda: next(left)))
    assert len(cut) < 30
    work = jobs(TINY, 5)
    assert set(by_key(list(fast.run(work)))) == set(range(5))


def test_a_job_that_fits_no_slot_is_named() -> None:
    fast = FastGenerator(tiny_model(), (2,), slots=2, max_length=96, max_new_tokens=20)
    with pytest.raises(ValueError, match="job 3: 120 prompt tokens"):
        list(fast.run([GenerationJob(3, (5,) * 120, 0.0, 20)]))


def test_taps_are_the_streams_that_transformers_calls_hidden_states(tiny_llama_dir) -> None:  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    directory = tiny_llama_dir(num_hidden_layers=4)
    loaded = load_model(str(directory))
    model = LlamaModel(loaded.config, loaded.weights(torch.float32), torch.device("cpu"))
    tokens = torch.randint(3, 200, (2, 11), generator=torch.Generator().manual_seed(0))
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        states = reference(tokens, output_hidden_states=True).hidden_states
    ours = target_states(model, tokens, (0, 2, 3))
    assert ours.taps is not None
    for index, boundary in enumerate((0, 2, 3)):
        torch.testing.assert_close(ours.taps[:, index].view(2, 11, -1), states[boundary], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.hidden.view(2, 11, -1), states[4], rtol=1e-4, atol=1e-4)
