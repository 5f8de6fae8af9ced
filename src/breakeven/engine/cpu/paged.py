"""Attention of ragged rows straight from the paged cache, on AMX tiles.

A unit of work is sixteen queries of one KV head of one sequence: consecutive rows times the query heads that share the
KV head. It goes over the keys in blocks of 256 with a running maximum (online softmax: Milakov and Gimelshein, arXiv
1805.02867; Rabe and Staats, arXiv 2112.05682). A page of keys is a tile as it lies; values are interleaved in pairs on
the way. Blocks begin at the sequence's first key, and a key that a row does not see adds exactly nothing to it: a
row's result depends on its own keys alone.
"""

from __future__ import annotations

from typing import Any

from numba import carray, cfunc, int64, njit, types

from breakeven.engine.cpu.products import shape_tiles
from breakeven.engine.cpu.simd import (
    add,
    address_of,
    copy_line,
    exp,
    interleave,
    larger,
    largest,
    load,
    load_long,
    load_real,
    mul,
    prefetch,
    release_tiles,
    replace_where,
    scratch,
    splat,
    store,
    store_bf16,
    store_real,
    sub,
    take_ticket,
    tile_dot,
    tile_load,
    tile_store,
    tile_zero,
    total,
    transpose_words,
)

PAGE = 16  # tokens of a page, and rows of a tile
_BLOCK = 256
_MASKED = -1e30  # no score is as low, and the difference of two of them is a number
_real = types.float32


@njit(error_model="numpy")
def _key(keys: int, pages: int, index: int, used: int, page_bytes: int) -> int:
    """Address of page number `index` of a sequence; beyond its end the first, whose keys will be masked."""
    return keys + load_long(pages + 8 * (index if index < used else 0)) * page_bytes


@njit(error_model="numpy")
def _unseen(row: int, key: int, visible: int) -> int:
    """Bit j is set if the sequence's row does not see its own row `key + j`; below 0 is the prefix, which all see."""
    if visible == 0:  # row t sees rows 0..t
        return (0xFFFF << min(max(row + 1 - key, 0), 16)) & 0xFFFF
    seen = load_long(visible + 8 * row)
    if key >= 64:
        return 0xFFFF
    if key >= 0:
        return ((seen >> key) & ((1 << min(16, 64 - key)) - 1)) ^ 0xFFFF
    return ((seen << -key) | ((1 << -key) - 1)) & 0xFFFF ^ 0xFFFF


