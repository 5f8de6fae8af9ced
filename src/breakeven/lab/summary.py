"""The schema of `summary.json`: everything a report shows, and nothing that depends on when or where it was computed.

`docs/summary-schema.md` is generated from these models (`python -m breakeven.lab.report.schema`). Figures are kept to
12 significant digits: far beyond any meaning, but short of the last bits in which processors differ.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from breakeven.lab.quantity import Provenance
from breakeven.lab.verdict import Verdict

SCHEMA_VERSION: Literal[1] = 1
ALL = "all"  # the condition that pools all conditions of a block
SIGNIFICANT_DIGITS = 12

MetricName = Literal["throughput", "ttft", "tpot", "latency"]
TimeName = Literal["ttft", "tpot", "latency"]
Better = Literal["higher", "lower"]
FactorVerdict = Literal["differs", "equivalent", "undecided"]


class SummaryError(ValueError):
    """A summary file that cannot be read. The message is meant for the user."""


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else value


Number = Annotated[float, AfterValidator(_rounded)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Figure(_Model):
    """A value that says where it came from."""

    value: Number | None = Field(description="the value; null: unavailable, and `note` says why")
    unit: str = Field(description="unit; `1` for a share")
    provenance: Provenance = Field(description="measured, server-reported, derived, or estimated")
    note: str = Field("", description="what the figure rests on, or why it is missing")


class IntervalFigure(_Model):
    """A geometric mean over blocks with its interval on logs, made as that of `Comparison`."""

    value: Number = Field(description="geometric mean over the valid blocks")
    ci_low: Number | None = Field(
        description="lower end of the interval; null with one block, or while a confidence sequence has no bounds"
    )
    ci_high: Number | None = Field(description="upper end; null likewise")
    unit: str = Field(description="unit")
    provenance: Provenance = Field(description="the weakest provenance among the blocks' figures")


class RunIdentity(_Model):
    """Which run this is. Times are those of the cells, in UTC; nothing here tells when the summary was made."""

    name: str = Field(description="the campaign's name")
    started: str = Field(description="start of the first cell, ISO 8601, UTC")
    ended: str = Field(description="end of the last cell, ISO 8601, UTC")
    breakeven_version: str = Field(description="version of breakeven that computed the summary")
    cells_planned: int = Field(
        description="blocks × arms × (conditions × levels, and the sentinel), of the blocks up to a declared stop"
    )
    cells_finished: int = Field(description="cells on disk, invalid ones included")
    cells_invalid: int = Field(description="finished cells that failed a gate")


class ArmDigest(_Model):
    """One arm of the campaign."""

    name: str = Field(description="the arm's name")
    baseline: bool = Field(description="is it the arm all others are compared with?")
    settings: dict[str, Any] = Field(description="the arm as resolved in campaign.json")
    synthetic_acceptance: Number | None = Field(
        default=None,
        description="acceptance length that the arm pretends: a condition, not a result; null: it is real, or unknown",
    )
    synthetic: bool = Field(default=False, description="is its acceptance set, not earned? Of known length or not")

    @property
    def pretends(self) -> bool:
        """Acceptance is set, not earned; also in summaries from before `synthetic` was told by itself."""
        return self.synthetic or self.synthetic_acceptance is not None


class CampaignDigest(_Model):
    """What was asked for."""

    name: str = Field(description="the campaign's name")
    sha256: str = Field(description="SHA-256 of the resolved campaign as canonical JSON")
    baseline: str = Field(description="name of the baseline arm")
    arms: list[ArmDigest] = Field(description="all arms, in the campaign's order")
    conditions: list[str] = Field(description="prompt domains; with factors, each domain with each of their values")
    factors: dict[str, list[str]] = Field(
        default={},
        description="what is crossed, by name (`domain` first): its values, as they stand in a condition's name, joined"
        " by `+`; empty where the domain is the only factor",
    )
    levels: list[int] = Field(description="streams in closed loop")
    blocks: int = Field(description="planned blocks (launches of every arm)")
    margin: Number = Field(description="ratios within 1 / (1 + margin) and 1 + margin are too small to matter")
    confidence: Number = Field(description="of every interval")
    seed: int = Field(description="from which orders, prompts and request seeds follow")
    resolved: dict[str, Any] = Field(description="the whole campaign with all its defaults")

    @property
    def open_loop(self) -> bool:
        """Is a level a rate? Where arrivals are a crossed factor all of its values are open."""
        varied = (self.resolved.get("conditions") or {}).get("arrivals")
        return bool(varied) or (self.resolved.get("arrivals") or {}).get("process", "closed") != "closed"


class CellSummary(_Model):
    """One cell: a block, an arm, a condition, a level."""

    id: str = Field(description="the cell's name on disk")
    block: int = Field(description="number of the block")
    arm: str = Field(description="arm")
    condition: str = Field(description="prompt domain")
    level: int = Field(description="streams in closed loop")
    started: str = Field(description="ISO 8601, UTC")
    valid: bool = Field(description="does it count?")
    invalid: list[str] = Field(description="why not, in plain words; empty if valid")
    requests: int = Field(description="requests sent")
    failed: int = Field(description="requests that failed")
    metrics: dict[str, Figure] = Field(
        description="by name: throughput and its two windows, requests_per_s, {ttft, tpot, latency, inter_chunk,"
        " token_gap, send_lag}_{mean, p50, p90, p99}, acceptance_length, tokens_per_step, output_tokens_mean,"
        " engine_time_mean and engine_lag (how many times as long answers took, from send to end) where vLLM tells its"
        " engine's own time, …"
    )
    counters: dict[str, Number] = Field(description="changes of the server's speculation counters over the cell")
    notes: list[str] = Field(description="warnings, in plain words")
    bodies_sha256: str | None = Field(
        default=None, description="SHA-256 of the request bodies as sent, salt and seeds included, in order"
    )
    rendered_sha256: str | None = Field(
        default=None,
        description="SHA-256 of the token ids that the server's template made of the prompts, by its own /tokenize;"
        " null where it does not tell them",
    )


class LevelSummary(_Model):
    """One arm at one level of one condition, over blocks."""

    arm: str = Field(description="arm")
    condition: str = Field(description='prompt domain, or "all": the domains of a block pooled')
    level: int = Field(description="streams in closed loop")
    blocks: int = Field(description="blocks that have a valid figure of throughput")
    metrics: dict[str, IntervalFigure] = Field(description="throughput (tok/s), ttft, tpot, latency (ms)")


class Comparison(_Model):
    """One arm against the baseline: one metric at one level of one condition."""

    level: int = Field(description="streams in closed loop")
    condition: str = Field(description='prompt domain, or "all": the domains of a block pooled')
    baseline: str = Field(description="arm in the denominator")
    arm: str = Field(description="arm in the numerator")
    metric: MetricName = Field(description="throughput is the primary one; ttft, tpot, latency are means over requests")
    better: Better = Field(description="lower: a ratio below 1 is better (latencies)")
    ratio: Number | None = Field(description="geometric mean of arm ÷ baseline over blocks; null without a valid block")
    ci_low: Number | None = Field(
        description="lower end of the paired t interval on logs (of the confidence sequence where the campaign stops"
        " by one); null with one block, or while it has no bounds"
    )
    ci_high: Number | None = Field(description="upper end; null likewise")
    blocks: int = Field(description="blocks in which both arms' cells are valid")
    block_ratios: dict[int, Number] = Field(description="arm ÷ baseline by number of block")
    verdict: Verdict = Field(description="pays, hurts, equivalent, or undecided")
    explanation: str = Field(description="the verdict in plain words")
    p_value: Number | None = Field(description="paired t test on logs against a ratio of 1, two-sided")
    p_adjusted: Number | None = Field(
        description='primary family (the primary metric of "all", without A/A): Holm over levels and arms; everything'
        " else: Benjamini–Hochberg"
    )
    primary: bool = Field(
        default=False, description="of the declared primary family: its p-values are adjusted together"
    )
    p_max_t: Number | None = Field(
        default=None,
        description="primary family: exact step-down max-T over levels and arms, whole blocks flipped; at least"
        " 2 / 2^blocks; null where blocks are incomplete",
    )
    p_sign_flip: Number | None = Field(description="sensitivity: exact sign-flip test; at least 2 / 2^blocks")
    hodges_lehmann: Number | None = Field(description="sensitivity: the ratio that one odd launch cannot move far")
    sd_log: Number | None = Field(description="standard deviation of the blocks' log ratios")
    blocks_needed: int | None = Field(
        description="if undecided: blocks in total that would decide it with 80% probability, if the estimate and its"
        " spread are the truth; null if decided or unknown"
    )
    provenance: Provenance = Field(description="the weakest provenance among the figures compared")
    synthetic: bool = Field(
        default=False,
        description="one side accepts drafts by lot, so there is no verdict: the ratio is what a drafter of that"
        " acceptance would give",
    )


class FactorEffect(_Model):
    """A factor's effect on logs, paired within blocks: a main effect, or an interaction as a ratio of ratios."""

    factor: str = Field(
        description="`arm × condition`: does the condition change the arm's ratio? `condition`: the baseline's own"
        " figure; `arm`: the mean over conditions. With several factors also each by its name, the mean over the others"
        " (`temperature`, `arm × temperature`), and two of them (`arm × temperature × cache`: does the one change how"
        " the other changes the arm's ratio?)"
    )
    arm: str = Field(description="the arm; of `condition`: the baseline")
    condition: str = Field(
        description="the condition, or the factor's value, in question; empty for the effect of an arm"
    )
    against: str = Field(
        description='what it is compared with: a condition or value, "the others", or the baseline arm'
    )
    metric: MetricName = Field(description="of which figure")
    level: int | None = Field(description="streams; null: the mean over all levels, of blocks that have all")
    ratio: Number = Field(description="geometric mean over blocks; 1.012: the arm gains 1.2% more there")
    ci_low: Number | None = Field(description="lower end of the paired t interval on logs; null with one block")
    ci_high: Number | None = Field(description="upper end")
    blocks: int = Field(description="blocks with a figure in every condition")
    p_value: Number | None = Field(description="paired t test on logs against 1, two-sided")
    p_adjusted: Number | None = Field(description="Holm over the conditions of this row's question")
    verdict: FactorVerdict = Field(description="by the campaign's margin, as verdicts of comparisons")


