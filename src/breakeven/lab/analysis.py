"""From a run's directory to its summary. The same directory gives the same summary, whenever and wherever.

Rules, beside those of docs/statistics.md:
- Only valid cells count. A block takes part in a comparison only where the cells of both arms are valid and have the
  figure; in condition "all", those of every condition.
- Condition "all" pools the domains of a block. Throughput: the sum of the cells' tokens within their windows, divided
  by the sum of the windows. Times: the mean over the requests of all cells.
- One figure per block, arm, condition and level goes into the statistics; requests are never n.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breakeven import __version__
from breakeven.lab.campaign import SENTINEL, AttachArm, Campaign
from breakeven.lab.client.types import RequestResult
from breakeven.lab.controls import Visit, aa_summary, control_lints, sentinel_summaries
from breakeven.lab.effects import factor_effects
from breakeven.lab.family import describe_family, with_adjusted_p
from breakeven.lab.known_traps import synthetic_arms
from breakeven.lab.lints import cell_lints, with_run_lints
from breakeven.lab.metrics import (
    CellMetrics,
    acceptance,
    agreement,
    cell_metrics,
    is_valid,
    latency_ms,
    tpot_ms,
    ttft_ms,
    window_named,
)
from breakeven.lab.needed import needed_acceptances
from breakeven.lab.quantity import Distribution, Provenance, Quantity
from breakeven.lab.records import CellKey, CellRecord, RunDirectory
from breakeven.lab.servers import leftovers, servers
from breakeven.lab.stats.breakeven import break_even
from breakeven.lab.stats.power import noise_floor, smallest_detectable
from breakeven.lab.stats.ratio import RatioEstimate, log_ratios, ratio_from_logs
from breakeven.lab.stats.robust import hodges_lehmann
from breakeven.lab.stats.signflip import sign_flip
from breakeven.lab.stopping import decided, estimator
from breakeven.lab.summary import (
    ALL,
    SCHEMA_VERSION,
    AcceptanceSummary,
    AgreementSummary,
    ArmDigest,
    Better,
    BreakEvenSummary,
    CampaignDigest,
    CellSummary,
    Comparison,
    ConditionBreakEven,
    DistributionSummary,
    Figure,
    IntervalFigure,
    InvalidCell,
    LevelSummary,
    Lint,
    LoadRange,
    MetricName,
    Noise,
    RunIdentity,
    Summary,
    TimeName,
)
from breakeven.lab.tails import tail_comparisons
from breakeven.lab.verdict import explain, more_blocks, verdict

METRICS: tuple[tuple[MetricName, str, Better], ...] = (
    ("throughput", "tok/s", "higher"),
    ("ttft", "ms", "lower"),
    ("tpot", "ms", "lower"),
    ("latency", "ms", "lower"),
)
TIMES: tuple[TimeName, ...] = ("ttft", "tpot", "latency")
_SAID = {"throughput": "throughput", "ttft": "mean TTFT", "tpot": "mean TPOT", "latency": "mean latency"}
_LENGTH_TOLERANCE = 0.10  # relative difference of two arms' mean output lengths that is worth a lint
_STEPS = 101  # quantiles kept of a distribution
# From firm to weak: what is computed from several figures is as weak as the weakest.
_STRENGTH = (Provenance.MEASURED, Provenance.SERVER_REPORTED, Provenance.DERIVED, Provenance.ESTIMATED)


class AnalysisError(ValueError):
    """A run that cannot be analysed; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ReducedCell:
    """One cell, reduced: `requests` without their chunks; `window_s` of the headline throughput, None without one."""

    record: CellRecord
    metrics: CellMetrics
    window_s: float | None
    ttft_ms: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    tpot_ms: NDArray[np.float64]
    stated_length: Quantity | None = None  # an acceptance length without counters: imported files only

    @property
    def key(self) -> CellKey:
        return self.record.key

    @property
    def valid(self) -> bool:
        return not self.record.invalid


@dataclass(frozen=True, slots=True)
class _Value:
    """One figure of one arm in one block, at one condition (or all) and level."""

    value: float
    provenance: Provenance


# The baseline's answer and an arm's to the same request
_Pair = tuple[RequestResult, RequestResult]

# (arm, condition, level, metric) → block → figure
_Values = Mapping[tuple[str, str, int, str], Mapping[int, _Value]]


