"""What drafting costs: an EAGLE-3 round's draft (and its verify) against a plain step of the target.

    python benchmarks/draft_cost.py [--streams 1 4 16] [--rounds 30] [--context 256] [--threads 2] [--json FILE]

SmolLM2-135M in bfloat16 with drafters of random weights, whose costs are those of trained ones of the same shape. Each
round times, in turn, a plain step of the whole engine and steps with each draft shape, over the same requests at about
the same context; the draft is timed inside its step. Random drafts are never accepted, so every step advances each
request by one token. Printed are lower quartiles over rounds (what else the machine does only ever adds) and their
ratios to the plain step of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from breakeven.engine.config import EngineConfig, ModelConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter import DrafterCheckpoint
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.drafter_tensors import drafter_shapes
from breakeven.engine.models.load import load_model
from breakeven.engine.proposers.base import DraftContext
from breakeven.engine.proposers.eagle3 import Eagle3Proposer
from breakeven.engine.request import SamplingParams
from breakeven.engine.tree import DraftTree

SHAPES: dict[str, SpeculationConfig | None] = {
    "off": None,
    "chain 3": SpeculationConfig("eagle3", num_steps=3, eagle_topk=1, num_draft_tokens=4),
    "chain 7": SpeculationConfig("eagle3", num_steps=7, eagle_topk=1, num_draft_tokens=8),
    "tree 2/4/16": SpeculationConfig("eagle3", num_steps=2, eagle_topk=4, num_draft_tokens=16),
}
HEADS = {  # intermediate size, KV heads, draft vocabulary
    "MLP 1536, 3 KV heads, Vd 8192": (1536, 3, 8192),
    "MLP 1536, 3 KV heads, Vd 16384": (1536, 3, 16384),
    "MLP 4608, 9 KV heads, Vd 16384": (4608, 9, 16384),
    "MLP 4608, 9 KV heads, Vd 32768": (4608, 9, 32768),
}


def random_head(target: ModelConfig, inner: int, kv_heads: int, vocab: int) -> DrafterCheckpoint:
    """A drafter beside the target: its width, heads and head dimension."""
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=inner,
        num_heads=target.num_heads,
        num_kv_heads=kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab,
        tap_boundaries=(2, target.num_layers // 2, target.num_layers - 3),
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in drafter_shapes(config).items()
    }
    weights["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    return DrafterCheckpoint(config, weights)


def lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


class Choice:
    """A controller that is told what to choose, and a stopwatch around `propose`."""

    def __init__(self) -> None:
        self.shape: SpeculationConfig | None = None
        self.draft_seconds = 0.0

    def choose(self, num_decoding: int) -> SpeculationConfig | None:
        return self.shape

    def watch(self) -> None:
        propose = Eagle3Proposer.propose

        def timed(proposer: Eagle3Proposer, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
            start = time.perf_counter()
            trees = propose(proposer, contexts)
            self.draft_seconds = time.perf_counter() - start
            return trees

        Eagle3Proposer.propose = timed  # type: ignore[method-assign]


def measure(engine: Engine, choice: Choice, streams: int, context: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds, lower quartile over rounds: of each shape's step and of the draft within it."""
    steps: dict[str, list[float]] = defaultdict(list)
    drafts: dict[str, list[float]] = defaultdict(list)
    generator = torch.Generator().manual_seed(streams)
    choice.shape = None
    for index in range(streams):
        prompt = torch.randint(1000, 16_000, (context,), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=3 * rounds + 200, ignore_eos=True)
        engine.add_request(f"{streams}-{index}", prompt, params)
    while engine.stats().generated_tokens < streams or any(
        not request.slot.decoding for request in engine._requests.values()
    ):
        engine.step()
    for index in range(rounds + 3):
        for name, shape in SHAPES.items():
            choice.shape = shape
            choice.draft_seconds = 0.0
            start = time.perf_counter()
            engine.step()
            elapsed = time.perf_counter() - start
            if index >= 3:  # the first rounds warm up
                steps[name].append(elapsed * 1e3)
                drafts[name].append(choice.draft_seconds * 1e3)
    for index in range(streams):
        engine.abort(f"{streams}-{index}")
    engine.reset_prefix_cache()
    return {name: {"step_ms": lower_quartile(steps[name]), "draft_ms": lower_quartile(drafts[name])} for name in SHAPES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(options.model)
    weights = model.weights(torch.bfloat16)
    choice = Choice()
    choice.watch()
    found = []
    for head, shape in HEADS.items():
        drafter = random_head(model.config, *shape)
        config = EngineConfig(device=options.device)
        engine = Engine(model.config, model.tokenizer, weights, config, choice, drafter)
        print(f"\n{head}\nstreams  shape         draft ms  / plain step   step ms  / plain step")
        for streams in options.streams:
            result = measure(engine, choice, streams, options.context, options.rounds)
            plain = result["off"]["step_ms"]
            for name, row in result.items():
                draft, step = row["draft_ms"], row["step_ms"]
                print(f"{streams:7d}  {name:12s} {draft:9.2f} {draft / plain:12.1%} {step:11.2f} {step / plain:12.2f}")
                found.append({"head": head, "streams": streams, "shape": name, **row, "plain_step_ms": plain})
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
