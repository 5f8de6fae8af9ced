"""GuideLLM's JSON: one file per arm, `benchmarks` with one entry per strategy.

`metrics.<name>.successful` has mean, median and percentiles; latency is in seconds, the rest in milliseconds. Its
`time_per_output_token_ms` includes the first token, so that `inter_token_latency_ms` is TPOT here.
`requests.successful` may be a sample: throughput is recomputed only if every request is there. Chunks are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breakeven.lab.importers.model import Document, ImportedRequest, ImportedRun, Stated, mapping, number, texts
from breakeven.lab.importers.naming import level_in_name, names_of_file

_TIMES = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "latency": ("request_latency", 1000.0),
}


def recognises(document: Document) -> bool:
    """An object with benchmarks that have metrics."""
    if document.kind != "json" or len(document.values) != 1:
        return False
    runs = texts(mapping(document.values[0]).get("benchmarks"))
    return bool(runs) and all("metrics" in mapping(run) for run in runs)


def read(document: Document) -> list[ImportedRun]:
    """One run per benchmark. ImportFileError if one has no level."""
    whole = mapping(document.values[0])
    runs = texts(whole.get("benchmarks"))
    return [_run(document, mapping(run), f"benchmark {index + 1}") for index, run in enumerate(runs)]


def _run(document: Document, run: Mapping[str, Any], where: str) -> ImportedRun:
    metrics = mapping(run.get("metrics"))
    requests = mapping(run.get("requests"))
    totals = mapping(metrics.get("request_totals")) or mapping(run.get("request_totals"))
    good = [_request(document, mapping(r), where) for r in texts(requests.get("successful"))]
    completed = totals.get("successful")
    completed = completed if isinstance(completed, int) else len(good) or None
    sampled = completed is not None and len(good) < completed
    level, notes = _level(document, run, where)
    if good and sampled:
        notes = (
            *notes,
            f"the file holds {len(good)} of {completed} requests: times are of these, throughput is stated",
        )
        good = [_without_start(r) for r in good]
    rates = mapping(mapping(metrics.get("output_tokens_per_second")).get("successful"))
    window = mapping(run.get("scheduler_metrics"))
    start = number(document, window, "measure_start_time") or number(document, run, "start_time")
    end = number(document, window, "measure_end_time") or number(document, run, "end_time")
    errored = totals.get("errored")
    return ImportedRun(
        file=document.file,
        tool="GuideLLM",
        names=names_of_file(document),
        level=level,
        condition="unstated",
        throughput_tok_s=number(document, rates, "mean"),
        stated={name: _stated(document, metrics, field, scale) for name, (field, scale) in _TIMES.items()},
        requests=tuple(good),
        completed=completed,
        failed=errored if isinstance(errored, int) else len(texts(requests.get("errored"))),
        duration_s=end - start if start is not None and end is not None and end > start else None,
        started_s=start,
        notes=notes,
        facts={"strategy": dict(_strategy(run))},
    )


def _strategy(run: Mapping[str, Any]) -> Mapping[str, Any]:
    for holder in ("config", "args"):
        if found := mapping(mapping(run.get(holder)).get("strategy")):
            return found
    return {}


def _level(document: Document, run: Mapping[str, Any], where: str) -> tuple[int, tuple[str, ...]]:
    strategy = _strategy(run)
    kind = str(strategy.get("type_", ""))
    if kind == "synchronous":
        return 1, ()
    for name in ("streams", "max_concurrency"):
        value = strategy.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, ()
    rate = strategy.get("rate")
    if isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate >= 1:
        return round(rate), ("open loop: the level is the request rate per second, not streams",)
    if told := level_in_name(document):
        return told, ()
    raise document.problem(
        f"no level: the strategy {kind or 'is not named and'} has neither streams nor a rate of 1 or more. Put the"
        " level into the file's name (off-c10.json)",
        where,
    )


def _request(document: Document, value: Mapping[str, Any], where: str) -> ImportedRequest:
    start, end = (number(document, value, f"request_{edge}_time") for edge in ("start", "end"))
    tokens, prompt = number(document, value, "output_tokens"), number(document, value, "prompt_tokens")
    latency = number(document, value, "request_latency")
    if latency is None and start is not None and end is not None:
        latency = end - start
    text = value.get("output")
    return ImportedRequest(
        start_s=start,
        ttft_ms=number(document, value, "time_to_first_token_ms"),
        latency_ms=None if latency is None else latency * 1000,
        gaps_ms=None,
        tpot_ms=number(document, value, "inter_token_latency_ms"),
        output_tokens=None if tokens is None else round(tokens),
        input_tokens=None if prompt is None else round(prompt),
        text=text if isinstance(text, str) else "",
    )


def _without_start(r: ImportedRequest) -> ImportedRequest:
    return ImportedRequest(
        None, r.ttft_ms, r.latency_ms, r.gaps_ms, r.tpot_ms, r.output_tokens, r.input_tokens, r.text, r.error
    )


def _stated(document: Document, metrics: Mapping[str, Any], name: str, scale: float) -> Stated:
    found = mapping(mapping(metrics.get(name)).get("successful"))
    percentiles = mapping(found.get("percentiles"))

    def scaled(values: Mapping[str, Any], statistic: str) -> float | None:
        value = number(document, values, statistic)
        return None if value is None else value * scale

    return Stated(
        scaled(found, "mean"), scaled(found, "median"), scaled(percentiles, "p90"), scaled(percentiles, "p99")
    )