class TailComparison(_Model):
    """One arm against the baseline: a tail quantile of a time over requests, all conditions of a block together."""

    arm: str = Field(description="arm in the numerator")
    condition: str = Field(description='"all"')
    level: int = Field(description="streams in closed loop")
    metric: TimeName = Field(description="which time; lower is better")
    quantile: Number = Field(description="0.9, 0.99 or 0.999")
    ratio: Number | None = Field(description="arm ÷ baseline; null: refused, and `note` says why")
    ci_low: Number | None = Field(description="lower end of the interval; null with one block")
    ci_high: Number | None = Field(description="upper end")
    bootstrap_low: Number | None = Field(description="sensitivity: the hierarchical bootstrap (blocks, then requests)")
    bootstrap_high: Number | None = Field(description="upper end of the same")
    method: Literal["blocks", "bootstrap"] | None = Field(
        description="`blocks`: over the blocks' quantiles, as `Comparison`; `bootstrap`: where blocks are too small for"
        " that (no verdict then in a campaign that may stop early)"
    )
    blocks: int = Field(description="blocks with requests of both arms")
    requests: int = Field(description="requests of the arm that has fewer")
    verdict: Verdict = Field(description="by the campaign's margin")
    p_value: Number | None = Field(description="paired t test over blocks; null otherwise")
    p_adjusted: Number | None = Field(description="Benjamini–Hochberg over all tails")
    note: str = Field(description="why it is refused, or what it rests on; may be empty")


