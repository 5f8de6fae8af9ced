"""What the EAGLE-3 drafter knows of each request: its own KV, and target features whose rows are not filed yet.

A request's draft row for slot i (see `models.drafter`: features h_{i-1} with token t_i) has its KV filed under slot i
of the target's own page table. Slot i then depends on t_0..t_i only, like the target's KV there, so a page that the
prefix cache remembers has valid draft KV for whoever finds it. Slot 0 has no features before it and stays empty.

Rows are filed late: when the request drafts, and at the latest when a page fills. Until then their features wait here,
at most a page and one round of them per request, which is all that a step without speculation pays for. The features
of each full page's last token are kept with the page: whoever continues from it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breakeven.engine.models.drafter import Drafter
from breakeven.engine.proposers.base import DraftContext


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What one request keeps of a target step.

    `rows` are those rows of the step's features that hold, in order, the tokens at `prefix`, `prefix` + 1, ...;
    `tokens` are known from 0 to at least the last of those; `pages` hold them.
    """

    request_id: str
    prefix: int
    pages: Sequence[int]
    rows: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """A batch of draft rows: first those to be filed, request after request, then each request's root.

    features [rows, 3 * target hidden]; tokens and positions int64 [rows]; slots int64 [rows - requests].
    """

    features: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor


@dataclass(slots=True)
class _Request:
    """`computed` tokens have their features known; slots below `filed` (but 0) have their draft KV; `chunks` hold the
    features h_{filed-1} to h_{computed-1} as (tensor, first row, rows)."""

    computed: int
    filed: int
    chunks: list[tuple[Tensor, int, int]] = field(default_factory=list)


