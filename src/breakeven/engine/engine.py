"""The engine: schedule, run, verify, hand over. One thread owns it; see `async_engine` for the bridge to a server."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from breakeven.engine.batch import StepPlan
from breakeven.engine.config import ConfigError, EngineConfig, ModelConfig, SpeculationConfig
from breakeven.engine.control import Controller, FixedController, ScheduledController
from breakeven.engine.kv import PagePool
from breakeven.engine.models.drafter import Drafter, DrafterCheckpoint
from breakeven.engine.models.load import load_model
from breakeven.engine.proposers.base import DraftContext, Proposer
from breakeven.engine.proposers.eagle3 import Eagle3Proposer
from breakeven.engine.proposers.features import FeatureStore, KeptRows
from breakeven.engine.proposers.ngram import NgramProposer
from breakeven.engine.request import (
    ContextLengthError,
    FinishReason,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenOutput,
)
from breakeven.engine.runner import Runner
from breakeven.engine.sampling import (
    RowSpec,
    SampleResult,
    SamplingBatch,
    SamplingProfile,
    build_batch,
    profile,
    sample,
    unique_tokens,
)
from breakeven.engine.scheduler import Scheduled, Scheduler, Slot
from breakeven.engine.stop import StopChecker
from breakeven.engine.taps import FeatureTaps
from breakeven.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from breakeven.engine.tree import DraftTree
from breakeven.engine.verify import Accepted, walk_batch

logger = logging.getLogger("breakeven.engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges now, and totals since the start. Token counts unless named otherwise."""

    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens_total: int
    preemptions: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    speculation: SpeculationStats


@dataclass(slots=True, eq=False)
class _Request:
    """A request inside the engine: its place in the scheduler and all that its tokens pass through."""

    slot: Slot
    params: SamplingParams
    seed: int
    stop: StopChecker
    prompt_ids: np.ndarray | None  # distinct, ascending; only where penalties need them
    profile: SamplingProfile
    counts: Counter[int] = field(default_factory=Counter)  # of output tokens; only where penalties need them
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


