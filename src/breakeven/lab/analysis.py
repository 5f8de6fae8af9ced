"""From a run's directory to its summary. The same directory gives the same summary, whenever and wherever.

Rules, beside those of docs/statistics.md:
- Only valid cells count. A block takes part in a comparison only where the cells of both arms are valid and have the
  figure; in condition "all", those of every condition.
- Condition "all" pools the conditions of a block: the domains, each with every value of the declared factors.
  Throughput: the sum of the cells' tokens within their windows, divided by the sum of the windows. Times: the mean over
  the requests of all cells.
- One figure per block, arm, condition and level goes into the statistics; requests are never n.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from breakeven import __version__
from breakeven.lab.campaign import JOIN, SENTINEL, Campaign
from breakeven.lab.cautions import cautions
from breakeven.lab.cell_summary import cell_summary, figure, invalid_cell, iso
from breakeven.lab.client.types import RequestResult
from breakeven.lab.controls import Visit, aa_summary, control_lints, sentinel_summaries
from breakeven.lab.effects import crossed, factor_effects
from breakeven.lab.family import describe_family, with_adjusted_p
from breakeven.lab.figures import METRICS, Value, Values, block_values, weakest
from breakeven.lab.known_traps import synthetic_arms
from breakeven.lab.lints import with_run_lints
from breakeven.lab.metrics import (
    acceptance,
    agreement,
    is_valid,
)
from breakeven.lab.needed import needed_acceptances
from breakeven.lab.play import turn_of
from breakeven.lab.quantity import Provenance, Quantity
from breakeven.lab.records import CellKey, CellRecord, RunDirectory
from breakeven.lab.reduced import ReducedCell, reduce_cell
from breakeven.lab.samples import TIMES, distributions, members, samples_by_block
from breakeven.lab.sent import sent_summaries
from breakeven.lab.servers import leftovers, servers
from breakeven.lab.stats.breakeven import break_even
from breakeven.lab.stats.power import noise_floor, smallest_detectable
from breakeven.lab.stats.ratio import log_ratios
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
    Comparison,
    ConditionBreakEven,
    IntervalFigure,
    LevelSummary,
    Lint,
    LoadRange,
    MetricName,
    Noise,
    RunIdentity,
    Summary,
)
from breakeven.lab.tails import tail_comparisons
from breakeven.lab.turns import turn_summaries
from breakeven.lab.verdict import explain, more_blocks, verdict

_SAID = {"throughput": "throughput", "ttft": "mean TTFT", "tpot": "mean TPOT", "latency": "mean latency"}


class AnalysisError(ValueError):
    """A run that cannot be analysed; the message says why and what to do."""


# Arms whose acceptance is set and not earned → the acceptance length that they pretend
_Pretending = Mapping[str, float | None]
# The baseline's answer and an arm's to the same request
_Pair = tuple[RequestResult, RequestResult]


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
    values = block_values(campaign, conditions, valid, sparse=sparse)
    figures = {at: {b: v.value for b, v in by_block.items()} for at, by_block in values.items()}
    pretending = synthetic_arms(campaign)
    comparisons = with_adjusted_p(
        campaign,
        [
            _compare(campaign, pretending, arm, condition, level, metric, better, values)
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
        campaign=_digest(campaign, pretending, conditions),
        environment=dict(environment),
        comparisons=comparisons,
        break_even={arm: _break_even(campaign, pretending, arm, ALL, comparisons) for arm in _arms(campaign)},
        break_even_by_condition=[
            ConditionBreakEven(arm=arm, break_even=_break_even(campaign, pretending, arm, condition, comparisons))
            for arm in _arms(campaign)
            for condition in conditions
        ],
        levels=_level_summaries(campaign, conditions, values),
        acceptance=_acceptances(campaign, pretending, conditions, valid),
        agreement=_agreements(campaign, pretending, conditions, valid),
        distributions=distributions(campaign, conditions, valid),
        noise=_noise(campaign, conditions, comparisons, values),
        invalid=[invalid_cell(cell) for cell in every if not cell.valid],
        missing=[] if sparse else _missing(campaign, conditions, every, blocks),
        lints=[*cautions(campaign, conditions, every, valid), *control_lints(campaign, comparisons, sentinels)],
        cells=[cell_summary(cell) for cell in every],
        interactions=interactions,
        main_effects=main_effects,
        tails=tail_comparisons(campaign, TIMES, samples_by_block(campaign, conditions, valid)),
        multiplicity=describe_family(campaign, comparisons),
        needed_acceptance=needed_acceptances(campaign, pretending, comparisons),
        aa=aa_summary(campaign, comparisons),
        sentinel=sentinels,
        turns=turn_summaries([(cell.key.arm, cell.key.level, cell.turns) for cell in valid.values()])
        if campaign.workload.sessions is not None
        else [],
        sent=sent_summaries([cell.record for cell in every]),
    )


def primary_comparisons(campaign: Campaign, cells: Sequence[ReducedCell]) -> list[Comparison]:
    """The comparisons of the declared primary family alone, each as `assemble` has it: what a declared stop looks at.

    Of the cells only metrics and windows are used. Raises AnalysisError as `assemble` does.
    """
    cells = [cell for cell in cells if not _is_sentinel(campaign, cell.key)]
    if not cells:
        raise AnalysisError("there is no finished cell yet")
    conditions = _conditions(campaign, cells)
    valid = {cell.key: cell for cell in _ordered(cells, campaign, conditions) if cell.valid}
    better = {metric: which for metric, _, which in METRICS}[campaign.primary_metric]
    values = block_values(campaign, conditions, valid, metrics=(campaign.primary_metric,), by_condition=False)
    pretending = synthetic_arms(campaign)
    found = [
        _compare(campaign, pretending, arm, ALL, level, campaign.primary_metric, better, values)
        for arm in _arms(campaign)
        for level in sorted(campaign.levels)
    ]
    return [c for c in with_adjusted_p(campaign, found) if c.primary]


# Cells


def _arms(campaign: Campaign) -> list[str]:
    return [name for name in campaign.arms if name != campaign.baseline]


def _conditions(campaign: Campaign, cells: Sequence[ReducedCell]) -> list[str]:
    """The campaign's conditions; where a prompt file names the domains, those of the cells."""
    domains = list(campaign.workload.domains or ())
    domains += sorted({cell.key.condition.split(JOIN)[0] for cell in cells} - set(domains))
    return campaign.condition_names(domains)


