"""Sessions by turn: contexts grow from turn to turn, so figures over all of them mix unlike requests. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from breakeven.lab.client.types import RequestResult
from breakeven.lab.metrics import is_valid, latency_ms, tpot_ms, ttft_ms
from breakeven.lab.play import turn_of
from breakeven.lab.summary import ALL, TurnSummary


@dataclass(slots=True)
class TurnValues:
    """What the valid requests of one turn number took, in milliseconds, and their prompts in tokens."""

    requests: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)

    def add(self, request: RequestResult) -> None:
        """One valid request, with its chunks."""
        self.requests += 1
        ttft, tpot = ttft_ms(request), tpot_ms(request)
        self.ttft += [ttft] if ttft is not None else []
        self.tpot += [tpot] if tpot is not None else []
        self.latency.append(latency_ms(request))
        self.prompt_tokens += [request.prompt_tokens] if request.prompt_tokens is not None else []
        self.cached_tokens += [request.cached_tokens] if request.cached_tokens is not None else []

    def join(self, other: TurnValues) -> None:
        self.requests += other.requests
        for name in ("ttft", "tpot", "latency", "prompt_tokens", "cached_tokens"):
            getattr(self, name).extend(getattr(other, name))


def values_by_turn(requests: Sequence[RequestResult]) -> dict[int, TurnValues]:
    """The valid requests of one cell, by the number of their turn."""
    found: dict[int, TurnValues] = defaultdict(TurnValues)
    for request in requests:
        if is_valid(request):
            found[turn_of(request.request_id)].add(request)
    return dict(found)


def turn_summaries(cells: Sequence[tuple[str, int, Mapping[int, TurnValues]]]) -> list[TurnSummary]:
    """A row for each arm, level and turn. `cells`: (arm, level, values by turn) of the valid ones, in their order."""
    joined: dict[tuple[str, int, int], TurnValues] = defaultdict(TurnValues)
    for arm, level, by_turn in cells:
        for turn, values in sorted(by_turn.items()):
            joined[arm, level, turn].join(values)
    arms = {arm: place for place, (arm, _, _) in reversed(list(enumerate(cells)))}
    return [
        TurnSummary(
            arm=arm, condition=ALL, level=level, turn=turn, requests=v.requests, ttft_ms=_mean(v.ttft),
            tpot_ms=_mean(v.tpot), latency_ms=_mean(v.latency), prompt_tokens=_mean(v.prompt_tokens),
            cached_share=_share(v),
        )
        for (arm, level, turn), v in sorted(joined.items(), key=lambda item: (arms[item[0][0]], *item[0][1:]))
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(values: TurnValues) -> float | None:
    """None where the server does not report both counts for every request."""
    if len(values.cached_tokens) < values.requests or len(values.prompt_tokens) < values.requests:
        return None
    total = sum(values.prompt_tokens)
    return sum(values.cached_tokens) / total if total else None
