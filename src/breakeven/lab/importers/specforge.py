"""SpecForge's public sweep: model → benchmark → results, each a configuration with the figures of both sides.

`metrics` holds {"Name", "output_throughput", "accept_length"}: one without a drafter ("Without EAGLE3", which the
public file misspells) and one for each drafter. The level is the batch size. The side without a drafter was run once
and is repeated in every configuration: equal figures are taken as one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breakeven.lab.importers.model import Document, ImportedRun, mapping, number, texts
from breakeven.lab.importers.naming import slug

_CONFIGURATION = ("batch_size", "steps", "topk", "num_draft_tokens")


def recognises(document: Document) -> bool:
    """Two levels of names over objects with `results` whose items have a configuration and `metrics`."""
    if document.kind != "json" or len(document.values) != 1:
        return False
    benchmarks = [b for model in mapping(document.values[0]).values() for b in mapping(model).values()]
    return bool(benchmarks) and all(
        all("batch_size" in mapping(r) and isinstance(mapping(r).get("metrics"), list) for r in texts(b["results"]))
        if isinstance(b, Mapping) and isinstance(b.get("results"), list)
        else False
        for b in benchmarks
    )


def models(document: Document) -> list[str]:
    """The models of a sweep, in the file's order."""
    return list(mapping(document.values[0]))


def read(document: Document, model: str | None = None) -> list[ImportedRun]:
    """The runs of one model, or of all; in the latter case the condition names the model, too."""
    whole = mapping(document.values[0])
    if model is not None and model not in whole:
        raise document.problem(f"no model {model!r}: it has {', '.join(whole)}")
    chosen = [model] if model is not None else list(whole)
    runs: dict[tuple[str, str, int, float | None], ImportedRun] = {}
    for name in chosen:
        for benchmark, entry in mapping(whole[name]).items():
            condition = benchmark if len(chosen) == 1 else f"{_short(name)}.{benchmark}"
            drafters = _drafters(entry)
            for index, result in enumerate(texts(mapping(entry).get("results"))):
                where = f"{name}, {benchmark}, result {index + 1}"
                for run in _pair(document, mapping(result), condition, drafters, where):
                    # What was run once and copied into every configuration is one run.
                    runs.setdefault((run.names[0], condition, run.level, run.throughput_tok_s), run)
    return list(runs.values())


def _short(model: str) -> str:
    """A model's name that leaves room for the benchmark's within 40 characters."""
    return slug(model.removesuffix("-FP8").replace("-Instruct", ""))[:24].rstrip("-._")


def _drafters(entry: Any) -> list[str]:
    names = [str(mapping(m).get("Name")) for r in texts(mapping(entry).get("results")) for m in texts(r.get("metrics"))]
    return [name for name in dict.fromkeys(names) if not _is_plain(name)]


def _is_plain(name: str) -> bool:
    return name.lower().startswith(("wihtout", "without", "baseline", "off"))


def _pair(
    document: Document, result: Mapping[str, Any], condition: str, drafters: list[str], where: str
) -> list[ImportedRun]:
    values = [number(document, result, name) for name in _CONFIGURATION]
    if any(value is None or value < 1 for value in values):
        raise document.problem(f"needs {', '.join(_CONFIGURATION)}, each a positive number", where)
    batch, steps, topk, tokens = (round(value or 0) for value in values)
    found = []
    for metric in texts(result.get("metrics")):
        figures = mapping(metric)
        name = str(figures.get("Name") or "")
        rate, length = number(document, figures, "output_throughput"), number(document, figures, "accept_length")
        if not name or rate is None:
            raise document.problem("every metric needs a Name and an output_throughput", where)
        names: tuple[str, ...] = (name, "off", "Without EAGLE3")
        if not _is_plain(name):
            which = f"-d{drafters.index(name) + 1}" if len(drafters) > 1 and name in drafters else ""
            names = (f"eagle3{which}-steps{steps}-topk{topk}-tokens{tokens}", name)
        notes = ()
        found.append(
            ImportedRun(
                file=document.file,
                tool="SpecForge sweep",
                names=names,
                level=batch,
                condition=condition,
                throughput_tok_s=rate,
                acceptance_length=None if _is_plain(name) else length,
                notes=_lints(length, tokens) if not _is_plain(name) else notes,
                facts={} if _is_plain(name) else {"drafter": name},
            )
        )
    return found


def _lints(length: float | None, tokens: int) -> tuple[str, ...]:
    if length is not None and not 1 <= length <= tokens:
        return (f"an acceptance length of {length:.3g} with {tokens} draft tokens cannot be",)
    return ()
