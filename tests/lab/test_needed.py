"""The acceptance length that breaks even: its point, the coverage of its interval, and what is said where open."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import campaign, cells

from breakeven.lab.analysis import summarise
from breakeven.lab.policy import PolicyError, decide
from breakeven.lab.report import policy
from breakeven.lab.report.html import page
from breakeven.lab.report.markdown import markdown
from breakeven.lab.report.words import needed_rows
from breakeven.lab.stats.needed import needed_acceptance
from breakeven.lab.summary import Summary

LENGTHS = (2.0, 2.5, 3.0)


def logs_of(cost: float, lengths: tuple[float, ...] = LENGTHS) -> list[float]:
    """Log ratios where a round costs `cost` rounds of the baseline."""
    return [math.log(length / cost) for length in lengths]


@settings(deadline=None)
@given(st.lists(st.floats(1, 8), min_size=2, max_size=5, unique=True), st.floats(1, 8))
def test_without_noise_the_cost_of_a_round_is_found(lengths: list[float], cost: float) -> None:
    lengths = [round(length, 3) for length in lengths]
    if len(set(lengths)) < len(lengths):
        return
    found = needed_acceptance(lengths, [logs_of(cost, tuple(lengths))] * 2)
    assert found.lengths == tuple(sorted(lengths))
    if min(lengths) < cost < max(lengths):
        assert found.length == pytest.approx(cost, rel=1e-9)
        assert found.note == ""
    elif cost < min(lengths):
        assert found.length is None
        assert found.low_open
        assert found.note.startswith(f"below {min(lengths):g}, the shortest measured")
    elif cost > max(lengths):
        assert found.length is None
        assert found.high_open
        assert "not even that pays" in found.note


@pytest.mark.parametrize(
    ("lengths", "blocks", "note"),
    [
        ((2.0, 3.0), [(0.3, 0.5), (0.31, 0.51)], "below 2, the shortest measured (it pays there already)"),
        ((2.0, 3.0), [(0.01, 0.5), (0.02, 0.6), (0.03, 0.55)], "below 2, the shortest measured (or up to 2.01)"),
        ((2.5,), [(0.2,), (-0.15,)], "not told (by the estimate below 2.5, the only one measured)"),
        ((2.5,), [(-0.2,), (0.15,)], "not told (by the estimate above 2.5, the only one measured)"),
        ((2.0, 3.0), [(-0.6, -0.3), (-0.61, -0.31)], "above 3, the longest measured (not even that pays)"),
        ((2.5,), [(-0.2,)], "above 2.5, the only one measured; one block: no interval"),
    ],
)
def test_what_lies_beyond_the_lengths_measured_is_said_as_surely_as_the_interval_allows(
    lengths: tuple[float, ...], blocks: list[tuple[float, ...]], note: str
) -> None:
    assert needed_acceptance(lengths, blocks).note == note


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-0.4, 0.4), min_size=3, max_size=3), min_size=1, max_size=3))
def test_the_order_of_the_arms_does_not_matter_and_ends_are_in_order(table: list[list[float]]) -> None:
    found = needed_acceptance(LENGTHS, table, resamples=200)
    turned = needed_acceptance(LENGTHS[::-1], [row[::-1] for row in table], resamples=200)
    assert (found.length, found.ci_low, found.ci_high) == (turned.length, turned.ci_low, turned.ci_high)
    assert all(a <= b + 1e-12 for a, b in zip(found.fitted, found.fitted[1:], strict=False))
    for low, high in ((found.ci_low, found.ci_high), (found.bootstrap_low, found.bootstrap_high)):
        assert low is None or high is None or low <= high
        assert all(end is None or LENGTHS[0] * 0.999 <= end <= LENGTHS[-1] * 1.001 for end in (low, high))
    if found.length is not None and found.blocks > 1:
        assert found.low_open or (found.ci_low is not None and found.ci_low <= found.length + 1e-9)
        assert found.high_open or (found.ci_high is not None and found.ci_high >= found.length - 1e-9)
    assert not (found.low_open and found.ci_low is not None)
    assert not (found.high_open and found.ci_high is not None)


def drawn(generator: np.random.Generator, cost: float, blocks: int) -> np.ndarray[Any, Any]:
    """Log ratios of one campaign: each arm's launches scatter by 2%, and the baseline's launch is all arms' own."""
    baseline = generator.normal(0, 0.02, (blocks, 1))
    return np.asarray(logs_of(cost)) + generator.normal(0, 0.02, (blocks, len(LENGTHS))) - baseline


