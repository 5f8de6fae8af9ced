"""The training-time test against a drafter that really drafts: same outputs, same gradients, same loss."""

from __future__ import annotations

import pytest
import torch
from train_tools import TINY, tiny_model

from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.step_ops import rotate
from breakeven.train.attention import chain_attention, plain_chain_attention
from breakeven.train.config import ShapeConfig
from breakeven.train.model import DrafterModule
from breakeven.train.target import target_states
from breakeven.train.trainer import draft_rope
from breakeven.train.ttt import TargetLabels, soft_cross_entropy, step_losses, target_labels, unroll

STEPS = 4
FLAGS = [{}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}]


def drafter(flags: dict[str, bool], seed: int = 0) -> DrafterModule:
    torch.manual_seed(seed)
    module = DrafterModule(
        ShapeConfig(tap_boundaries=(1, 3, 5), num_heads=4, num_kv_heads=2, **flags).drafter(TINY, 17)
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        module.tap_scale.copy_(torch.rand_like(module.tap_scale) + 0.5)
    return module


def draft_one_row(
    module: DrafterModule,
    config: DrafterConfig,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    position: int,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of a drafter with an ordinary KV cache, head by head: the plainest reading of EAGLE-3."""
    weights = dict(module.named_parameters())
    query, key, value, residual = module.qkv(weights, embedding[None, None], hidden[None, None])
    query, key = rotate(query, cos[position], sin[position]), rotate(key, cos[position], sin[position])
    cache.append((key[0, :, 0], value[0, :, 0]))
    fold = config.num_heads // config.num_kv_heads
    attended = torch.empty(1, config.num_heads, 1, config.head_dim)
    for head in range(config.num_heads):
        scores = torch.stack([query[0, head, 0] @ k[head // fold] for k, _ in cache]) * config.head_dim**-0.5
        attended[0, head, 0] = sum(p * v[head // fold] for p, (_, v) in zip(scores.softmax(0), cache, strict=True))
    hidden, out = module.finish(weights, attended, residual)
    return hidden[0, 0], out[0, 0]


@pytest.mark.parametrize("flags", FLAGS, ids=["eagle3", "norm-before-residual", "eagle3.1"])
@torch.no_grad()
def test_step_k_is_what_a_real_chain_of_drafts_computes_at_depth_k(flags: dict[str, bool]) -> None:
    module = drafter(flags)
    config = module.config
    target = tiny_model()
    tokens = torch.randint(3, TINY.vocab_size, (2, 14), generator=torch.Generator().manual_seed(1))
    taps = target_states(target, tokens, config.tap_boundaries).taps
    assert taps is not None
    taps = taps.view(2, 14, 3, -1)
    embeddings = torch.nn.functional.embedding(tokens, target.embedding)
    cos, sin = draft_rope(TINY, config, 32, torch.float32, torch.device("cpu"))
    weights = dict(module.named_parameters())
    outputs = unroll(module, weights, taps, embeddings, cos, sin, STEPS)
    fused = module.fuse(weights, taps)
    for sequence in range(2):
        for root in range(14 - STEPS):
            cache: list[tuple[torch.Tensor, torch.Tensor]] = []
            for row in range(root + 1):  # true features: row i is (h_i, t_{i+1}) at position i
                hidden, out = draft_one_row(
                    module, config, embeddings[sequence, row + 1], fused[sequence, row], row, cache, cos, sin
                )
            torch.testing.assert_close(outputs[0][sequence, root], out, rtol=1e-4, atol=1e-5)
            for depth in range(1, STEPS):  # then its own outputs, with the tokens that did follow
                hidden, out = draft_one_row(
                    module, config, embeddings[sequence, root + 1 + depth], hidden, root + depth, cache, cos, sin
                )
                torch.testing.assert_close(outputs[depth][sequence, root], out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("later", [0, 1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_merged_attention_and_its_gradients_are_those_of_one_softmax(later: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(later)

    def leaf(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 9, 8, generator=generator, requires_grad=True)

    query, keys, values = (
        leaf(4),
        [leaf(kv_heads) for _ in range(later + 1)],
        [leaf(kv_heads) for _ in range(later + 1)],
    )
    upstream = torch.randn(2, 4, 9, 8, generator=generator)
    fold = 4 // kv_heads
    leaves = [query, *keys, *values]
    merged = chain_attention(query, keys, values)
    plain = plain_chain_attention(
        query, [k.repeat_interleave(fold, 1) for k in keys], [v.repeat_interleave(fold, 1) for v in values]
    )
    torch.testing.assert_close(merged, plain, rtol=1e-4, atol=1e-5)
    for got, want in zip(
        torch.autograd.grad(merged, leaves, upstream), torch.autograd.grad(plain, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_loss_and_its_gradients_are_those_of_autograd_over_whole_logits() -> None:
    generator = torch.Generator().manual_seed(3)
    batch, length, hidden, vocab = 2, 8, 6, 11
    outputs = [torch.randn(batch, length, hidden, generator=generator, requires_grad=True) for _ in range(3)]
    head = torch.randn(vocab, hidden, generator=generator, requires_grad=True)
    places = torch.tensor([1, 2, 5, 6, 10, 14])  # two conversations; place 1 has one row before it
    offsets = places % length
    weight = torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    p = torch.randn(6, vocab, generator=generator).softmax(-1)
    known = torch.tensor([True, True, True, False, True, True])
    got = step_losses(outputs, head, TargetLabels(p, known, p.argmax(-1)), places, offsets, weight, 0.8, 4.0)
    want = torch.zeros(())
    for step, out in enumerate(outputs):
        for index, place in enumerate(places.tolist()):
            if place % length >= step + 1 and known[index]:
                row, column = divmod(place, length)
                log_q = (out[row, column - 1 - step] @ head.T).log_softmax(-1)
                want = want - 0.8**step * weight[index] * (p[index] * log_q).sum() / 4.0
    torch.testing.assert_close(got.total, want)
    leaves = [*outputs, head]
    for a, b in zip(torch.autograd.grad(got.total, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(a, b)
    assert got.count.tolist() == [6, 5, 3]


def test_labels_are_the_targets_own_distribution_over_the_draft_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(20, 8, generator=generator), torch.randn(50, 8, generator=generator)
    ids = torch.tensor([1, 4, 5, 9, 12, 19])
    outside = torch.tensor([i for i in range(20) if i not in ids.tolist()])
    labels = target_labels(hidden, head[ids], head[outside])
    logits = hidden @ head.T
    torch.testing.assert_close(labels.p, logits[:, ids].softmax(-1))
    best = logits.argmax(-1)
    assert labels.known.tolist() == torch.isin(best, ids).tolist()
    assert ids[labels.best[labels.known]].tolist() == best[labels.known].tolist()


def test_soft_cross_entropy_has_its_minimum_at_the_target() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1]])
    gradient, loss, best = soft_cross_entropy(p.log(), p, torch.ones(1))
    assert gradient.abs().max() < 1e-6
    assert loss.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    assert best.tolist() == [0]
