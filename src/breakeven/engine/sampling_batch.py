"""What the sampler must do to each row, gathered from the requests' own data into a few flat arrays.

Done on the host in NumPy: no PyTorch arithmetic, no device sync; the arrays are then copied to the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breakeven.engine.gumbel import row_keys
from breakeven.engine.request import SamplingParams
from breakeven.engine.warp import Counts, Edits, Scales, Truncation

Ids = NDArray[np.int64]
_NO_COUNTS: Mapping[int, int] = {}
_NO_IDS: Ids = np.empty(0, np.int64)
_NO_VALUES: NDArray[np.float32] = np.empty(0, np.float32)
_GREEDY_BELOW = 1e-5  # temperatures so low that dividing by them could overflow
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits warped at once


class Draw(IntEnum):
    """How a row's token is chosen once its logits are edited."""

    GREEDY = 0
    PLAIN = 1  # from the whole softmax
    TRUNCATED = 2  # after top-k, top-p or min-p


@dataclass(frozen=True, slots=True)
class SamplingProfile:
    """What follows from a request's parameters alone; made once per request by `profile`.

    `plain_greedy`: nothing but the argmax is needed, ever: if it holds for all rows use `SamplingBatch.greedy`.
    """

    params: SamplingParams
    draw: Draw
    penalised: bool
    repeats_matter: bool  # repetition penalty
    counts_matter: bool  # frequency or presence penalty
    bias_ids: Ids
    bias_values: NDArray[np.float32]
    plain_greedy: bool


def profile(params: SamplingParams) -> SamplingProfile:
    """The profile of a request. A temperature below 1e-5 and top_k = 1 are greedy."""
    if params.temperature < _GREEDY_BELOW or params.top_k == 1:
        draw = Draw.GREEDY
    elif params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        draw = Draw.TRUNCATED
    else:
        draw = Draw.PLAIN
    repeats_matter = params.repetition_penalty != 1
    counts_matter = params.frequency_penalty != 0 or params.presence_penalty != 0
    penalised = repeats_matter or counts_matter
    return SamplingProfile(
        params=params,
        draw=draw,
        penalised=penalised,
        repeats_matter=repeats_matter,
        counts_matter=counts_matter,
        bias_ids=np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias)),
        bias_values=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
        plain_greedy=draw is Draw.GREEDY
        and not penalised
        and not params.logit_bias
        and params.min_tokens == 0
        and params.logprobs is None,
    )


def unique_tokens(token_ids: Iterable[int]) -> Ids:
    """The distinct ids, ascending: what `RowSpec.prompt_tokens` takes. Cache it per request."""
    return np.unique(np.fromiter(token_ids, np.int64))


@dataclass(slots=True)
class RowSpec:
    """One row of logits: a decode row, or one node of a draft tree.

    `position` is the absolute index (prompt's first token: 0) of the token to be drawn. `output_counts` counts the
    request's output tokens so far, the tree's root included if it is one; share the one mapping between the nodes of
    a tree. `path` holds the drafted tokens from the root (excluded) to this node (included). `emitted` is the number
    of output tokens before the one to be drawn, `path` included. `output_counts` and `prompt_tokens` (distinct ids)
    are read only if the profile is `penalised`, so leave them None otherwise.
    """

    profile: SamplingProfile
    seed: int
    position: int
    output_counts: Mapping[int, int] | None = None
    prompt_tokens: Ids | None = None
    path: tuple[int, ...] = ()
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows that are warped and drawn together. rows int64 [B]; temperature float32 [B, 1] and keys int64 [B]."""

    rows: Tensor
    draw: Draw
    edits: Edits | None = None
    temperature: Tensor | None = None
    keys: Tensor | None = None
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """All the sampler needs besides the logits. `logprobs[row]`: how many best tokens to report, None: no logprobs."""

    num_rows: int
    has_greedy: bool  # some rows need the bare argmax
    blocks: tuple[RowBlock, ...] = ()
    logprobs: tuple[int | None, ...] | None = None  # None: no row asks

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingBatch:
        """A batch whose rows are all `plain_greedy`; costs nothing to make."""
        return cls(num_rows, has_greedy=True)


class _CountArrays:
    """Ids and counts of each request's output, made once for all the nodes of its tree."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Ids, NDArray[np.float32]]] = {}

    def __call__(self, counts: Mapping[int, int]) -> tuple[Ids, NDArray[np.float32]]:
        arrays = self._made.get(id(counts))
        if arrays is None:
            ids = np.fromiter(counts.keys(), np.int64, len(counts))
            numbers = np.fromiter(counts.values(), np.float32, len(counts))
            arrays = self._made[id(counts)] = (ids[numbers > 0], numbers[numbers > 0])
        return arrays


@dataclass(slots=True)
class _Entries:
    """Flat indices with per-row constants, concatenated once at the end."""

    index: list[Ids] = field(default_factory=list)
    constants: list[tuple[float, ...]] = field(default_factory=list)  # one tuple per array of index
    values: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, index: Ids, *constants: float, values: NDArray[np.float32] | None = None) -> None:
        if len(index):
            self.index.append(index)
            self.constants.append(constants)
            if values is not None:
                self.values.append(values)

    def tensors(self, device: torch.device) -> list[Tensor] | None:
        """Index, then values if any, then one array per constant; None if empty."""
        if not self.index:
            return None
        arrays: list[NDArray[np.int64] | NDArray[np.float32]] = [np.concatenate(self.index)]
        if self.values:
            arrays.append(np.concatenate(self.values))
        lengths = [len(index) for index in self.index]
        columns = zip(*self.constants, strict=True)
        arrays += [np.repeat(np.array(column, np.float32), lengths) for column in columns]
        return [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]


