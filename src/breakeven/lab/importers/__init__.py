"""Other tools' result files, read into the summary that a run of our own gives.

`import_files` is the whole of it: each file is recognised by its content, its runs become cells, and the analysis goes
on as if they had been measured, as far as the file lets it. A single run gets no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from breakeven.lab.analysis import assemble
from breakeven.lab.campaign import Gates, Sampling, Workload
from breakeven.lab.importers import aiperf, bench_serving, guidellm, specforge, table
from breakeven.lab.importers.campaign import ImportedArm, ImportedCampaign
from breakeven.lab.importers.convert import cell
from breakeven.lab.importers.lints import lints, tools
from breakeven.lab.importers.load import Loaded, load
from breakeven.lab.importers.model import Document, ImportedRun, ImportFileError
from breakeven.lab.importers.naming import distinct, is_baseline
from breakeven.lab.records import CellKey
from breakeven.lab.summary import Summary

__all__ = ["ImportFileError", "import_files", "read_runs"]

_FORMATS = (
    "vLLM bench serve JSON, SGLang bench_serving JSONL, AIPerf profile_export.jsonl or profile_export_aiperf.json,"
    " GuideLLM JSON, the SpecForge sweep, or CSV with arm,level,throughput_tok_s"
)

_READERS: tuple[tuple[Callable[[Document], bool], Callable[[Document], list[ImportedRun]]], ...] = tuple(
    (reader.recognises, reader.read) for reader in (bench_serving, aiperf, guidellm, table)
)


def read_runs(document: Document, model: str | None = None) -> list[ImportedRun]:
    """The runs in a document. ImportFileError if its format is none of those known."""
    if specforge.recognises(document):
        return specforge.read(document, model)
    for recognises, read in _READERS:
        if recognises(document):
            return read(document)
    what = document.values[0] if document.values else None
    held = ", ".join(map(str, list(what)[:8])) if isinstance(what, Mapping) else type(what).__name__
    raise document.problem(f"its format is not known (it holds: {held}). Known are: {_FORMATS}")


def import_files(
    files: Sequence[str],
    baseline: str,
    *,
    name: str = "imported",
    margin: float = 0.03,
    confidence: float = 0.95,
    max_failed_share: float = 0.0,
    model: str | None = None,
) -> Summary:
    """The summary of other tools' files, each `FILE` or `ARM=FILE`. ImportFileError says what is wrong."""
    loaded = _without_doubles([load(file) for file in files])
    runs = [run for one in loaded for run in read_runs(one.document, model)]
    runs = [run for run in runs if run.throughput_tok_s or run.requests]
    if not runs:
        raise ImportFileError("the files hold no run with a throughput")
    known_as, arms = _arms(runs, baseline)
    conditions = distinct([run.condition for run in runs])
    keys = _keys(runs, [arms[known] for known in known_as], [_condition(conditions[run.condition]) for run in runs])
    campaign = _campaign(
        name=name,
        baseline=arms[next(known for known, run in zip(known_as, runs, strict=True) if is_baseline(run, baseline))],
        arms=arms,
        known_as=known_as,
        runs=runs,
        keys=keys,
        margin=margin,
        confidence=confidence,
        max_failed_share=max_failed_share,
    )
    by_key = dict(zip(keys, runs, strict=True))
    cells = [cell(run, key, campaign) for key, run in by_key.items()]
    environment: dict[str, Any] = {
        "imported": {
            "tools": tools(runs),
            "files": [{"name": one.document.file, "sha256": one.sha256, "bytes": one.size} for one in loaded],
        }
    }
    summary = assemble(campaign, environment, cells, sparse=True)
    return _finished(summary, by_key, campaign.baseline)


def _without_doubles(loaded: Sequence[Loaded]) -> list[Loaded]:
    """AIPerf's summary counts as read where its records are read. ImportFileError for a file given twice."""
    seen: dict[str, str] = {}
    for one in loaded:
        if one.document.file in seen:
            raise ImportFileError(f"{one.document.file} is given twice")
        seen[one.document.file] = one.sha256
    records = {
        one.document.file.rpartition("/")[0]
        for one in loaded
        if one.document.beside is not None and one.document.kind == "jsonl"
    }
    return [
        one
        for one in loaded
        if not (one.document.file.rpartition("/")[0] in records and one.document.stem == "profile_export_aiperf")
    ]