def analyse(run: RunDirectory) -> Summary:
    """The summary of a run. Raises AnalysisError if it has no cell, RecordError if its files cannot be read.

    A cell whose files are damaged is an invalid one; the rest is analysed.
    """
    journal = run.read_journal()
    told = servers(journal)
    environment = {**run.environment, **({"servers": told} if told else {})}
    summary = summarise(run.campaign, environment, run.readable_cells())
    left = [Lint(message=sentence, cells=[]) for sentence in leftovers(journal)]
    return summary.model_copy(update={"lints": [*summary.lints, *left]})


def summarise(campaign: Campaign, environment: Mapping[str, Any], records: Iterable[CellRecord]) -> Summary:
    """As `analyse`, from what was read. Each record is reduced before the next is asked for."""
    cells = [reduce_cell(record, campaign) for record in records]
    return with_run_lints(campaign, assemble(campaign, environment, cells))


def assemble(
    campaign: Campaign, environment: Mapping[str, Any], cells: Sequence[ReducedCell], *, sparse: bool = False
) -> Summary:
    """As `summarise`, from reduced cells. `sparse`: not every arm × condition × level was planned (imported files).

    Then nothing is missing, and "all" pools at each level the conditions that have a cell there.
    """
    cells = list(cells)
    if not cells:
        raise AnalysisError("the run has no finished cell: continue it with `breakeven run --resume`")
    guards = sorted((cell for cell in cells if _is_sentinel(campaign, cell.key)), key=lambda cell: cell.key)
    cells = [cell for cell in cells if not _is_sentinel(campaign, cell.key)]
    if not cells:
        raise AnalysisError("the run has no finished cell but sentinels: continue it with `breakeven run --resume`")
    conditions = _conditions(campaign, cells)
    cells = _ordered(cells, campaign, conditions)
    valid = {cell.key: cell for cell in cells if cell.valid}
    values = _values(campaign, conditions, valid, sparse=sparse)
    figures = {at: {b: v.value for b, v in by_block.items()} for at, by_block in values.items()}
    comparisons = with_adjusted_p(
        campaign,
        [
            _compare(campaign, arm, condition, level, metric, better, values)
            for arm in _arms(campaign)
            for condition in (ALL, *conditions)
            for metric, _, better in METRICS
            for level in sorted(campaign.levels)
        ],
    )
    main_effects, interactions = factor_effects(campaign, conditions, [metric for metric, _, _ in METRICS], figures)
    sentinels = sentinel_summaries(campaign, _visits(guards))
    every = [*cells, *guards]
    begun = max(cell.key.block for cell in every) + 1
    blocks = begun if decided(campaign, comparisons, begun) else campaign.blocks  # that the run was to have
    return Summary(
        schema_version=SCHEMA_VERSION,
        run=_identity(campaign, conditions, every, blocks, sparse=sparse),
        campaign=_digest(campaign, conditions),
        environment=dict(environment),
        comparisons=comparisons,
        break_even={arm: _break_even(campaign, arm, ALL, comparisons) for arm in _arms(campaign)},
        break_even_by_condition=[
            ConditionBreakEven(arm=arm, break_even=_break_even(campaign, arm, condition, comparisons))
            for arm in _arms(campaign)
            for condition in conditions
        ],
        levels=_level_summaries(campaign, conditions, values),
        acceptance=_acceptances(campaign, conditions, valid),
        agreement=_agreements(campaign, conditions, valid),
        distributions=_distributions(campaign, conditions, valid),
        noise=_noise(campaign, conditions, comparisons, values),
        invalid=[_invalid(cell) for cell in every if not cell.valid],
        missing=[] if sparse else _missing(campaign, conditions, every, blocks),
        lints=[*_lints(campaign, conditions, every, valid), *control_lints(campaign, comparisons, sentinels)],
        cells=[_cell_summary(cell) for cell in every],
        interactions=interactions,
        main_effects=main_effects,
        tails=tail_comparisons(campaign, TIMES, _samples(campaign, conditions, valid)),
        multiplicity=describe_family(campaign, comparisons),
        needed_acceptance=needed_acceptances(campaign, synthetic_arms(campaign), comparisons),
        aa=aa_summary(campaign, comparisons),
        sentinel=sentinels,
    )


# Cells


