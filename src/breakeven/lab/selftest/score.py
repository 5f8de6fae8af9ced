"""How often the report's functions are right about simulated campaigns. Pure arithmetic; the same seed, the same rates.

Rates are shares of campaigns × levels unless said otherwise. Three truths are simulated in each scenario: no effect
(false positives), an effect that falls through break-even (coverage, power), and one just beyond the margin (the worst
case for a wrong "equivalent").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from breakeven.lab.selftest.scenarios import Scenario
from breakeven.lab.selftest.simulate import (
    BREAK_EVEN,
    LEVELS,
    Values,
    simulate,
    tails,
    true_interaction,
    true_logs,
)
from breakeven.lab.stats.breakeven import break_even
from breakeven.lab.stats.factorial import contrasts
from breakeven.lab.stats.multiplicity import holm
from breakeven.lab.stats.quantile import block_floor, quantile_ratio, requests_floor
from breakeven.lab.stats.ratio import ratio_from_logs, sequence_ratio
from breakeven.lab.stats.robust import hodges_lehmann, outlying
from breakeven.lab.stats.signflip import max_t, smallest_p
from breakeven.lab.stats.student import t_quantile
from breakeven.lab.verdict import verdict

MARGIN = 0.03
CONFIDENCE = 0.95
ALPHA = 0.05
MAX_FALSE_POSITIVES = 0.06
MIN_COVERAGE = 0.93
SEQUENCE_BLOCKS = 20  # how far a confidence sequence is watched
_BATCH = 250  # campaigns drawn at a time
_TAIL_QUANTILES = (0.9, 0.99)


@dataclass(slots=True)
class _Tally:
    hits: float = 0.0
    trials: int = 0

    def add(self, hit: bool) -> None:
        self.hits += hit
        self.trials += 1

    @property
    def rate(self) -> float | None:
        return self.hits / self.trials if self.trials else None


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario. Rates are shares; None where there are too few blocks for the figure.

    `false_positive_rate`: intervals that exclude 1 where there is no effect. `coverage`: of the ratio's interval;
    `coverages`: of every interval, by name. `familywise`: campaigns with any level significant after correction, by
    method, without an effect. `outlier_warnings`: comparisons without an effect with a block that stands apart.
    `power`: right verdicts where the true effect is beyond the margin by more than 1%.
    `wrong_verdicts`: by name. `naive_false_positive_rate`: what a t test of requests as if independent would give.
    """

    name: str
    blocks: int
    campaigns: int
    false_positive_rate: float
    coverage: float
    coverages: dict[str, float | None]
    false_positive_rates: dict[str, float | None]
    familywise: dict[str, float | None]
    power: float
    equivalent_when_equal: float
    outlier_warnings: float
    wrong_verdicts: dict[str, float]
    naive_false_positive_rate: float
    median_interval_factor: float
    problems: tuple[str, ...] = field(default=())

    @property
    def within_bounds(self) -> bool:
        return not self.problems


class _Tallies(dict[str, _Tally]):
    def __missing__(self, name: str) -> _Tally:
        return self.setdefault(name, _Tally())

    def rate(self, name: str) -> float | None:
        return self[name].rate