class Multiplicity(_Model):
    """How many questions are asked at once, and what the blocks can answer."""

    primary_metric: MetricName = Field(description="the declared one")
    tests: int = Field(description="p-values in the primary family: levels × arms, without A/A")
    significant: int = Field(description="of them, those with p_adjusted at most 1 − confidence")
    blocks: int = Field(description="fewest valid blocks of a test in the family")
    smallest_sign_flip_p: Number | None = Field(description="2 / 2^blocks: no exact test can go below")
    blocks_for_max_t: int | None = Field(description="blocks from which the exact max-T can reject at all")
    blocks_for_holm: int | None = Field(description="blocks from which Holm over exact sign-flip tests can")
    statement: str = Field(description="the same in plain words")


class AaLevel(_Model):
    """The A/A arm against the baseline at one level: the truth is 1."""

    level: int = Field(description="streams in closed loop")
    ratio: Number | None = Field(description="geometric mean of throughput over blocks")
    ci_low: Number | None = Field(description="lower end")
    ci_high: Number | None = Field(description="upper end")
    noise_floor: Number | None = Field(description="half the interval as a share: nearer to 1 nothing can be told")
    verdict: Verdict = Field(description="pays or hurts would be a false alarm")


class AaSummary(_Model):
    """The baseline measured against itself, launch for launch."""

    arm: str = Field(description="name of the second baseline")
    tests: int = Field(description="comparisons of all metrics, conditions and levels that have a p-value")
    false_positives: int = Field(description="of them, those with p ≤ 1 − confidence; they are correlated")
    false_positive_rate: Number | None = Field(description="false_positives ÷ tests; to be expected: 1 − confidence")
    levels: list[AaLevel] = Field(description="throughput of all conditions pooled")
    statement: str = Field(description="the same in plain words")