@cfunc(types.void(types.voidptr), cache=True, error_model="numpy")
def attend(data: Any) -> None:
    """One thread's share of the units. data int64:

    counter, q, bytes between rows of q, out (dense rows of heads * dim), keys, values (one layer's, dense), kv heads,
    query heads per KV head, head dim, units, number of units, scale's address (float64); after them for each unit:
    first row, rows, prefix, page table's address, visible's address or 0, KV head, first query, keys to visit.
    """
    a = carray(data, 12, int64)
    query, query_stride, out, keys, values = a[1], a[2], a[3], a[4], a[5]
    kv_heads, fold, dim, units, count = a[6], a[7], a[8], a[9], a[10]
    scale = splat(_real(carray(data, 12, types.float64)[11]))
    config = scratch(64)
    packed = scratch(16 * 2 * 256)  # the queries, pairs of dims across
    rows_of = scratch(16 * 2 * 256)
    across = scratch(256 * 64)  # scores, a key's sixteen queries in a line
    scores = scratch(16 * 256 * 4)  # scores, a query's keys in a line
    peaks, totals = scratch(64), scratch(64)
    weights = scratch(256 * 32)
    mixed = scratch(16 * 4 * 64)  # 32 keys' values, 64 dims: pairs of keys interleaved
    sums = scratch(16 * 4 * 256)
    size = dim * 2
    token_bytes = kv_heads * size
    page_bytes = PAGE * token_bytes
    heads = kv_heads * fold
    zero = splat(_real(0.0))
    shape_tiles(config, 16, 16)
    while True:
        number = take_ticket(address_of(data))
        if number >= count:
            break
        unit = units + number * 64
        first, rows, prefix = load_long(unit), load_long(unit + 8), load_long(unit + 16)
        pages, visible, kv_head = load_long(unit + 24), load_long(unit + 32), load_long(unit + 40)
        first_query, length = load_long(unit + 48), load_long(unit + 56)
        queries = min(16, rows * fold - first_query)
        used = (prefix + rows + PAGE - 1) // PAGE
        for q in range(16):
            at = rows_of + q * size
            if q < queries:
                row, head = (first_query + q) // fold, kv_head * fold + (first_query + q) % fold
                source = query + (first + row) * query_stride + head * size
                for line in range(0, size, 64):
                    copy_line(at + line, source + line)
            else:
                for line in range(0, size, 64):
                    store(at + line, zero)
        for part in range(dim // 32):
            transpose_words(rows_of + part * 64, size, packed + part * 1024, 64)
        for block in range(0, length, _BLOCK):
            steps = (min(_BLOCK, length - block) + 31) // 32
            for base in (keys, values):
                for index in range(2 * steps):
                    at = _key(base, pages, block // PAGE + index, used, page_bytes) + kv_head * size
                    for token in range(PAGE):
                        for line in range(0, size, 64):
                            prefetch(at + token * token_bytes + line)
            for index in range(2 * steps):
                at = _key(keys, pages, block // PAGE + index, used, page_bytes) + kv_head * size
                tile_zero(0)
                for part in range(dim // 32):
                    tile_load(4, at + part * 64, token_bytes)
                    tile_load(6, packed + part * 1024, 64)
                    tile_dot(0, 4, 6)
                tile_store(0, across + index * 1024, 64)
            for index in range(2 * steps):
                transpose_words(across + index * 1024, 64, scores + index * 64, _BLOCK * 4)
            for q in range(queries):
                row = (first_query + q) // fold
                line = scores + q * _BLOCK * 4
                for index in range(max(prefix - block, 0) // 16, 2 * steps):
                    at = line + index * 64
                    unseen = _unseen(row, block + index * 16 - prefix, visible)
                    store(at, replace_where(load(at), unseen, _real(_MASKED)))
                peak = load(line)
                for index in range(1, 2 * steps):
                    peak = larger(peak, load(line + index * 64))
                before = load_real(peaks + 4 * q)
                now = max(before, largest(peak)) if block else largest(peak)
                store_real(peaks + 4 * q, now)
                shift = splat(now)
                even, odd = zero, zero
                for step in range(steps):
                    at, to = line + step * 128, weights + step * 1024 + q * 64
                    left = exp(mul(sub(load(at), shift), scale))
                    right = exp(mul(sub(load(at + 64), shift), scale))
                    store_bf16(to, left)
                    store_bf16(to + 32, right)
                    even, odd = add(even, left), add(odd, right)
                weight = total(add(even, odd))
                if block:
                    factor = exp(mul(sub(splat(before), shift), scale))
                    for at in range(sums + q * dim * 4, sums + (q + 1) * dim * 4, 64):
                        store(at, mul(load(at), factor))
                    weight += load_real(totals + 4 * q) * total(factor) * _real(0.0625)
                store_real(totals + 4 * q, weight)
            for part in range(dim // 64):
                at = sums + part * 256
                if block:
                    tile_load(0, at, dim * 4)
                    tile_load(1, at + 64, dim * 4)
                    tile_load(2, at + 128, dim * 4)
                    tile_load(3, at + 192, dim * 4)
                else:
                    tile_zero(0)
                    tile_zero(1)
                    tile_zero(2)
                    tile_zero(3)
                for step in range(steps):
                    for half in range(2):
                        value = _key(values, pages, block // PAGE + 2 * step + half, used, page_bytes)
                        value += kv_head * size + part * 128
                        for pair in range(8):
                            to = mixed + (half * 8 + pair) * 256
                            interleave(value, value + token_bytes, to)
                            interleave(value + 64, value + token_bytes + 64, to + 128)
                            value += 2 * token_bytes
                    tile_load(4, weights + step * 1024, 64)
                    tile_load(6, mixed, 256)
                    tile_dot(0, 4, 6)
                    tile_load(7, mixed + 64, 256)
                    tile_dot(1, 4, 7)
                    tile_load(6, mixed + 128, 256)
                    tile_dot(2, 4, 6)
                    tile_load(7, mixed + 192, 256)
                    tile_dot(3, 4, 7)
                tile_store(0, at, dim * 4)
                tile_store(1, at + 64, dim * 4)
                tile_store(2, at + 128, dim * 4)
                tile_store(3, at + 192, dim * 4)
        for q in range(queries):
            by = splat(_real(1.0) / load_real(totals + 4 * q))
            row, head = (first_query + q) // fold, kv_head * fold + (first_query + q) % fold
            to = out + ((first + row) * heads + head) * size
            for index in range(dim // 16):
                store_bf16(to + index * 32, mul(load(sums + q * dim * 4 + index * 64), by))
    release_tiles()
