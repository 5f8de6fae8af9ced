"""Frozen configuration of a model, of speculation and of the engine; validated once, at construction."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import Literal

DType = Literal["float32", "bfloat16"]
SpeculativeAlgorithm = Literal["ngram", "eagle3"]


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names the field and what to do."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of the rotary embedding: `linear`, or `llama3` (with its four parameters)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-, Qwen2- or Qwen3-like decoder, in the terms of its Hugging Face config.json."""

    family: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool = False  # biases on q, k, v (Qwen2)
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm per head on q and k (Qwen3)
    rope_scaling: RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What is drafted each round, in SGLang's terms.

    `num_steps` is the depth; `eagle_topk` the branching; `num_draft_tokens` the nodes verified, root included.
    A chain of K drafts is `num_steps=K, eagle_topk=1, num_draft_tokens=K + 1`.
    """

    algorithm: SpeculativeAlgorithm
    num_steps: int = 3
    eagle_topk: int = 1
    num_draft_tokens: int = 4
    draft_model_path: str | None = None
    draft_layer_ids: Literal["boundary", "output"] | None = None  # what the drafter's layer ids mean; None: by rule
    ngram_min: int = 2  # shortest suffix looked up in the context
    ngram_max: int = 4  # longest suffix looked up

    def __post_init__(self) -> None:
        for name in ("num_steps", "eagle_topk", "ngram_min"):
            if getattr(self, name) < 1:
                raise ConfigError(f"speculative {name} must be at least 1, got {getattr(self, name)}")
        if self.num_draft_tokens < 2:
            raise ConfigError(
                f"speculative num_draft_tokens counts the root, so it must be at least 2, got {self.num_draft_tokens}"
            )
        if self.num_draft_tokens > 64:
            raise ConfigError(f"speculative num_draft_tokens must be at most 64, got {self.num_draft_tokens}")
        if self.eagle_topk == 1 and self.num_draft_tokens > self.num_steps + 1:
            raise ConfigError(
                f"a chain of {self.num_steps} steps has {self.num_steps + 1} nodes, root included, but "
                f"num_draft_tokens is {self.num_draft_tokens}; lower it or raise num_steps"
            )
        if self.draft_layer_ids not in (None, "boundary", "output"):
            raise ConfigError(
                f"speculative draft_layer_ids must be 'boundary' or 'output', got {self.draft_layer_ids!r}"
            )
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max ({self.ngram_max}) must not be below ngram_min ({self.ngram_min})")

    def at_depth(self, num_steps: int) -> SpeculationConfig | None:
        """The same speculation, drafting at most `num_steps` deep; None for 0: off."""
        if num_steps <= 0:
            return None
        if num_steps >= self.num_steps:
            return self
        drawn = self.eagle_topk + (num_steps - 1) * self.eagle_topk**2  # candidates that so many levels yield
        return replace(self, num_steps=num_steps, num_draft_tokens=min(self.num_draft_tokens, 1 + drawn))


@dataclass(frozen=True, slots=True)
class SpeculationSchedule:
    """How deep to draft, by the number of sequences that decode: inclusive ranges (first, last, num_steps); 0: off.

    The rules are those of vLLM's `num_speculative_tokens_per_batch_size`: the first range starts at 1, and what lies
    between two ranges or after the last takes the depth of the range before it. Ranges are kept by rising batch size.
    """

    ranges: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ConfigError("the speculation schedule is empty; write ranges such as [[1, 4, 3], [5, 256, 0]]")
        for first, last, num_steps in self.ranges:
            if first < 1 or last < first:
                raise ConfigError(
                    f"the speculation schedule has the range {first} to {last}; a range is [first, last, num_steps] "
                    "with 1 <= first <= last"
                )
            if num_steps < 0:
                raise ConfigError(
                    f"the speculation schedule asks for {num_steps} steps at {first} to {last}; the least is 0: off"
                )
        ordered = tuple(sorted(self.ranges))
        if ordered[0][0] != 1:
            raise ConfigError(
                f"the speculation schedule starts at {ordered[0][0]}, so nothing is said of smaller batches; start the "
                "first range at 1"
            )
        for before, after in itertools.pairwise(ordered):
            if after[0] <= before[1]:
                raise ConfigError(
                    f"the speculation schedule says two things of batch size {after[0]}: the ranges {before[0]} to "
                    f"{before[1]} and {after[0]} to {after[1]} overlap"
                )
        object.__setattr__(self, "ranges", ordered)

    @classmethod
    def parse(cls, text: str) -> SpeculationSchedule:
        """From JSON such as `[[1,4,3],[5,8,1],[9,256,0]]`. ConfigError says what is wrong with it."""
        try:
            given = json.loads(text)
        except ValueError:
            raise ConfigError(
                f"the speculation schedule {text!r} is not JSON; write ranges such as '[[1,4,3],[5,256,0]]', in quotes"
            ) from None
        if not isinstance(given, list) or not all(
            isinstance(entry, list) and len(entry) == 3 and all(type(number) is int for number in entry)
            for entry in given
        ):
            raise ConfigError(
                f"the speculation schedule {text!r} is not a list of [first, last, num_steps], three whole numbers each"
            )
        return cls(tuple((first, last, num_steps) for first, last, num_steps in given))

    def num_steps(self, num_decoding: int) -> int:
        """The depth while `num_decoding` sequences decode; below 1, that of 1."""
        index = bisect_right([first for first, _, _ in self.ranges], num_decoding) - 1
        return self.ranges[max(index, 0)][2]

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths it ever asks for, ascending."""
        return tuple(sorted({num_steps for _, _, num_steps in self.ranges}))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine. Token counts unless said otherwise."""

    dtype: DType = "bfloat16"
    device: str = "cpu"
    page_size: int = 16  # tokens per KV page
    kv_cache_tokens: int = 65_536  # capacity of the KV pool
    max_running_requests: int = 256
    max_context: int | None = None  # None: the model's own limit
    prefill_chunk: int = 512  # prompt tokens processed in one step at most
    prefix_cache: bool = True
    speculation: SpeculationConfig | None = None
    schedule: SpeculationSchedule | None = None  # None: `speculation` at every batch size
    seed: int = 0  # for requests that name none
    debug_checks: bool = field(default=False)  # assert the integrity of the KV pool after every step

    def __post_init__(self) -> None:
        for name in ("page_size", "kv_cache_tokens", "max_running_requests", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_cache_tokens < 2 * self.page_size:
            raise ConfigError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold at least two pages of {self.page_size} tokens"
            )
        if self.schedule is None:
            return
        if self.speculation is None:
            raise ConfigError("a speculation schedule needs an algorithm; name it with --speculative-algorithm")
        deepest = self.schedule.depths[-1]
        if deepest > self.speculation.num_steps:
            raise ConfigError(
                f"the speculation schedule asks for {deepest} steps, but speculative num_steps is "
                f"{self.speculation.num_steps}; raise num_steps or lower the schedule"
            )