class SentinelPoint(_Model):
    """One sentinel cell."""

    block: int = Field(description="number of the block")
    started: str = Field(description="ISO 8601, UTC")
    throughput: Number = Field(description="tok/s")


class SentinelSummary(_Model):
    """The same cell, with the same prompts and seeds, in every launch of an arm: what changed over the campaign?"""

    arm: str = Field(description="arm")
    level: int = Field(description="streams in closed loop")
    points: list[SentinelPoint] = Field(description="by time")
    cv: Number | None = Field(description="coefficient of variation over the launches")
    drift_per_hour: Number | None = Field(description="slope of log throughput over time, as a share per hour")
    drift_low: Number | None = Field(description="lower end of its interval; null under three launches")
    drift_high: Number | None = Field(description="upper end")
    p_value: Number | None = Field(description="of the slope against 0, two-sided")


class LoadRange(_Model):
    """A range of load; null: open, beyond the levels measured."""

    low: Number | None = Field(description="from")
    high: Number | None = Field(description="to")


class BreakEvenSummary(_Model):
    """The load at which the ratio of throughput comes down to 1."""

    level: Number | None = Field(description="streams; null: outside the levels measured, or no single crossing")
    ci_low: Number | None = Field(description="lower end of the interval; null where open or unknown")
    ci_high: Number | None = Field(description="upper end; null where open or unknown")
    low_open: bool = Field(description="the data do not bound it from below")
    high_open: bool = Field(description="the data do not bound it from above")
    condition: str = Field(description='prompt domain, or "all"')
    note: str = Field(description="what is to be said of it, in plain words; may be empty")
    monotone: bool = Field(description="false: the data reject that the ratio falls with load; see `pays`")
    levels: list[Number] = Field(description="levels with at least one valid block")
    fitted: list[Number] = Field(description="the non-increasing fit of the ratio at these levels")
    pays: list[LoadRange] = Field(description="ranges of load where the (fitted) mean ratio is above 1")
    blocks: int = Field(description="blocks used")
    surely_pays: list[LoadRange] = Field(
        default=[],
        description="ranges of load where the interval of the mean ratio, at each load by itself, lies above 1",
    )
    surely_hurts: list[LoadRange] = Field(
        default=[], description="ranges where it lies below 1; between them: not known"
    )


class ConditionBreakEven(_Model):
    """Break-even of one arm in one condition."""

    arm: str = Field(description="arm")
    break_even: BreakEvenSummary = Field(description="as in `break_even`")


class AgreementSummary(_Model):
    """Do an arm and the baseline give the same text for the same request?"""

    arm: str = Field(description="arm, against the baseline")
    condition: str = Field(description='prompt domain, or "all"')
    level: int | None = Field(description="streams; null: all levels")
    pairs: int = Field(description="pairs of answers to the same request in the same block")
    identical: int = Field(description="pairs with the same text")
    identical_share: Number | None = Field(description="identical ÷ pairs")
    first_divergence_median: Number | None = Field(description="characters before the first difference, median")
    common_prefix_share: Number | None = Field(description="share of all characters before the first difference")
    length_mismatches: int = Field(description="pairs of different length in characters")
    token_mismatches: int | None = Field(description="pairs of different length in tokens")
    expected: bool = Field(description="should the texts be identical? (temperature 0)")


