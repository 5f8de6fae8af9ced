"""The target's answers, many side by side: static slots over a dense KV, steps replayed as a CUDA graph.

The weights and formulas are the engine's (`target.run_layers`); greedy tokens are the engine's own, which a test holds
in fp32. What makes it fast: no plan per step, sampling on the device, one copy to the host every `steps_per_sync`
steps, and finished slots refilled by a batched prefill in between. With the Triton kernel of `decode_attention` a step
reads what each slot holds, and one graph serves all lengths. Without it PyTorch's attention reads every slot up to the
longest one's length bucket, with a graph per bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.models.llama import LlamaModel
from breakeven.train.decode_attention import append_and_attend, why_not
from breakeven.train.decode_sampling import Draw, gumbel_draw, kernel_draw
from breakeven.train.decode_sampling import why_not as why_no_draw
from breakeven.train.target import Attend, causal_attention, run_layers

_BUCKET = 128  # lengths of the KV that a step reads are multiples of this
_PREFILL_TOKENS = 32_768  # prompt tokens, padded, that one prefill handles


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One prompt. `temperature` 0 is greedy. `key` is handed back with the answer."""

    key: int
    prompt: tuple[int, ...]
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer with its end-of-turn token, if it came; `stopped` False: cut at max_tokens."""

    job: GenerationJob
    tokens: tuple[int, ...]
    stopped: bool


class FastGenerator:
    """`slots` sequences of at most `max_length` tokens side by side. Sampling is seeded, and exact for a seed only on
    one device, slot count and order of jobs. `use_kernels` None: where they run; on CUDA a warning says why not."""

    def __init__(
        self,
        model: LlamaModel,
        eos_token_ids: Sequence[int],
        *,
        slots: int,
        max_length: int,
        max_new_tokens: int,
        steps_per_sync: int = 16,
        seed: int = 0,
        use_graphs: bool | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        self.model = model
        self.slots, self.steps_per_sync = slots, steps_per_sync
        # every sync may overrun a finished slot; it stays where it is then, so no slack is needed behind it
        self.max_length = min(-(-max_length // _BUCKET) * _BUCKET, model.config.max_position)
        config = model.config
        device = self.device = model.embedding.device
        dtype = model.embedding.dtype
        shape = (config.num_layers, slots * self.max_length, config.num_kv_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._base = torch.arange(slots, device=device) * self.max_length
        self._current = torch.zeros(slots, dtype=torch.long, device=device)  # the token to be processed next
        self._position = torch.zeros(slots, dtype=torch.long, device=device)  # … and its position
        self._active = torch.zeros(slots, dtype=torch.bool, device=device)
        self._count = torch.zeros(slots, dtype=torch.long, device=device)  # tokens generated so far
        self._limit = torch.zeros(slots, dtype=torch.long, device=device)
        self._inverse = torch.ones(slots, dtype=torch.float32, device=device)  # 1 / temperature; greedy: 1
        self._noise = torch.zeros(slots, dtype=torch.float32, device=device)  # 1 where sampled, 0 where greedy
        self._out = torch.zeros(slots, max_new_tokens + 1, dtype=torch.long, device=device)
        self._eos_ids = frozenset(eos_token_ids)
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self._rows = torch.arange(slots, device=device)
        self._jobs: list[GenerationJob | None] = [None] * slots
        self._graphs: dict[int, Callable[[], None]] = {}
        self._use_graphs = device.type == "cuda" if use_graphs is None else use_graphs
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.use_kernels = self._usable("attention", use_kernels, lambda: why_not(device, dtype, *heads))
        fast_draw = self._usable("draw", use_kernels, lambda: why_no_draw(device, dtype, config.vocab_size))
        self._draw: Draw = kernel_draw if fast_draw else gumbel_draw
        self._pool: Any = None  # of the graphs' memory, once there is one
        self._max_new = max_new_tokens
        torch.manual_seed(seed)

    def _usable(self, what: str, wanted: bool | None, problem: Callable[[], str | None]) -> bool:
        if wanted is not None:
            return wanted
        reason = problem()
        if reason is not None and self.device.type == "cuda":
            warnings.warn(f"generation falls back to PyTorch's {what}, which is slower: {reason}", stacklevel=3)
        return reason is None

    def fits(self, job: GenerationJob) -> bool:
        """Whether the prompt and its answer fit a slot."""
        return (
            len(job.prompt) > 0
            and 0 < job.max_tokens <= self._max_new
            and len(job.prompt) + job.max_tokens <= self.max_length
        )

    @torch.inference_mode()
    def run(self, jobs: Iterable[GenerationJob], keep_on: Callable[[], bool] = lambda: True) -> Iterator[Generated]:
        """Answers as they finish. `keep_on` is asked at every sync; once False, no prompt is started and what is still
        unfinished is dropped. ValueError for a job that does not fit."""
        waiting = iter(jobs)
        exhausted = False
        finished: list[Generated] = []
        while True:
            if not keep_on():
                self._active.zero_()
                self._jobs = [None] * self.slots
                yield from finished
                return
            free = [slot for slot, job in enumerate(self._jobs) if job is None]
            refill: list[tuple[int, GenerationJob]] = []
            while free and not exhausted:
                job = next(waiting, None)
                if job is None:
                    exhausted = True
                elif not self.fits(job):
                    raise ValueError(
                        f"job {job.key}: {len(job.prompt)} prompt tokens and {job.max_tokens} for the answer do not fit"
                        f" a slot of {self.max_length} tokens"
                    )
                else:
                    refill.append((free.pop(0), job))
            self._start(refill)
            if all(job is None for job in self._jobs):
                yield from finished
                return
            step = self._graph(self.max_length if self.use_kernels else self._bucket())
            for _ in range(self.steps_per_sync):
                step()
            yield from finished  # the caller's work on them overlaps with the steps just launched
            finished = self._collect()

    def _bucket(self) -> int:
        """What PyTorch's attention must read until the next sync."""
        longest = int((self._position * self._active).max())
        return min(-(-(longest + 1 + self.steps_per_sync) // _BUCKET) * _BUCKET, self.max_length)

    def _collect(self) -> list[Generated]:
        state = torch.stack((self._active.long(), self._count)).tolist()
        done = [slot for slot, job in enumerate(self._jobs) if job is not None and not state[0][slot]]
        if not done:
            return []
        rows = self._out[torch.tensor(done, device=self.device)].tolist()
        finished = []
        for slot, row in zip(done, rows, strict=True):
            tokens = tuple(row[: state[1][slot]])
            job = self._jobs[slot]
            assert job is not None
            finished.append(Generated(job, tokens, stopped=bool(tokens) and tokens[-1] in self._eos_ids))
            self._jobs[slot] = None
        return finished

    def _start(self, refill: Sequence[tuple[int, GenerationJob]]) -> None:
        """Prefill prompts into their slots, sorted by length so that padding is small; draw the first tokens."""
        ordered = sorted(refill, key=lambda item: len(item[1].prompt))
        start = 0
        while start < len(ordered):
            end = start + 1
            while end < len(ordered) and (end + 1 - start) * len(ordered[end][1].prompt) <= _PREFILL_TOKENS:
                end += 1
            self._prefill(ordered[start:end])
            start = end

    def _prefill(self, part: Sequence[tuple[int, GenerationJob]]) -> None:
        device = self.device
        width = max(len(job.prompt) for _, job in part)
        padded = [list(job.prompt) + [0] * (width - len(job.prompt)) for _, job in part]
        tokens = torch.tensor(padded, device=device)
        slots = torch.tensor([slot for slot, _ in part], device=device)
        last = torch.tensor([len(job.prompt) - 1 for _, job in part], device=device)
        # padding is written too, behind the prompt: decoding overwrites it before anything may see it
        places = (self._base[slots].unsqueeze(1) + torch.arange(width, device=device)).reshape(-1)
        causal = causal_attention(len(part), width)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._keys[layer].index_copy_(0, places, key)
            self._values[layer].index_copy_(0, places, value)
            return causal(layer, query, key, value)

        positions = torch.arange(width, device=device).repeat(len(part))
        hidden = run_layers(self.model, tokens.reshape(-1), positions, attend).hidden
        hidden = hidden.view(len(part), width, -1)[torch.arange(len(part), device=device), last]
        temperatures = torch.tensor([job.temperature for _, job in part], device=device)
        sampled = temperatures > 0
        self._inverse[slots] = torch.where(sampled, 1 / temperatures.clamp_min(1e-6), 1.0)
        self._noise[slots] = sampled.float()
        self._limit[slots] = torch.tensor([job.max_tokens for _, job in part], device=device)
        first = self._draw(self.model.head(hidden), self._inverse[slots], self._noise[slots])
        self._position[slots] = last + 1
        self._current[slots] = first
        self._out[slots, 0] = first
        self._count[slots] = 1
        self._active[slots] = ~torch.isin(first, self._eos) & (self._limit[slots] > 1)
        for slot, job in part:
            self._jobs[slot] = job

    def _graph(self, bucket: int) -> Callable[[], None]:
        def eager() -> None:
            self._step(bucket)

        if not self._use_graphs:
            return eager
        made = self._graphs.get(bucket)
        if made is None:
            made = self._graphs[bucket] = self._capture(eager)
        return made

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the step as a CUDA graph. Warm-up runs change the state, which is put back."""
        state = (self._current, self._position, self._active, self._count, self._out)
        saved = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        if self._pool is None:
            self._pool = graph.pool()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)  # the KV written meanwhile is written again, with the same rows
        replay: Callable[[], None] = graph.replay
        return replay

    def _step(self, length: int) -> None:
        """One token for every active slot. Inactive ones compute along, and stay where they are."""
        position = self._position.clamp_max(length - 1)  # only inactive slots can be beyond
        attend = self._kernel_attention() if self.use_kernels else self._bucket_attention(position, length)
        hidden = run_layers(self.model, self._current, position, attend).hidden
        token = self._draw(self.model.head(hidden), self._inverse, self._noise)
        token = torch.where(self._active, token, self._current)
        column = torch.where(self._active, self._count, torch.full_like(self._count, self._max_new))
        self._out[self._rows, column] = token  # inactive slots write to a column that nobody reads
        self._current.copy_(token)
        moved = self._active.long()
        self._count.add_(moved)
        self._position.add_(moved)
        ended = (token.unsqueeze(1) == self._eos).any(1) | (self._count >= self._limit)
        self._active.logical_and_(~ended)

    def _kernel_attention(self) -> Attend:
        held = torch.where(self._active, self._position, -1)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            return append_and_attend(query, key, value, keys, values, held, self.max_length)

        return attend

    def _bucket_attention(self, position: Tensor, length: int) -> Attend:
        """PyTorch's attention over the first `length` rows of every slot."""
        config = self.model.config
        slots, dim, kv_heads = self.slots, config.head_dim, config.num_kv_heads
        fold = config.num_heads // kv_heads
        places = self._base + position
        bias = torch.zeros(slots, 1, 1, length, dtype=self._keys.dtype, device=self.device)
        seen = torch.arange(length, device=self.device) <= position.unsqueeze(1)
        bias.masked_fill_(~seen.view(slots, 1, 1, length), float("-inf"))
        bias = bias.expand(slots, kv_heads, fold, length)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._keys[layer].index_copy_(0, places, key)
            self._values[layer].index_copy_(0, places, value)
            shape = (slots, self.max_length, kv_heads, dim)
            keys = self._keys[layer].view(shape)[:, :length].transpose(1, 2)
            values = self._values[layer].view(shape)[:, :length].transpose(1, 2)
            out = F.scaled_dot_product_attention(
                query.reshape(slots, kv_heads, fold, dim), keys, values, attn_mask=bias
            )
            return out.reshape(slots, kv_heads * fold, dim)

        return attend
