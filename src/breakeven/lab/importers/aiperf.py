"""AIPerf: `profile_export.jsonl` (one record per request) and `profile_export_aiperf.json` (the summary).

Each metric is `{"value": …, "unit": …}` in records and `{"unit": …, "avg": …, "p50": …}` in the summary. Records have
`request_start_ns`, but not the concurrency: that is in the summary's `input_config`, looked for beside the records.
AIPerf's `inter_token_latency` is (latency − TTFT) / (tokens − 1), which is TPOT here;
`inter_chunk_latency` are the gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from breakeven.lab.importers.model import Document, ImportedRequest, ImportedRun, Stated, mapping
from breakeven.lab.importers.naming import level_in_name, names_of_file

_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1000.0, "sec": 1000.0, "seconds": 1000.0}
_TIMES = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "inter_chunk": "inter_chunk_latency",
    "latency": "request_latency",
}


def recognises(document: Document) -> bool:
    """Records with metadata and metrics, or a summary with request latency and the configuration."""
    if not document.values:
        return False
    first = mapping(document.values[0])
    records = "request_start_ns" in mapping(first.get("metadata")) and "metrics" in first
    return records or _is_summary(first)


def _is_summary(value: Mapping[str, Any]) -> bool:
    return "avg" in mapping(value.get("request_latency")) or "avg" in mapping(value.get("output_token_throughput"))


def read(document: Document) -> list[ImportedRun]:
    """One run. ImportFileError if records are damaged, or if nothing tells the level."""
    first = mapping(document.values[0])
    return [_summary(document, first) if _is_summary(first) else _records(document)]


def _summary(document: Document, value: Mapping[str, Any]) -> ImportedRun:
    level = _configured(value) or level_in_name(document)
    if not level:
        raise document.problem("no concurrency in input_config: put it into the file's or folder's name (…-c10)")
    started = str(value.get("start_time") or "")
    return ImportedRun(
        file=document.file,
        tool="AIPerf",
        names=names_of_file(document),
        level=level,
        condition="unstated",
        throughput_tok_s=_plain(document, value, "output_token_throughput"),
        stated={name: _stated(document, value, field) for name, field in _TIMES.items()},
        completed=_whole(_plain(document, value, "request_count")),
        failed=_whole(_plain(document, value, "error_request_count")) or 0,
        duration_s=_seconds(document, value, "benchmark_duration"),
        output_tokens=_plain(document, value, "total_output_tokens") or _plain(document, value, "total_osl"),
        started_s=_iso(started),
        facts={"aiperf_version": value["aiperf_version"]} if value.get("aiperf_version") else {},
    )


def _records(document: Document) -> ImportedRun:
    requests = []
    for index, record in enumerate(document.values):
        found = mapping(record)
        metadata, metrics = mapping(found.get("metadata")), mapping(found.get("metrics"))
        if metadata.get("benchmark_phase", "profiling") != "profiling":
            continue
        start = metadata.get("request_start_ns")
        if not isinstance(start, (int, float)):
            raise document.problem("no request_start_ns", f"line {index + 1}")
        failed = found.get("error") or metadata.get("was_cancelled")
        requests.append(
            ImportedRequest(
                start_s=start / 1e9,
                ttft_ms=_value(document, metrics, "time_to_first_token", index),
                latency_ms=_value(document, metrics, "request_latency", index),
                gaps_ms=_gaps(document, metrics, index),
                tpot_ms=_value(document, metrics, "inter_token_latency", index),
                output_tokens=_whole(_value(document, metrics, "output_sequence_length", index)),
                input_tokens=_whole(_value(document, metrics, "input_sequence_length", index)),
                error=str(mapping(found.get("error")).get("message") or "cancelled") if failed else None,
            )
        )
    if not requests:
        raise document.problem("no request of the phase 'profiling'")
    level = _configured(document.beside or {}) or level_in_name(document)
    note: tuple[str, ...] = ()
    if not level:
        level = most_at_once(requests)
        note = (f"the level is not in the file: taken as {level}, the most requests at once",)
    good = [r for r in requests if r.error is None]
    return ImportedRun(
        file=document.file,
        tool="AIPerf",
        names=names_of_file(document),
        level=level,
        condition="unstated",
        throughput_tok_s=None,
        requests=tuple(requests),
        completed=len(good),
        failed=len(requests) - len(good),
        started_s=min(r.start_s or 0.0 for r in requests),
        notes=note,
    )


def most_at_once(requests: Sequence[ImportedRequest]) -> int:
    """The most requests that were under way together; at least 1."""
    edges = []
    for r in requests:
        if r.start_s is not None:
            edges += [(r.start_s, 1), (r.start_s + (r.latency_ms or 0.0) / 1000, -1)]
    running = most = 0
    for _, change in sorted(edges):
        running += change
        most = max(most, running)
    return max(most, 1)


def _configured(value: Mapping[str, Any]) -> int | None:
    """The first `concurrency` within `input_config` that is a positive whole number."""
    for found in _all(value.get("input_config"), "concurrency"):
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return None


def _all(value: Any, name: str) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if name in value:
            yield value[name]
        for inner in value.values():
            yield from _all(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _all(inner, name)


def _scale(document: Document, metric: Mapping[str, Any], name: str) -> float:
    unit = str(metric.get("unit", "ms"))
    if name in (*_TIMES.values(), "benchmark_duration"):
        if unit not in _MILLISECONDS:
            raise document.problem(f"{name} has the unit {unit!r}, which is not a unit of time")
        return _MILLISECONDS[unit]
    return 1.0


def _value(document: Document, metrics: Mapping[str, Any], name: str, index: int) -> float | None:
    metric = mapping(metrics.get(name))
    value = metric.get("value")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise document.problem(f"{name} must be a number, and is {value!r:.60}", f"line {index + 1}")
    return value * _scale(document, metric, name)


def _gaps(document: Document, metrics: Mapping[str, Any], index: int) -> tuple[float, ...] | None:
    metric = mapping(metrics.get("inter_chunk_latency"))
    values = metric.get("value")
    if not isinstance(values, list):
        return None
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        raise document.problem("inter_chunk_latency must be a list of numbers", f"line {index + 1}")
    scale = _scale(document, metric, "inter_chunk_latency")
    return tuple(v * scale for v in values)


def _plain(document: Document, value: Mapping[str, Any], name: str) -> float | None:
    found = mapping(value.get(name)).get("avg")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise document.problem(f"{name}.avg must be a number")
    return float(found)


def _seconds(document: Document, value: Mapping[str, Any], name: str) -> float | None:
    found = _plain(document, value, name)
    return None if found is None else found * _scale(document, mapping(value.get(name)), name) / 1000


def _stated(document: Document, value: Mapping[str, Any], name: str) -> Stated:
    metric = mapping(value.get(name))
    if not metric:
        return Stated()
    scale = _scale(document, metric, name)

    def figure(statistic: str) -> float | None:
        found = metric.get(statistic)
        return found * scale if isinstance(found, (int, float)) else None

    return Stated(figure("avg"), figure("p50"), figure("p90"), figure("p99"))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _iso(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
