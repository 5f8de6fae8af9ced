"""Who runs in the next step, with which rows and which KV pages. No tensors here.

Every running sequence is described by its tokens and one watermark, `computed`: how many of them have their KV in the
cache. A sequence with one token left to compute is decoding; more left means that its prompt (or, after a
pre-emption, its prompt and output) is being prefilled, in chunks. Nothing else distinguishes the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from breakeven.engine.batch import SequenceRows
from breakeven.engine.kv import PagePool, page_hash
from breakeven.engine.tree import DraftTree


@dataclass(slots=True, eq=False)
class Slot:
    """A request's place in the scheduler. Token counts throughout; `tokens` is prompt and output so far."""

    request_id: str
    tokens: list[int]
    prompt_len: int
    max_len: int  # prompt and output never exceed this
    computed: int = 0
    cached: int = 0  # of the prompt, found in the prefix cache when first admitted
    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # identities of the full pages that are remembered
    admitted_before: bool = False

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and len(self.tokens) > self.prompt_len

    @property
    def max_draft_depth(self) -> int:
        """One less than the tokens that may still be emitted: a round also emits a bonus."""
        return self.max_len - len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's rows in this step. `tree` is what is verified, None where nothing is drafted."""

    sequence: Slot
    rows: SequenceRows
    tree: DraftTree | None

    @property
    def samples(self) -> bool:
        return self.rows.sampled > 0


Propose = Callable[[Sequence[Slot]], Sequence[DraftTree | None]]


class Scheduler:
    """Continuous batching over one page pool, first come first served; the latest arrival is pre-empted first."""

    def __init__(self, pool: PagePool, *, max_running: int, prefill_chunk: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Slot] = deque()
        self.running: list[Slot] = []  # in order of arrival
        self.preemptions = 0
        self.prefix_hit_tokens = 0

    def add(self, sequence: Slot) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Slot) -> None:
        """A sequence has ended or was aborted: its pages are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self, propose: Propose | None) -> list[Scheduled]:
        """The rows of the next step. `propose` drafts for the decoding sequences; None: no speculation."""
        self._admit()
        decoding = [sequence for sequence in self.running if sequence.decoding]
        trees = propose(decoding) if propose is not None and decoding else [None] * len(decoding)
        drafted: Mapping[str, DraftTree | None] = {
            sequence.request_id: tree for sequence, tree in zip(decoding, trees, strict=True)
        }
        scheduled: list[Scheduled] = []
        budget = self.prefill_chunk
        for sequence in list(self.running):
            if sequence not in self.running:  # pre-empted for one before it
                continue
            tree = drafted.get(sequence.request_id)
            if sequence.decoding:
                num_rows = 1
            else:
                num_rows = min(sequence.pending, budget)
                budget -= num_rows
                if num_rows == 0:
                    continue
            drafts = 0 if tree is None else len(tree) - 1
            if drafts and not self._reserve(sequence, sequence.computed + num_rows + drafts):
                tree, drafts = None, 0  # KV is short: speculation gives way before anybody is pre-empted
            if not self._reserve_or_preempt(sequence, sequence.computed + num_rows + drafts):
                continue
            scheduled.append(Scheduled(sequence, _rows(sequence, num_rows, tree), tree))
        return [item for item in scheduled if item.sequence in self.running]

    def advance(self, sequence: Slot, kept: int) -> None:
        """`kept` further tokens of the sequence now have valid KV, in place. Remembers the pages they fill."""
        sequence.computed += kept
        size = self.pool.page_size
        while (len(sequence.hashes) + 1) * size <= sequence.computed:
            page_index = len(sequence.hashes)
            previous = sequence.hashes[-1] if sequence.hashes else b""
            identity = page_hash(previous, sequence.tokens[page_index * size : (page_index + 1) * size])
            sequence.hashes.append(identity)
            self.pool.remember(sequence.pages[page_index], identity)

    def trim(self, sequence: Slot) -> None:
        """Give back the pages that only rejected drafts needed."""
        needed = self._pages_for(len(sequence.tokens))
        if len(sequence.pages) > needed:
            self.pool.release(sequence.pages[needed:])
            del sequence.pages[needed:]

    def check(self) -> None:
        """AssertionError unless pages are owned exactly by the running sequences and watermarks are in range."""
        self.pool.check([sequence.pages for sequence in self.running])
        for sequence in self.running:
            assert 0 <= sequence.computed <= len(sequence.tokens)
            assert len(sequence.pages) * self.pool.page_size >= sequence.computed
        for sequence in self.waiting:
            assert not sequence.pages
            assert sequence.computed == 0

    def _admit(self) -> None:
        size = self.pool.page_size
        prefilling = sum(sequence.pending for sequence in self.running if not sequence.decoding)
        while self.waiting and len(self.running) < self.max_running and prefilling < self.prefill_chunk:
            sequence = self.waiting[0]
            # At least one token must be computed to have logits, so the last one is never taken from the cache.
            pages, hashes = self.pool.match(sequence.tokens[: len(sequence.tokens) - 1])
            needed = self._pages_for(len(sequence.tokens)) - len(pages)
            # Room for the whole prompt and, so that admission does not pre-empt at once, a page for each one running.
            spare = len(self.running) if self.running else 0
            if needed + spare > self.pool.available:
                self.pool.release(pages)
                return
            self.waiting.popleft()
            sequence.pages, sequence.hashes = pages, hashes
            sequence.computed = len(pages) * size
            self.prefix_hit_tokens += sequence.computed
            if not sequence.admitted_before:
                sequence.cached = min(sequence.computed, sequence.prompt_len)
                sequence.admitted_before = True
            more = self.pool.allocate(needed)
            assert more is not None, "checked above"
            sequence.pages += more
            self.running.append(sequence)
            prefilling += sequence.pending

    def _reserve(self, sequence: Slot, length: int) -> bool:
        """Give the sequence pages for `length` tokens if they are to be had."""
        missing = self._pages_for(length) - len(sequence.pages)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _reserve_or_preempt(self, sequence: Slot, length: int) -> bool:
        """As `_reserve`, pre-empting later arrivals as needed; False if the sequence itself had to go."""
        while not self._reserve(sequence, length):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Slot) -> None:
        """Back to the head of the queue, to be computed anew (from the prefix cache where it survives)."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Slot) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.hashes, sequence.computed = [], [], 0

    def _pages_for(self, length: int) -> int:
        return -(-length // self.pool.page_size)


def _rows(sequence: Slot, num_rows: int, tree: DraftTree | None) -> SequenceRows:
    start = sequence.computed
    tokens = tuple(sequence.tokens[start : start + num_rows])
    pages = tuple(sequence.pages)
    if tree is not None:
        visible = None if tree.is_chain else tuple(tree.ancestor_masks)
        positions = tuple(start + depth for depth in tree.depths)
        return SequenceRows(tokens + tuple(tree.tokens), positions, start, pages, len(tree), visible)
    reaches_end = start + num_rows == len(sequence.tokens)
    return SequenceRows(tokens, tuple(range(start, start + num_rows)), start, pages, 1 if reaches_end else 0)
