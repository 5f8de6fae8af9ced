"""What is done to each row between the products: RMS norm, and rotary embedding with the storing of K and V."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, cfunc, int64, types

from breakeven.engine.cpu.simd import (
    add,
    address_of,
    copy_line,
    fma,
    load_bf16,
    load_long,
    mul,
    splat,
    store_bf16,
    sub,
    take_ticket,
    total,
)

_SHARE = 8  # rows that a thread takes at a time


@cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
def rms_norm(data: Any) -> None:
    """One thread's share of y = x / rms(x) * weight, in float32, rounded once. data int64:

    counter, x, bytes between rows of x, weight, y (dense), rows, width, address of epsilon (float64).
    """
    a = carray(data, 8, int64)
    x, x_stride, weight, y, rows, width = a[1], a[2], a[3], a[4], a[5], a[6]
    epsilon = types.float32(carray(data, 8, types.float64)[7])
    while True:
        first = take_ticket(address_of(data)) * _SHARE
        if first >= rows:
            break
        for row in range(first, min(first + _SHARE, rows)):
            source, target = x + row * x_stride, y + row * width * 2
            even, odd = splat(types.float32(0.0)), splat(types.float32(0.0))
            for at in range(0, width * 2 - 32, 64):
                left, right = load_bf16(source + at), load_bf16(source + at + 32)
                even, odd = fma(left, left, even), fma(right, right, odd)
            if width & 16:
                left = load_bf16(source + width * 2 - 32)
                even = fma(left, left, even)
            mean = total(add(even, odd)) / types.float32(width)
            scale = splat(types.float32(1.0) / np.sqrt(mean + epsilon))
            for at in range(0, width * 2, 32):
                store_bf16(target + at, mul(mul(load_bf16(source + at), scale), load_bf16(weight + at)))


@cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
def rotate_and_store(data: Any) -> None:
    """One thread's share of: rotate q in place, rotate k and store it in the cache, and store v. data int64:

    counter, qkv (dense), heads, kv heads, head dim, rows, cos, sin (dense, a row per position, its halves equal),
    positions (int64), slots (int64), keys, values (one layer's, dense).
    """
    a = carray(data, 12, int64)
    qkv, heads, kv_heads, dim, rows = a[1], a[2], a[3], a[4], a[5]
    cosines, sines, positions, slots, keys, values = a[6], a[7], a[8], a[9], a[10], a[11]
    size = dim * 2
    while True:
        first = take_ticket(address_of(data)) * _SHARE
        if first >= rows:
            break
        for row in range(first, min(first + _SHARE, rows)):
            position = load_long(positions + row * 8)
            slot = load_long(slots + row * 8)
            source = qkv + row * (heads + 2 * kv_heads) * size
            key = keys + slot * kv_heads * size
            for head in range(heads + kv_heads):
                to = source if head < heads else key + (head - heads) * size
                for at in range(0, dim, 32):
                    cos, sin = load_bf16(cosines + position * size + at), load_bf16(sines + position * size + at)
                    low, high = load_bf16(source + at), load_bf16(source + dim + at)
                    store_bf16(to + at, sub(mul(low, cos), mul(high, sin)))
                    store_bf16(to + dim + at, fma(high, cos, mul(low, sin)))
                source += size
            value = values + slot * kv_heads * size
            for at in range(0, kv_heads * size, 64):
                copy_line(value + at, source + at)
