"""Attention of one new token per slot, each over its own rows of a dense KV.

A Triton kernel where it can run: it reads what a slot holds and no more, so neither the longest slot nor an inactive
one costs the others anything, and one CUDA graph serves all lengths. `why_not` says where it cannot; the caller then
keeps to PyTorch's attention.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_BYTES = 16_384  # of keys, and as many of values, that a program holds per pipeline stage at most
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def append_and_attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, held: Tensor, max_length: int
) -> Tensor:
    """Write each active slot's key and value behind its rows, and attend to all of them.

    query [slots, heads, dim], key and value [slots, kv_heads, dim], of any row stride; keys and values contiguous
    [slots·max_length, kv_heads, dim]; held int64 [slots]: rows that a slot has already, less than max_length, or -1 for
    an inactive slot, whose KV stays as it is and whose output means nothing (but is finite). → [slots, heads, dim].
    """
    from breakeven.train.decode_kernels import append_and_attend_kernel

    slots, heads, dim = query.shape
    kv_heads = key.shape[1]
    fold = heads // kv_heads
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(2) != 1 or tensor.stride(1) != dim:
            raise ValueError(f"{name}: the heads of a row must be contiguous, its strides are {tensor.stride()}")
    out = torch.empty((slots, heads, dim), dtype=query.dtype, device=query.device)
    kernel: Any = append_and_attend_kernel
    kernel[(slots, kv_heads)](
        query,
        key,
        value,
        keys,
        values,
        out,
        held,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        max_length,
        math.log2(math.e) * dim**-0.5,
        KV_HEADS=kv_heads,
        FOLD=fold,
        ROWS=max(16, 1 << (fold - 1).bit_length()),  # a matrix product wants 16 rows
        DIM=dim,
        BLOCK=max(16, min(64, _TILE_BYTES // (dim * query.element_size()))),
        PRECISION="ieee",
        num_warps=4,
        num_stages=2,
    )
    return out


def why_not(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    """Why the kernel cannot serve this; None: it can. Compiles it, and holds its result to PyTorch's attention."""
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return f"the head dimension {head_dim} is not a power of two from 16 to 256"
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    return compile_problem(
        device, dtype, lambda: probe_error(device, dtype, num_heads, num_kv_heads, head_dim), tolerance
    )


def compile_problem(
    device: torch.device, dtype: torch.dtype, probe: Callable[[], float], tolerance: float
) -> str | None:
    """Why a Triton kernel cannot serve: where it cannot run, does not compile, or its probe is off by more than
    `tolerance`."""
    if device.type != "cuda":
        return f"the device is {device.type}, not CUDA"
    if dtype not in _DTYPES:
        return f"no kernel for {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        error = probe()
    except Exception as problem:  # a compiler's errors are of many types, and none may end the run
        lines = str(problem).strip().splitlines()
        return f"the Triton kernel did not compile or run: {type(problem).__name__}: {lines[0] if lines else ''}"
    if not error <= tolerance:  # not "greater": NaN is no agreement
        return f"the Triton kernel is off by {error:.3g} from PyTorch's result"
    return None


def probe_error(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> float:
    """Largest difference from PyTorch's attention over a few slots of random rows."""
    max_length = 256
    held = [0, 5, -1, 130, 255]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    heads = num_heads + 2 * num_kv_heads
    qkv = random(len(held), heads, head_dim)
    query, key, value = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, -num_kv_heads:]
    keys, values = (random(len(held) * max_length, num_kv_heads, head_dim) for _ in range(2))
    out = append_and_attend(query, key, value, keys, values, torch.tensor(held, device=device), max_length)
    worst = 0.0
    for slot, rows in enumerate(held):
        if rows < 0:
            continue
        own = slice(slot * max_length, slot * max_length + rows)
        k = torch.cat((keys[own], key[slot : slot + 1])).transpose(0, 1)
        v = torch.cat((values[own], value[slot : slot + 1])).transpose(0, 1)
        folded = query[slot].reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
        expected = F.scaled_dot_product_attention(folded.float(), k.float(), v.float())
        difference = (out[slot].float() - expected.reshape(num_heads, head_dim)).abs().max().item()
        worst = difference if not difference <= worst else worst
    return worst
