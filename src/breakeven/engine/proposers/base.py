"""What a proposer is: something that drafts, for each request, the tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from breakeven.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One request as a proposer sees it.

    `tokens` is prompt and output so far; the last one is the tree's root. It is the engine's own list: read it, keep
    no reference to it. `max_depth` is how deep a draft can be of use: one less than the tokens the request may still
    emit, as each round also emits a bonus; 0 or less asks for no draft. `pages` are the KV pages of all tokens but the
    last, for proposers that keep KV of their own beside the target's.
    """

    request_id: str
    tokens: Sequence[int]
    max_depth: int
    pages: Sequence[int] = ()


class Proposer(Protocol):
    """Drafts for a batch of requests each round.

    What is drafted may depend on anything except the noise that verification will use; otherwise the output would no
    longer follow the target's distribution.

    A proposer that works from token ids (n-gram) needs this interface only. One that reads the target's hidden states
    (EAGLE-3) draws on the engine's `FeatureStore`, which is handed the tapped features of the rows that were kept after
    each target forward, whether or not anything was drafted. Nothing here presumes that a request is drafted for in
    every round: a proposer must cope with contexts that grew by any number of tokens since it last saw them.
    """

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """One tree per context, in order; None where nothing is drafted. Trees obey `max_depth`."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that ended. Unknown ids are ignored."""
        ...