class AcceptanceSummary(_Model):
    """Acceptance of drafts by one arm, from counters summed over valid blocks."""

    arm: str = Field(description="arm")
    condition: str = Field(description='prompt domain, or "all"')
    level: int = Field(description="streams in closed loop")
    length: Figure = Field(description="mean acceptance length, bonus token included: 1 + accepted ÷ drafts")
    draft_share: Figure = Field(description="accepted ÷ drafted tokens")
    per_position: list[Figure] = Field(description="share of drafts accepted at least this deep, from depth 1 on")
    tokens_per_step: Figure = Field(description="tokens per target forward that emitted any, as the requests report")
    valid: bool = Field(description="natural text with EOS respected, few loops, no impossible counter")
    notes: list[str] = Field(description="warnings, in plain words")


class NeededAcceptanceSummary(_Model):
    """Which acceptance length breaks even at a load, from arms whose acceptance was set: no result of a drafter."""

    arms: list[str] = Field(description="the synthetic arms it rests on; they differ in the acceptance length alone")
    level: int = Field(description="streams in closed loop")
    length: Number | None = Field(
        description="tokens a round, bonus token included, at which throughput equals the baseline's; null: outside the"
        " lengths measured, and `note` says on which side"
    )
    ci_low: Number | None = Field(description="lower end of its interval; null where open or unknown")
    ci_high: Number | None = Field(description="upper end; null where open or unknown")
    low_open: bool = Field(description="the lengths measured do not bound it from below")
    high_open: bool = Field(description="the lengths measured do not bound it from above")
    bootstrap_low: Number | None = Field(description="sensitivity: by resampling whole blocks; null where open")
    bootstrap_high: Number | None = Field(description="upper end of the same")
    lengths: list[Number] = Field(description="the acceptance lengths that were set, ascending")
    fitted: list[Number] = Field(description="the non-decreasing fit of the ratio of throughput at these lengths")
    blocks: int = Field(description="blocks used")
    note: str = Field(description="what is to be said of it, in plain words; may be empty")


class DistributionSummary(_Model):
    """How a time is distributed over requests: all conditions and valid blocks of an arm at a level."""

    arm: str = Field(description="arm")
    condition: str = Field(description='"all"')
    level: int = Field(description="streams in closed loop")
    metric: Literal["ttft", "latency"] = Field(description="which time")
    unit: str = Field(description="ms")
    count: int = Field(description="requests")
    quantiles: list[Number] = Field(description="the 101 quantiles 0, 0.01, …, 1, by linear interpolation")


class SentSummary(_Model):
    """What the requests of a condition said of how tokens are chosen, and what became of their prompts."""

    condition: str = Field(description="prompt domain, or that and the factors' values; `sentinel`")
    template: str = Field(description="`chat` or `completions`: the route")
    fields: dict[str, Any] = Field(description="sampling as sent; what is not named is each server's own default")
    seed: str = Field(description="the seed rule in plain words")
    extra_body: dict[str, Any] = Field(description="further fields of every request")
    rendered: list[str] = Field(description="arms whose rendered prompts are known in every cell")
    rendered_alike: bool | None = Field(
        description="are they the same in all these arms, in every block and level? null with fewer than two"
    )


class TurnSummary(_Model):
    """One turn number of the sessions of an arm at a level: all conditions and valid blocks together, no interval."""

    arm: str = Field(description="arm")
    condition: str = Field(description='"all"')
    level: int = Field(description="sessions in play")
    turn: int = Field(description="from 1; sessions that are shorter have no further turns")
    requests: int = Field(description="valid requests")
    ttft_ms: Number | None = Field(description="mean; from the end of the answer before, plus the think time")
    tpot_ms: Number | None = Field(description="mean")
    latency_ms: Number | None = Field(description="mean")
    prompt_tokens: Number | None = Field(description="mean, by the server: the context so far")
    cached_share: Number | None = Field(description="of the prompt tokens, those found in the prefix cache")