class Engine:
    """Continuous batching with lossless speculation over one target.

    The tokens a request gets depend on its prompt, parameters and seed, never on speculation or on the batch (up to
    the rounding of floating-point sums, whose order depends on the batch).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        weights: Mapping[str, Tensor],
        config: EngineConfig,
        controller: Controller | None = None,
        drafter: DrafterCheckpoint | None = None,
    ) -> None:
        """`drafter`: needed for EAGLE-3, and loaded whether or not `config.speculation` names it, so that the
        controller may choose it. ConfigError if the configuration cannot be served."""
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        num_pages = config.kv_cache_tokens // config.page_size
        limit = config.max_context if config.max_context is not None else model_config.max_position
        if limit > model_config.max_position:
            raise ConfigError(
                f"max_context is {limit}, but the model's positions end at {model_config.max_position}; lower it"
            )
        self.max_context = min(limit, num_pages * config.page_size)
        self._pool = PagePool(num_pages, config.page_size, prefix_cache=config.prefix_cache)
        self._scheduler = Scheduler(
            self._pool, max_running=config.max_running_requests, prefill_chunk=config.prefill_chunk
        )
        self._runner = Runner(model_config, config, weights, num_pages)
        self._controller = controller if controller is not None else _controller(config)
        self._proposers: dict[SpeculationConfig, Proposer] = {}
        self._features: FeatureStore | None = None
        self._boundaries: tuple[int, ...] = ()
        if drafter is not None:
            model = self._runner.model
            head = Drafter(
                drafter.config, model_config, drafter.weights, model.embedding, self._runner.device, model.head.weight
            )
            self._features = FeatureStore(head, num_pages, config.page_size)
            self._boundaries = drafter.config.tap_boundaries
        if config.speculation is not None:
            self._proposer(config.speculation)
        self._requests: dict[str, _Request] = {}
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._totals = SpeculationStats()

    @classmethod
    def from_pretrained(cls, name_or_path: str, config: EngineConfig, controller: Controller | None = None) -> Engine:
        """Load a model (see `load_model`) and build its engine. ConfigError says what cannot be served."""
        if config.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device is {config.device!r}, but PyTorch sees no CUDA device here; use --device cpu")
        model = load_model(name_or_path)
        dtype = _DTYPES[config.dtype]
        weights = model.weights(dtype)
        drafter = None
        if config.speculation is not None and config.speculation.algorithm == "eagle3":
            drafter = _load_drafter(name_or_path, config.speculation, model.config, weights, dtype)
        return cls(model.config, model.tokenizer, weights, config, controller, drafter)

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """RequestError unless the request can be served."""
        if not prompt_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        vocab = self.model_config.vocab_size
        wrong = next((token for token in prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the model's vocabulary of {vocab}")
        if len(prompt_ids) >= self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, but this server's maximum context length is "
                f"{self.max_context} tokens, of which at least one is for the answer; shorten the prompt"
            )
        if params.max_tokens is not None and len(prompt_ids) + params.max_tokens > self.max_context:
            raise ContextLengthError(
                f"prompt ({len(prompt_ids)} tokens) and max_tokens ({params.max_tokens}) exceed this server's "
                f"maximum context length of {self.max_context} tokens; shorten the prompt or lower max_tokens"
            )
        for token in (*params.logit_bias, *params.stop_token_ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token id {token} in logit_bias or stop_token_ids is outside the model's vocabulary of {vocab}"
                )

    def add_request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request. RequestError if it cannot be served or the id is in use."""
        self.validate(prompt_ids, params)
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        budget = self.max_context - len(prompt_ids)
        if params.max_tokens is not None:
            budget = min(budget, params.max_tokens)
        made = profile(params)
        detokenizer = IncrementalDetokenizer(self.tokenizer, context=prompt_ids)
        request = _Request(
            slot=Slot(request_id, list(prompt_ids), len(prompt_ids), len(prompt_ids) + budget),
            params=params,
            seed=params.seed if params.seed is not None else _derived_seed(self.config.seed, request_id),
            stop=StopChecker(params, self.tokenizer.eos_token_ids, detokenizer, budget),
            prompt_ids=unique_tokens(prompt_ids) if made.penalised else None,
            profile=made,
        )
        self._requests[request_id] = request
        self._scheduler.add(request.slot)
        self._prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its KV at once. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._drop(request)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; requests in flight keep their own KV."""
        self._pool.reset_prefix_cache()
        return True

    def reset_stats(self) -> None:
        """Start the totals of `stats` anew, as after a warm-up."""
        self._prompt_tokens = self._generated_tokens = 0
        self._scheduler.preemptions = self._scheduler.prefix_hit_tokens = 0
        self._totals = SpeculationStats()

    def stats(self) -> EngineStats:
        """Gauges and totals."""
        size = self._pool.page_size
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_tokens_used=self._pool.owned * size,
            kv_tokens_total=self._pool.num_pages * size,
            preemptions=self._scheduler.preemptions,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            speculation=_copy(self._totals),
        )

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One round for every scheduled request: draft, run the target once, verify, hand over. [] if idle."""
        if not self._requests:
            return []
        scheduled = self._scheduler.schedule(self._proposal())
        taps = FeatureTaps(self._boundaries) if self._features is not None else None
        logits = self._runner.forward(StepPlan(tuple(item.rows for item in scheduled)), taps)
        sampling = [item for item in scheduled if item.samples]
        result = sample(logits, self._sampling_batch(sampling)) if sampling else None
        draws = result.token_list() if result is not None else []
        rounds: list[tuple[Scheduled, Accepted, int]] = []
        first = 0
        for item, accepted in zip(sampling, walk_batch([item.tree for item in sampling], draws), strict=True):
            rounds.append((item, accepted, first))
            first += item.rows.sampled
        self._compact(rounds)
        if self._features is not None and taps is not None and scheduled:
            self._features.observe(_kept_rows(scheduled, rounds), taps.features)
        for item in scheduled:
            if not item.samples:
                self._scheduler.advance(item.sequence, len(item.rows))
        outputs = [self._finish_round(item, accepted, row, result) for item, accepted, row in rounds]
        if self.config.debug_checks:
            self.check()
        return outputs

    def check(self) -> None:
        """AssertionError unless every KV page is accounted for. For tests."""
        self._scheduler.check()
        assert len(self._scheduler.running) + len(self._scheduler.waiting) == len(self._requests)
        if self._features is not None:
            self._features.check()

    def _proposal(self) -> Callable[[Sequence[Slot]], Sequence[DraftTree | None]] | None:
        decoding = sum(sequence.decoding for sequence in self._scheduler.running)
        speculation = self._controller.choose(decoding)
        if speculation is None:
            return None
        proposer = self._proposer(speculation)
        return lambda slots: proposer.propose(
            [DraftContext(slot.request_id, slot.tokens, slot.max_draft_depth, slot.pages) for slot in slots]
        )

    def _proposer(self, speculation: SpeculationConfig) -> Proposer:
        proposer = self._proposers.get(speculation)
        if proposer is None:
            if speculation.algorithm == "ngram":
                proposer = NgramProposer(speculation)
            elif self._features is not None:
                proposer = Eagle3Proposer(speculation, self._features)
            else:
                raise ConfigError(
                    "speculative algorithm 'eagle3' needs a drafter, but the engine was built without one; name its "
                    "directory with --speculative-draft-model-path (or give Engine its `drafter`)"
                )
            self._proposers[speculation] = proposer
        return proposer

    def _sampling_batch(self, sampling: Sequence[Scheduled]) -> SamplingBatch:
        requests = [self._requests[item.sequence.request_id] for item in sampling]
        if all(request.profile.plain_greedy for request in requests):
            return SamplingBatch.greedy(sum(item.rows.sampled for item in sampling))
        rows: list[RowSpec] = []
        for item, request in zip(sampling, requests, strict=True):
            paths = item.tree.paths if item.tree is not None else ((),)
            length = len(item.sequence.tokens)
            rows += [
                RowSpec(
                    request.profile,
                    request.seed,
                    length + len(path),
                    request.counts,
                    request.prompt_ids,
                    path,
                    length - item.sequence.prompt_len + len(path),
                )
                for path in paths
            ]
        return build_batch(rows, self.model_config.vocab_size, self.tokenizer.eos_token_ids, device=self._runner.device)

    def _compact(self, rounds: Sequence[tuple[Scheduled, Accepted, int]]) -> None:
        """Move the KV of accepted rows to where their tokens belong. A chain's rows lie there already."""
        size = self._pool.page_size
        moves = []
        for item, accepted, _ in rounds:
            pages, prefix = item.rows.pages, item.rows.prefix
            for index, node in enumerate(accepted.nodes):
                if node != index:
                    source, target = prefix + node, prefix + index
                    moves.append(
                        (pages[source // size] * size + source % size, pages[target // size] * size + target % size)
                    )
        self._runner.compact(moves)

    def _finish_round(
        self, item: Scheduled, accepted: Accepted, first_row: int, result: SampleResult | None
    ) -> RequestOutput:
        """Pass the accepted tokens one by one through the stop checker, and hand over what it lets pass."""
        slot = item.sequence
        request = self._requests[slot.request_id]
        drafted = 0 if item.tree is None else len(item.tree) - 1
        text, emitted = "", 0
        finish_reason: FinishReason | None = None
        stop_reason: str | int | None = None
        for token in accepted.tokens:
            decision = request.stop.push(token)
            slot.tokens.append(token)
            emitted += 1
            text += decision.text
            if decision.finished is not None:
                finish_reason, stop_reason = decision.finished, decision.stop_reason
                break
        kept = accepted.tokens[:emitted]
        if request.profile.penalised:
            request.counts.update(kept)
        if request.params.logprobs is not None and result is not None:
            tokens = tuple(result.outputs([first_row + node for node in accepted.nodes[:emitted]]))
        else:
            tokens = tuple(TokenOutput(token) for token in kept)
        self._generated_tokens += emitted
        for stats in (request.speculation, self._totals):
            _count(stats, drafted, emitted)
        self._scheduler.advance(slot, len(item.rows) - drafted - 1 + emitted)
        if finish_reason is not None:
            del self._requests[slot.request_id]
            self._drop(request)
        else:
            self._scheduler.trim(slot)
        return RequestOutput(
            request_id=slot.request_id,
            tokens=tokens,
            text=text,
            prompt_tokens=slot.prompt_len,
            cached_tokens=slot.cached,
            completion_tokens=len(slot.tokens) - slot.prompt_len,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            speculation=_copy(request.speculation) if finish_reason is not None else None,
        )

    def _drop(self, request: _Request) -> None:
        self._scheduler.remove(request.slot)
        for proposer in self._proposers.values():
            proposer.forget(request.slot.request_id)
        if self._features is not None:
            self._features.forget(request.slot.request_id)


def _controller(config: EngineConfig) -> Controller:
    """What the configuration asks for: off, one shape, or shapes by batch size."""
    if config.speculation is not None and config.schedule is not None:
        return ScheduledController(config.speculation, config.schedule)
    return FixedController(config.speculation)


def _kept_rows(scheduled: Sequence[Scheduled], rounds: Sequence[tuple[Scheduled, Accepted, int]]) -> list[KeptRows]:
    """Which rows of the step's features each sequence keeps: all that were computed but rejected drafts. A run that a
    stop will cut is kept whole: its request ends, and what it filed beyond the stop lies in no remembered page."""
    kept = []
    accepted_of = iter(rounds)
    start = 0
    for item in scheduled:
        slot, count = item.sequence, len(item.rows)
        rows: Sequence[int] = range(start, start + count)
        tokens: Sequence[int] = slot.tokens
        if item.samples:
            _, accepted, _ = next(accepted_of)
            root = start + count - item.rows.sampled
            rows = [*range(start, root), *(root + node for node in accepted.nodes)]
            if len(accepted.nodes) > 1:
                tokens = [*slot.tokens, *accepted.tokens]
        kept.append(KeptRows(slot.request_id, item.rows.prefix, item.rows.pages, rows, tokens))
        start += count
    return kept


def _load_drafter(
    name_or_path: str,
    speculation: SpeculationConfig,
    target: ModelConfig,
    target_weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> DrafterCheckpoint:
    """The drafter that `speculation` names, else the one in the box. ConfigError if none is there or fits."""
    from breakeven.engine.models.drafter_load import default_drafter, load_drafter

    directory = speculation.draft_model_path or default_drafter(name_or_path)
    if directory is None:
        raise ConfigError(
            f"speculative algorithm 'eagle3': there is no drafter in the box for {name_or_path!r}; name the directory "
            "of one that was trained for it with --speculative-draft-model-path"
        )
    loaded = load_drafter(directory, target, layer_ids=speculation.draft_layer_ids)
    for note in loaded.notes:
        logger.info("drafter: %s", note)
    return DrafterCheckpoint(loaded.config, loaded.weights(dtype, target_weights))


def _count(stats: SpeculationStats, drafted: int, emitted: int) -> None:
    """Count one round. Accepted are the tokens that drafting added, so completion = steps + accepted, also where a
    stop cuts the run: counting drafts beyond the stop would overstate the acceptance length (vllm issue 56101)."""
    stats.steps += 1
    if drafted:
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += emitted - 1
        missing = emitted - 1 - len(stats.accepted_per_position)
        stats.accepted_per_position.extend([0] * max(missing, 0))
        for position in range(emitted - 1):
            stats.accepted_per_position[position] += 1


def _copy(stats: SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        stats.drafts, stats.draft_tokens, stats.accepted_tokens, list(stats.accepted_per_position), stats.steps
    )


def _derived_seed(seed: int, request_id: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