def _build_edits(
    rows: Sequence[RowSpec],
    vocab_size: int,
    eos_ids: Sequence[int],
    count_arrays: _CountArrays,
    device: torch.device,
) -> Edits | None:
    """The edits of one block; `rows` in the block's order."""
    scales, counts, path_counts, bias, banned = _Entries(), _Entries(), _Entries(), _Entries(), _Entries()
    for local, row in enumerate(rows):
        offset = local * vocab_size
        params = row.profile.params
        if row.profile.penalised:
            output = row.output_counts or {}
            ids, numbers = count_arrays(output) if output else (_NO_IDS, _NO_VALUES)
            path: Mapping[int, int] = Counter(row.path) if row.path else _NO_COUNTS
            path_ids = np.fromiter(path.keys(), np.int64, len(path)) + offset if path else _NO_IDS
            if row.profile.repeats_matter:
                for part in (row.prompt_tokens, ids):
                    if part is not None:
                        scales.add(part + offset, params.repetition_penalty)
                scales.add(path_ids, params.repetition_penalty)
            if row.profile.counts_matter:
                penalties = (params.frequency_penalty, params.presence_penalty)
                counts.add(ids + offset, *penalties, values=numbers)
                totals = np.array([output.get(token, 0) + number for token, number in path.items()], np.float32)
                path_counts.add(path_ids, *penalties, values=totals)
        if len(row.profile.bias_ids):
            known = row.profile.bias_ids < vocab_size
            bias.add(row.profile.bias_ids[known] + offset, values=row.profile.bias_values[known])
        if row.emitted < params.min_tokens:
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
            known_ids = sorted(token for token in stop_ids if 0 <= token < vocab_size)
            banned.add(np.array(known_ids, np.int64) + offset)
    made = [entries.tensors(device) for entries in (scales, counts, path_counts, bias, banned)]
    if all(tensors is None for tensors in made):
        return None
    return Edits(
        scales=Scales(*made[0]) if made[0] else None,
        counts=Counts(*made[1]) if made[1] else None,
        path_counts=Counts(*made[2]) if made[2] else None,
        bias=(made[3][0], made[3][1]) if made[3] else None,
        banned=made[4][0] if made[4] else None,
    )


def _build_truncation(rows: Sequence[RowSpec], vocab_size: int, device: torch.device) -> Truncation:
    params = [row.profile.params for row in rows]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    top_p = [p.top_p if p.top_p < 1 else math.inf for p in params]
    log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    return Truncation(
        top_k=torch.tensor(top_k, dtype=torch.int64).to(device, non_blocking=True),
        top_p=torch.tensor(top_p, dtype=torch.float64).to(device, non_blocking=True),
        log_min_p=torch.tensor(log_min_p, dtype=torch.float32).to(device, non_blocking=True),
        smallest_k=min(p.top_k for p in params),
        needs_mass=any(k == vocab_size and p < 1 for k, p in zip(top_k, top_p, strict=True)),
    )


def _chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


def build_batch(
    rows: Sequence[RowSpec], vocab_size: int, eos_ids: Sequence[int], device: torch.device | str = "cpu"
) -> SamplingBatch:
    """Gather the rows' needs, grouped by how they are drawn so that a row pays only for what it asks.

    `eos_ids` are masked, with the request's stop_token_ids, while fewer than min_tokens tokens are emitted (EOS only
    if the request heeds it). Bias and stop ids outside the vocabulary have nothing to act on and are passed over.
    """
    device = torch.device(device)
    members: dict[Draw, list[int]] = {draw: [] for draw in Draw}
    has_greedy = False
    for index, row in enumerate(rows):
        drawn_how = row.profile.draw
        if drawn_how is Draw.GREEDY and not (
            row.profile.penalised or len(row.profile.bias_ids) or row.emitted < row.profile.params.min_tokens
        ):
            has_greedy = True
        else:
            members[drawn_how].append(index)
    size = max(1, _BLOCK_ELEMENTS.get(device.type, 1 << 20) // vocab_size)
    count_arrays = _CountArrays()
    blocks = []
    for drawn_how, indices in members.items():
        for chunk in _chunks(indices, size):
            specs = [rows[index] for index in chunk]
            sampled = drawn_how is not Draw.GREEDY
            temperature = [[row.profile.params.temperature] for row in specs]
            keys = row_keys([row.seed for row in specs], [row.position for row in specs]) if sampled else None
            blocks.append(
                RowBlock(
                    rows=torch.tensor(chunk, dtype=torch.int64).to(device, non_blocking=True),
                    draw=drawn_how,
                    edits=_build_edits(specs, vocab_size, eos_ids, count_arrays, device),
                    temperature=torch.tensor(temperature).to(device, non_blocking=True) if sampled else None,
                    keys=None if keys is None else torch.from_numpy(keys).to(device, non_blocking=True),
                    truncation=_build_truncation(specs, vocab_size, device) if drawn_how is Draw.TRUNCATED else None,
                )
            )
    logprobs = tuple(row.profile.params.logprobs for row in rows)
    return SamplingBatch(
        num_rows=len(rows),
        has_greedy=has_greedy,
        blocks=tuple(blocks),
        logprobs=logprobs if any(number is not None for number in logprobs) else None,
    )
