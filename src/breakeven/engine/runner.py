"""Executes step plans: owns the weights and the KV tensors, turns host rows into tensors, never sees a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from breakeven.engine.attention import KVCache, plan_attention
from breakeven.engine.batch import SequenceRows, StepPlan
from breakeven.engine.config import EngineConfig, ModelConfig
from breakeven.engine.models.llama import LlamaModel
from breakeven.engine.step_ops import KernelStep, StepOps, TorchStep, can_use_kernels
from breakeven.engine.taps import FeatureTaps


class Runner:
    """One target on one device."""

    def __init__(
        self, model_config: ModelConfig, config: EngineConfig, weights: Mapping[str, Tensor], num_pages: int
    ) -> None:
        self.device = torch.device(config.device)
        self.model = LlamaModel(model_config, weights, self.device)
        self.fold = model_config.num_heads // model_config.num_kv_heads
        self.cache = KVCache(
            model_config.num_layers,
            num_pages,
            config.page_size,
            model_config.num_kv_heads,
            model_config.head_dim,
            self.model.embedding.dtype,
            self.device,
        )
        self._kernels = can_use_kernels(model_config, self.cache)

    @torch.inference_mode()
    def forward(self, plan: StepPlan, taps: FeatureTaps | None = None) -> Tensor:
        """Logits [sampled rows, vocab] of the plan's sampled rows, in order, on the device; nothing waits for it.

        `taps` records the features of all rows on the way.
        """
        tokens = np.fromiter((t for s in plan.sequences for t in s.tokens), np.int64, plan.num_rows)
        positions = np.fromiter((p for s in plan.sequences for p in s.positions), np.int64, plan.num_rows)
        sampled = None
        if plan.num_sampled != plan.num_rows:
            sampled = self._tensor(_sampled_rows(plan.sequences))
        return self.model.forward(self._tensor(tokens), sampled, self._step(plan, self._tensor(positions)), taps)

    def _step(self, plan: StepPlan, positions: Tensor) -> StepOps:
        cos, sin = self.model.cos, self.model.sin
        if self._kernels:
            return KernelStep(self.model.config, plan, self.cache, cos, sin, positions)
        attention = plan_attention(plan, self.cache, self.fold)
        return TorchStep(self.model.config, attention, self.cache, cos, sin, positions)

    @torch.inference_mode()
    def compact(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy KV slots (from, to), all at once: sources are read before any target is written."""
        if moves:
            pairs = np.array(moves, np.int64)
            self.cache.move(self._tensor(pairs[:, 0].copy()), self._tensor(pairs[:, 1].copy()))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _sampled_rows(sequences: Sequence[SequenceRows]) -> np.ndarray:
    rows: list[int] = []
    start = 0
    for sequence in sequences:
        start += len(sequence)
        rows.extend(range(start - sequence.sampled, start))
    return np.array(rows, np.int64)
