"""Does what stands before an engine keep up with it? The time in which answers arrived, over the engine's own. Pure.

An engine makes a token for each stream in a round, and its API server writes a chunk for each. If that process is the
slower of the two, it is what a campaign measures, and it flatters whoever writes fewer chunks, as speculation does.
Seen with vLLM 0.23 and an 8B shape on one H200: examples/synthetic-acceptance.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from breakeven.lab.campaign import Campaign
from breakeven.lab.client.types import RequestResult
from breakeven.lab.gates import failed
from breakeven.lab.records import CellRecord
from breakeven.lab.summary import Lint

MAX_LAG = 1.05  # the time of arrival over the engine's own, above which a level is named


def decode_times(requests: Sequence[RequestResult], told: Mapping[str, float]) -> dict[str, Any]:
    """What a cell's record keeps of it: `decode_times` with `requests`, `engine_s` and `arrival_s`, summed; or nothing.

    `told`: the rise of the server's decode times over the cell, `sum` in seconds and `count`. Both are of a request's
    first token to its last. Nothing is kept unless the server tells of exactly the requests that were sent, all of
    which ended properly: else the two sums are not of the same answers.
    """
    whole = bool(requests) and not any(failed(r) or not r.chunks for r in requests)
    if not whole or told.get("count") != len(requests):
        return {}
    arrival_ns = sum(r.chunks[-1].arrival_ns - r.chunks[0].arrival_ns for r in requests)
    times = {"requests": len(requests), "engine_s": told["sum"], "arrival_s": arrival_ns / 1e9}
    return {"decode_times": times}


def lag(record: CellRecord) -> float | None:
    """How many times as long answers took to arrive as the engine took to make them; None where that is not known."""
    times = record.extra.get("decode_times")
    if not isinstance(times, Mapping):
        return None
    engine_s, arrival_s = times.get("engine_s"), times.get("arrival_s")
    if not isinstance(engine_s, int | float) or not isinstance(arrival_s, int | float) or engine_s <= 0:
        return None
    return arrival_s / engine_s


def front_end_lints(campaign: Campaign, records: Sequence[CellRecord]) -> Iterator[Lint]:
    """The arms whose answers arrived later than their engine made them, by the median of a level's cells."""
    unit = "requests/s" if campaign.open_loop else "streams"
    for arm in campaign.arms:
        cells: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for record in records:
            if record.key.arm == arm and (found := lag(record)) is not None:
                cells[record.key.level].append((found, record.key.id))
        medians = {level: statistics.median(found for found, _ in own) for level, own in sorted(cells.items())}
        late = {level: median for level, median in medians.items() if median > MAX_LAG}
        if not late:
            continue
        told = ", ".join(f"{median:.2f} times at {level}" for level, median in late.items())
        yield Lint(
            message=f"{arm}: answers took longer to arrive than its engine took to make them ({told} {unit}): what "
            "writes the chunks could not keep up, and is what was measured there. That flatters speculation, which "
            "writes fewer chunks. Give the server more API processes (vLLM: --api-server-count) in every arm, or let "
            "it write less (--stream-interval, continuous_usage: false)",
            cells=[name for level in late for _, name in cells[level]],
        )
