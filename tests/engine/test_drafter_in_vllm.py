"""Drafters that this project writes, in vLLM on the CPU: they load, serve, and fare there as they do here.

Needs vLLM in an environment of its own: BREAKEVEN_VLLM_PYTHON names its interpreter. BREAKEVEN_VLLM_DRAFTER names the
drafter to compare (without it: the one in the box), BREAKEVEN_VLLM_PROMPTS how many prompts (100).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_tools import config_for, random_weights
from engine_tools import run_all
from vllm_server import SpeculativeRun, vllm_server

import breakeven
from breakeven.engine.config import EngineConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter_load import default_drafter, load_drafter
from breakeven.engine.models.drafter_save import save_drafter
from breakeven.engine.models.load import LoadedModel
from breakeven.engine.request import SamplingParams

VLLM_PYTHON = os.environ.get("BREAKEVEN_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not VLLM_PYTHON, reason="BREAKEVEN_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.timeout(3600),
]
NUM_STEPS = 3


def our_run(target: Path, drafter: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> SpeculativeRun:
    """The same prompts through this engine: greedy, fp32, a chain of NUM_STEPS."""
    speculation = SpeculationConfig(
        "eagle3",
        num_steps=NUM_STEPS,
        eagle_topk=1,
        num_draft_tokens=NUM_STEPS + 1,
        draft_model_path=str(drafter),
    )
    engine = Engine.from_pretrained(str(target), EngineConfig(dtype="float32", speculation=speculation))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    results = run_all(engine, prompts, [params] * len(prompts), at_once=8)
    counts = engine.stats().speculation
    return SpeculativeRun(tuple(tuple(result.ids) for result in results), counts.drafts, counts.accepted_tokens)


def compare(target: Path, drafter: Path, prompts: Sequence[Sequence[int]], max_tokens: int, log: Path) -> None:
    """The same answers in vLLM and here, and acceptance lengths within 2% of each other.

    Both count rounds and accepted drafts. vLLM also counts drafts accepted beyond a request's end, at most NUM_STEPS
    for each request, so `max_tokens` must not be small.
    """
    ours = our_run(target, drafter, prompts, max_tokens)
    with vllm_server(VLLM_PYTHON, target, drafter, log, num_steps=NUM_STEPS) as server:
        theirs = server.run(prompts, max_tokens)
    different = [
        index for index, pair in enumerate(zip(ours.answers, theirs.answers, strict=True)) if pair[0] != pair[1]
    ]
    print(f"acceptance length: ours {ours.acceptance_length:.4f}, vLLM's {theirs.acceptance_length:.4f}")
    assert different == [], f"{len(different)} of {len(prompts)} answers differ"
    assert ours.acceptance_length == pytest.approx(theirs.acceptance_length, rel=0.02)


def suite_prompts(model: LoadedModel, count: int) -> list[list[int]]:
    """Token ids of `count` prompts from the lab's suites, in turn, in the model's chat form."""
    folder = Path(breakeven.__file__).parent / "lab" / "workload" / "suites"
    suites = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))]
    records = list(islice(chain.from_iterable(zip(*suites, strict=False)), count))
    texts = [model.tokenizer.render_chat(record["messages"]) for record in records]
    return [model.tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.mark.parametrize("format", ["official", "vllm", "speculators"])
def test_a_random_drafter_loads_and_serves_in_vllm_without_changing_the_answers(
    smol: LoadedModel, tmp_path: Path, format: Any
) -> None:
    config = config_for(smol.config, 4096)
    drafter = save_drafter(tmp_path / "drafter", config, smol.config, random_weights(config), format=format)
    assert load_drafter(drafter, smol.config).config == config
    prompts = suite_prompts(smol, 3)
    with vllm_server(VLLM_PYTHON, smol.directory, drafter, tmp_path / "log", num_steps=NUM_STEPS) as server:
        found = server.run(prompts, max_tokens=12)
    engine = Engine.from_pretrained(str(smol.directory), EngineConfig(dtype="float32"))
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    expected = tuple(tuple(result.ids) for result in run_all(engine, prompts, [greedy] * 3))
    assert found.answers == expected
    assert found.drafts > 0


def test_a_trained_drafter_fares_in_vllm_as_it_does_here(smol: LoadedModel, tmp_path: Path) -> None:
    named = os.environ.get("BREAKEVEN_VLLM_DRAFTER")
    drafter = Path(named) if named else default_drafter("smollm2-135m")
    if drafter is None:
        pytest.skip("there is no drafter in the box; BREAKEVEN_VLLM_DRAFTER names another")
    torch.set_num_threads(max(2, torch.get_num_threads()))
    prompts = suite_prompts(smol, int(os.environ.get("BREAKEVEN_VLLM_PROMPTS", "100")))
    compare(smol.directory, drafter, prompts, 128, tmp_path / "log")