def _ordered(cells: Sequence[ReducedCell], campaign: Campaign, conditions: Sequence[str]) -> list[ReducedCell]:
    """By block, then in the campaign's order. Raises AnalysisError for a cell that is no part of the campaign."""
    arms = list(campaign.arms)
    for cell in cells:
        if (
            cell.key.arm not in campaign.arms
            or cell.key.level not in campaign.levels
            or cell.key.condition not in conditions
        ):
            raise AnalysisError(
                f"the cell {cell.key.id} is no part of the campaign (arms {', '.join(arms)}; levels"
                f" {', '.join(map(str, campaign.levels))}; conditions {', '.join(conditions[:20])}): campaign.json and"
                f" cells/ are not of the same run"
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
            visits[cell.key.arm].append(Visit(cell.key.block, started, iso(started), rate))
    return visits


# Comparisons


def _compare(
    campaign: Campaign,
    pretending: _Pretending,
    arm: str,
    condition: str,
    level: int,
    metric: MetricName,
    better: Better,
    values: Values,
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
        provenance=weakest(side[b].provenance for side in (ours, theirs) for b in blocks),
    )
    return _without_verdict(pretending, compared)


def _without_verdict(lengths: _Pretending, compared: Comparison) -> Comparison:
    """The comparison as it stands; where acceptance was set and not earned, without verdict and p-values."""
    pretending = [name for name in (compared.arm, compared.baseline) if name in lengths]
    if not pretending:
        return compared
    told = " and ".join(
        f"{name} (length {'unknown' if (length := lengths[name]) is None else f'{length:g}'})" for name in pretending
    )
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


def _break_even(
    campaign: Campaign, pretending: _Pretending, arm: str, condition: str, comparisons: Sequence[Comparison]
) -> BreakEvenSummary:
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
        note="; ".join(filter(None, (_condition_note(pretending, arm), found.note))),
        monotone=found.monotone,
        levels=list(found.levels),
        fitted=[math.exp(value) for value in found.fitted],
        pays=[LoadRange(low=low, high=high) for low, high in found.pays],
        blocks=found.blocks,
        surely_pays=[LoadRange(low=low, high=high) for low, high in found.surely_pays],
        surely_hurts=[LoadRange(low=low, high=high) for low, high in found.surely_hurts],
    )