def _arms(runs: Sequence[ImportedRun], baseline: str) -> tuple[list[str], dict[str, str]]:
    """Each run's name as the files have it, and every name's arm, the baseline's first."""
    known_as = [baseline if is_baseline(run, baseline) else run.names[0] for run in runs]
    if baseline not in known_as:
        there = ", ".join(dict.fromkeys(known_as))
        raise ImportFileError(
            f"no run of the baseline {baseline!r}: the files have {there}. Name an arm with ARM=FILE, or choose another"
            " baseline"
        )
    if len(set(known_as)) < 2:
        raise ImportFileError(f"only {baseline} is there: give the files of another arm, too")
    return known_as, distinct([baseline, *known_as])


def _condition(name: str) -> str:
    return "all-prompts" if name == "all" else name


def _keys(runs: Sequence[ImportedRun], arms: Sequence[str], conditions: Sequence[str]) -> list[CellKey]:
    """One key per run. Repetitions are numbered as the files do, else in their order. ImportFileError for doubles."""
    stated = {run.block for run in runs if run.block is not None}
    numbers = {block: index for index, block in enumerate(sorted(stated))}
    seen: dict[tuple[str, str, int], int] = {}
    used: set[CellKey] = set()
    keys = []
    for run, arm, condition in zip(runs, arms, conditions, strict=True):
        at = (arm, condition, run.level)
        block = numbers[run.block] if run.block is not None else seen.get(at, 0)
        seen[at] = seen.get(at, 0) + 1
        key = CellKey(block, arm, condition, run.level)
        if key in used:
            raise ImportFileError(
                f"{run.file}: block {run.block} of {arm}, {condition}, level {run.level} is there twice"
            )
        used.add(key)
        keys.append(key)
    return keys


def _campaign(
    *,
    name: str,
    baseline: str,
    arms: Mapping[str, str],
    known_as: Sequence[str],
    runs: Sequence[ImportedRun],
    keys: Sequence[CellKey],
    margin: float,
    confidence: float,
    max_failed_share: float,
) -> ImportedCampaign:
    first = dict(reversed(list(zip(known_as, runs, strict=True))))
    try:
        return ImportedCampaign(
            name=name,
            arms={
                arm: ImportedArm(known_as=known, tool=first[known].tool, facts=dict(first[known].facts))
                for known, arm in arms.items()
            },
            baseline=baseline,
            workload=Workload(domains=tuple(dict.fromkeys(key.condition for key in keys))),
            levels=tuple(sorted({key.level for key in keys})),
            blocks=max(key.block for key in keys) + 1,
            sampling=Sampling(temperature=None, ignore_eos=None if all(run.natural for run in runs) else True),
            gates=Gates(max_failed_share=max_failed_share),
            margin=margin,
            confidence=confidence,
        )
    except ValidationError as problem:
        detail = problem.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise ImportFileError(f"the files make no campaign: {place}: {detail['msg']}") from None


def _finished(summary: Summary, runs: Mapping[CellKey, ImportedRun], baseline: str) -> Summary:
    """Takes out what an import cannot know, and puts its lints first."""
    texts = any(r.text for run in runs.values() for r in run.requests)
    dated = {key.id for key, run in runs.items() if run.started_s}
    identity = summary.run
    if len(dated) < len(runs):
        identity = identity.model_copy(update={"started": "undated", "ended": "undated"})
    return summary.model_copy(
        update={
            "run": identity,
            "agreement": summary.agreement if texts else [],
            "comparisons": [c for c in summary.comparisons if c.blocks],
            "noise": [n for n in summary.noise if n.blocks],
            "break_even_by_condition": [b for b in summary.break_even_by_condition if b.break_even.levels],
            "lints": [*lints(runs, baseline), *summary.lints],
            "cells": [c if c.id in dated else c.model_copy(update={"started": "unknown"}) for c in summary.cells],
        }
    )
