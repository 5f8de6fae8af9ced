"""Attention of ragged rows over the paged cache: PyTorch's own kernels, on any device.

Sequences with few rows each (decode, verify) are padded to one batch; a long prefill chunk is attended on its own.
Query heads that share a KV head are folded into the query axis, so K and V are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from breakeven.engine.batch import SequenceRows, StepPlan

_LONG = 32  # rows from which a sequence is attended on its own


class KVCache:
    """K and V of all layers: [layers, pages, page_size, kv_heads, head_dim] each."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages, page_size, kv_heads, head_dim)
        self.page_size = page_size
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._k_slots = self.k.view(num_layers, num_pages * page_size, kv_heads, head_dim)
        self._v_slots = self.v.view(num_layers, num_pages * page_size, kv_heads, head_dim)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store rows. slots int64 [rows]; key and value [rows, kv_heads, head_dim]."""
        self._k_slots[layer].index_copy_(0, slots, key)
        self._v_slots[layer].index_copy_(0, slots, value)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots of all layers: int64 [n] each. Rotary positions are baked in by depth, so a copy stays valid."""
        self._k_slots[:, target] = self._k_slots[:, source]
        self._v_slots[:, target] = self._v_slots[:, source]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences attended together, padded to the widest.

    rows int64 [B * T]: which row fills each place (padding repeats a row), None: the rows as they lie;
    flat int64: the places that are not padding, None: all; pages int64 [B * P]; bias [B, 1, group * T, P * page].
    """

    batch: int
    width: int
    rows: Tensor | None
    flat: Tensor | None
    targets: Tensor | None  # rows of the output that the unpadded places fill; None: all, in order
    pages: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's attention, the same for all layers. slots int64 [rows]: where each row's K and V go."""

    slots: Tensor
    groups: tuple[AttentionGroup, ...]


def row_slots(sequence: SequenceRows, page_size: int) -> NDArray[np.int64]:
    """Slot of each row of the sequence."""
    index = np.arange(sequence.prefix, sequence.prefix + len(sequence))
    return np.asarray(sequence.pages, np.int64)[index // page_size] * page_size + index % page_size


def _visible(sequence: SequenceRows, width: int, length: int) -> NDArray[np.bool_]:
    """[width, length]: which keys each row sees; padding rows see the prefix's first key, so no row sees nothing."""
    rows, prefix = len(sequence), sequence.prefix
    mask = np.zeros((width, length), np.bool_)
    mask[:rows, :prefix] = True
    if sequence.visible is None:
        mask[:rows, prefix : prefix + rows] = np.tri(rows, dtype=np.bool_)
    else:
        bits = np.array(sequence.visible, np.uint64)[:, None] >> np.arange(rows, dtype=np.uint64)[None, :]
        mask[:rows, prefix : prefix + rows] = (bits & np.uint64(1)).astype(np.bool_)
    mask[rows:, 0] = True
    return mask


def _group(
    sequences: Sequence[SequenceRows],
    starts: Sequence[int],
    page_size: int,
    fold: int,
    total_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    width = max(len(sequence) for sequence in sequences)
    num_pages = max(-(-(sequence.prefix + len(sequence)) // page_size) for sequence in sequences)
    batch = len(sequences)
    pages = np.zeros((batch, num_pages), np.int64)
    rows = np.empty((batch, width), np.int64)
    mask = np.empty((batch, width, num_pages * page_size), np.bool_)
    keep = np.zeros((batch, width), np.bool_)
    for index, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        used = -(-(sequence.prefix + len(sequence)) // page_size)
        pages[index, :used] = sequence.pages[:used]
        pages[index, used:] = sequence.pages[0]
        rows[index] = start
        rows[index, : len(sequence)] += np.arange(len(sequence))
        keep[index, : len(sequence)] = True
        mask[index] = _visible(sequence, width, num_pages * page_size)
    bias = torch.zeros(mask.shape, dtype=dtype)
    bias.masked_fill_(torch.from_numpy(~mask), float("-inf"))
    dense = bool(keep.all())
    whole = dense and rows.size == total_rows and bool((rows.ravel() == np.arange(total_rows)).all())

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return AttentionGroup(
        batch=batch,
        width=width,
        rows=None if whole else tensor(rows.ravel()),
        flat=None if dense else tensor(np.flatnonzero(keep)),
        targets=None if whole else tensor(rows[keep]),
        pages=tensor(pages.ravel()),
        bias=bias.repeat(1, fold, 1).unsqueeze(1).to(device, non_blocking=True),
    )


def plan_attention(plan: StepPlan, cache: KVCache, fold: int) -> AttentionPlan:
    """Masks, page tables and slots of a step. `fold`: query heads per KV head."""
    dtype, device = cache.k.dtype, cache.k.device
    starts = np.cumsum([0, *(len(sequence) for sequence in plan.sequences)]).tolist()
    short = [index for index, sequence in enumerate(plan.sequences) if len(sequence) < _LONG]
    members = [[index] for index, sequence in enumerate(plan.sequences) if len(sequence) >= _LONG]
    members += _by_length(short, plan.sequences, cache.page_size)
    groups = tuple(
        _group(
            [plan.sequences[index] for index in member],
            [starts[index] for index in member],
            cache.page_size,
            fold,
            plan.num_rows,
            dtype,
            device,
        )
        for member in members
    )
    slots = np.concatenate([row_slots(sequence, cache.page_size) for sequence in plan.sequences])
    return AttentionPlan(torch.from_numpy(slots).to(device, non_blocking=True), groups)


def _by_length(indices: list[int], sequences: Sequence[SequenceRows], page_size: int) -> list[list[int]]:
    """Split the short sequences where padding them together would waste more than it saves in calls."""
    if not indices:
        return []
    pages = {index: (sequences[index].prefix + len(sequences[index])) // page_size + 1 for index in indices}
    longest = max(pages.values())
    waste = sum(longest - count for count in pages.values()) / (longest * len(indices))
    if len(indices) < 8 or waste < 0.3:
        return [indices]
    small = [index for index in indices if pages[index] <= longest / 2]
    large = [index for index in indices if pages[index] > longest / 2]
    return [sorted(part) for part in (large, *(_by_length(small, sequences, page_size))) if part]


def attend(query: Tensor, layer: int, plan: AttentionPlan, cache: KVCache) -> Tensor:
    """Attention output, contiguous [rows, heads, head_dim], for query of the same shape."""
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend_group(query, layer, plan.groups[0], cache)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.groups:
        part = _attend_group(query if group.rows is None else query[group.rows], layer, group, cache)
        if group.flat is not None:
            part = part[group.flat]
        output[group.targets] = part
    return output


def _attend_group(query: Tensor, layer: int, group: AttentionGroup, cache: KVCache) -> Tensor:
    _, _, page_size, kv_heads, dim = cache.k.shape
    heads = query.shape[1]
    fold = heads // kv_heads
    batch, width = group.batch, group.width
    length = group.pages.shape[0] // batch * page_size
    key = cache.k[layer].index_select(0, group.pages).view(batch, length, kv_heads, dim).transpose(1, 2)
    value = cache.v[layer].index_select(0, group.pages).view(batch, length, kv_heads, dim).transpose(1, 2)
    folded = (
        query.reshape(batch, width, kv_heads, fold, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, fold * width, dim)
    )
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=group.bias)
    return out.view(batch, kv_heads, fold, width, dim).permute(0, 3, 1, 2, 4).reshape(batch * width, heads, dim)