class FeatureStore:
    """One per engine, shared by the proposers of all shapes."""

    def __init__(self, drafter: Drafter, num_pages: int, page_size: int) -> None:
        self.drafter = drafter
        self.cache = drafter.new_cache(num_pages, page_size)
        device = drafter.target_ids.device
        self._page_features = torch.zeros(num_pages, drafter.feature_size, dtype=drafter.dtype, device=device)
        self._page_size = page_size
        self._requests: dict[str, _Request] = {}

    def observe(self, kept: Sequence[KeptRows], features: Tensor) -> None:
        """Take in a step: features [rows of the step, 3 * target hidden]. Files the rows of pages that fill.

        To be called after every target step, with every request that computed anything, before any of their pages is
        released.
        """
        size = self._page_size
        chunks: list[tuple[Tensor, int, int]] = []
        waiting, fresh = _RowLists(), _RowLists()  # rows to file: from features that waited, and from this step's
        fresh_rows: list[int] = []
        page_ids: list[int] = []
        page_rows: list[int] = []
        remaining: list[int] = []
        places: list[tuple[_Request, int, int]] = []
        for item in kept:
            request = self._at(item.request_id, item.prefix, item.pages)
            rows, prefix = item.rows, item.prefix
            computed = prefix + len(rows)
            full = computed // size * size
            skip = 0
            if full > prefix:
                middle = prefix + 1  # slot i needs h_{i-1}: up to slot `prefix` from what waited
                chunks += request.chunks
                waiting.add(item.tokens, item.pages, request.filed, middle, size)
                skip = full - middle
                fresh.add(item.tokens, item.pages, middle, full, size)
                fresh_rows += rows[:skip]
                page_ids += item.pages[prefix // size : full // size]
                page_rows += rows[size - 1 - prefix % size :: size]
                request.filed = full
                request.chunks = []
            places.append((request, len(remaining), len(rows) - skip))
            remaining += rows[skip:]
            request.computed = computed
        if page_ids:
            sources = [self._gather(chunks)] if chunks else []
            if fresh_rows:
                sources.append(self._select(features, fresh_rows))
            if sources:
                waiting.extend(fresh)
                self._file(sources[0] if len(sources) == 1 else torch.cat(sources), waiting)
            self._page_features[self._tensor(page_ids)] = self._select(features, page_rows)
        if len(remaining) < features.shape[0]:  # hold no more than waits
            features = self._select(features, remaining)
        for request, first, count in places:
            request.chunks.append((features, first, count))

    def draft_rows(self, contexts: Sequence[DraftContext]) -> DraftRows:
        """The rows that a round of drafting begins with. The caller files all but the roots, at once.

        Each context's last token is its root: not computed by the target yet, all others are.
        """
        size = self._page_size
        index_of: dict[int, tuple[int, Tensor]] = {}  # tensor -> its first row in their concatenation
        total = 0
        filing = _RowLists()
        filing_rows: list[int] = []
        root_rows: list[int] = []
        requests = []
        for context in contexts:
            computed = len(context.tokens) - 1
            request = self._at(context.request_id, computed, context.pages)
            rows: list[int] = []
            for tensor, first, count in request.chunks:
                known = index_of.get(id(tensor))
                if known is None:
                    known = index_of[id(tensor)] = (total, tensor)
                    total += tensor.shape[0]
                rows += range(known[0] + first, known[0] + first + count)
            filing.add(context.tokens, context.pages, request.filed, computed, size)
            filing_rows += rows[:-1]
            root_rows.append(rows[-1])
            requests.append(request)
        tensors = [tensor for _, tensor in index_of.values()]
        together = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        count, batch = len(filing_rows), len(root_rows)
        tokens = filing.tokens + [context.tokens[-1] for context in contexts]
        positions = filing.positions + [len(context.tokens) - 2 for context in contexts]
        host = self._tensor(filing_rows + root_rows + tokens + positions + filing.slots)
        order, token_ids, places, slots = torch.split(host, [count + batch] * 3 + [count])
        features = together.index_select(0, order)
        for index, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            request.filed = max(len(context.tokens) - 1, 1)
            request.chunks = [(features, count + index, 1)]
        return DraftRows(features, token_ids, places, slots)

    def forget(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def check(self) -> None:
        """AssertionError unless each request's waiting features are those between its two watermarks. For tests."""
        for name, request in self._requests.items():
            waiting = sum(count for _, _, count in request.chunks)
            assert 1 <= request.filed <= max(request.computed, 1), f"{name}: {request.filed} of {request.computed}"
            assert waiting == request.computed - request.filed + 1, f"{name}: {waiting} features wait"
            assert request.filed >= request.computed // self._page_size * self._page_size, f"{name}: a page unfiled"

    def _at(self, request_id: str, computed: int, pages: Sequence[int]) -> _Request:
        """The request with `computed` tokens done.

        If that is not where it was left, it was admitted (again) with a cached prefix, which ends with a page. One
        that was admitted again exactly where it was left needs nothing: its tokens are the same.
        """
        request = self._requests.get(request_id)
        if request is None or request.computed != computed:
            request = self._requests[request_id] = _Request(computed, max(computed, 1))
            if computed:
                assert computed % self._page_size == 0, "a cached prefix ends with a page"
                last = pages[computed // self._page_size - 1]
                request.chunks = [(self._page_features[last : last + 1].clone(), 0, 1)]
        return request

    def _gather(self, chunks: Sequence[tuple[Tensor, int, int]]) -> Tensor:
        return torch.cat([tensor[first : first + count] for tensor, first, count in chunks])

    def _file(self, features: Tensor, rows: _RowLists) -> None:
        count = len(rows.tokens)
        tokens, positions, slots = self._tensor(rows.tokens + rows.positions + rows.slots).view(3, count)
        x, _ = self.drafter.inputs(self.drafter.fuse(features), tokens)
        self.drafter.extend(x, positions, slots, self.cache)

    def _select(self, features: Tensor, rows: Sequence[int]) -> Tensor:
        return features.index_select(0, self._tensor(rows))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        array: NDArray[np.int64] = np.array(values, np.int64)
        return torch.from_numpy(array).to(self._page_features.device, non_blocking=True)


@dataclass(slots=True)
class _RowLists:
    """Token, rotary position and physical slot of rows that are to be filed."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], pages: Sequence[int], start: int, end: int, page_size: int) -> None:
        """Slots `start` to `end` - 1 of one request."""
        self.tokens += tokens[start:end]
        self.positions += range(start - 1, end - 1)
        self.slots += [pages[slot // page_size] * page_size + slot % page_size for slot in range(start, end)]

    def extend(self, other: _RowLists) -> None:
        self.tokens += other.tokens
        self.positions += other.positions
        self.slots += other.slots
