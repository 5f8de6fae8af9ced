"""The analysis finds what was put into the run, leaves out what is invalid, and never varies."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from breakeven.lab.analysis import AnalysisError, analyse, summarise
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.report.schema import schema_markdown
from breakeven.lab.stats.ratio import paired_ratio
from breakeven.lab.summary import ALL, Comparison, Summary, SummaryError, read_summary

ROOT = Path(__file__).resolve().parents[2]


def summary_of(records: list[CellRecord], **fields: object) -> Summary:
    return summarise(synthetic.campaign(**fields), synthetic.ENVIRONMENT, records)


def comparison(
    summary: Summary, level: int, *, arm: str = "ngram", metric: str = "throughput", condition: str = ALL
) -> Comparison:
    wanted = (arm, condition, metric, level)
    (found,) = [c for c in summary.comparisons if (c.arm, c.condition, c.metric, c.level) == wanted]
    return found


def a_run(noise: float = 0.01, **fields: object) -> list[CellRecord]:
    return synthetic.cells(synthetic.campaign(**fields), synthetic.by_level(), noise=noise)


@pytest.fixture(scope="module")
def quiet() -> Summary:
    """No noise: the truth is in every block."""
    return summary_of(a_run(noise=0.0))


@pytest.fixture(scope="module")
def noisy() -> Summary:
    return summary_of(a_run())


# Ratios, verdicts, break-even


def test_without_noise_the_ratios_are_those_that_were_built_in(quiet: Summary) -> None:
    for level, truth in synthetic.RATIOS.items():
        for condition in (ALL, "coding", "encyclopedic"):
            found = comparison(quiet, level, condition=condition)
            assert found.ratio == pytest.approx(truth, rel=1e-6)
            assert found.blocks == 5
            assert set(found.block_ratios) == set(range(5))


def test_the_throughput_of_an_arm_at_a_level_is_the_one_built_in(quiet: Summary) -> None:
    for row in quiet.levels:
        truth = synthetic.BASE[row.level] * (1 if row.arm == "off" else synthetic.RATIOS[row.level])
        assert row.metrics["throughput"].value == pytest.approx(truth, rel=1e-6)


def test_with_noise_intervals_hold_the_truth_and_verdicts_follow_it(noisy: Summary) -> None:
    for level, truth in synthetic.RATIOS.items():
        found = comparison(noisy, level)
        assert found.ci_low is not None
        assert found.ci_high is not None
        assert found.ci_low < truth < found.ci_high
        assert found.verdict == ("pays" if truth > 1 else "hurts")
        assert found.explanation.startswith(f"ngram {found.verdict}")


def test_equal_arms_are_equivalent_when_launches_scatter_little() -> None:
    records = synthetic.cells(synthetic.campaign(), lambda arm, condition, level: 1.0, noise=0.003)
    summary = summary_of(records)
    assert {comparison(summary, level).verdict for level in synthetic.LEVELS} == {"equivalent"}


def test_break_even_lies_where_the_ratios_cross_one(quiet: Summary, noisy: Summary) -> None:
    left, right = math.log(synthetic.RATIOS[5]), math.log(synthetic.RATIOS[10])
    truth = math.exp(math.log(5) + (math.log(10) - math.log(5)) * left / (left - right))
    assert quiet.break_even["ngram"].level == pytest.approx(truth, rel=1e-5)
    found = noisy.break_even["ngram"]
    assert found.ci_low is not None
    assert found.ci_high is not None
    assert found.ci_low < truth < found.ci_high
    assert found.condition == ALL


def test_break_even_beyond_the_levels_is_null_and_open() -> None:
    always = synthetic.by_level(dict.fromkeys(synthetic.LEVELS, 1.5))
    found = summary_of(synthetic.cells(synthetic.campaign(), always)).break_even["ngram"]
    assert (found.level, found.ci_high, found.high_open) == (None, None, True)
    assert found.note == "above 10"


def test_domains_have_their_own_comparisons_and_break_even() -> None:
    def ratio(arm: str, condition: str, level: int) -> float:
        return 1.0 if arm == "off" else (1.3 if condition == "coding" else 0.8)

    summary = summary_of(synthetic.cells(synthetic.campaign(), ratio))
    assert comparison(summary, 2, condition="coding").verdict == "pays"
    assert comparison(summary, 2, condition="encyclopedic").verdict == "hurts"
    notes = {entry.break_even.condition: entry.break_even.note for entry in summary.break_even_by_condition}
    assert notes == {"coding": "above 10", "encyclopedic": "below 1"}


def test_all_is_the_sum_of_tokens_over_the_sum_of_windows() -> None:
    given = synthetic.campaign(levels=(2,), blocks=1)
    rates = {("off", "coding"): 40.0, ("off", "encyclopedic"): 80.0, ("ngram", "coding"): 100.0}
    rates["ngram", "encyclopedic"] = 50.0
    records = [synthetic.cell(CellKey(0, arm, domain, 2), rate) for (arm, domain), rate in rates.items()]
    found = comparison(summarise(given, {}, records), 2)
    # Equal tokens in every cell, so the pooled rate is the harmonic mean of the two.
    off, ngram = 2 / (1 / 40 + 1 / 80), 2 / (1 / 100 + 1 / 50)
    assert found.ratio == pytest.approx(ngram / off, rel=1e-6)


def test_times_are_compared_as_means_over_requests_and_lower_is_better() -> None:
    given = synthetic.campaign(workload={"domains": ["coding"], "max_tokens": synthetic.TOKENS}, levels=(2,))
    records = [
        synthetic.cell(CellKey(block, arm, "coding", 2), 50.0, ttft_s=0.2 if arm == "off" else 0.5)
        for block in range(given.blocks)
        for arm in given.arms
    ]
    found = comparison(summarise(given, {}, records), 2, metric="ttft")
    gap = 2 / 50.0
    assert found.ratio == pytest.approx((0.5 + gap) / (0.2 + gap), rel=1e-6)
    assert (found.better, found.verdict) == ("lower", "hurts")


def test_estimates_are_those_of_the_paired_ratio_and_p_values_are_adjusted(noisy: Summary) -> None:
    found = comparison(noisy, 5)
    direct = paired_ratio([1.0] * 5, [found.block_ratios[b] for b in range(5)])
    assert (found.ratio, found.ci_low, found.ci_high) == pytest.approx((direct.ratio, direct.ci_low, direct.ci_high))
    assert found.p_sign_flip == pytest.approx(2 / 2**5)
    for c in noisy.comparisons:
        assert c.p_value is not None
        assert c.p_adjusted is not None
        assert c.p_adjusted >= c.p_value


# Few blocks


def test_one_block_gives_a_ratio_but_no_interval_and_no_verdict() -> None:
    summary = summary_of(a_run(blocks=1), blocks=1)
    for c in summary.comparisons:
        assert c.ratio is not None
        assert (c.ci_low, c.ci_high, c.p_value, c.verdict, c.blocks) == (None, None, None, "undecided", 1)
    assert "At least two are needed" in comparison(summary, 1).explanation
    found = summary.break_even["ngram"]
    assert found.level is not None
    assert (found.ci_low, found.ci_high) == (None, None)


def test_undecided_says_how_many_blocks_it_would_take() -> None:
    given = synthetic.campaign(blocks=2, levels=(2,))
    rates = {("off", 0): 50.0, ("ngram", 0): 51.0, ("off", 1): 50.0, ("ngram", 1): 57.0}
    records = [
        synthetic.cell(CellKey(block, arm, domain, 2), rate)
        for (arm, block), rate in rates.items()
        for domain in ("coding", "encyclopedic")
    ]
    found = comparison(summarise(given, {}, records), 2)
    assert found.verdict == "undecided"
    assert found.blocks_needed is not None
    assert found.blocks_needed > 2
    assert f"about {found.blocks_needed - 2} more block" in found.explanation


# Invalid and missing cells


def test_an_invalid_cell_takes_its_block_out_of_its_comparisons_and_of_no_other() -> None:
    records = a_run()
    spoiled = CellKey(1, "ngram", "coding", 2)
    records = [synthetic.spoil(r, "the client sent late") if r.key == spoiled else r for r in records]
    summary = summary_of(records)
    assert [(c.cell, c.reasons) for c in summary.invalid] == [(spoiled.id, ["the client sent late"])]
    assert set(comparison(summary, 2, condition="coding").block_ratios) == {0, 2, 3, 4}
    assert set(comparison(summary, 2).block_ratios) == {0, 2, 3, 4}
    assert comparison(summary, 2, condition="encyclopedic").blocks == 5
    assert comparison(summary, 1).blocks == 5
    assert (summary.run.cells_invalid, summary.run.cells_finished) == (1, len(records))


def test_an_invalid_cell_cannot_change_any_figure_but_by_its_absence() -> None:
    records = a_run()
    at = next(i for i, r in enumerate(records) if r.key == CellKey(0, "off", "coding", 5))
    wild = synthetic.spoil(synthetic.cell(records[at].key, 1e6), "the server generated no token")
    with_it = summary_of([*records[:at], wild, *records[at + 1 :]])
    without = summary_of([*records[:at], *records[at + 1 :]])
    for field in ("comparisons", "break_even", "levels", "agreement", "acceptance", "distributions", "noise"):
        assert getattr(with_it, field) == getattr(without, field)
    assert without.missing == [wild.key.id]
    assert with_it.missing == []


def test_a_level_without_any_valid_block_is_undecided_with_nulls() -> None:
    records = [synthetic.spoil(r, "broken") if r.key.arm == "ngram" and r.key.level == 10 else r for r in a_run()]
    summary = summary_of(records)
    found = comparison(summary, 10)
    assert (found.ratio, found.blocks, found.verdict) == (None, 0, "undecided")
    assert summary.break_even["ngram"].levels == [1, 2, 5]


def test_a_run_without_one_valid_cell_still_has_a_summary() -> None:
    summary = summary_of([synthetic.spoil(replace(r, requests=()), "not measured: port in use") for r in a_run()])
    assert {c.verdict for c in summary.comparisons} == {"undecided"}
    assert len(summary.invalid) == len(summary.cells)


def test_a_run_without_cells_and_a_cell_of_another_campaign_are_refused() -> None:
    with pytest.raises(AnalysisError, match="no finished cell"):
        summary_of([])
    with pytest.raises(AnalysisError, match="no part of the campaign"):
        summary_of([synthetic.cell(CellKey(0, "off", "coding", 3), 10.0)])


# Acceptance, agreement, lints


def test_acceptance_is_from_summed_counters_and_only_for_arms_that_draft(quiet: Summary) -> None:
    assert {a.arm for a in quiet.acceptance} == {"ngram"}
    assert len(quiet.acceptance) == 3 * len(synthetic.LEVELS)
    for a in quiet.acceptance:
        assert a.length.value == pytest.approx(2.0)
        assert [p.value for p in a.per_position] == pytest.approx([0.6, 0.3, 0.1])
        assert a.valid
        assert a.length.provenance.value == "server-reported"


def test_agreement_counts_the_same_requests_and_finds_the_first_difference() -> None:
    records = a_run()
    at = next(i for i, r in enumerate(records) if r.key == CellKey(0, "ngram", "coding", 5))
    changed = tuple(
        replace(r, text=r.text[:10] + "!", completion_tokens=40) if i < 3 else r
        for i, r in enumerate(records[at].requests)
    )
    records[at] = replace(records[at], requests=changed)
    summary = summary_of(records)
    by_place = {(a.condition, a.level): a for a in summary.agreement}
    total, place = by_place[ALL, None], by_place["coding", 5]
    assert (place.pairs, place.identical, place.first_divergence_median, place.token_mismatches) == (50, 47, 10, 3)
    assert total.pairs - total.identical == 3
    assert total.expected
    assert by_place["encyclopedic", 5].identical_share == 1.0


def test_notes_of_cells_become_lints_with_their_cells() -> None:
    records = a_run()
    records[0] = replace(records[0], extra={"counter_problems": ["the counters could not be read"]})
    found = [lint for lint in summary_of(records).lints if lint.message == "the counters could not be read"]
    assert [lint.cells for lint in found] == [[records[0].key.id]]


def test_distributions_hold_the_extremes_and_count_every_valid_request(noisy: Summary) -> None:
    rows = [d for d in noisy.distributions if (d.arm, d.level, d.metric) == ("off", 5, "latency")]
    assert [d.count for d in rows] == [5 * 2 * 10]
    assert rows[0].quantiles == sorted(rows[0].quantiles)
    assert len(rows[0].quantiles) == 101


# The same, always


def test_the_same_directory_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    given = synthetic.campaign(blocks=2)
    first = synthetic.write(tmp_path / "first", given, synthetic.cells(given, synthetic.by_level()))
    text = analyse(first).to_json()
    shutil.copytree(tmp_path / "first", tmp_path / "elsewhere")
    second = type(first).open(tmp_path / "elsewhere")
    assert analyse(second).to_json() == text
    assert str(tmp_path) not in text


def test_the_order_in_which_cells_are_read_does_not_matter() -> None:
    records = a_run(blocks=2)
    assert summary_of(records, blocks=2).to_json() == summary_of(records[::-1], blocks=2).to_json()


def test_a_summary_survives_its_file(tmp_path: Path, noisy: Summary) -> None:
    path = tmp_path / "summary.json"
    path.write_text(noisy.to_json(), encoding="utf-8")
    assert read_summary(path) == noisy
    keys = {"level", "condition", "baseline", "arm", "metric", "ratio", "ci_low", "ci_high", "blocks", "verdict"}
    plain = json.loads(path.read_text(encoding="utf-8"))
    assert all(keys <= row.keys() for row in plain["comparisons"])
    assert {"level", "ci_low", "ci_high"} <= plain["break_even"]["ngram"].keys()


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 2}', "\x00"])
def test_a_file_that_is_no_summary_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SummaryError, match=r"summary\.json is not a summary"):
        read_summary(path)


def test_the_schema_page_is_generated_from_the_models() -> None:
    page = (ROOT / "docs" / "summary-schema.md").read_text(encoding="utf-8")
    assert page == schema_markdown(), "python -m breakeven.lab.report.schema > docs/summary-schema.md"
    assert all(f"| `{name}` |" in page for name in (*Summary.model_fields, *Comparison.model_fields))


def test_an_attached_arm_is_said_not_to_be_launched_anew(quiet: Summary) -> None:
    assert not [lint for lint in quiet.lints if "attached" in lint.message]
    arms = {"off": {"type": "attach", "url": "http://a"}, "ngram": {"type": "embedded"}}
    found = [lint.message for lint in summary_of(a_run(noise=0.0), arms=arms).lints if "attached" in lint.message]
    assert len(found) == 1
    assert found[0].startswith("off: attached, so not launched anew")