def reduce_cell(record: CellRecord, campaign: Campaign) -> ReducedCell:
    """One cell, reduced to what `assemble` needs: metrics, computed once; its chunks are let go."""
    key = record.key
    metrics = cell_metrics(
        record.requests, record.counters, record.started_ns, record.ended_ns, key.level, natural=campaign.natural,
        open_loop=campaign.arrivals.open,
    )  # fmt: skip
    window = window_named(metrics.throughput_window, record.requests, key.level, open_loop=campaign.arrivals.open)
    good = [r for r in record.requests if is_valid(r)]
    return ReducedCell(
        record=replace(record, requests=tuple(replace(r, chunks=()) for r in record.requests)),
        metrics=metrics,
        window_s=window.seconds if window is not None else None,
        ttft_ms=np.asarray([ttft for ttft in map(ttft_ms, good) if ttft is not None]),
        latency_ms=np.asarray([latency_ms(r) for r in good]),
        tpot_ms=np.asarray([tpot for tpot in map(tpot_ms, good) if tpot is not None]),
    )


def _arms(campaign: Campaign) -> list[str]:
    return [name for name in campaign.arms if name != campaign.baseline]


def _conditions(campaign: Campaign, cells: Sequence[ReducedCell]) -> list[str]:
    """The campaign's domains; those of the cells where a prompt file names them."""
    named = list(campaign.workload.domains or ())
    return named + sorted({cell.key.condition for cell in cells} - set(named))


def _ordered(cells: Sequence[ReducedCell], campaign: Campaign, conditions: Sequence[str]) -> list[ReducedCell]:
    """By block, then in the campaign's order. Raises AnalysisError for a cell that is no part of the campaign."""
    arms = list(campaign.arms)
    for cell in cells:
        if cell.key.arm not in campaign.arms or cell.key.level not in campaign.levels:
            raise AnalysisError(
                f"the cell {cell.key.id} is no part of the campaign (arms {', '.join(arms)}; levels"
                f" {', '.join(map(str, campaign.levels))}): campaign.json and cells/ are not of the same run"
            )
    ordered = sorted(
        cells, key=lambda c: (c.key.block, arms.index(c.key.arm), conditions.index(c.key.condition), c.key.level)
    )
    for before, after in itertools.pairwise(ordered):
        if before.key == after.key:
            raise AnalysisError(f"the cell {after.key.id} is there twice")
    return ordered


def _missing(campaign: Campaign, conditions: Sequence[str], cells: Sequence[ReducedCell], blocks: int) -> list[str]:
    present = {cell.key for cell in cells}
    planned = (
        CellKey(block, arm, condition, level)
        for block in range(blocks)
        for arm in campaign.arms
        for condition in conditions
        for level in sorted(campaign.levels)
    )
    sentinels = (
        CellKey(block, arm, SENTINEL, campaign.sentinel_level)
        for block in range(blocks if campaign.sentinel is not None else 0)
        for arm in campaign.arms
    )
    return [key.id for key in (*planned, *sentinels) if key not in present]


def _is_sentinel(campaign: Campaign, key: CellKey) -> bool:
    return campaign.sentinel is not None and key.condition == SENTINEL


def _visits(guards: Sequence[ReducedCell]) -> dict[str, list[Visit]]:
    """The valid sentinel cells that have a throughput, by arm."""
    visits: dict[str, list[Visit]] = defaultdict(list)
    for cell in guards:
        rate = cell.metrics.throughput_tok_s.value
        if cell.valid and rate:
            started = cell.record.started_ns
            visits[cell.key.arm].append(Visit(cell.key.block, started, _iso(started), rate))
    return visits


# One figure per block


def _values(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell], *, sparse: bool = False
) -> _Values:
    values: dict[tuple[str, str, int, str], dict[int, _Value]] = defaultdict(dict)
    blocks = sorted({key.block for key in valid})
    at_level = {level: {key.condition for key in valid if key.level == level} for level in campaign.levels}
    for arm in campaign.arms:
        for level in campaign.levels:
            pooled = [c for c in conditions if c in at_level[level]] if sparse else conditions
            for condition in (ALL, *conditions):
                members = pooled if condition == ALL else [condition]
                for block in blocks:
                    cells = [valid.get(CellKey(block, arm, member, level)) for member in members]
                    present = [cell for cell in cells if cell is not None]
                    if len(present) < len(members) or not present:
                        continue
                    for metric, _, _ in METRICS:
                        value = _throughput(present) if metric == "throughput" else _mean_time(present, metric)
                        if value is not None and value.value > 0 and math.isfinite(value.value):
                            values[arm, condition, level, metric][block] = value
    return values


