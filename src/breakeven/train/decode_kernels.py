"""Triton kernels of a decoding step. Importing this needs triton: `decode_attention` and `draw` do so when asked.

No `from __future__ import annotations` here: Triton reads `tl.constexpr` from the annotations themselves.
"""

import triton
import triton.language as tl


@triton.jit
def append_and_attend_kernel(
    query,
    key,
    value,
    keys,
    values,
    out,
    held,
    query_stride,
    key_stride,
    value_stride,
    max_length,
    scale,
    KV_HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (slot, kv head): softmax over the slot's own rows, with a running maximum in fp32 (Milakov & Gimelshein,
    arXiv 1805.02867). The new row never comes from the cache: it starts the sums, so nothing read here was written
    here. `scale` includes log2(e)."""
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    live = rows[:, None] < FOLD
    count = tl.load(held + slot).to(tl.int32)  # rows in the cache; -1: an inactive slot, whose output is its value

    q = tl.load(query + slot * query_stride + (head * FOLD + rows[:, None]) * DIM + dims[None, :], mask=live, other=0.0)
    new_key = tl.load(key + slot * key_stride + head * DIM + dims)
    new_value = tl.load(value + slot * value_stride + head * DIM + dims)
    base = slot * max_length * KV_HEADS * DIM + head * DIM
    row = base + tl.maximum(count, 0) * KV_HEADS * DIM + dims
    tl.store(keys + row, new_key, mask=(dims < DIM) & (count >= 0))
    tl.store(values + row, new_value, mask=(dims < DIM) & (count >= 0))

    top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32) + new_value.to(tl.float32)[None, :]
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        there = places < count
        offsets = base + places[:, None] * (KV_HEADS * DIM) + dims[None, :]
        k = tl.load(keys + offsets, mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        v = tl.load(values + offsets, mask=there[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    result = mixed / total[:, None]
    to = out + (slot * KV_HEADS * FOLD + head * FOLD + rows[:, None]) * DIM + dims[None, :]
    tl.store(to, result.to(q.dtype), mask=live)
