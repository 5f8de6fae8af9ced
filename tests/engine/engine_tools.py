"""Running whole engines in tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from breakeven.engine.config import EngineConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.request import RequestOutput, SamplingParams, TokenOutput

TINY = EngineConfig(
    dtype="float32", page_size=4, kv_cache_tokens=2048, prefill_chunk=64, max_running_requests=32, debug_checks=True
)
TIGHT = dataclasses.replace(TINY, kv_cache_tokens=160, prefill_chunk=7, max_running_requests=8)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CHAIN = SpeculationConfig("ngram", num_steps=3, eagle_topk=1, num_draft_tokens=4, ngram_min=1, ngram_max=3)
TREE = SpeculationConfig("ngram", num_steps=4, eagle_topk=3, num_draft_tokens=10, ngram_min=1, ngram_max=3)
EAGLE3 = {
    "eagle3 chain": SpeculationConfig("eagle3", num_steps=3, eagle_topk=1, num_draft_tokens=4),
    "eagle3 tree": SpeculationConfig("eagle3", num_steps=2, eagle_topk=4, num_draft_tokens=16),
}


def sampled(seed: int, max_tokens: int = 24) -> SamplingParams:
    """Everything that shapes a distribution, at once."""
    return SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: 1.0},
        min_tokens=3,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=(7,),
    )


class ModeController:
    """`mode` says what every step uses; "switching" draws anew for each step, of those that the engine can serve."""

    def __init__(self, seed: int = 0, *, eagle3: bool = False) -> None:
        self.mode = "off"
        self._eagle3 = eagle3
        self._random = random.Random(seed)

    def choose(self, num_decoding: int) -> SpeculationConfig | None:
        modes: dict[str, SpeculationConfig | None] = {"off": None, "chain": CHAIN, "tree": TREE}
        if self._eagle3:
            modes |= EAGLE3
        return modes[self._random.choice(list(modes)) if self.mode == "switching" else self.mode]


@dataclass
class Finished:
    """All that one request gave."""

    tokens: list[TokenOutput] = field(default_factory=list)
    text: str = ""
    last: RequestOutput | None = None
    steps: int = 0

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def run_all(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, at_once: int | None = None
) -> list[Finished]:
    """Every request to its end, at most `at_once` in flight (None: all); the KV pool must be clean afterwards."""
    results = [Finished() for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    in_flight: set[str] = set()
    while waiting or in_flight:
        while waiting and (at_once is None or len(in_flight) < at_once):
            index = waiting.pop()
            engine.add_request(str(index), prompts[index], params[index])
            in_flight.add(str(index))
        for output in engine.step():
            result = results[int(output.request_id)]
            result.tokens.extend(output.tokens)
            result.text += output.text
            result.steps += 1
            if output.finish_reason is not None:
                result.last = output
                in_flight.remove(output.request_id)
    engine.check()
    assert engine.stats().kv_tokens_used == 0, "KV pages leaked"
    return results