def _throughput(cells: Sequence[ReducedCell]) -> _Value | None:
    """Tokens within the cells' windows, divided by the windows' time."""
    tokens = seconds = 0.0
    for cell in cells:
        rate = cell.metrics.throughput_tok_s.value
        if rate is None or cell.window_s is None:
            return None
        tokens += rate * cell.window_s
        seconds += cell.window_s
    return _Value(tokens / seconds, _weakest(cell.metrics.throughput_tok_s.provenance for cell in cells))


def _mean_time(cells: Sequence[ReducedCell], metric: str) -> _Value | None:
    """The mean over the requests of all cells, in milliseconds."""
    total, count = 0.0, 0
    parts: list[Distribution] = [getattr(cell.metrics, metric) for cell in cells]
    for part in parts:
        if part.mean.value is None:
            return None
        total += part.mean.value * part.count
        count += part.count
    return _Value(total / count, _weakest(part.mean.provenance for part in parts))


def _weakest(provenances: Iterable[Provenance]) -> Provenance:
    return max(provenances, key=_STRENGTH.index, default=Provenance.DERIVED)


# Comparisons


def _compare(
    campaign: Campaign, arm: str, condition: str, level: int, metric: MetricName, better: Better, values: _Values
) -> Comparison:
    ours = values.get((arm, condition, level, metric), {})
    theirs = values.get((campaign.baseline, condition, level, metric), {})
    blocks = sorted(ours.keys() & theirs.keys())
    common: dict[str, Any] = {
        "level": level, "condition": condition, "baseline": campaign.baseline, "arm": arm, "metric": metric,
        "better": better, "blocks": len(blocks),
    }  # fmt: skip
    if not blocks:
        return Comparison(
            **common, ratio=None, ci_low=None, ci_high=None, block_ratios={}, verdict="undecided",
            explanation="Undecided: no block has a valid figure of both arms.", p_value=None, p_adjusted=None,
            p_sign_flip=None, hodges_lehmann=None, sd_log=None, blocks_needed=None, provenance=Provenance.DERIVED,
        )  # fmt: skip
    logs = log_ratios([theirs[b].value for b in blocks], [ours[b].value for b in blocks])
    estimate = estimator(campaign)(logs, campaign.confidence)
    higher = better == "higher"
    decided = verdict(estimate, campaign.margin, higher_is_better=higher)
    more = more_blocks(estimate, campaign.margin)
    several = len(blocks) > 1
    compared = Comparison(
        **common,
        ratio=estimate.ratio,
        ci_low=estimate.ci_low,
        ci_high=estimate.ci_high,
        block_ratios={b: math.exp(log) for b, log in zip(blocks, logs, strict=True)},
        verdict=decided,
        explanation=explain(
            estimate,
            campaign.margin,
            metric=_SAID[metric],
            arm=arm,
            baseline=campaign.baseline,
            higher_is_better=higher,
        ),
        p_value=estimate.p_value,
        p_adjusted=None,
        p_sign_flip=sign_flip(logs, seed=campaign.seed).p_value if several else None,
        hodges_lehmann=hodges_lehmann(logs, campaign.confidence).ratio if several else None,
        sd_log=estimate.sd_log,
        blocks_needed=len(blocks) + more if decided == "undecided" and more else None,
        provenance=_weakest(side[b].provenance for side in (ours, theirs) for b in blocks),
    )
    return _without_verdict(campaign, compared)


def _without_verdict(campaign: Campaign, compared: Comparison) -> Comparison:
    """The comparison as it stands; where acceptance was set and not earned, without verdict and p-values."""
    lengths = synthetic_arms(campaign)
    pretending = [name for name in (compared.arm, compared.baseline) if name in lengths]
    if not pretending:
        return compared
    told = " and ".join(f"{name} (length {lengths[name]:g})" for name in pretending)
    return compared.model_copy(
        update={
            "synthetic": True,
            "verdict": "undecided",
            "explanation": f"No verdict: acceptance is synthetic in {told}. The ratio is what a drafter of that"
            " acceptance would give, not what one gives.",
            "p_value": None,
            "p_sign_flip": None,
            "blocks_needed": None,
        }
    )


