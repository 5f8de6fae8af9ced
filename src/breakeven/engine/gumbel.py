"""Gumbel noise that is a pure function of (seed, absolute position, token id).

A draw by argmax(logit + Gumbel noise) is an exact sample of the softmax (the Gumbel-max trick). With noise keyed by
position instead of drawn from a stream, the token at a position is the same whether it is decoded or verified, in
whatever batch, in whatever tree: losslessness becomes equality (after drafter-invariant decoding, arXiv 2408.07978).

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) in wrapping 64-bit integer arithmetic, which
is the same on CPU and CUDA. The logarithms are taken in float64, where libraries may differ in the last bit; that
matters only to scores that tie to within about 1e-15.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # odd, 2**64 / golden ratio: the increment of SplitMix64
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_ONE_BITS = 0x3FF0000000000000  # the float64 1.0; with 52 random mantissa bits: uniform in [1, 2)
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}  # noise made at once: the CPU's cache, the GPU's memory


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix_array(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(multiplier)
    return state


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """One 64-bit key per row from the request's seed (any integer, taken modulo 2**64) and the token's position."""
    seed = np.array([value & _MASK64 for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    step = np.uint64(_STEP)
    return _mix_array(_mix_array(seed + step) + (position + np.uint64(1)) * step).view(np.int64)


def _mix_(state: Tensor) -> Tensor:
    """SplitMix64's finaliser in place. PyTorch's right shift keeps the sign, hence the masks."""
    shifted = torch.empty_like(state)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        torch.bitwise_right_shift(state, shift, out=shifted)
        state.bitwise_xor_(shifted.bitwise_and_(_MASK64 >> shift))
        if multiplier is not None:
            state.mul_(_signed(multiplier))
    return state


def token_hash(keys: Tensor, token_ids: Tensor) -> Tensor:
    """int64 hash of each (row key, token id). keys [R]; token_ids [R, C], or [C] shared by all rows; gives [R, C]."""
    return _mix_((token_ids + 1) * _signed(_STEP) + keys[:, None])


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float64 uniform noise [R, C] strictly inside (0, 1): the odd multiples of 2**-53."""
    bits = token_hash(keys, token_ids).bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1).bitwise_or_(_ONE_BITS)
    return bits.view(torch.float64).sub_(1 - 2.0**-53)


def argmax_rows(values: Tensor) -> Tensor:
    """Index [R] of the largest entry of each row of [R, C]; the lowest index if several tie.

    On a CPU PyTorch's argmax of a row is several times slower than its amax, so the search is done in two levels.
    """
    rows, columns = values.shape
    width = 256
    blocks = columns // width
    if values.device.type != "cpu" or blocks < 4 or values.stride(1) != 1:
        return values.argmax(-1)
    blocked = values[:, : blocks * width].view(rows, blocks, width)
    block_max = blocked.amax(-1)
    best = block_max.argmax(-1, keepdim=True)
    within = blocked.gather(1, best[:, :, None].expand(rows, 1, width)).squeeze(1).argmax(-1)
    index = best.squeeze(1) * width + within
    if blocks * width < columns:
        tail = values[:, blocks * width :]
        tail_max, tail_index = tail.max(-1)
        index = torch.where(tail_max > block_max.gather(1, best).squeeze(1), tail_index + blocks * width, index)
    return index


def draw(logits: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """The column [R] that wins argmax(logit + Gumbel noise) in each row: a sample of softmax(logits).

    logits float [R, C], already warped, -inf for what is excluded; keys int64 [R]; token_ids int64 [R, C] names the
    token of each column (None: column c is token c). Noise is made a few rows at a time to bound memory.
    """
    rows, columns = logits.shape
    ids = torch.arange(columns, device=logits.device) if token_ids is None else token_ids
    chunk = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 20) // max(1, columns))
    winners = []
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        exponential = uniform(keys[part], ids if ids.dim() == 1 else ids[part]).log_().neg_()
        winners.append(argmax_rows(torch.sub(logits[part], exponential.log_())))  # -log(E) is Gumbel noise
    return torch.cat(winners) if len(winners) != 1 else winners[0]
