"""Exactness on the real model in float32: speculation off, chain, tree and switching give the same tokens.

The quick run takes a sample of the prompts; `pytest -m slow` takes 200 (tens of minutes on 2 cores).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from eagle3_tools import drafter_config, random_drafter
from engine_tools import ModeController, run_all

from breakeven.engine.config import EngineConfig
from breakeven.engine.engine import Engine
from breakeven.engine.gumbel import uniform
from breakeven.engine.models.drafter import DrafterCheckpoint
from breakeven.engine.models.drafter_load import default_drafter, load_drafter
from breakeven.engine.models.load import LoadedModel
from breakeven.engine.request import SamplingParams
from breakeven.engine.sampling import RowSpec, build_batch, profile, unique_tokens
from breakeven.engine.sampling_batch import Draw

SUITES = Path(__file__).parents[2] / "src/breakeven/lab/workload/suites"
NEAR_TIE = 1e-4  # two best scores closer than this may swap with the order of a floating-point sum
TOKENS = 20
LONGEST = 120  # prompt tokens: several must share the tight engine's few pages


def prompts_of(model: LoadedModel, count: int) -> list[list[int]]:
    """Short chat prompts of all domains in turn, as the server would render them."""
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(SUITES.glob("*.jsonl"))]
    mixed = [row for rows in itertools.zip_longest(*files) for row in rows if row is not None]
    render = model.tokenizer.render_chat
    encoded = (model.tokenizer.encode(render(row["messages"]), add_special_tokens=False) for row in mixed)
    chosen = list(itertools.islice((ids for ids in encoded if len(ids) <= LONGEST), count))
    assert len(chosen) == count
    return chosen


def params_of(kind: str, count: int) -> list[SamplingParams]:
    if kind == "greedy":
        return [SamplingParams(temperature=0, max_tokens=TOKENS)] * count
    base = SamplingParams(
        temperature=0.8, top_p=0.9, presence_penalty=0.2, frequency_penalty=0.2, repetition_penalty=1.1
    )
    return [dataclasses.replace(base, max_tokens=TOKENS, seed=seed) for seed in range(count)]


def drafter_of(model: LoadedModel) -> DrafterCheckpoint:
    """The drafter in the box; where there is none, one of random weights."""
    directory = default_drafter("smollm2-135m")
    if directory is None:
        layers = model.config.num_layers
        return random_drafter(drafter_config(model.config, (2, layers // 2, layers - 3), draft_vocab_size=8192))
    loaded = load_drafter(directory, model.config)
    return DrafterCheckpoint(loaded.config, loaded.weights(torch.float32))


class Trial:
    """Two engines on the same weights: a roomy one, and one that chunks prompts and pre-empts."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        weights = model.weights(torch.float32)
        roomy = EngineConfig(dtype="float32", kv_cache_tokens=65_536, max_running_requests=24, debug_checks=True)
        tight = dataclasses.replace(roomy, page_size=4, kv_cache_tokens=480, prefill_chunk=96, max_running_requests=12)
        self.controller = ModeController(eagle3=True)
        drafter = drafter_of(model)
        self.roomy = Engine(model.config, model.tokenizer, weights, roomy, self.controller, drafter)
        self.tight = Engine(model.config, model.tokenizer, weights, tight, self.controller, drafter)
        self.flips = 0

    def compare(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        expected: Sequence[list[int]],
        actual: Sequence[list[int]],
    ) -> None:
        """Equal, or first different at a near tie; those are counted."""
        for prompt, param, one, other in zip(prompts, params, expected, actual, strict=True):
            if one != other:
                place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
                gap = self.gap(prompt, one[:place], param, (one[place], other[place]))
                assert gap < NEAR_TIE, f"tokens differ at {place} though the scores are {gap} apart"
                self.flips += 1

    def gap(self, prompt: list[int], output: list[int], params: SamplingParams, pair: tuple[int, int]) -> float:
        """Difference of the two tokens' edited logits (noise added where sampled) after prompt and output."""
        reference = transformers.AutoModelForCausalLM.from_pretrained(self.model.directory, dtype=torch.float32)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, -1:].float()
        made = profile(params)
        if made.draw is Draw.GREEDY and not made.penalised:
            return abs(float(logits[0, pair[0]] - logits[0, pair[1]]))
        spec = RowSpec(
            made, params.seed or 0, len(prompt) + len(output), Counter(output), unique_tokens(prompt), (), len(output)
        )
        block = build_batch([spec], logits.shape[1], self.model.tokenizer.eos_token_ids).blocks[0]
        logits = logits.clone()
        if block.edits is not None:
            block.edits.apply_(logits)
        scores = logits.double()
        if block.keys is not None and block.temperature is not None:
            noise = -torch.log(-torch.log(uniform(block.keys, torch.arange(logits.shape[1]))))
            scores = scores / block.temperature + noise
        return abs(float(scores[0, pair[0]] - scores[0, pair[1]]))


@pytest.fixture(scope="module")
def trial(smol: LoadedModel) -> Trial:
    return Trial(smol)


def check_exactness(trial: Trial, kind: str, count: int, alone: int) -> None:
    prompts, params = prompts_of(trial.model, count), params_of(kind, count)
    trial.flips = 0
    trial.controller.mode = "off"
    expected = [r.ids for r in run_all(trial.roomy, prompts, params)]
    before = trial.tight.stats().preemptions
    runs = 0
    for mode in ("off", "chain", "tree", "eagle3 chain", "eagle3 tree", "switching"):
        trial.controller.mode = mode
        crowded = run_all(trial.tight, prompts, params)
        trial.compare(prompts, params, expected, [r.ids for r in crowded])
        single = run_all(trial.roomy, prompts[:alone], params[:alone], at_once=1)
        trial.compare(prompts[:alone], params[:alone], expected[:alone], [r.ids for r in single])
        runs += count + alone
    assert trial.tight.stats().preemptions > before, "nothing was pre-empted: the test shows less than it says"
    assert trial.tight.stats().speculation.accepted_tokens > 0
    print(f"{kind}: {runs} sequences compared, {trial.flips} flips at near ties")
    assert trial.flips <= max(1, runs // 200)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_do_not_depend_on_speculation_quick(trial: Trial, kind: str) -> None:
    check_exactness(trial, kind, count=12, alone=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_do_not_depend_on_speculation_200_prompts(trial: Trial, kind: str) -> None:
    check_exactness(trial, kind, count=200, alone=40)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_greedy_equals_transformers(trial: Trial, count: int) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(trial.model.directory, dtype=torch.float32)
    prompts, params = prompts_of(trial.model, count), params_of("greedy", count)
    trial.controller.mode = "off"
    trial.flips = 0
    ours = [r.ids for r in run_all(trial.roomy, prompts, params)]
    theirs = []
    for prompt in prompts:
        output = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=TOKENS
        )
        theirs.append(output[0, len(prompt) :].tolist())
    trial.compare(prompts, params, theirs, ours)
    print(f"{count} prompts against transformers, {trial.flips} flips at near ties")
    assert trial.flips <= max(1, count // 200)
