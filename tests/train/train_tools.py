"""A tiny target and tiny data for the training tests."""

from __future__ import annotations

import torch

from breakeven.engine.config import ModelConfig
from breakeven.engine.models.llama import LlamaModel
from breakeven.engine.models.weights import expected_shapes
from breakeven.train.conversations import Conversation

TINY = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=128,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
)


def tiny_weights(config: ModelConfig = TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights; logits spread enough for argmaxes to be decided."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            scale = 0.5 if "embed" in name else shape[1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def tiny_model(config: ModelConfig = TINY, seed: int = 0) -> LlamaModel:
    return LlamaModel(config, tiny_weights(config, seed), torch.device("cpu"))


def conversations(count: int, seed: int = 0, greedy: bool = False, longest: int = 40) -> list[Conversation]:
    """Random tokens: a prompt that is not learnt and an answer that is."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        size = int(torch.randint(12, longest, (1,), generator=generator))
        tokens = torch.randint(3, TINY.vocab_size, (size,), generator=generator).tolist()
        prompt = 4 + number % 4
        mask = [0.0] * prompt + [1.0] * (size - prompt)
        made.append(Conversation(f"c{number}", "chat", tuple(tokens), tuple(mask), greedy))
    return made
