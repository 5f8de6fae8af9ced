"""Acceptance of drafted tokens over one cell, from the server's counters, checked against what was received. Pure.

Counters are deltas over the cell's window: `num_drafts` (rounds in which at least one token was drafted),
`num_draft_tokens`, `num_accepted_tokens`, and `accepted_pos_0`, `accepted_pos_1`, … (rounds whose draft was accepted
at least that deep).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from breakeven.lab.client.types import RequestResult
from breakeven.lab.quantity import Provenance, Quantity

CROSS_CHECK_TOLERANCE = 0.01  # relative difference between two sources that is worth a note
UNDER_COUNT_SHARE = 0.10  # share of tokens that chunks must show, and counters miss, to be worth a note
LOOPING_SHARE_LIMIT = 0.10  # above this share of looping texts acceptance describes the loops


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`length`: mean acceptance length, bonus token included: 1 + accepted / drafts.

    `per_position[i]`: share of rounds whose draft was accepted at least i + 1 deep. `tokens_per_step`: completion
    tokens per target forward that emitted any, drafted or not: what speculation gave after truncation at EOS.
    `valid`: the text was natural (real prompts, EOS respected, few loops) and no counter was impossible.
    """

    length: Quantity
    draft_share: Quantity  # accepted / drafted tokens
    per_position: tuple[Quantity, ...]
    tokens_per_step: Quantity
    valid: bool
    notes: tuple[str, ...]


def acceptance(
    counters: Mapping[str, float],
    requests: Sequence[RequestResult],
    *,
    natural: bool = True,
    looping_share: float | None = None,
) -> Acceptance:
    """Acceptance over a cell. `requests`: all of them. `natural`: real text with EOS respected.

    Without counters the sums of the requests' own are used, where the server sends those.
    """
    notes: list[str] = []
    own = _sum_of_requests(requests)
    source = "server counters over the cell"
    if not counters.get("num_drafts") and own.get("num_drafts"):
        counters, source = own, "the requests' own counters"
    problem = _impossible(counters)
    drafts = counters.get("num_drafts", 0.0)
    accepted = counters.get("num_accepted_tokens")
    drafted = counters.get("num_draft_tokens")

    def unavailable(unit: str, why: str) -> Quantity:
        return Quantity(None, unit, Provenance.SERVER_REPORTED, why)

    absent = problem or ("no speculation counters" if not counters else "nothing was drafted")
    length, share = unavailable("tokens", absent), unavailable("1", absent)
    positions: tuple[Quantity, ...] = ()
    if problem:
        notes.append(problem)
    elif drafts > 0 and accepted is not None:
        length = Quantity(1 + accepted / drafts, "tokens", Provenance.SERVER_REPORTED, source)
        if drafted:
            share = Quantity(accepted / drafted, "1", Provenance.SERVER_REPORTED, source)
        positions = tuple(
            Quantity(value / drafts, "1", Provenance.SERVER_REPORTED, source) for value in _positions(counters)
        )
        notes += _cross_checks(drafts, drafted, accepted, own, requests)
    if length.value is not None and not natural:
        notes.append("acceptance not valid: the prompts are not real text or EOS was ignored")
    looping = looping_share is not None and looping_share > LOOPING_SHARE_LIMIT
    if length.value is not None and looping:
        notes.append(f"acceptance not valid: {looping_share:.0%} of the texts loop")
    valid = length.value is not None and natural and not looping
    return Acceptance(length, share, positions, _tokens_per_step(requests), valid, tuple(notes))


def _positions(counters: Mapping[str, float]) -> list[float]:
    values: list[float] = []
    while (key := f"accepted_pos_{len(values)}") in counters:
        values.append(counters[key])
    return values