@pytest.mark.parametrize("cost", [2.2, 2.5, 2.8])
def test_the_intervals_hold_the_truth_as_often_as_they_say(cost: float) -> None:
    """400 campaigns of 4 blocks. By chance alone a coverage of 95% gives 92% to 98% here (±3 standard errors)."""
    generator = np.random.Generator(np.random.PCG64(5))
    campaigns, held = 400, 0
    for _ in range(campaigns):
        found = needed_acceptance(LENGTHS, drawn(generator, cost, 4).tolist(), resamples=0)
        held += (found.ci_low or 0.0) <= cost <= (found.ci_high or math.inf)
    assert held / campaigns >= 0.92


def test_resampling_four_blocks_holds_the_truth_less_often_than_it_says() -> None:
    """Why it is a check beside the interval, and not the interval: 80 campaigns, 87% in the long run."""
    generator = np.random.Generator(np.random.PCG64(6))
    campaigns, held = 80, 0
    for number in range(campaigns):
        found = needed_acceptance(LENGTHS, drawn(generator, 2.5, 4).tolist(), seed=number)
        held += (found.bootstrap_low or 0.0) <= 2.5 <= (found.bootstrap_high or math.inf)
    assert 0.75 <= held / campaigns < 0.95


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        needed_acceptance([0.5, 2.0], [[0.0, 0.1]])
    with pytest.raises(ValueError, match="distinct"):
        needed_acceptance([2.0, 2.0], [[0.0, 0.1]])


def test_a_ratio_that_falls_with_acceptance_is_not_interpolated() -> None:
    table = [[0.3 + 0.001 * b, 0.0, -0.3 + 0.001 * b] for b in range(6)]
    found = needed_acceptance(LENGTHS, table)
    assert found.length is None
    assert "differ in something else" in found.note
    assert (found.ci_low, found.ci_high, found.bootstrap_low, found.bootstrap_high) == (None,) * 4


def test_an_interval_that_is_not_known_is_not_called_unbounded(summary: Summary) -> None:
    row = summary.needed_acceptance[0].model_copy(
        update=dict.fromkeys(("length", "ci_low", "ci_high", "bootstrap_low", "bootstrap_high"))
    )
    for both, shown in ((False, "–"), (True, "not bounded")):
        made = row.model_copy(update={"low_open": both, "high_open": both})
        [told] = needed_rows(summary.model_copy(update={"needed_acceptance": [made]}))
        assert (told.interval, told.bootstrap) == (shown, shown)


# Through the whole analysis

COST = {1: 1.5, 2: 2.2, 5: 2.6, 10: 3.4}  # of a round, by level: cheap to dear


def arm(length: float | None, **more: Any) -> dict[str, Any]:
    speculation = {"method": "eagle3", "draft_model_path": "/d", "num_steps": 3}
    if length is not None:
        speculation["synthetic_acceptance_length"] = length  # type: ignore[assignment]
    return {"type": "vllm", "model": "/m", "speculation": speculation, **more}


def measured(*, blocks: int = 4) -> Summary:
    arms = {"off": {"type": "vllm", "model": "/m"}, "real": arm(None)}
    arms |= {f"al-{length:g}": arm(length) for length in LENGTHS}
    # Another shape of server: not on the same curve.
    arms["al-2.7-tp2"] = arm(2.7, tensor_parallel=2)
    made = campaign(arms=arms, baseline="off", blocks=blocks, workload={"domains": ("coding",), "max_tokens": 48})

    def ratio(name: str, condition: str, level: int) -> float:
        if name == "off":
            return 1.0
        return (float(name.split("-")[1]) if name.startswith("al-") else 2.0) / COST[level]

    return summarise(made, {"commands": {}}, cells(made, ratio, noise=0.01))


@pytest.fixture(scope="module")
def summary() -> Summary:
    return measured()


