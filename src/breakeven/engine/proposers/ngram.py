"""Prompt lookup: draft what followed the last occurrence of the context's own suffix.

No model and no forward: the longest suffix of `ngram_max` down to `ngram_min` tokens that occurred before is found in
an index kept per request, and what followed it then is proposed (Saxena, prompt-lookup decoding, 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from breakeven.engine.config import SpeculationConfig
from breakeven.engine.proposers.base import DraftContext
from breakeven.engine.tree import DraftTree

OCCURRENCES_SEARCHED = 32  # most recent occurrences of each suffix looked at for different continuations


class NgramIndex:
    """Where each n-gram of a growing token list ended last, and where each of those occurred before that.

    An n-gram is filed once the token after it is known, so every one found has a continuation. Extending by m tokens
    costs O(m) whatever the length of the list.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._sizes = range(ngram_max, ngram_min - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}  # n-gram (any size) -> index of its last token
        self._previous = {size: array("q") for size in self._sizes}  # by index of the last token; -1: none before
        self._length = 0  # tokens seen
        self._tail: tuple[int, ...] = ()  # the last few of them

    def update(self, tokens: Sequence[int]) -> None:
        """Take in what was appended. Starts anew if the list got shorter or its known end changed."""
        tail_start = self._length - len(self._tail)
        if len(tokens) < self._length or tuple(tokens[tail_start : self._length]) != self._tail:
            self._last.clear()
            for previous in self._previous.values():
                del previous[:]
            self._length = 0
        for end in range(max(self._length - 1, 0), len(tokens) - 1):
            for size in self._sizes:
                before = -1
                if end + 1 >= size:
                    gram = tuple(tokens[end + 1 - size : end + 1])
                    before = self._last.get(gram, -1)
                    self._last[gram] = end
                self._previous[size].append(before)
        self._length = len(tokens)
        self._tail = tuple(tokens[-(self._sizes.start + 1) :])

    def occurrences(self, tokens: Sequence[int]) -> Iterator[int]:
        """Last indices of earlier occurrences of the suffix: longest suffix first, then the most recent first."""
        for size in self._sizes:
            if size > len(tokens):
                continue
            end = self._last.get(tuple(tokens[-size:]), -1)
            for _ in range(OCCURRENCES_SEARCHED):
                if end < 0:
                    break
                yield end
                end = self._previous[size][end]


def continuation(tokens: Sequence[int], end: int, length: int) -> tuple[int, ...]:
    """`length` tokens that followed index `end`; past the end of the list the period is repeated (as in LZ77)."""
    following = tuple(tokens[end + 1 : end + 1 + length])
    period = len(tokens) - 1 - end
    return tuple(following[index % period] for index in range(length))


class NgramProposer:
    """Chains (eagle_topk 1: the most recent match), or trees of up to eagle_topk different continuations.

    For trees, continuations of the longest suffix come first, then the more recent; they are merged where they agree.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        return [self._propose(context) for context in contexts]

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def _propose(self, context: DraftContext) -> DraftTree | None:
        config = self._config
        depth = min(config.num_steps, context.max_depth, config.num_draft_tokens - 1)
        if depth < 1:
            return None
        index = self._indices.get(context.request_id)
        if index is None:
            index = self._indices[context.request_id] = NgramIndex(config.ngram_min, config.ngram_max)
        index.update(context.tokens)
        paths: dict[tuple[int, ...], None] = {}  # distinct, in order of preference
        for end in index.occurrences(context.tokens):
            paths.setdefault(continuation(context.tokens, end, depth))
            if len(paths) == config.eagle_topk:
                break
        return DraftTree.from_paths(paths, config.num_draft_tokens - 1) if paths else None