def _break_even(campaign: Campaign, arm: str, condition: str, comparisons: Sequence[Comparison]) -> BreakEvenSummary:
    rows = sorted(
        (
            c
            for c in comparisons
            if (c.arm, c.condition, c.metric) == (arm, condition, "throughput") and c.ratio is not None
        ),
        key=lambda c: c.level,
    )
    if not rows:
        return BreakEvenSummary(
            level=None, ci_low=None, ci_high=None, low_open=True, high_open=True, condition=condition, blocks=0,
            note="no block has a valid figure of both arms", monotone=True, levels=[], fitted=[], pays=[],
        )  # fmt: skip
    blocks = sorted({block for row in rows for block in row.block_ratios})
    found = break_even(
        [row.level for row in rows],
        [[math.log(row.block_ratios[b]) if b in row.block_ratios else math.nan for row in rows] for b in blocks],
        campaign.confidence,
        anytime=campaign.stop.rule == "confidence_sequence",
    )
    return BreakEvenSummary(
        level=found.level,
        ci_low=found.ci_low,
        ci_high=found.ci_high,
        low_open=found.low_open,
        high_open=found.high_open,
        condition=condition,
        note="; ".join(filter(None, (_condition_note(campaign, arm), found.note))),
        monotone=found.monotone,
        levels=list(found.levels),
        fitted=[math.exp(value) for value in found.fitted],
        pays=[LoadRange(low=low, high=high) for low, high in found.pays],
        blocks=found.blocks,
        surely_pays=[LoadRange(low=low, high=high) for low, high in found.surely_pays],
        surely_hurts=[LoadRange(low=low, high=high) for low, high in found.surely_hurts],
    )


def _condition_note(campaign: Campaign, arm: str) -> str:
    lengths = synthetic_arms(campaign)
    if arm not in lengths:
        return ""
    return f"acceptance is synthetic: where a drafter of acceptance length {lengths[arm]:g} would break even"


def _level_summaries(campaign: Campaign, conditions: Sequence[str], values: _Values) -> list[LevelSummary]:
    rows = []
    for arm in campaign.arms:
        for condition in (ALL, *conditions):
            for level in sorted(campaign.levels):
                metrics: dict[str, IntervalFigure] = {}
                for metric, unit, _ in METRICS:
                    found = values.get((arm, condition, level, metric))
                    if found:
                        metrics[metric] = _interval_figure(list(found.values()), unit, campaign.confidence)
                if metrics:
                    blocks = len(values.get((arm, condition, level, "throughput"), {}))
                    rows.append(LevelSummary(arm=arm, condition=condition, level=level, blocks=blocks, metrics=metrics))
    return rows


def _interval_figure(values: Sequence[_Value], unit: str, confidence: float) -> IntervalFigure:
    mean: RatioEstimate = ratio_from_logs([math.log(v.value) for v in values], confidence)
    return IntervalFigure(
        value=mean.ratio,
        ci_low=mean.ci_low,
        ci_high=mean.ci_high,
        unit=unit,
        provenance=_weakest(v.provenance for v in values),
    )


def _noise(
    campaign: Campaign, conditions: Sequence[str], comparisons: Sequence[Comparison], values: _Values
) -> list[Noise]:
    rows = []
    for c in comparisons:
        if c.metric != "throughput":
            continue
        base = [v.value for v in values.get((campaign.baseline, c.condition, c.level, "throughput"), {}).values()]
        spread = float(np.std(base, ddof=1) / np.mean(base)) if len(base) > 1 else None
        known = c.sd_log is not None
        rows.append(
            Noise(
                arm=c.arm,
                condition=c.condition,
                level=c.level,
                blocks=c.blocks,
                sd_log=c.sd_log,
                noise_floor=noise_floor(c.sd_log or 0.0, c.blocks, campaign.confidence) if known else None,
                smallest_detectable=smallest_detectable(c.sd_log or 0.0, c.blocks, campaign.confidence)
                if known
                else None,
                baseline_cv=spread,
            )
        )
    return rows


# Acceptance, agreement, distributions


