"""From a trained drafter to a checkpoint that engines load, its head pruned to the vocabulary asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from breakeven.engine.config import ModelConfig
from breakeven.engine.models.drafter_save import save_drafter
from breakeven.train.model import DrafterModule
from breakeven.train.vocab import offsets, pruned_rows

_SHARD_BYTES = 38_000_000  # below the 40 MB that a file in a repository should not exceed


def export_drafter(
    drafter: DrafterModule,
    target: ModelConfig,
    target_ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    vocab_size: int,
    directory: Path,
    format: Literal["official", "vllm", "speculators"],
    verifier_name: str | None = None,
) -> Path:
    """Write the checkpoint. `counts` [target vocab] decide which rows stay; weight files take at most 38 MB each."""
    size = min(vocab_size, len(target_ids))
    rows = pruned_rows(counts, target_ids, size)
    weights = drafter.export_weights(torch.bfloat16, torch.from_numpy(rows))
    weights["d2t"] = torch.from_numpy(offsets(target_ids[rows]))
    config = replace(drafter.config, draft_vocab_size=size)
    return save_drafter(
        directory, config, target, weights, format=format, max_shard_bytes=_SHARD_BYTES, verifier_name=verifier_name
    )