def _condition_note(lengths: _Pretending, arm: str) -> str:
    if arm not in lengths:
        return ""
    length = lengths[arm]
    of_what = "its set acceptance" if length is None else f"acceptance length {length:g}"
    return f"acceptance is synthetic: where a drafter of {of_what} would break even"


def _level_summaries(campaign: Campaign, conditions: Sequence[str], values: Values) -> list[LevelSummary]:
    rows = []
    for arm in campaign.arms:
        for condition in (ALL, *conditions):
            for level in sorted(campaign.levels):
                metrics: dict[str, IntervalFigure] = {}
                for metric, unit, _ in METRICS:
                    found = values.get((arm, condition, level, metric))
                    if found:
                        metrics[metric] = _interval_figure(campaign, list(found.values()), unit)
                if metrics:
                    blocks = len(values.get((arm, condition, level, "throughput"), {}))
                    rows.append(LevelSummary(arm=arm, condition=condition, level=level, blocks=blocks, metrics=metrics))
    return rows


def _interval_figure(campaign: Campaign, values: Sequence[Value], unit: str) -> IntervalFigure:
    mean = estimator(campaign)([math.log(v.value) for v in values], campaign.confidence)
    return IntervalFigure(
        value=mean.ratio,
        ci_low=mean.ci_low,
        ci_high=mean.ci_high,
        unit=unit,
        provenance=weakest(v.provenance for v in values),
    )


