"""Prometheus text → counters of speculation and of the engine's own time, and their rise over a cell. Pure.

Counters are read by vLLM's names after any prefix (`vllm:`, `breakeven:`, `llamacpp:`, `trtllm_`, …), summed over ranks
and engines. SGLang counts verifications, tokens and requests instead, each when a request has finished: a verification
is a round, and of a request's tokens all but the first and one for each round were drafted and accepted.

The engine's own time for a request is the sum of vLLM's histograms of queue and inference time: from when the scheduler
takes it in, between two steps, to its last token, by the clock of the engine's core, before any API server sees it
(vllm/v1/metrics/stats.py, `update_from_finished_request`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*\Z")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|\Z)')
_COUNTER = re.compile(
    r"(?:.*[:_])?spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)(?:_total)?\Z"
)
_SGLANG = re.compile(r"sglang[:_](spec_verify_calls|generation_tokens|num_requests)_total\Z")
_ENGINE_TIME = re.compile(r"vllm[:_]request_(queue|inference)_time_seconds_(sum|count)\Z")
_GAUGE = re.compile(r"^\s*#\s*TYPE\s+(\S+)\s+gauge\s*$", re.M)
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}

Series = tuple[str, tuple[tuple[str, str], ...]]  # name of the sample, sorted labels


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a scrape."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Rise:
    """How far counters rose between two scrapes, and what cannot be about it, in plain words.

    `values`: num_drafts, num_draft_tokens, num_accepted_tokens, accepted_pos_0, …; empty if the server has none.
    `restarted`: a counter ran backwards, so there was a restart or a reset in between. `engine`: `requests` that
    ended and the engine's own `seconds` for them, summed; empty if the server does not tell them.
    """

    values: Mapping[str, float]
    problems: tuple[str, ...] = ()
    restarted: bool = False
    engine: Mapping[str, float] = field(default_factory=dict)


def samples(text: str) -> Iterator[Sample]:
    """The samples of a scrape. Comments, and lines that are not samples, are passed over."""
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _SAMPLE.match(stripped)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {
            name: re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), quoted)
            for name, quoted in _LABEL.findall(match[2] or "")
        }
        yield Sample(match[1], labels, value)


def speculation_series(text: str) -> dict[Series, float]:
    """The speculation counters of a scrape, one entry per rank or engine; empty if there are none.

    Gauges are passed over: TensorRT-LLM has some of the same names, of its last iteration alone.
    """
    found: dict[Series, float] = {}
    gauges = set(_GAUGE.findall(text))
    for sample in samples(text):
        if sample.name in gauges:
            continue
        if _COUNTER.match(sample.name) or _SGLANG.match(sample.name):
            found[(sample.name, tuple(sorted(sample.labels.items())))] = sample.value
    if not any(_COUNTER.match(name) or "spec_verify_calls" in name for name, _ in found):
        return {}  # SGLang without speculation
    return found


def engine_time_series(text: str) -> dict[Series, float]:
    """Sums and counts of the requests' queue and inference times in a scrape; empty where they are not told."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in samples(text)
        if _ENGINE_TIME.match(sample.name)
    }


def with_rounds(series: Mapping[Series, float], drafted_per_round: int) -> dict[Series, float]:
    """The series with rounds, where a server counts drafted tokens only and drafts the same number in each round."""
    if any(_key(one) == "num_drafts" for one in series):
        return dict(series)
    rounds = {
        (name.replace("num_draft_tokens", "num_drafts"), labels): value / drafted_per_round
        for (name, labels), value in series.items()
        if _key((name, labels)) == "num_draft_tokens"
    }
    return {**series, **rounds}


def _key(series: Series) -> str | None:
    other = _SGLANG.match(series[0])
    if other is not None:
        return "num_drafts" if other[1] == "spec_verify_calls" else other[1]
    match = _COUNTER.match(series[0])
    if match is None:
        return None
    if match[1] != "num_accepted_tokens_per_pos":
        return match[1]
    position = dict(series[1]).get("position", "")
    return f"accepted_pos_{int(position)}" if position.isdigit() else None


def rise(before: Mapping[Series, float], after: Mapping[Series, float]) -> Rise:
    """The counters' rise, summed over ranks. A series that appears in between began at zero."""
    values: dict[str, float] = {}
    engine: dict[str, float] = {}
    problems: list[str] = []
    for series in sorted(after.keys() | before.keys()):
        key, time = _key(series), _ENGINE_TIME.match(series[0])
        if key is None and time is None:
            continue
        if series not in after or after[series] < before.get(series, 0.0):
            problems.append(f"the counter {series[0]} ran backwards: the server was restarted or reset in between")
            continue
        risen = after[series] - before.get(series, 0.0)
        if key is not None:
            values[key] = values.get(key, 0.0) + risen
        elif time is not None:
            name = f"{time[1]}_{time[2]}"
            engine[name] = engine.get(name, 0.0) + risen
    if problems:
        return Rise({}, tuple(dict.fromkeys(problems)), True)
    values = _of_sglang(values)
    return Rise(values, tuple(impossible(values)), engine=_engine_time(engine))


def _engine_time(risen: Mapping[str, float]) -> dict[str, float]:
    """Queue and inference times of the same requests, added up; empty unless both are told of as many."""
    if len(risen) < 4 or risen["queue_count"] != risen["inference_count"]:
        return {}
    return {"requests": risen["queue_count"], "seconds": risen["queue_sum"] + risen["inference_sum"]}


def _of_sglang(values: dict[str, float]) -> dict[str, float]:
    """Accepted drafts from SGLang's counters; all others are left as they are."""
    tokens, requests = values.pop("generation_tokens", None), values.pop("num_requests", None)
    rounds = values.get("num_drafts")
    if tokens is not None and requests is not None and rounds and "num_accepted_tokens" not in values:
        values["num_accepted_tokens"] = max(0.0, tokens - requests - rounds)
    return values


def impossible(values: Mapping[str, float]) -> Iterator[str]:
    """What cannot be of counters over one window, as sentences."""
    drafts = values.get("num_drafts")
    drafted = values.get("num_draft_tokens")
    accepted = values.get("num_accepted_tokens")
    if accepted is not None and drafted is not None and accepted > drafted:
        yield f"the server claims {accepted:g} accepted tokens of {drafted:g} drafted ones"
    if drafts is not None and drafted is not None and drafted < drafts:
        yield f"the server claims {drafts:g} drafts with {drafted:g} drafted tokens"
    above = drafts
    position = 0
    while (here := values.get(f"accepted_pos_{position}")) is not None:
        if above is not None and here > above:
            yield f"the server claims {here:g} drafts accepted at position {position}, out of {above:g}"
        above = here
        position += 1