def test_each_level_has_the_acceptance_that_it_takes(summary: Summary) -> None:
    curve = [row for row in summary.needed_acceptance if len(row.arms) == 3]
    assert [row.arms for row in curve] == [["al-2", "al-2.5", "al-3"]] * 4
    by_level = {row.level: row for row in curve}
    for level in (2, 5):
        row = by_level[level]
        assert row.length == pytest.approx(COST[level], rel=0.02)
        assert row.ci_low is not None
        assert row.ci_high is not None
        assert row.ci_low <= COST[level] <= row.ci_high
    assert by_level[1].length is None
    assert by_level[1].note.startswith("below 2")
    assert by_level[10].length is None
    assert by_level[10].note.startswith("above 3")
    assert by_level[10].high_open
    others = [row for row in summary.needed_acceptance if len(row.arms) == 1]
    assert {tuple(row.arms) for row in others} == {("al-2.7-tp2",)}


def test_synthetic_arms_get_no_verdict_and_no_place_in_a_policy(summary: Summary) -> None:
    pretended = [c for c in summary.comparisons if c.arm.startswith("al-")]
    assert pretended
    assert {c.verdict for c in pretended} == {"undecided"}
    assert all(c.explanation.startswith("No verdict") and c.p_value is None for c in pretended)
    assert {row.arm for row in summary.agreement} == {"real"}  # their texts mean nothing
    found = decide(summary)
    assert {choice.arm for choice in found.choices} == {"real", "off"}
    assert any("al-2 is left out: its acceptance is synthetic" in note for note in found.notes)


def test_only_synthetic_arms_give_no_policy() -> None:
    made = campaign(
        arms={"off": {"type": "vllm", "model": "/m"}, "al": arm(2.0)}, workload={"domains": ("coding",)}, blocks=2
    )
    summary = summarise(made, {}, cells(made, synthetic.by_level()))
    with pytest.raises(PolicyError, match="synthetic"):
        decide(summary)
    assert summary.multiplicity is not None
    assert summary.multiplicity.statement.startswith("Acceptance is synthetic in every comparison")


def test_a_campaign_of_conditions_alone_is_headed_by_the_acceptance_that_it_takes(summary: Summary) -> None:
    kept = ("off", "al-2", "al-2.5", "al-3")
    arms = [arm for arm in summary.campaign.arms if arm.name in kept]
    curve = [row for row in summary.needed_acceptance if len(row.arms) == 3]
    comparisons = [c for c in summary.comparisons if c.arm in kept]
    alone = summary.model_copy(
        update={
            "campaign": summary.campaign.model_copy(update={"arms": arms}),
            "needed_acceptance": curve,
            "comparisons": comparisons,
        }
    )
    assert policy.choices(alone) == []
    told = policy.sentence(alone, [])
    at_two = next(row for row in needed_rows(alone) if row.level == 2)
    assert f"at 2 streams {at_two.length} ({at_two.interval})" in told
    assert "at 1 stream below 2, the shortest measured" in told
    assert "at 10 streams above 3" in told
    assert policy.deployable(alone).why_not.startswith("synthetic acceptance")
    assert policy.sentence(summary, policy.choices(summary)).startswith(("Run ", "No policy"))


def test_the_report_shows_it_beside_what_real_drafters_reached(summary: Summary) -> None:
    """And the schedule with its flags, and above all what is to be known first: one page, as pages take seconds."""
    told = {"tuning": {"statement": "Everything below is <b>confirmed</b>."}}
    html = page(summary.model_copy(update={"environment": told}))
    assert "Acceptance needed to break even" in html
    assert "real 2.00" in html
    assert "3 deep at 1, off from 2 sequences on" in html
    assert "--speculative-config" in html
    assert html.index("Everything below is &lt;b&gt;") < html.index('id="answer"')
    assert "> condition</span>" in html
    text = markdown(summary)
    assert "| condition | 2.00 |" in text
    assert "| 1 | – | below 2.00 | real 2.00 | below 2, the shortest measured (it pays there already) |" in text


def test_no_synthetic_arm_no_table() -> None:
    made = campaign(blocks=2, workload={"domains": ("coding",), "max_tokens": 48})
    summary = summarise(made, {}, cells(made, synthetic.by_level()))
    assert summary.needed_acceptance == []
    assert "Acceptance length that breaks even" not in markdown(summary)