def _noise(
    campaign: Campaign, conditions: Sequence[str], comparisons: Sequence[Comparison], values: Values
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


# Acceptance and agreement


def _acceptances(
    campaign: Campaign, pretending: _Pretending, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[AcceptanceSummary]:
    rows = []
    for arm in campaign.arms:
        for condition in (ALL, *conditions):
            for level in sorted(campaign.levels):
                cells = members(arm, condition, level, conditions, valid)
                row = _acceptance(campaign, pretending, arm, condition, level, cells)
                if row is not None:
                    rows.append(row)
    return rows


def _acceptance(
    campaign: Campaign, pretending: _Pretending, arm: str, condition: str, level: int, cells: Sequence[ReducedCell]
) -> AcceptanceSummary | None:
    """Counters summed over the cells; None if the arm drafted nothing or the server does not say."""
    counters: dict[str, float] = defaultdict(float)
    for cell in cells:
        for name, change in cell.record.counters.items():
            counters[name] += change
    requests = [r for cell in cells for r in cell.record.requests]
    good = sum(is_valid(r) for r in requests)
    looping = sum((c.metrics.looping_share.value or 0.0) * sum(is_valid(r) for r in c.record.requests) for c in cells)
    natural = campaign.natural if condition == ALL else campaign.setting(condition).natural
    found = acceptance(counters, requests, natural=natural, looping_share=looping / good if good else None)
    stated = [cell.stated_length.value for cell in cells if cell.stated_length and cell.stated_length.value is not None]
    if found.length.value is None and stated:
        mean = Quantity(sum(stated) / len(stated), "tokens", Provenance.SERVER_REPORTED, "as the files state it")
        found = replace(found, length=mean, valid=natural)
    if found.length.value is None:
        return None
    if arm in pretending:
        found = replace(found, valid=False, notes=(*found.notes, "acceptance is synthetic: set, not earned"))
    return AcceptanceSummary(
        arm=arm,
        condition=condition,
        level=level,
        length=figure(found.length),
        draft_share=figure(found.draft_share),
        per_position=[figure(q) for q in found.per_position],
        tokens_per_step=figure(found.tokens_per_step),
        valid=found.valid,
        notes=list(found.notes),
    )


def _answers(cell: ReducedCell) -> dict[tuple[str, str], RequestResult]:
    """Valid answers by (place in the cell, prompt): the same in every arm of a block."""
    start = cell.key.id
    return {(r.request_id.removeprefix(start), r.prompt_id): r for r in cell.record.requests if is_valid(r)}


def _pairs(campaign: Campaign, valid: Mapping[CellKey, ReducedCell]) -> dict[CellKey, list[_Pair]]:
    """By cell that the baseline has too: its answers, each beside the baseline's to the same request.

    Of sessions whose contexts are what the model itself said, only first turns are the same request in all arms.
    """
    sessions = campaign.workload.sessions
    own_contexts = sessions is not None and sessions.answers == "own"
    answers = {
        key: {at: r for at, r in _answers(cell).items() if not own_contexts or turn_of(r.request_id) == 1}
        for key, cell in valid.items()
    }
    found = {}
    for key, mine in answers.items():
        theirs = answers.get(replace(key, arm=campaign.baseline))
        if theirs is not None and key.arm != campaign.baseline:
            found[key] = [(theirs[at], own) for at, own in mine.items() if at in theirs]
    return found


def _agreements(
    campaign: Campaign, pretending: _Pretending, conditions: Sequence[str], valid: Mapping[CellKey, ReducedCell]
) -> list[AgreementSummary]:
    """Whose texts are their own only: those of synthetic acceptance mean nothing."""
    rows: list[AgreementSummary] = []
    if campaign.baseline in pretending:
        return rows
    by_cell = _pairs(campaign, valid)
    for arm in _arms(campaign):
        if arm in pretending:
            continue
        for condition in (ALL, *conditions):
            for level in (None, *sorted(campaign.levels)):
                cells = members(arm, condition, level, conditions, valid)
                pairs = [pair for cell in cells for pair in by_cell.get(cell.key, ())]
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
                        expected=all(
                            campaign.setting(name).sampling.temperature == 0
                            for name in (conditions if condition == ALL else (condition,))
                        ),
                    )
                )
    return rows


# Records of what was done


def _identity(
    campaign: Campaign, conditions: Sequence[str], cells: Sequence[ReducedCell], blocks: int, *, sparse: bool = False
) -> RunIdentity:
    planned = blocks * len(campaign.arms) * (len(conditions) * len(campaign.levels) + (campaign.sentinel is not None))
    measured = [cell for cell in cells if cell.record.requests] or list(cells)
    return RunIdentity(
        name=campaign.name,
        started=iso(min(cell.record.started_ns for cell in measured)),
        ended=iso(max(cell.record.ended_ns for cell in measured)),
        breakeven_version=__version__,
        cells_planned=len(cells) if sparse else planned,
        cells_finished=len(cells),
        cells_invalid=sum(not cell.valid for cell in cells),
    )


def _digest(campaign: Campaign, pretending: _Pretending, conditions: Sequence[str]) -> CampaignDigest:
    resolved = campaign.resolved()
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
                synthetic_acceptance=pretending.get(name),
                synthetic=name in pretending,
            )
            for name, settings in resolved["arms"].items()
        ],
        conditions=list(conditions),
        factors=crossed(campaign, conditions) if campaign.factors else {},
        levels=sorted(campaign.levels),
        blocks=campaign.blocks,
        margin=campaign.margin,
        confidence=campaign.confidence,
        seed=campaign.seed,
        resolved=resolved,
    )
