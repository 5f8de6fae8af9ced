"""y = x W^T for bfloat16 on AMX tiles: one kernel from one row to thousands.

Weights lie in the order in which they are read: for each group of 32 outputs, for each 32 inputs, two tiles of 1 KB.
Every element of y is a float32 sum over the inputs in one order, whatever the number of rows, and is rounded once,
after the bias, the residual or the activation.
"""

from __future__ import annotations

from typing import Any

from numba import carray, cfunc, int64, njit, types

from breakeven.engine.cpu.simd import (
    add,
    address_of,
    configure_tiles,
    div,
    exp,
    load,
    load_bf16,
    mul,
    prefetch,
    release_tiles,
    scratch,
    splat,
    store_bf16,
    store_byte,
    store_long,
    sub,
    take_ticket,
    tile_dot,
    tile_load,
    tile_store,
    tile_zero,
)

PLAIN, ADD, GATED = 0, 1, 2
_BLOCK = 512  # rows for which a group of weights is read once: their inputs fit in the second-level cache
_AHEAD = 4 * 2048  # bytes that weights are asked for in advance, where the tiles' work hides them from the prefetcher


@njit(error_model="numpy")
def shape_tiles(config: int, upper: int, lower: int) -> None:
    """Tiles 0, 1 and 4 get `upper` rows, 2, 3 and 5 `lower`; 6 and 7 hold 16. All are 64 bytes wide."""
    for offset in range(0, 64, 8):
        store_long(config + offset, 0)
    store_byte(config, 1)
    for tile in range(8):
        store_byte(config + 16 + 2 * tile, 64)
    for tile in (0, 1, 4):
        store_byte(config + 48 + tile, upper)
    for tile in (2, 3, 5):
        store_byte(config + 48 + tile, max(lower, 1))
    for tile in (6, 7):
        store_byte(config + 48 + tile, 16)
    configure_tiles(config)


@njit(error_model="numpy")
def _one_by_two(x: int, stride: int, weights: int, steps: int, sums: int) -> None:
    """Up to 16 rows times 32 outputs; sums [2, 16, 16] float32."""
    tile_zero(0)
    tile_zero(1)
    for _ in range(steps):
        tile_load(4, x, stride)
        tile_load(6, weights, 64)
        tile_load(7, weights + 1024, 64)
        tile_dot(0, 4, 6)
        tile_dot(1, 4, 7)
        x += 64
        weights += 2048
    tile_store(0, sums, 64)
    tile_store(1, sums + 1024, 64)


@njit(error_model="numpy")
def _two_by_two(x: int, stride: int, weights: int, steps: int, sums: int, ahead: int) -> None:
    """17 to 32 rows times 32 outputs; sums [2 halves of the rows, 2, 16, 16] float32."""
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    second = x + 16 * stride
    for _ in range(steps):
        if ahead:
            for line in range(0, 2048, 64):
                prefetch(weights + ahead + line)
        tile_load(4, x, stride)
        tile_load(6, weights, 64)
        tile_load(7, weights + 1024, 64)
        tile_dot(0, 4, 6)
        tile_load(5, second, stride)
        tile_dot(1, 4, 7)
        tile_dot(2, 5, 6)
        tile_dot(3, 5, 7)
        x += 64
        second += 64
        weights += 2048
    tile_store(0, sums, 64)
    tile_store(1, sums + 1024, 64)
    tile_store(2, sums + 2048, 64)
    tile_store(3, sums + 3072, 64)


@njit(error_model="numpy")
def _finish(sums: int, rows: int, mode: int, out: int, stride: int, residual: int, biases: int, both: bool) -> None:
    """Round the sums of up to 16 rows. residual: 0 or the address that goes with `out`; biases: 0 or two lines."""
    one = splat(types.float32(1.0))
    zero = splat(types.float32(0.0))
    for row in range(rows):
        left, right = load(sums + row * 64), load(sums + 1024 + row * 64)
        if biases:
            left, right = add(left, load_bf16(biases)), add(right, load_bf16(biases + 32))
        if mode == GATED:
            store_bf16(out, mul(div(left, add(one, exp(sub(zero, left)))), right))
        else:
            if mode == ADD:
                left = add(left, load_bf16(residual))
                if both:
                    right = add(right, load_bf16(residual + 32))
                residual += stride
            store_bf16(out, left)
            if both:
                store_bf16(out + 32, right)
        out += stride


@cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
def product(data: Any) -> None:
    """One thread's share of y = x W^T. data int64:

    counter, x, bytes between rows of x, packed weights, inputs / 32, groups, rows, mode, y, bytes between rows of y,
    residual or 0 (laid out as y), biases or 0 (as the groups), outputs / 16.
    """
    a = carray(data, 13, int64)
    x, x_stride, weights, steps, groups, rows = a[1], a[2], a[3], a[4], a[5], a[6]
    mode, y, y_stride, residual, biases, blocks = a[7], a[8], a[9], a[10], a[11], a[12]
    sums, config = scratch(4096), scratch(64)
    group_bytes = steps * 2048
    y_step = 32 if mode == GATED else 64
    shaped = 0
    units = groups * ((rows + _BLOCK - 1) // _BLOCK)
    while True:
        unit = take_ticket(address_of(data))
        if unit >= units:
            break
        group = unit % groups
        start = unit // groups * _BLOCK
        end = min(start + _BLOCK, rows)
        w = weights + group * group_bytes
        both = 2 * group + 1 < blocks
        bias = biases + group * 64 if biases else 0
        for row in range(start, end, 32):
            upper, lower = min(16, end - row), min(16, max(0, end - row - 16))
            if shaped != upper * 32 + lower:
                shape_tiles(config, upper, lower)
                shaped = upper * 32 + lower
            to = y + row * y_stride + group * y_step
            beside = residual + row * y_stride + group * y_step if residual else 0
            if lower:
                _two_by_two(x + row * x_stride, x_stride, w, steps, sums, _AHEAD if row == start else 0)
                _finish(sums, upper, mode, to, y_stride, beside, bias, both)
                _finish(sums + 2048, lower, mode, to + 16 * y_stride, y_stride, beside + 16 * y_stride, bias, both)
            else:
                _one_by_two(x + row * x_stride, x_stride, w, steps, sums)
                _finish(sums, upper, mode, to, y_stride, beside, bias, both)
    release_tiles()
