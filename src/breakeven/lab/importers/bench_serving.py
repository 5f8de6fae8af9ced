"""`vllm bench serve --save-result [--save-detailed]` and SGLang's `bench_serving --output-file [--output-details]`.

The two descend from one script and share most fields: seconds in `ttfts` and `itls` (one list per request, gaps between
chunks), milliseconds in `mean_ttft_ms`, `mean_tpot_ms`, `mean_itl_ms`, `mean_e2el_ms` (vLLM) and `mean_e2e_latency_ms`
(SGLang). vLLM adds `start_times`, `max_output_tokens_per_s` and the deltas `spec_decode_*`; SGLang `accept_length`, the
server's average since it started. vLLM appends results with --append-result, SGLang always: one JSON object per line.
Fields looked up in vllm/benchmarks/serve.py and python/sglang/bench_serving.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from breakeven.lab.importers.model import Document, ImportedRequest, ImportedRun, Stated, count, mapping, number, texts
from breakeven.lab.importers.naming import level_in_name, names_of_file

_TIMES = {"ttft": ("ttft",), "tpot": ("tpot",), "inter_chunk": ("itl",), "latency": ("e2el", "e2e_latency")}
_RANDOM = re.compile(r"random|generated-shared-prefix|prefix_repetition|synthetic", re.I)
_FACTS = (
    "backend", "endpoint_type", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "dataset_name", "random_input_len", "random_output_len", "sharegpt_output_len", "date",
    "label", "tag",
)  # fmt: skip


def recognises(document: Document) -> bool:
    """A flat object with a throughput and the duration of a benchmark."""
    return document.kind in ("json", "jsonl") and bool(document.values) and all(_is_result(v) for v in document.values)


def _is_result(value: Any) -> bool:
    return isinstance(value, Mapping) and "output_throughput" in value and "duration" in value and "completed" in value


def read(document: Document) -> list[ImportedRun]:
    """The runs of a file, in its order. ImportFileError for what is damaged or has no level."""
    return [_run(document, value, f"result {index + 1}") for index, value in enumerate(document.values)]


def _run(document: Document, value: Mapping[str, Any], where: str) -> ImportedRun:
    sglang = "total_output_tokens_retokenized" in value or "accept_length" in value
    requests = _requests(document, value, where)
    duration, tokens = number(document, value, "duration"), number(document, value, "total_output_tokens")
    failed = count(document, value, "failed")
    if failed is None:
        failed = sum(r.error is not None for r in requests)
    level, level_note = _level(document, value, where)
    natural, notes = _nature(value, sglang)
    return ImportedRun(
        file=document.file,
        tool="SGLang bench_serving" if sglang else "vLLM bench serve",
        names=names_of_file(document, value.get("arm"), value.get("label"), value.get("tag")),
        level=level,
        condition=str(value.get("condition") or value.get("dataset_name") or "unstated"),
        throughput_tok_s=number(document, value, "output_throughput"),
        stated={name: _stated(document, value, fields) for name, fields in _TIMES.items()},
        requests=requests,
        completed=count(document, value, "completed"),
        failed=failed,
        duration_s=duration,
        output_tokens=tokens,
        counters=_counters(document, value, where),
        acceptance_length=number(document, value, "accept_length") if sglang else None,
        natural=natural,
        started_s=_date(value.get("date")),
        notes=(*level_note, *notes, *_lints(document, value, level)),
        facts={name: value[name] for name in _FACTS if value.get(name) not in (None, "")},
    )


def _level(document: Document, value: Mapping[str, Any], where: str) -> tuple[int, tuple[str, ...]]:
    stated = count(document, value, "max_concurrency") or level_in_name(document)
    if stated:
        return stated, ()
    rate = value.get("request_rate")
    if isinstance(rate, (int, float)) and 1 <= rate < 10_000:
        return round(rate), ("open loop: the level is the request rate per second, not streams",)
    peak = count(document, value, "max_concurrent_requests") or count(document, value, "num_prompts")
    peak = peak or count(document, value, "completed")
    if peak and rate in ("inf", None, float("inf")):
        return peak, ("no limit of concurrency: all requests were sent at once, and the level is their number",)
    raise document.problem(
        "no level: max_concurrency is empty and the request rate is not a whole number of 1 or more. Put the level into"
        " the file's name (off-c10.json), or write the figures as CSV",
        where,
    )


def _stated(document: Document, value: Mapping[str, Any], fields: Sequence[str]) -> Stated:
    for name in fields:
        if f"mean_{name}_ms" in value:
            median = number(document, value, f"median_{name}_ms")
            p50 = median if median is not None else number(document, value, f"p50_{name}_ms")
            return Stated(
                number(document, value, f"mean_{name}_ms"), p50, number(document, value, f"p90_{name}_ms"),
                number(document, value, f"p99_{name}_ms"),
            )  # fmt: skip
    return Stated()


def _requests(document: Document, value: Mapping[str, Any], where: str) -> tuple[ImportedRequest, ...]:
    """Empty without details. ImportFileError if the lists are not of one length."""
    lists = {
        name: texts(value.get(name))
        for name in ("ttfts", "itls", "output_lens", "input_lens", "errors", "generated_texts", "start_times")
    }
    size = len(lists["ttfts"])
    if not size or not lists["output_lens"]:
        return ()
    unequal = {name: len(items) for name, items in lists.items() if items and len(items) != size}
    if unequal:
        raise document.problem(f"ttfts has {size} requests, but {unequal}: the file is damaged", where)

    def at(name: str, index: int) -> Any:
        return lists[name][index] if lists[name] else None

    found = []
    for index in range(size):
        try:
            ttft = float(lists["ttfts"][index]) * 1000
            gaps = tuple(float(gap) * 1000 for gap in at("itls", index) or ())
            start, out, prompt = at("start_times", index), at("output_lens", index), at("input_lens", index)
            error = str(at("errors", index) or "") or None
            found.append(
                ImportedRequest(
                    start_s=None if start is None else float(start),
                    ttft_ms=ttft if error is None else None,
                    latency_ms=ttft + sum(gaps) if error is None else None,
                    gaps_ms=gaps if lists["itls"] else None,
                    tpot_ms=None,
                    output_tokens=None if out is None else int(out),
                    input_tokens=None if prompt is None else int(prompt),
                    text=str(at("generated_texts", index) or ""),
                    error=error,
                )
            )
        except (TypeError, ValueError) as problem:
            raise document.problem(f"request {index + 1} is damaged: {problem}", where) from None
    return tuple(found)


def _counters(document: Document, value: Mapping[str, Any], where: str) -> dict[str, float]:
    """vLLM's deltas over the run; per position it states shares of the drafts."""
    names = {"num_drafts": "num_drafts", "num_draft_tokens": "draft_tokens", "num_accepted_tokens": "accepted_tokens"}
    found = {ours: number(document, value, f"spec_decode_{theirs}") for ours, theirs in names.items()}
    counters = {name: figure for name, figure in found.items() if figure is not None}
    drafts = counters.get("num_drafts")
    if drafts:
        for depth, share in enumerate(texts(value.get("spec_decode_per_position_acceptance_rates"))):
            if isinstance(share, bool) or not isinstance(share, (int, float)):
                raise document.problem("spec_decode_per_position_acceptance_rates must be a list of numbers", where)
            counters[f"accepted_pos_{depth}"] = share * drafts
    return counters