def run_scenario(
    scenario: Scenario, campaigns: int, seed: int = 0, progress: Callable[[str], None] = lambda part: None
) -> Result:
    """Simulates `campaigns` campaigns for each truth and scores them. Raises ValueError for fewer than one."""
    if campaigns < 1:
        raise ValueError(f"needs at least one campaign, not {campaigns}")
    key = [seed, *scenario.name.encode()]
    tallies, widths = _Tallies(), []
    for number, (effect, score) in enumerate((("null", _null), ("effect", _effect), ("margin", _margin))):
        progress(effect)
        generator = np.random.default_rng([*key, number])
        for start in range(0, campaigns, _BATCH):
            drawn = simulate(scenario, effect, min(_BATCH, campaigns - start), generator, MARGIN)
            log_ratios = drawn.pooled[:, :, 1] - drawn.pooled[:, :, 0]
            by_condition = drawn.by_condition[:, :, 1] - drawn.by_condition[:, :, 0]
            for index in range(len(log_ratios)):
                score(scenario, log_ratios[index], by_condition[index], tallies)
            widths += [_factor(row) for row in log_ratios[:, :, 0]] if effect == "effect" else []
            if effect == "null":
                _naive(drawn.request_logs, tallies)
    progress("tails")
    _tails(scenario, campaigns, np.random.default_rng([*key, 3]), tallies)
    progress("sequence")
    _sequence(scenario, max(1, campaigns // 2), np.random.default_rng([*key, 4]), tallies)
    return _result(scenario, campaigns, tallies, float(np.median(widths)))


def _null(scenario: Scenario, logs: Values, by_condition: Values, tallies: _Tallies) -> None:
    """No effect at any level. `logs`: (blocks, levels); `by_condition`: (blocks, conditions, levels)."""
    p_values = []
    for column in logs.T:
        estimate = ratio_from_logs(column.tolist(), CONFIDENCE)
        p = estimate.p_value
        assert p is not None
        p_values.append(p)
        tallies["fp ratio"].add(p <= ALPHA)
        tallies["cover ratio, no effect"].add(_holds(estimate.ci_low, estimate.ci_high, 1.0))
        decided = verdict(estimate, MARGIN)
        tallies["outlier"].add(bool(outlying(column.tolist())))
        for wrong in ("pays", "hurts"):
            tallies[f"wrong {wrong} when equal"].add(decided == wrong)
        tallies["equivalent when equal"].add(decided == "equivalent")
    tallies["familywise holm"].add(min(holm(p_values)) <= ALPHA)
    if smallest_p(scenario.blocks) <= ALPHA:
        tallies["familywise max-T"].add(min(max_t(logs.tolist())) <= ALPHA)
    for contrast in contrasts(by_condition.mean(axis=2).tolist(), CONFIDENCE):
        tallies["fp interaction"].add((contrast.estimate.p_value or 0.0) <= ALPHA)


def _effect(scenario: Scenario, logs: Values, by_condition: Values, tallies: _Tallies) -> None:
    """An effect that falls with load, through 0 at BREAK_EVEN, and differs between the conditions."""
    for truth, column in zip(true_logs("effect", MARGIN), logs.T, strict=True):
        estimate = ratio_from_logs(column.tolist(), CONFIDENCE)
        tallies["cover ratio"].add(_holds(estimate.ci_low, estimate.ci_high, math.exp(truth)))
        robust = hodges_lehmann(column.tolist(), CONFIDENCE)
        if robust.ci_low is not None:
            tallies["cover Hodges–Lehmann"].add(_holds(robust.ci_low, robust.ci_high, math.exp(truth)))
        decided = verdict(estimate, MARGIN)
        right = "pays" if truth > 0 else "hurts"
        if abs(truth) > math.log1p(MARGIN) + 0.01:
            tallies["power"].add(decided == right)
        wrong = "hurts" if truth > 0 else "pays"
        tallies[f"wrong {wrong} when {right}"].add(decided == wrong)
    found = break_even(LEVELS, logs.tolist(), CONFIDENCE)
    tallies["monotonicity rejected"].add(not found.monotone)
    tallies["cover break-even"].add(found.monotone and _holds(found.ci_low, found.ci_high, BREAK_EVEN))
    for contrast in contrasts(by_condition.mean(axis=2).tolist(), CONFIDENCE):
        truth_there = math.exp(true_interaction(scenario))
        tallies["cover interaction"].add(_holds(contrast.estimate.ci_low, contrast.estimate.ci_high, truth_there))


def _margin(scenario: Scenario, logs: Values, by_condition: Values, tallies: _Tallies) -> None:
    """The arm hurts by just more than the margin."""
    for column in logs.T:
        decided = verdict(ratio_from_logs(column.tolist(), CONFIDENCE), MARGIN)
        tallies["wrong equivalent when hurts"].add(decided == "equivalent")
        tallies["wrong pays when hurts"].add(decided == "pays")


def _naive(request_logs: Values, tallies: _Tallies) -> None:
    """A t test of all requests of all blocks as if each were a replication."""
    differences = (request_logs[:, :, 1] - request_logs[:, :, 0]).reshape(len(request_logs), -1)
    count = differences.shape[1]
    t = differences.mean(axis=1) / (differences.std(axis=1, ddof=1) / math.sqrt(count))
    for value in t:
        tallies["naive"].add(abs(float(value)) > t_quantile(1 - ALPHA / 2, count - 1))


def _tails(scenario: Scenario, campaigns: int, generator: np.random.Generator, tallies: _Tallies) -> None:
    """Quantiles of requests' times, at the fewest requests that are not refused; the arm takes 10% longer."""
    effect = math.log(1.1)
    for quantile in _TAIL_QUANTILES:
        each = max(block_floor(quantile), math.ceil(requests_floor(quantile) / scenario.blocks))
        for start in range(0, campaigns, _BATCH):
            times = np.exp(tails(scenario, each, effect, min(_BATCH, campaigns - start), generator))
            for campaign in times:
                found = quantile_ratio(
                    campaign[:, 0].tolist(), campaign[:, 1].tolist(), quantile, seed=0, confidence=CONFIDENCE,
                    resamples=0,
                )  # fmt: skip
                tallies[f"cover p{quantile * 100:g}"].add(_holds(found.ci_low, found.ci_high, math.exp(effect)))
    # The bootstrap, where blocks are too small for the figure of each; a quarter of the campaigns, for its cost.
    for campaign in np.exp(tails(scenario, 8, effect, max(1, campaigns // 4), generator)):
        found = quantile_ratio(
            campaign[:, 0].tolist(), campaign[:, 1].tolist(), 0.5, seed=0, confidence=CONFIDENCE, resamples=400
        )  # fmt: skip
        if found.bootstrap_low is not None:
            tallies["cover bootstrap"].add(_holds(found.bootstrap_low, found.bootstrap_high, math.exp(effect)))


def _sequence(scenario: Scenario, campaigns: int, generator: np.random.Generator, tallies: _Tallies) -> None:
    """Is the truth inside the confidence sequence after *every* block? And how often would peeking at p err?"""
    longer = _with_blocks(scenario, SEQUENCE_BLOCKS)
    for start in range(0, campaigns, _BATCH):
        drawn = simulate(longer, "null", min(_BATCH, campaigns - start), generator)
        for logs in drawn.pooled[:, :, 1, 0] - drawn.pooled[:, :, 0, 0]:
            always, peeked = True, False
            for blocks in range(2, SEQUENCE_BLOCKS + 1):
                estimate = sequence_ratio(logs[:blocks].tolist(), CONFIDENCE)
                always &= _holds(estimate.ci_low, estimate.ci_high, 1.0)
                peeked |= (ratio_from_logs(logs[:blocks].tolist(), CONFIDENCE).p_value or 0.0) <= ALPHA
            tallies["cover confidence sequence"].add(always)
            tallies["peeking"].add(peeked)


def _with_blocks(scenario: Scenario, blocks: int) -> Scenario:
    return Scenario(**{**asdict(scenario), "blocks": blocks})


def _holds(low: float | None, high: float | None, truth: float) -> bool:
    """Is the truth inside? An open end (None) holds everything on its side."""
    return (low is None or low <= truth) and (high is None or high >= truth)


def _factor(logs: Values) -> float:
    """Upper ÷ lower end of the ratio's interval."""
    estimate = ratio_from_logs(logs.tolist(), CONFIDENCE)
    return (estimate.ci_high or math.nan) / (estimate.ci_low or math.nan)


def _result(scenario: Scenario, campaigns: int, tallies: _Tallies, factor: float) -> Result:
    coverages = {
        name: tallies.rate(f"cover {name}")
        for name in (
            "ratio", "ratio, no effect", "Hodges–Lehmann", "p90", "p99", "bootstrap", "break-even", "interaction",
            "confidence sequence",
        )
    }  # fmt: skip
    false = {name: tallies.rate(f"fp {name}") for name in ("ratio", "interaction")}
    familywise = {name: tallies.rate(f"familywise {name}") for name in ("holm", "max-T")}
    wrong = {
        name: tallies.rate(f"wrong {name}") or 0.0
        for name in (
            "pays when equal", "hurts when equal", "pays when hurts", "hurts when pays", "equivalent when hurts",
        )
    }  # fmt: skip
    problems = [
        f"{name}: false-positive rate {rate:.1%} is above {MAX_FALSE_POSITIVES:.0%}"
        for name, rate in (*false.items(), *((f"familywise {n}", r) for n, r in familywise.items()))
        if rate is not None and rate > MAX_FALSE_POSITIVES
    ]
    problems += [
        f"{name}: coverage {rate:.1%} is below {MIN_COVERAGE:.0%}"
        for name, rate in coverages.items()
        if rate is not None and rate < MIN_COVERAGE
    ]
    problems += [
        f"verdict {name}: {rate:.1%} is above {MAX_FALSE_POSITIVES:.0%}"
        for name, rate in wrong.items()
        if rate > MAX_FALSE_POSITIVES
    ]
    return Result(
        name=scenario.name,
        blocks=scenario.blocks,
        campaigns=campaigns,
        false_positive_rate=false["ratio"] or 0.0,
        coverage=coverages["ratio"] or 0.0,
        coverages=coverages,
        false_positive_rates={
            **false, "monotonicity": tallies.rate("monotonicity rejected"), "peeking at p": tallies.rate("peeking"),
        },
        familywise=familywise,
        power=tallies.rate("power") or 0.0,
        outlier_warnings=tallies.rate("outlier") or 0.0,
        equivalent_when_equal=tallies.rate("equivalent when equal") or 0.0,
        wrong_verdicts=wrong,
        naive_false_positive_rate=tallies.rate("naive") or 0.0,
        median_interval_factor=factor,
        problems=tuple(problems),
    )  # fmt: skip


def table_rows(results: Sequence[Result]) -> list[list[str]]:
    """A heading and a row for each scenario, all in percent."""
    heading = [
        "scenario", "blocks", "false pos.", "interaction", "family", "ratio", "p90", "p99", "break-even", "contrast",
        "sequence", "power", "wrong =", "naive",
    ]  # fmt: skip
    rows = [heading]
    for r in results:
        family = max((rate for rate in r.familywise.values() if rate is not None), default=None)
        cells = [
            r.false_positive_rate, r.false_positive_rates["interaction"], family, r.coverage, r.coverages["p90"],
            r.coverages["p99"], r.coverages["break-even"], r.coverages["interaction"],
            r.coverages["confidence sequence"], r.power, r.wrong_verdicts["equivalent when hurts"],
            r.naive_false_positive_rate,
        ]  # fmt: skip
        rows.append([r.name, str(r.blocks), *("–" if c is None else f"{c * 100:.1f}" for c in cells)])
    return rows


def to_json(results: Sequence[Result], limits: Sequence[Result], *, campaigns: int, seed: int) -> dict[str, Any]:
    """What `breakeven selftest --json` writes."""
    return {
        "schema_version": 1,
        "campaigns": campaigns,
        "seed": seed,
        "nominal": {"alpha": ALPHA, "confidence": CONFIDENCE, "margin": MARGIN},
        "bounds": {"max_false_positive_rate": MAX_FALSE_POSITIVES, "min_coverage": MIN_COVERAGE},
        "within_bounds": all(r.within_bounds for r in results),
        "scenarios": [_plain(r) for r in results],
        "known_limits": [_plain(r) for r in limits],
    }


def _plain(result: Result) -> dict[str, Any]:
    return {**asdict(result), "problems": list(result.problems), "within_bounds": result.within_bounds}
