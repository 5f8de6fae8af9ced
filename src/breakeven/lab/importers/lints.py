"""What a reader of imported figures should know. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from breakeven.lab.importers.convert import is_timed
from breakeven.lab.importers.model import ImportedRun
from breakeven.lab.records import CellKey
from breakeven.lab.summary import Lint

SINGLE_RUN = "single run: no interval"
_TOLERANCE = 0.02  # between a stated throughput and tokens ÷ duration
_LENGTHS = 0.10  # between two arms' mean output lengths


def lints(runs: Mapping[CellKey, ImportedRun], baseline: str) -> list[Lint]:
    """In order of weight."""
    found: list[Lint] = []
    groups: dict[tuple[str, str, int], int] = {}
    for key in runs:
        at = (key.arm, key.condition, key.level)
        groups[at] = groups.get(at, 0) + 1
    single = [at for at, count in groups.items() if count == 1]
    if len(single) == len(groups):
        found.append(
            Lint(
                message=f"{SINGLE_RUN}. Every figure comes from one run, and how far another would lie from it is"
                " unknown: a lead, not a result",
                cells=[],
            )
        )
    else:
        if single:
            cells = [key.id for key in runs if (key.arm, key.condition, key.level) in set(single)]
            found.append(Lint(message=SINGLE_RUN, cells=cells))
        found.append(
            Lint(
                message="the repetitions in the files are taken as blocks, paired in their order: whether each was a"
                " launch of its own, on the same machine, is not known; if not, the intervals are too narrow",
                cells=[],
            )
        )
    found.append(
        Lint(
            message="imported: cache, warm-up, client saturation and order of the arms could not be checked; times"
            " count from the moment of sending, so that queueing in the client is hidden",
            cells=[],
        )
    )
    summaries = [key.id for key, run in runs.items() if not run.requests]
    partly = [key.id for key, run in runs.items() if run.requests and not is_timed(run)]
    if summaries:
        found.append(
            Lint(message="a summary only: nothing could be recomputed, everything is as stated", cells=summaries)
        )
    if partly:
        found.append(Lint(message="no send times: throughput is as stated, over ramp-up and drain", cells=partly))
    found += _each(runs)
    found += _lengths(runs, baseline)
    pairs = {(condition, level) for arm, condition, level in groups if arm == baseline}
    lone = [key.id for key in runs if (key.condition, key.level) not in pairs]
    if lone:
        found.append(Lint(message=f"no run of {baseline} to compare with", cells=lone))
    return found


def _each(runs: Mapping[CellKey, ImportedRun]) -> list[Lint]:
    short, unequal = [], []
    for key, run in runs.items():
        if run.completed is not None and run.completed < 2 * key.level:
            short.append(key.id)
        if run.output_tokens and run.duration_s and run.throughput_tok_s:
            implied = run.output_tokens / run.duration_s
            if abs(implied / run.throughput_tok_s - 1) > _TOLERANCE:
                unequal.append(key.id)
    found = []
    if short:
        found.append(
            Lint(
                message="fewer than two requests per stream: much of the run is ramp-up and drain, and its throughput"
                " is below that of steady load",
                cells=short,
            )
        )
    if unequal:
        found.append(
            Lint(message="the stated throughput is not the output tokens divided by the duration", cells=unequal)
        )
    return found


def _lengths(runs: Mapping[CellKey, ImportedRun], baseline: str) -> list[Lint]:
    """For summaries; the analysis looks at requests itself."""
    found = []
    for key, run in runs.items():
        other = runs.get(CellKey(key.block, baseline, key.condition, key.level))
        if key.arm == baseline or other is None or run.requests or other.requests:
            continue
        ours, theirs = _mean_length(run), _mean_length(other)
        if ours and theirs and abs(ours / theirs - 1) > _LENGTHS:
            found.append(
                Lint(
                    message=f"{key.arm} answers with {ours:.0f} tokens on average, {baseline} with {theirs:.0f}: they"
                    " do not do the same work, so compare TPOT rather than latency",
                    cells=[key.id],
                )
            )
    return found


def _mean_length(run: ImportedRun) -> float | None:
    return run.output_tokens / run.completed if run.output_tokens and run.completed else None


def tools(runs: Sequence[ImportedRun]) -> list[str]:
    """The tools the runs come from, each once."""
    return list(dict.fromkeys(run.tool for run in runs))