def _nature(value: Mapping[str, Any], sglang: bool) -> tuple[bool, list[str]]:
    data = str(value.get("dataset_name") or "")
    if _RANDOM.search(data):
        return False, [f"the prompts are made up ({data}): acceptance is not that of real text"]
    if sglang and value.get("disable_ignore_eos") is not True:
        return False, [
            "bench_serving ignores EOS unless --disable-ignore-eos was given, and the file does not say: acceptance may"
            " not be that of natural text"
        ]
    return True, []


def _lints(document: Document, value: Mapping[str, Any], level: int) -> list[str]:
    """What cannot be, or is not what its name says."""
    notes = []
    peak, mean = number(document, value, "max_output_tokens_per_s"), number(document, value, "output_throughput")
    if peak is not None and mean is not None and 0 < peak < mean * 0.999:
        notes.append(f"peak throughput ({peak:.4g} tok/s) below the mean ({mean:.4g}) cannot be")
    tpot, itl = number(document, value, "mean_tpot_ms"), number(document, value, "mean_itl_ms")
    if tpot and itl and itl > 1.3 * tpot:
        notes.append(
            f'mean "ITL" is {itl / tpot:.1f} times TPOT: a chunk carries several tokens, so it is inter-chunk latency'
        )
    share = number(document, value, "spec_decode_acceptance_rate")
    if share is not None and not 0 <= share <= 100:
        notes.append(f"an acceptance rate of {share:g}% cannot be")
    retold, told = (
        number(document, value, name) for name in ("total_output_tokens_retokenized", "total_output_tokens")
    )
    if retold and told and abs(retold / told - 1) > 0.05:
        notes.append(f"the server counts {told:.0f} output tokens, the client's tokenizer {retold:.0f}")
    lifetime = number(document, value, "accept_length")
    if lifetime is not None:
        notes.append("accept_length is the server's average since it started, earlier runs and the warm-up included")
    asked = number(document, value, "random_output_len")
    written = [length for length in texts(value.get("output_lens")) if isinstance(length, (int, float))]
    if asked and mapping(value).get("dataset_name") == "random" and written and max(written) > asked:
        notes.append(f"an answer of {max(written):g} tokens where {asked:g} were asked for cannot be")
    return notes


def _date(text: Any) -> float | None:
    """vLLM's `20250131-235959`, without a zone: taken as UTC."""
    try:
        return datetime.strptime(str(text), "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