class InvalidCell(_Model):
    """A cell that does not count."""

    cell: str = Field(description="the cell's name on disk")
    block: int = Field(description="number of the block")
    arm: str = Field(description="arm")
    condition: str = Field(description="prompt domain")
    level: int = Field(description="streams in closed loop")
    reasons: list[str] = Field(description="which gates it failed, in plain words")


class Lint(_Model):
    """Something that a reader should know, though it makes no cell invalid."""

    message: str = Field(description="in plain words")
    cells: list[str] = Field(description="which cells; empty: the whole run")


class Noise(_Model):
    """How far launches scatter, and what cannot be told apart because of it."""

    arm: str = Field(description="arm, against the baseline")
    condition: str = Field(description='prompt domain, or "all"')
    level: int = Field(description="streams in closed loop")
    blocks: int = Field(description="blocks used")
    sd_log: Number | None = Field(description="standard deviation of the blocks' log ratios of throughput")
    noise_floor: Number | None = Field(description="half the interval as a share: nearer to 1 nothing can be told")
    smallest_detectable: Number | None = Field(description="share that these blocks show with 80% probability")
    baseline_cv: Number | None = Field(description="coefficient of variation of the baseline's throughput over blocks")


class Summary(_Model):
    """The whole of `summary.json`."""

    schema_version: Literal[1] = Field(description="raised when a field changes its meaning or goes away")
    run: RunIdentity = Field(description="which run")
    campaign: CampaignDigest = Field(description="what was asked for")
    environment: dict[str, Any] = Field(description="versions, hardware and commands, as recorded when it ran")
    comparisons: list[Comparison] = Field(description="every arm × metric × condition × level")
    break_even: dict[str, BreakEvenSummary] = Field(description='by arm: throughput of condition "all"')
    break_even_by_condition: list[ConditionBreakEven] = Field(description="the same for each prompt domain")
    levels: list[LevelSummary] = Field(description="every arm × condition × level with a valid block")
    acceptance: list[AcceptanceSummary] = Field(description="arms that draft; empty if no server reports it")
    agreement: list[AgreementSummary] = Field(
        description="identical texts, arm against baseline; none for synthetic acceptance, whose texts mean nothing"
    )
    distributions: list[DistributionSummary] = Field(description="TTFT and latency over requests")
    noise: list[Noise] = Field(description="scatter between launches")
    invalid: list[InvalidCell] = Field(description="cells that do not count, and why")
    missing: list[str] = Field(description="planned cells that are not on disk: the run is not finished")
    lints: list[Lint] = Field(description="what else a reader should know")
    cells: list[CellSummary] = Field(description="every finished cell")
    interactions: list[FactorEffect] = Field(default=[], description="does the condition change an arm's ratio?")
    main_effects: list[FactorEffect] = Field(default=[], description="of conditions on the baseline, and of arms")
    tails: list[TailComparison] = Field(default=[], description="ratios of tail quantiles, or why there is none")
    multiplicity: Multiplicity | None = Field(default=None, description="several questions at once")
    needed_acceptance: list[NeededAcceptanceSummary] = Field(
        default=[], description="acceptance length that breaks even at each level; empty without synthetic arms"
    )
    aa: AaSummary | None = Field(default=None, description="the baseline against itself; null without A/A blocks")
    sentinel: list[SentinelSummary] = Field(default=[], description="by arm; empty without a sentinel cell")
    turns: list[TurnSummary] = Field(default=[], description="of sessions, by turn; empty without sessions")
    sent: list[SentSummary] = Field(
        default=[], description="by condition: sampling and prompts as sent; empty for runs that do not record them"
    )

    def to_json(self) -> str:
        """The text of `summary.json`; the same summary gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @property
    def arms(self) -> list[str]:
        """Names of the arms that are compared with the baseline, in the campaign's order."""
        return [arm.name for arm in self.campaign.arms if not arm.baseline]


def read_summary(path: Path) -> Summary:
    """Read a `summary.json`. Raises SummaryError with a message for the user."""
    try:
        return Summary.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SummaryError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        detail = "it is not UTF-8 text"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            detail = f"{'.'.join(str(part) for part in first['loc']) or 'the file'}: {first['msg']}"
        raise SummaryError(f"{path} is not a summary of schema version {SCHEMA_VERSION}: {detail}") from error
