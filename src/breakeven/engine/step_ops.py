"""What a forward does to its rows between the matrix products, for one step: PyTorch's way, or the CPU kernels'.

The model's forward is written once, against `StepOps`; which one it gets depends on the device, the type and the
shapes, never on the step.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.attention import AttentionPlan, KVCache, attend, row_slots
from breakeven.engine.batch import StepPlan
from breakeven.engine.config import ModelConfig
from breakeven.engine.cpu import available


class StepOps(Protocol):
    """One step's rows, and where their K and V go."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of x [rows, hidden]."""

    def rotate_and_store(self, layer: int, qkv: Tensor) -> Tensor:
        """Rotated q [rows, heads, dim] of qkv [rows, heads + 2 kv_heads, dim]; k and v go into the cache. May
        overwrite qkv."""

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attention output, contiguous [rows, heads, dim]."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention. x [rows, heads, head_dim]; cos and sin [rows, 1, head_dim]."""
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated


class TorchStep:
    """PyTorch's operators, on any device."""

    def __init__(
        self, config: ModelConfig, plan: AttentionPlan, cache: KVCache, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> None:
        self._config = config
        self._plan = plan
        self._cache = cache
        self._cos = cos[positions].unsqueeze(1)
        self._sin = sin[positions].unsqueeze(1)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def rotate_and_store(self, layer: int, qkv: Tensor) -> Tensor:
        heads, stored = self._config.num_heads, self._config.num_heads + self._config.num_kv_heads
        query_key = rotate(qkv[:, :stored], self._cos, self._sin)
        self._cache.write(layer, self._plan.slots, query_key[:, heads:], qkv[:, stored:])
        return query_key[:, :heads]

    def attend(self, layer: int, query: Tensor) -> Tensor:
        return attend(query, layer, self._plan, self._cache)


def can_use_kernels(config: ModelConfig, cache: KVCache) -> bool:
    """Whether `KernelStep` serves this model: bfloat16 on a CPU with AMX, and shapes that its tiles divide."""
    return (
        cache.k.device.type == "cpu"
        and cache.k.dtype == torch.bfloat16
        and cache.page_size == 16
        and config.head_dim in (64, 128, 256)
        and config.hidden_size % 16 == 0
        and available()
    )


class KernelStep:
    """The kernels of `engine.cpu`."""

    def __init__(
        self, config: ModelConfig, plan: StepPlan, cache: KVCache, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> None:
        from breakeven.engine.cpu import ops

        self._ops = ops
        self._epsilon = config.rms_norm_eps
        self._cache = cache
        self._cos, self._sin, self._positions = cos, sin, positions
        self._slots = torch.cat([torch.from_numpy(row_slots(s, cache.page_size)) for s in plan.sequences])
        self._units = ops.plan_units(plan, config.num_kv_heads, config.num_heads // config.num_kv_heads)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self._epsilon)

    def rotate_and_store(self, layer: int, qkv: Tensor) -> Tensor:
        keys, values = self._cache.k[layer], self._cache.v[layer]
        return self._ops.rotate_and_store(qkv, self._cos, self._sin, self._positions, self._slots, keys, values)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        return self._ops.attend(query, self._units, self._cache.k[layer], self._cache.v[layer])
