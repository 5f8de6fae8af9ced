"""Triton kernels of a decoding step. Importing this needs triton; `decode_attention` and `decode_sampling` launch them.

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


@triton.jit
def draw_kernel(
    logits,
    inverse,
    noise,
    uniform,
    out,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program per row: the first argmax, or for rows with noise the token at which the cumulated softmax passes the
    row's uniform number. Three readings: maximum and sum, the block that it falls into, the token in that block."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at = logits + row * row_stride
    factor = tl.load(inverse + row)
    top = tl.max(tl.load(at + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32), 0) * factor
    best = tl.full([], VOCAB, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        here = start + columns
        x = tl.load(at + here, mask=here < VOCAB, other=float("-inf")).to(tl.float32) * factor
        highest = tl.max(x, 0)
        first = tl.min(tl.where(x == highest, here, VOCAB), 0)
        best = tl.where((highest > top) | (start == 0), first, best)
        higher = tl.maximum(top, highest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher

    sampled = tl.load(noise + row) > 0
    target = tl.load(uniform + row) * total
    limit = sampled.to(tl.int32) * VOCAB  # a greedy row is done
    passed = tl.full([], 0.0, tl.float32)  # probability of the blocks before, times total
    before = tl.full([], 0.0, tl.float32)  # … of those before the chosen one
    chosen = tl.full([], 0, tl.int32)
    for start in range(0, limit, BLOCK):
        here = start + columns
        x = tl.load(at + here, mask=here < VOCAB, other=float("-inf")).to(tl.float32) * factor
        mass = tl.sum(tl.exp(x - top), 0)
        reached = (passed <= target) & (mass > 0)  # the last block that begins at or before the target
        chosen = tl.where(reached, start, chosen)
        before = tl.where(reached, passed, before)
        passed += mass
    here = chosen + columns
    x = tl.load(at + here, mask=here < VOCAB, other=float("-inf")).to(tl.float32) * factor
    mass = tl.exp(x - top)
    beyond = (before + tl.cumsum(mass, 0) > target) & (mass > 0)
    token = tl.min(tl.where(beyond, here, VOCAB), 0)
    # rounding can leave the target behind the last sum: then the last token of that block that has any probability
    last = tl.max(tl.where(mass > 0, here, 0), 0)
    token = tl.where(token < VOCAB, token, last)
    token = tl.where(sampled, token, best)
    tl.store(out + row, tl.minimum(token, VOCAB - 1).to(tl.int64))  # rows of NaN stay in the vocabulary