def _members(
    arm: str, condition: str, level: int | None, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[ReducedCell]:
    """The valid cells of an arm at a condition (or all) and a level (None: all)."""
    wanted = set(conditions) if condition == ALL else {condition}
    return [
        cell
        for key, cell in valid.items()
        if key.arm == arm and key.condition in wanted and (level is None or key.level == level)
    ]


def _acceptances(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[AcceptanceSummary]:
    rows = []
    for arm in campaign.arms:
        for condition in (ALL, *conditions):
            for level in sorted(campaign.levels):
                row = _acceptance(campaign, arm, condition, level, _members(arm, condition, level, conditions, valid))
                if row is not None:
                    rows.append(row)
    return rows


def _acceptance(
    campaign: Campaign, arm: str, condition: str, level: int, cells: Sequence[ReducedCell]
) -> AcceptanceSummary | None:
    """Counters summed over the cells; None if the arm drafted nothing or the server does not say."""
    counters: dict[str, float] = defaultdict(float)
    for cell in cells:
        for name, change in cell.record.counters.items():
            counters[name] += change
    requests = [r for cell in cells for r in cell.record.requests]
    good = sum(is_valid(r) for r in requests)
    looping = sum((c.metrics.looping_share.value or 0.0) * sum(is_valid(r) for r in c.record.requests) for c in cells)
    found = acceptance(counters, requests, natural=campaign.natural, looping_share=looping / good if good else None)
    stated = [cell.stated_length.value for cell in cells if cell.stated_length and cell.stated_length.value is not None]
    if found.length.value is None and stated:
        mean = Quantity(sum(stated) / len(stated), "tokens", Provenance.SERVER_REPORTED, "as the files state it")
        found = replace(found, length=mean, valid=campaign.natural)
    if found.length.value is None:
        return None
    if arm in synthetic_arms(campaign):
        found = replace(found, valid=False, notes=(*found.notes, "acceptance is synthetic: set, not earned"))
    return AcceptanceSummary(
        arm=arm,
        condition=condition,
        level=level,
        length=_figure(found.length),
        draft_share=_figure(found.draft_share),
        per_position=[_figure(q) for q in found.per_position],
        tokens_per_step=_figure(found.tokens_per_step),
        valid=found.valid,
        notes=list(found.notes),
    )


def _answers(cell: ReducedCell) -> dict[tuple[str, str], RequestResult]:
    """Valid answers by (place in the cell, prompt): the same in every arm of a block."""
    start = cell.key.id
    return {(r.request_id.removeprefix(start), r.prompt_id): r for r in cell.record.requests if is_valid(r)}


def _pairs(campaign: Campaign, valid: Mapping[CellKey, ReducedCell]) -> dict[CellKey, list[_Pair]]:
    """By cell that the baseline has too: its answers, each beside the baseline's to the same request."""
    answers = {key: _answers(cell) for key, cell in valid.items()}
    found = {}
    for key, mine in answers.items():
        theirs = answers.get(replace(key, arm=campaign.baseline))
        if theirs is not None and key.arm != campaign.baseline:
            found[key] = [(theirs[at], own) for at, own in mine.items() if at in theirs]
    return found


def _agreements(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[AgreementSummary]:
    rows = []
    by_cell = _pairs(campaign, valid)
    for arm in _arms(campaign):
        for condition in (ALL, *conditions):
            for level in (None, *sorted(campaign.levels)):
                members = _members(arm, condition, level, conditions, valid)
                pairs = [pair for cell in members for pair in by_cell.get(cell.key, ())]
                if not pairs:
                    continue
                found = agreement(
                    [a.text for a, _ in pairs],
                    [b.text for _, b in pairs],
                    [a.completion_tokens for a, _ in pairs],
                    [b.completion_tokens for _, b in pairs],
                )
                rows.append(
                    AgreementSummary(
                        arm=arm,
                        condition=condition,
                        level=level,
                        pairs=found.pairs,
                        identical=found.identical,
                        identical_share=found.identical_share,
                        first_divergence_median=found.first_divergence_median,
                        common_prefix_share=found.common_prefix_share,
                        length_mismatches=found.length_mismatches,
                        token_mismatches=found.token_mismatches,
                        expected=campaign.sampling.temperature == 0
                        and not {arm, campaign.baseline} & set(synthetic_arms(campaign)),
                    )
                )
    return rows


def _distributions(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[DistributionSummary]:
    rows = []
    for metric in ("ttft", "latency"):
        for arm in campaign.arms:
            for level in sorted(campaign.levels):
                cells = _members(arm, ALL, level, conditions, valid)
                samples = [cell.ttft_ms if metric == "ttft" else cell.latency_ms for cell in cells]
                data = np.concatenate(samples) if samples else np.empty(0)
                if data.size:
                    rows.append(
                        DistributionSummary(
                            arm=arm,
                            condition=ALL,
                            level=level,
                            metric=metric,
                            unit="ms",
                            count=int(data.size),
                            quantiles=[float(q) for q in np.quantile(data, np.linspace(0, 1, _STEPS))],
                        )
                    )
    return rows


def _samples(
    campaign: Campaign, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> dict[tuple[str, int, str], dict[int, NDArray[np.float64]]]:
    """The requests' times of each arm, level and time, by block; all conditions, as condition "all" has them."""
    samples: dict[tuple[str, int, str], dict[int, NDArray[np.float64]]] = defaultdict(dict)
    for arm, level in itertools.product(campaign.arms, campaign.levels):
        for block in sorted({key.block for key in valid}):
            cells = [valid.get(CellKey(block, arm, condition, level)) for condition in conditions]
            present = [cell for cell in cells if cell is not None]
            if len(present) < len(conditions):
                continue
            for time in TIMES:
                joined = np.concatenate([getattr(cell, f"{time}_ms") for cell in present])
                if joined.size:
                    samples[arm, level, time][block] = joined
    return samples


# What a reader should know


def _invalid(cell: ReducedCell) -> InvalidCell:
    key = cell.key
    return InvalidCell(
        cell=key.id, block=key.block, arm=key.arm, condition=key.condition, level=key.level,
        reasons=list(cell.record.invalid),
    )  # fmt: skip


def _lints(
    campaign: Campaign, conditions: Sequence[str], cells: Sequence[ReducedCell], valid: Mapping[CellKey, ReducedCell]
) -> list[Lint]:
    where: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        for note in _notes(cell):
            where[note].append(cell.key.id)
        if cell.valid and cell.metrics.throughput_tok_s.value is None:
            where[f"no throughput: {cell.metrics.throughput_tok_s.note}"].append(cell.key.id)
    lints = [Lint(message=message, cells=names) for message, names in where.items()]
    if campaign.arrivals.open:
        lints.append(
            Lint(
                message=f"open loop, {campaign.arrivals.process} arrivals: a level is a rate, not a number of streams:"
                f" its number times {campaign.arrivals.unit_rate:g} requests/s",
                cells=[],
            )
        )
    attached = [name for name, arm in campaign.arms.items() if isinstance(arm, AttachArm) and arm.start_command is None]
    if attached:
        lints.append(
            Lint(
                message=f"{', '.join(attached)}: attached, so not launched anew for each block; the intervals hold the"
                " scatter of one launch over time, not that between launches",
                cells=[],
            )
        )
    for arm in _arms(campaign):
        for level in sorted(campaign.levels):
            lints += _length_lint(campaign, conditions, arm, level, valid)
    return [*lints, *cell_lints(campaign, valid)]


def _notes(cell: ReducedCell) -> list[str]:
    """The cell's own notes and those of its counters, each once."""
    problems = cell.record.extra.get("counter_problems") or []
    return list(dict.fromkeys([*cell.metrics.notes, *(str(problem) for problem in problems)]))


def _length_lint(
    campaign: Campaign, conditions: Sequence[str], arm: str, level: int, valid: Mapping[CellKey, ReducedCell]
) -> list[Lint]:
    """Arms that do not write equally much do not do the same work."""
    ours = _mean_length(_members(arm, ALL, level, conditions, valid))
    theirs = _mean_length(_members(campaign.baseline, ALL, level, conditions, valid))
    if ours is None or theirs is None or abs(ours / theirs - 1) <= _LENGTH_TOLERANCE:
        return []
    return [
        Lint(
            message=f"{arm} answers with {ours:.0f} tokens on average at level {level}, {campaign.baseline} with"
            f" {theirs:.0f}: they do not do the same work, so compare TPOT rather than latency",
            cells=[],
        )
    ]


def _mean_length(cells: Sequence[ReducedCell]) -> float | None:
    counts = [r.completion_tokens or 0 for cell in cells for r in cell.record.requests if is_valid(r)]
    return sum(counts) / len(counts) if sum(counts) else None


# Records of what was done


def _identity(
    campaign: Campaign, conditions: Sequence[str], cells: Sequence[ReducedCell], blocks: int, *, sparse: bool = False
) -> RunIdentity:
    planned = blocks * len(campaign.arms) * (len(conditions) * len(campaign.levels) + (campaign.sentinel is not None))
    measured = [cell for cell in cells if cell.record.requests] or list(cells)
    return RunIdentity(
        name=campaign.name,
        started=_iso(min(cell.record.started_ns for cell in measured)),
        ended=_iso(max(cell.record.ended_ns for cell in measured)),
        breakeven_version=__version__,
        cells_planned=len(cells) if sparse else planned,
        cells_finished=len(cells),
        cells_invalid=sum(not cell.valid for cell in cells),
    )


def _digest(campaign: Campaign, conditions: Sequence[str]) -> CampaignDigest:
    resolved = campaign.model_dump(mode="json")
    canonical = json.dumps(resolved, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return CampaignDigest(
        name=campaign.name,
        sha256=hashlib.sha256(canonical.encode()).hexdigest(),
        baseline=campaign.baseline,
        arms=[
            ArmDigest(
                name=name,
                baseline=name == campaign.baseline,
                settings=settings,
                synthetic_acceptance=synthetic_arms(campaign).get(name),
            )
            for name, settings in resolved["arms"].items()
        ],
        conditions=list(conditions),
        levels=sorted(campaign.levels),
        blocks=campaign.blocks,
        margin=campaign.margin,
        confidence=campaign.confidence,
        seed=campaign.seed,
        resolved=resolved,
    )


def _cell_summary(cell: ReducedCell) -> CellSummary:
    key, m = cell.key, cell.metrics
    quantities: dict[str, Quantity] = {
        "throughput": m.throughput_tok_s,
        "throughput_whole": m.throughput_whole_tok_s,
        "throughput_steady": m.throughput_steady_tok_s,
        "requests_per_s": m.requests_per_s,
        "completion_tokens": m.completion_tokens,
        "prompt_tokens": m.prompt_tokens,
        "output_tokens_mean": m.output_tokens.mean,
        "duration": m.duration_s,
    }
    for name in ("ttft", "tpot", "latency", "inter_chunk", "token_gap", "send_lag"):
        part: Distribution = getattr(m, name)
        quantities |= {f"{name}_mean": part.mean, f"{name}_p50": part.p50, f"{name}_p90": part.p90}
        quantities[f"{name}_p99"] = part.p99
    quantities |= {
        "acceptance_length": m.acceptance_length,
        "draft_share": m.acceptance.draft_share,
        "tokens_per_step": m.acceptance.tokens_per_step,
        "looping_share": m.looping_share,
        "cached_share": m.cached_share,
        "client_cpu": Quantity(cell.record.client_cpu_s, "s", Provenance.MEASURED),
        **_load_quantities(cell.record),
    }
    return CellSummary(
        id=key.id,
        block=key.block,
        arm=key.arm,
        condition=key.condition,
        level=key.level,
        started=_iso(cell.record.started_ns),
        valid=cell.valid,
        invalid=list(cell.record.invalid),
        requests=m.requests,
        failed=m.failed,
        metrics={name: _figure(quantity) for name, quantity in quantities.items()},
        counters=dict(cell.record.counters),
        notes=_notes(cell),
    )


def _load_quantities(record: CellRecord) -> dict[str, Quantity]:
    """Offered and achieved rates, streams in flight and the client's headroom, as the runner noted them."""
    load = record.extra.get("load")
    if not isinstance(load, dict):
        return {}
    found = {
        name: Quantity(load.get(name), unit, provenance)
        for name, unit, provenance in (
            ("offered_per_s", "1/s", Provenance.DERIVED),
            ("sent_per_s", "1/s", Provenance.MEASURED),
            ("completed_per_s", "1/s", Provenance.MEASURED),
            ("in_flight_mean", "1", Provenance.MEASURED),
            ("in_flight_max", "1", Provenance.MEASURED),
        )
    }
    client = record.extra.get("client")
    if isinstance(client, dict):
        note = str(client.get("note", ""))
        found["client_events_per_s"] = Quantity(client.get("events_per_s"), "1/s", Provenance.MEASURED)
        found["client_capacity"] = Quantity(client.get("capacity_per_s"), "1/s", Provenance.ESTIMATED, note)
        found["client_headroom"] = Quantity(client.get("headroom"), "1", Provenance.ESTIMATED, note)
    return found


def _figure(quantity: Quantity) -> Figure:
    return Figure(value=quantity.value, unit=quantity.unit, provenance=quantity.provenance, note=quantity.note)


def _iso(nanoseconds: int) -> str:
    moment = datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{nanoseconds // 1_000_000 % 1000:03d}Z"
