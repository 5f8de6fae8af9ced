"""The next token of every slot from its logits: drawn from softmax(logits / T), or the argmax.

The Triton kernel reads the logits three times and writes one number a row; PyTorch's way makes a dozen passes over
fp32 copies of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from breakeven.train.decode_attention import compile_problem

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [rows, vocab], inverse fp32 [rows]: 1 / T, noise fp32 [rows]: 1 to sample, 0 for argmax) → int64 [rows]."""

_BLOCK = 4096


def gumbel_draw(logits: Tensor, inverse: Tensor, noise: Tensor) -> Tensor:
    """argmax(logits / T + Gumbel noise): drawn from softmax(logits / T), or the argmax where noise is 0."""
    scores = logits.float() * inverse.unsqueeze(1)
    exponential = torch.empty_like(scores).exponential_()
    gumbel = exponential.clamp_min_(1e-30).log_().mul_(-noise.unsqueeze(1))
    return scores.add_(gumbel).argmax(-1)


def kernel_draw(logits: Tensor, inverse: Tensor, noise: Tensor) -> Tensor:
    """By inversion of the cumulated softmax in fp32, with one uniform number a row; of equal maxima the first."""
    # drawn in fp64: the least fp32 number would give the first token of the vocabulary 2^-24 whatever its logit
    uniform = torch.rand(logits.shape[0], dtype=torch.float64, device=logits.device).float()
    return invert(logits, inverse, noise, uniform)


def invert(logits: Tensor, inverse: Tensor, noise: Tensor, uniform: Tensor) -> Tensor:
    """`kernel_draw` with uniform numbers given, fp32 [rows] in [0, 1]."""
    from breakeven.train.decode_kernels import draw_kernel

    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits: a row must be contiguous, its strides are {logits.stride()}")
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    kernel: Any = draw_kernel
    kernel[(rows,)](
        logits,
        inverse.contiguous(),
        noise.contiguous(),
        uniform,
        out,
        logits.stride(0),
        VOCAB=vocab,
        BLOCK=min(_BLOCK, 1 << (vocab - 1).bit_length()),
        num_warps=8,
    )
    return out


def why_not(device: torch.device, dtype: torch.dtype, vocab: int) -> str | None:
    """Why the kernel cannot serve this; None: it can. Compiles it, and holds its choices to PyTorch's."""
    return compile_problem(device, dtype, lambda: probe_error(device, dtype, vocab), 1e-4)


def probe_error(device: torch.device, dtype: torch.dtype, vocab: int) -> float:
    """Largest miss over a few rows of random logits: how far, in probability, a uniform number lies outside the
    interval of the token that it chose; infinite for a wrong argmax."""
    rows = 8
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(device=device, dtype=dtype)
    inverse = torch.linspace(0.5, 2, rows, device=device)
    noise = (torch.arange(rows, device=device) % 4 > 0).float()
    uniform = torch.rand(rows, generator=generator).to(device)
    uniform[1], uniform[2] = 0.0, 1.0
    tokens = invert(logits, inverse, noise, uniform)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        return float("inf")
    scores = logits.double() * inverse.double().unsqueeze(1)
    up_to = scores.softmax(-1).cumsum(-1)
    last = up_to.gather(1, tokens.unsqueeze(1)).squeeze(1)
    first = last - scores.softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    miss = torch.maximum(first - uniform, uniform - last).clamp_min(0)
    wrong = scores.gather(1, tokens.unsqueeze(1)).squeeze(1) < scores.amax(1)
    return float(torch.where(noise > 0, miss, torch.where(wrong, float("inf"), 0.0)).max())