def _impossible(counters: Mapping[str, float]) -> str:
    """A sentence that names what cannot be; empty if nothing."""
    negative = sorted(name for name, value in counters.items() if value < 0)
    if negative:
        return f"the counter {negative[0]} ran backwards: the server reset it within the cell"
    drafts = counters.get("num_drafts", 0.0)
    drafted = counters.get("num_draft_tokens")
    accepted = counters.get("num_accepted_tokens", 0.0)
    positions = _positions(counters)
    if drafted is not None and accepted > drafted:
        return f"{accepted:g} accepted tokens of {drafted:g} drafted ones cannot be"
    if drafted is not None and drafted < drafts:
        return f"{drafts:g} drafts with {drafted:g} drafted tokens cannot be"
    if any(value > drafts for value in positions):
        return "more accepted drafts at a position than there were drafts cannot be"
    if any(after > before for before, after in itertools.pairwise(positions)):
        return "more drafts accepted at a deeper position than at a shallower one cannot be"
    return ""


def _sum_of_requests(requests: Sequence[RequestResult]) -> dict[str, float]:
    """Sums of the requests' own counters; empty unless every request that produced tokens has them."""
    producing = [r for r in requests if r.error is None and r.completion_tokens]
    if not producing or any(not r.speculation or "num_drafts" not in r.speculation for r in producing):
        return {}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return {
        name: float(sum((r.speculation or {}).get(name, 0.0) for r in producing))
        for name in names
        if any(name in (r.speculation or {}) for r in producing)
    }


def _cross_checks(
    drafts: float, drafted: float | None, accepted: float, own: Mapping[str, float], requests: Sequence[RequestResult]
) -> list[str]:
    """Checks that hold only if all requests succeeded: failed ones are in the counters, but have no count."""
    if any(r.error is not None or r.completion_tokens is None for r in requests):
        return []
    notes = []
    # Each round emits its accepted tokens and one more; prefill emits the first token. More than was received means
    # that tokens behind an EOS or a stop string were counted. The last round of an answer that was cut at its longest
    # may have brought a draft more than fitted, which says nothing about the counters.
    received = sum(max((r.completion_tokens or 0) - 1, 0) for r in requests)
    depth = drafted / drafts if drafted else 0.0
    excess = accepted + drafts - received - depth * sum(r.finish_reason == "length" for r in requests)
    if requests and excess > CROSS_CHECK_TOLERANCE * max(received, 1):
        notes.append(
            f"the counters claim {accepted + drafts:g} tokens from speculation, but only {received} were received after"
            " each first token: acceptance is over-counted (tokens behind EOS, or traffic that is not ours)"
        )
    # A chunk of k tokens holds k − 1 that were drafted, if it is one step and not several: then k is within a draft.
    beyond = sum(max((r.completion_tokens or 0) - len(r.chunks), 0) for r in requests if r.chunks)
    in_a_step = 1 + depth if drafted else 0.0
    single = all(c.tokens is not None and c.tokens <= in_a_step for r in requests for c in r.chunks)
    if single and beyond > UNDER_COUNT_SHARE * max(received, 1) and accepted < (1 - UNDER_COUNT_SHARE) * beyond:
        notes.append(
            f"the chunks hold {beyond} tokens beyond one each, but the counters claim only {accepted:g} accepted ones:"
            " acceptance is under-counted, as by the counters of one rank of several"
        )
    if own.get("num_drafts"):
        theirs = 1 + own.get("num_accepted_tokens", 0.0) / own["num_drafts"]
        ours = 1 + accepted / drafts
        if abs(theirs - ours) > CROSS_CHECK_TOLERANCE * ours:
            notes.append(f"acceptance length is {ours:.3f} by the server's counters, {theirs:.3f} by the requests' own")
    return notes


def _tokens_per_step(requests: Sequence[RequestResult]) -> Quantity:
    producing = [r for r in requests if r.error is None and r.completion_tokens]
    steps = [(r.speculation or {}).get("num_steps", 0.0) for r in producing]
    if not producing or not all(steps):
        return Quantity(None, "tokens", Provenance.SERVER_REPORTED, "the server does not report steps per request")
    tokens = sum(r.completion_tokens or 0 for r in producing)
    return Quantity(tokens / sum(steps), "tokens", Provenance.SERVER_REPORTED)
