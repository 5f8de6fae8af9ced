"""Tokens per second of training's generator: the Triton kernels against PyTorch's attention.

    python benchmarks/generation_speed.py [--slots 2048] [--seconds 8] [--model smollm2-135m] [--json FILE]

Without --model: random bfloat16 weights of SmolLM2-135M's shape, whose costs are its own. Every slot is refilled as its
answer ends, at lengths drawn between 64 and --max-tokens; half of the answers are greedy, half are sampled. The first
sync, which compiles and records graphs, is left out; then each way runs for --seconds. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from breakeven.engine.config import ModelConfig
from breakeven.engine.models.llama import LlamaModel
from breakeven.engine.models.load import load_model
from breakeven.engine.models.weights import expected_shapes
from breakeven.train.fast_generate import FastGenerator, GenerationJob

SMOLLM2_135M = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
)


def random_model(device: torch.device) -> LlamaModel:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(
            torch.bfloat16
        )
        for name, shape in expected_shapes(SMOLLM2_135M).items()
    }
    return LlamaModel(SMOLLM2_135M, weights, device)


def work(vocab: int, prompt_tokens: int, max_tokens: int) -> Iterator[GenerationJob]:
    draw = random.Random(0)
    for key in itertools.count():
        prompt = tuple(draw.randrange(3, vocab) for _ in range(draw.randint(prompt_tokens // 4, prompt_tokens)))
        yield GenerationJob(key, prompt, (0.0, 0.7)[key % 2], draw.randint(min(64, max_tokens), max_tokens))


def measure(model: LlamaModel, options: argparse.Namespace, kernels: bool) -> dict[str, float]:
    """Over `options.seconds` after the warm-up, prefills included."""
    generator = FastGenerator(
        model,
        (),  # no token ends an answer, so that lengths are as drawn
        slots=options.slots,
        max_length=options.prompt_tokens + options.max_tokens,
        max_new_tokens=options.max_tokens,
        steps_per_sync=options.steps_per_sync,
        use_kernels=None if kernels else False,
    )
    if kernels and not generator.use_kernels:
        raise SystemExit("error: the kernels cannot run here; the warning above says why")
    answered = 0
    marks: list[tuple[float, int]] = []  # at every sync once warm: seconds, tokens generated so far
    begun = time.perf_counter()

    def keep_on() -> bool:
        # tokens of answers handed over, and of all slots: those of the last sync's answers are not refilled yet
        tokens = answered + int(generator._count.sum())
        now = time.perf_counter()
        if now - begun >= options.warm_seconds:
            marks.append((now, tokens))
        return len(marks) < 3 or now - marks[0][0] < options.seconds

    for answer in generator.run(work(model.config.vocab_size, options.prompt_tokens, options.max_tokens), keep_on):
        answered += len(answer.tokens)
    seconds, tokens = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    steps = (len(marks) - 1) * options.steps_per_sync
    return {"tokens_per_second": tokens / seconds, "ms_per_step": seconds / steps * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model that the engine loads; left out: random weights")
    parser.add_argument("--slots", type=int, nargs="+", default=[2048])
    parser.add_argument("--steps-per-sync", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="the longest prompt; the shortest is a quarter")
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm-seconds", type=float, default=5.0)
    parser.add_argument("--only", choices=("kernels", "pytorch"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device; this compares kernels that need one")
    device = torch.device("cuda")
    if options.model:
        loaded = load_model(options.model)
        model = LlamaModel(loaded.config, loaded.weights(torch.bfloat16), device)
    else:
        model = random_model(device)
    found: list[dict[str, object]] = []
    for slots in options.slots:
        for name in ("kernels", "pytorch"):
            if options.only in (None, name):
                result = measure(model, argparse.Namespace(**{**vars(options), "slots": slots}), name == "kernels")
                torch.cuda.empty_cache()
                found.append({"slots": slots, "attention": name, **result})
                print(
                    f"{slots} slots, {name:8}: {result['tokens_per_second']:9,.0f} tokens/s,"
                    f" {result['ms_per_step']:.2f} ms a step",
                    flush=True,
                )
    if options.json is not None:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": found}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
