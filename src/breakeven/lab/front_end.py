"""Does what stands before an engine keep up with it? The time that answers took, over the engine's own. Pure.

An engine makes a token for each stream in a round, and its API server takes requests in and writes a chunk for each of
these tokens. If that process is the slower of the two, a campaign measures it, and whoever writes fewer chunks gains,
as speculation does. Seen with vLLM 0.23 and an 8B shape on one H200: examples/synthetic-acceptance.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from breakeven.lab.campaign import SENTINEL, Campaign
from breakeven.lab.client.types import RequestResult
from breakeven.lab.gates import failed
from breakeven.lab.records import CellRecord
from breakeven.lab.summary import Lint

MAX_LAG = 1.10  # from send to end over the engine's own time, above which a level is named
MIN_FACTOR = 1.03  # between two arms' lags, below which it is scatter, whatever the margin

_Place = tuple[str, int]  # condition and level


def engine_times(requests: Sequence[RequestResult], told: Mapping[str, float]) -> dict[str, Any]:
    """What a cell's record keeps of it: `engine_times` with `requests`, `engine_s` and `client_s`, summed; or nothing.

    `told`: the rise of the server's own figures over the cell, `seconds` and `requests`, from when the engine's
    scheduler takes a request in, between two steps, to its last token. `client_s` is from send to end. Nothing is kept
    unless the server tells of exactly as many requests as were sent, all of which ended properly: else the two sums are
    not of the same answers.
    """
    if not requests or any(map(failed, requests)) or told.get("requests") != len(requests):
        return {}
    client_s = sum(r.end_ns - r.send_ns for r in requests) / 1e9
    return {"engine_times": {"requests": len(requests), "engine_s": told["seconds"], "client_s": client_s}}


def lag(record: CellRecord) -> float | None:
    """How many times as long as its engine's own time answers took; None where that is not known."""
    times = record.extra.get("engine_times")
    if not isinstance(times, Mapping):
        return None
    found = [times.get(name) for name in ("requests", "engine_s", "client_s")]
    requests, engine_s, client_s = (value if isinstance(value, int | float) else 0 for value in found)
    return client_s / engine_s if requests > 0 and engine_s > 0 and client_s > 0 else None


def front_end_lints(campaign: Campaign, records: Sequence[CellRecord]) -> Iterator[Lint]:
    """One sentence: where answers took much longer than their engine, and what that does to the ratios.

    By the median over blocks of each condition and level. In closed loop without think times throughput goes as one
    over the time of a request. So of two arms' ratio up to the quotient of their lags is not their engines': all of it
    where streams run in step, less where an engine from which requests are held back has smaller rounds.
    """
    found: dict[str, dict[_Place, list[tuple[float, str]]]] = {arm: defaultdict(list) for arm in campaign.arms}
    for record in records:
        key = record.key
        if key.condition != SENTINEL and key.arm in found and (here := lag(record)) is not None:
            found[key.arm][key.condition, key.level].append((here, key.id))
    lags = {
        arm: {
            place: statistics.median(value for value, _ in own) for place, own in sorted(places.items(), key=_by_level)
        }
        for arm, places in found.items()
    }
    late = {arm: {at: value for at, value in places.items() if value > MAX_LAG} for arm, places in lags.items()}
    if not any(late.values()):
        return
    several = len({condition for places in lags.values() for condition, _ in places}) > 1

    def where(place: _Place) -> str:
        condition, level = place
        arrivals = campaign.setting(condition).arrivals
        load = f"{arrivals.rate(level):g} requests/s" if arrivals.open else f"{level} stream{'s' * (level != 1)}"
        return f"{load} ({condition})" if several else load

    told = "; ".join(
        f"{arm} {', '.join(f'{value:.2f} times at {where(at)}' for at, value in places.items())}"
        for arm, places in late.items()
        if places
    )
    yield Lint(
        message=f"answers took longer than their engine did ({told}): something between engine and client held them "
        "back. At thousands of tokens a second that is usually vLLM's API process, and more of them help "
        "(--api-server-count, in every arm); else a network, a proxy or the tokenizer, and with short answers or long "
        "steps the wait for a running step, which is the engine's own." + "".join(_shifts(campaign, lags, where)),
        cells=[name for arm, places in late.items() for at in places for _, name in found[arm][at]],
    )


def _shifts(
    campaign: Campaign, lags: Mapping[str, Mapping[_Place, float]], where: Callable[[_Place], str]
) -> Iterator[str]:
    """What of the arms' ratios comes from unlike lags, where it is more than the margin."""
    if campaign.open_loop or campaign.workload.sessions is not None:
        return
    base = lags[campaign.baseline]
    least = math.log(max(MIN_FACTOR, 1 + campaign.margin))
    for arm, places in lags.items():
        factors = {at: base[at] / lag for at, lag in places.items() if at in base and max(base[at], lag) > MAX_LAG}
        told = [f"{f:.2f} at {where(at)}" for at, f in factors.items() if abs(math.log(f)) > least]
        if told:
            yield f" Of {arm}'s throughput over {campaign.baseline}'s, up to {', '.join(told)} comes from that alone."


def _by_level(item: tuple[_Place, Any]) -> tuple[int, str]:
    (condition, level), _ = item
    return level, condition
