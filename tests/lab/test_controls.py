"""Interactions, tails, the declared family, A/A blocks, sentinels and outlying blocks, as the summary has them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic

from breakeven.lab.analysis import primary_comparisons, summarise
from breakeven.lab.campaign import SENTINEL, Campaign
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import CellKey, CellRecord, RunDirectory
from breakeven.lab.reduced import reduce_cell
from breakeven.lab.report import words
from breakeven.lab.stats.signflip import max_t
from breakeven.lab.stopping import Looks, decided
from breakeven.lab.summary import ALL, FactorEffect, Summary
from breakeven.lab.tails import tail_comparisons

HOUR_NS = 3_600_000_000_000


def summary_of(given: Campaign, records: list[CellRecord]) -> Summary:
    return summarise(given, synthetic.ENVIRONMENT, records)


def interaction(summary: Summary, level: int | None = None, metric: str = "throughput") -> FactorEffect:
    (found,) = [r for r in summary.interactions if (r.level, r.metric) == (level, metric)]
    return found


# Did the domain matter?


def test_an_interaction_is_the_ratio_of_the_domains_ratios() -> None:
    def ratio(arm: str, condition: str, level: int) -> float:
        return 1.0 if arm == "off" else (1.30 if condition == "coding" else 1.04)

    summary = summary_of(given := synthetic.campaign(), synthetic.cells(given, ratio, noise=0.003))
    for level in (None, *synthetic.LEVELS):
        found = interaction(summary, level)
        assert found.ratio == pytest.approx(1.25, rel=0.01)
        assert (found.condition, found.against, found.verdict) == ("coding", "encyclopedic", "differs")
    assert interaction(summary, None, "tpot").ratio == pytest.approx(1 / 1.25, rel=0.01)
    (sentence,) = words.condition_sentences(summary, "ngram")
    assert sentence.startswith("Domain: the ratio in coding against encyclopedic, over all levels, is +2")
    assert sentence.endswith("], differs.")


def test_where_domains_do_not_differ_the_answer_is_equivalent_with_an_interval() -> None:
    summary = summary_of(given := synthetic.campaign(), synthetic.cells(given, synthetic.by_level(), noise=0.01))
    found = interaction(summary)
    assert found.verdict == "equivalent"
    assert found.ci_low is not None
    assert found.ci_high is not None
    assert found.ci_low < 1 < found.ci_high
    (sentence,) = words.condition_sentences(summary, "ngram")
    assert sentence.endswith("], equivalent.")


def test_main_effects_of_arms_and_domains_stand_beside() -> None:
    def ratio(arm: str, condition: str, level: int) -> float:
        return (1.5 if condition == "coding" else 1.0) * (2.0 if arm == "ngram" else 1.0)

    summary = summary_of(given := synthetic.campaign(), synthetic.cells(given, ratio, noise=0.0))
    effects = {r.factor: r for r in summary.main_effects if (r.metric, r.level) == ("throughput", None)}
    assert effects["condition"].ratio == pytest.approx(1.5, rel=1e-6)
    assert effects["condition"].arm == "off"
    assert effects["arm"].ratio == pytest.approx(2.0, rel=1e-6)
    assert interaction(summary).ratio == pytest.approx(1.0, rel=1e-6)


def test_one_domain_has_no_interaction() -> None:
    given = synthetic.campaign(workload={"domains": ("chat",), "max_tokens": synthetic.TOKENS})
    summary = summary_of(given, synthetic.cells(given, synthetic.by_level()))
    assert (summary.interactions, summary.main_effects) == ([], [])
    assert words.condition_sentences(summary, "ngram") == []


# Several questions at once


def test_the_primary_family_has_holm_and_the_exact_max_t_over_its_levels() -> None:
    given = synthetic.campaign(blocks=7)
    summary = summary_of(given, synthetic.cells(given, synthetic.by_level()))
    family = [c for c in summary.comparisons if c.primary]
    assert [(c.metric, c.condition, c.level) for c in family] == [("throughput", ALL, n) for n in synthetic.LEVELS]
    exact = max_t([[math.log(c.block_ratios[b]) for c in family] for b in range(7)], seed=given.seed)
    assert [c.p_max_t for c in family] == pytest.approx(exact)
    assert all(c.p_max_t is None for c in summary.comparisons if not c.primary)
    assert summary.multiplicity is not None
    assert (summary.multiplicity.tests, summary.multiplicity.blocks) == (4, 7)
    assert summary.multiplicity.blocks_for_holm == 8
    assert "only from 8 on" in summary.multiplicity.statement


def test_another_metric_can_be_declared_primary() -> None:
    given = synthetic.campaign(primary_metric="tpot")
    summary = summary_of(given, synthetic.cells(given, synthetic.by_level()))
    assert {c.metric for c in summary.comparisons if c.primary} == {"tpot"}
    assert summary.multiplicity is not None
    assert "smallest p is 2/2^5" in summary.multiplicity.statement


def test_a_verdict_that_does_not_outlast_the_correction_is_called_a_lead() -> None:
    summary = summary_of(given := synthetic.campaign(), synthetic.cells(given, synthetic.by_level()))
    assert words.correction(summary, "ngram") == ""
    weaker = [
        c.model_copy(update={"p_adjusted": 0.08}) if c.primary and c.level == 2 else c for c in summary.comparisons
    ]
    changed = summary.model_copy(update={"comparisons": weaker})
    assert "the difference at 2 streams is not significant" in words.correction(changed, "ngram")


# Tails


def test_tails_are_refused_under_their_floors_and_otherwise_have_an_interval() -> None:
    given = synthetic.campaign(levels=(10,))
    summary = summary_of(given, synthetic.cells(given, lambda arm, c, level: 0.8 if arm == "ngram" else 1.0))
    rows = {(t.metric, t.quantile): t for t in summary.tails}
    assert rows["tpot", 0.9].ratio == pytest.approx(1.25, rel=0.05)
    assert rows["tpot", 0.9].verdict == "hurts"
    assert rows["tpot", 0.9].requests == 200
    assert rows["latency", 0.99].ratio is None
    assert "662" in rows["latency", 0.99].note
    assert "6,636" in rows["latency", 0.999].note


# A/A


def test_aa_launches_the_baseline_twice_and_reports_false_alarms_and_noise() -> None:
    given = synthetic.campaign(aa=True)
    assert list(given.arms) == ["off", "ngram", "off-aa"]
    assert given.arms["off-aa"] == given.arms["off"]

    def ratio(arm: str, condition: str, level: int) -> float:
        return synthetic.RATIOS[level] if arm == "ngram" else 1.0

    summary = summary_of(given, synthetic.cells(given, ratio, noise=0.005))
    assert summary.aa is not None
    assert summary.aa.arm == "off-aa"
    assert summary.aa.false_positives <= summary.aa.tests / 5
    assert {row.verdict for row in summary.aa.levels} <= {"equivalent", "undecided"}
    assert all(row.noise_floor is not None and row.noise_floor < 0.03 for row in summary.aa.levels)
    assert not any(c.primary for c in summary.comparisons if c.arm == "off-aa")
    assert Campaign.model_validate_json(given.model_dump_json()) == given


def test_an_aa_that_differs_is_a_false_alarm() -> None:
    given = synthetic.campaign(aa=True)
    records = synthetic.cells(given, lambda arm, c, level: 1.2 if arm == "off-aa" else 1.0, noise=0.005)
    summary = summary_of(given, records)
    assert summary.aa is not None
    assert summary.aa.false_positive_rate is not None
    assert summary.aa.false_positive_rate > 0.3
    assert "False alarm at 1, 2, 5, 10 streams" in summary.aa.statement


# Sentinels


def sentinel_cells(given: Campaign, rates: list[float]) -> list[CellRecord]:
    records = []
    for block, rate in enumerate(rates):
        for position, arm in enumerate(given.arms):
            found = synthetic.cell(CellKey(block, arm, SENTINEL, 1), rate)
            start = found.started_ns + (2 * block + position) * HOUR_NS
            records.append(replace(found, started_ns=start))
    return records


def test_every_launch_begins_with_the_same_sentinel_cell() -> None:
    given = synthetic.campaign(sentinel=True)
    schedule = build_schedule(given, load_suites(given))
    first = [launch.cells[0] for launch in schedule.launches]
    assert {cell.key.condition for cell in first} == {SENTINEL}
    assert len({(cell.prompt_ids, cell.seeds, cell.key.level) for cell in first}) == 1
    elsewhere = {p for cell in schedule.cells() if cell.key.condition != SENTINEL for p in cell.prompt_ids}
    assert elsewhere.isdisjoint(first[0].prompt_ids)
    assert schedule.prompt(SENTINEL, first[0].prompt_ids[0]).messages
    assert SENTINEL not in schedule.conditions
    plain = synthetic.campaign()
    assert build_schedule(plain, load_suites(plain)).sha256 != schedule.sha256


def test_a_sentinel_shows_drift_and_takes_part_in_no_comparison() -> None:
    given = synthetic.campaign(sentinel=True)
    records = synthetic.cells(given, synthetic.by_level())
    plain = summarise(synthetic.campaign(), synthetic.ENVIRONMENT, records)
    rates = [40.0 * math.exp(-0.05 * block) for block in range(5)]
    summary = summary_of(given, [*records, *sentinel_cells(given, rates)])
    assert [c.ratio for c in summary.comparisons] == [c.ratio for c in plain.comparisons]
    assert summary.run.cells_planned == plain.run.cells_planned + 10
    assert summary.missing == []
    (off, _) = summary.sentinel
    assert off.drift_per_hour == pytest.approx(math.expm1(-0.025), rel=0.01)
    assert any("drifts by -2.5% per hour" in lint.message for lint in summary.lints)
    steady = summary_of(given, [*records, *sentinel_cells(given, [40.0, 40.1, 39.9, 40.05, 40.0])])
    assert not any("drifts" in lint.message for lint in steady.lints)


def test_missing_sentinels_are_missing_cells() -> None:
    given = synthetic.campaign(sentinel=True)
    summary = summary_of(given, synthetic.cells(given, synthetic.by_level()))
    assert len(summary.missing) == 10
    assert all(SENTINEL in name for name in summary.missing)


# Outlying blocks


def test_a_block_in_another_state_is_named() -> None:
    given = synthetic.campaign()
    records = synthetic.cells(given, synthetic.by_level(), noise=0.01)
    slowed = [
        synthetic.cell(r.key, synthetic.BASE[5] * 0.6, tokens_per_chunk=2)
        if (r.key.block, r.key.arm, r.key.level) == (3, "ngram", 5)
        else r
        for r in records
    ]
    messages = [lint.message for lint in summary_of(given, slowed).lints]
    assert any("ngram at level 5: block 4 stands apart" in message for message in messages)
    assert not any("stands apart" in lint.message for lint in summary_of(given, records).lints)


def test_few_blocks_are_said_to_miss_rare_states_and_ten_are_not() -> None:
    def told(blocks: int) -> list[str]:
        given = synthetic.campaign(blocks=blocks, levels=(1,))
        lints = summary_of(given, synthetic.cells(given, synthetic.by_level())).lints
        return [lint.message for lint in lints if "may not have shown itself" in lint.message]

    (message,) = told(5)
    assert "fewer than 45%" in message
    assert told(10) == []


# Where the ratio does not fall steadily


def test_a_ratio_that_rises_again_has_ranges_of_load_with_intervals() -> None:
    humps = dict(zip(synthetic.LEVELS, (1.3, 0.7, 0.7, 1.4), strict=True))
    given = synthetic.campaign()
    summary = summary_of(given, synthetic.cells(given, synthetic.by_level(humps), noise=0.01))
    found = summary.break_even["ngram"]
    assert not found.monotone
    assert [(r.low is None, r.high is None) for r in found.surely_pays] == [(True, False), (False, True)]
    (hurts,) = found.surely_hurts
    assert hurts.low is not None
    assert hurts.high is not None
    assert 1 < hurts.low < 2 < 5 < hurts.high < 10
    assert "surely hurts from" in words.sure_ranges(found)


# Stopping early


def test_a_campaign_that_stops_by_its_sequence_ends_when_all_is_decided_and_misses_nothing() -> None:
    given = synthetic.campaign(stop="confidence_sequence", blocks=12, levels=(1, 10))
    assert given.stop.rule == "confidence_sequence"
    records = synthetic.cells(given, synthetic.by_level(), noise=0.005)
    looks = []
    for blocks in (2, 3, 6):
        summary = summary_of(given, [r for r in records if r.key.block < blocks])
        undecided = [c.level for c in summary.comparisons if c.primary and c.verdict == "undecided"]
        assert bool(summary.missing) == (bool(undecided) or blocks < given.stop.min_blocks)
        looks.append(bool(undecided))
    assert looks[0] is True
    assert looks[-1] is False
    fixed = summary_of(synthetic.campaign(blocks=12, levels=(1, 10)), [r for r in records if r.key.block < 6])
    early = summary_of(given, [r for r in records if r.key.block < 6])
    assert len(fixed.missing) == 48
    for wide, narrow in zip(early.comparisons, fixed.comparisons, strict=True):
        assert wide.ratio == narrow.ratio
        assert (wide.ci_low or 0) < (narrow.ci_low or 0) < (narrow.ci_high or 0) < (wide.ci_high or 0)
    for wide_row, narrow_row in zip(early.levels, fixed.levels, strict=True):
        wide_rate, narrow_rate = wide_row.metrics["throughput"], narrow_row.metrics["throughput"]
        assert wide_rate.value == narrow_rate.value
        assert (wide_rate.ci_low or 0) < (narrow_rate.ci_low or 0) < (narrow_rate.ci_high or 0)
        assert (narrow_rate.ci_high or 0) < (wide_rate.ci_high or 0)
    wide_even, narrow_even = early.break_even["ngram"], fixed.break_even["ngram"]
    assert (wide_even.ci_low or 0) < (narrow_even.ci_low or 0) < (narrow_even.ci_high or 0) < (wide_even.ci_high or 99)


def test_a_tail_that_only_the_bootstrap_can_speak_of_gets_no_verdict_where_the_campaign_may_stop_early() -> None:
    times = 100.0 + np.arange(60.0)  # under 100 a block, and over 662 in twelve
    samples = {
        (arm, 1, "latency"): dict.fromkeys(range(12), times * factor) for arm, factor in (("off", 1.0), ("ngram", 1.5))
    }
    for stop, verdict in (("fixed", "hurts"), ("confidence_sequence", "undecided")):
        rows = tail_comparisons(synthetic.campaign(stop=stop, levels=(1,), blocks=12), ("latency",), samples)
        (p99,) = [row for row in rows if row.quantile == 0.99]
        assert (p99.method, p99.verdict) == ("bootstrap", verdict)
        assert ("no verdict" in p99.note) == (stop != "fixed")


@pytest.mark.parametrize(("metric", "after"), [("throughput", (2, 5)), ("ttft", (4,))])
def test_a_look_sees_the_very_comparisons_of_the_whole_summary_and_reads_each_cell_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, after: tuple[int, ...]
) -> None:
    given = synthetic.campaign(
        stop="confidence_sequence", blocks=5, levels=(1, 2), aa=True, sentinel={"requests": 2}, primary_metric=metric
    )
    records = synthetic.cells(given, synthetic.by_level(), noise=0.002)
    records[3] = synthetic.spoil(records[3], "the server ended during the cell")
    records += [
        synthetic.cell(CellKey(block, arm, SENTINEL, 1), 30.0) for block in range(given.blocks) for arm in given.arms
    ]
    run = synthetic.write(tmp_path / "run", given, records)
    read: list[str] = []
    read_cell = RunDirectory.read_cell

    def counted(self: RunDirectory, cell_id: str) -> CellRecord:
        read.append(cell_id)
        return read_cell(self, cell_id)

    monkeypatch.setattr(RunDirectory, "read_cell", counted)
    looks = Looks(run)
    for blocks in after:
        seen = [r for r in records if r.key.block < blocks]
        whole = [c for c in summary_of(given, seen).comparisons if c.primary]
        alone = primary_comparisons(given, [reduce_cell(r, given) for r in seen])
        assert alone == whole
        assert looks.enough(blocks) == decided(given, whole, blocks)
        assert {c.metric for c in whole} == {metric}
    assert len(read) == len(set(read)) == sum(r.key.block < after[-1] for r in records)
    assert not Looks(synthetic.write(tmp_path / "empty", given, [])).enough(4)
    fixed = synthetic.write(tmp_path / "fixed", synthetic.campaign(blocks=6, levels=(1, 2)), [])
    assert not Looks(fixed).enough(6)
