"""Interactions, confidence sequences and outlying blocks, against definitions and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from breakeven.lab.stats.factorial import contrasts, main_effect
from breakeven.lab.stats.ratio import ratio_from_logs, sequence_ratio
from breakeven.lab.stats.robust import outlying
from breakeven.lab.stats.sequence import MIXTURE_VARIANCE, critical_t, log_e_value
from breakeven.lab.verdict import explain, verdict

logs = st.floats(-2, 2).map(lambda x: round(x, 3))


@given(st.integers(2, 4), st.integers(2, 6), st.data())
def test_a_contrast_is_a_condition_minus_the_mean_of_the_others(
    conditions: int, blocks: int, data: st.DataObject
) -> None:
    rows = [[data.draw(logs) for _ in range(conditions)] for _ in range(blocks)]
    found = contrasts(rows)
    assert [c.condition for c in found] == ([0] if conditions == 2 else list(range(conditions)))
    for c in found:
        values = [row[c.condition] - np.mean([v for i, v in enumerate(row) if i != c.condition]) for row in rows]
        expected = ratio_from_logs(values)
        assert c.estimate.ratio == pytest.approx(expected.ratio)
        assert c.estimate.ci_low == pytest.approx(expected.ci_low, abs=1e-12)
        assert c.p_adjusted is not None
        assert c.p_adjusted >= (c.estimate.p_value or 0) - 1e-12


def test_what_all_conditions_share_makes_no_interaction_and_incomplete_blocks_do_not_count() -> None:
    rows = [[0.1, 0.1, 0.1], [0.5, 0.5, 0.5], [0.2, math.nan, 5.0], [-0.3, -0.3, -0.3]]
    for c in contrasts(rows):
        assert c.estimate.ratio == pytest.approx(1)
        assert c.estimate.blocks == 3
    effect = main_effect(rows)
    assert effect is not None
    assert effect.log_ratio == pytest.approx(0.1)


def test_one_condition_or_no_complete_block_has_no_contrast() -> None:
    assert contrasts([[0.1], [0.2]]) == []
    assert contrasts([[0.1, math.nan]]) == []
    assert contrasts([]) == []
    assert main_effect([]) is None
    with pytest.raises(ValueError, match="every block"):
        contrasts([[0.1, 0.2], [0.3]])


@pytest.mark.parametrize(("t", "blocks"), [(0.5, 3), (2.5, 5), (6.0, 4), (3.0, 12)])
def test_the_e_value_is_the_ratio_of_the_mixture_of_noncentral_ts_to_the_central_t(t: float, blocks: int) -> None:
    def under(effect: float) -> float:
        density = stats.nct.pdf(t, blocks - 1, effect * math.sqrt(blocks))
        return float(density * stats.norm.pdf(effect, scale=math.sqrt(MIXTURE_VARIANCE)))

    mixture = integrate.quad(under, -12, 12, limit=200)[0]
    assert math.exp(log_e_value(t, blocks)) == pytest.approx(mixture / stats.t.pdf(t, blocks - 1), rel=1e-3)


@given(st.integers(3, 60), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_critical_t_is_where_the_e_value_reaches_its_bound_and_is_wider_than_t(
    blocks: int, confidence: float
) -> None:
    critical = critical_t(blocks, confidence)
    if math.isinf(critical):
        assert blocks < 4
        return
    assert log_e_value(critical, blocks) == pytest.approx(-math.log1p(-confidence))
    assert critical > stats.t.ppf((1 + confidence) / 2, blocks - 1)


def test_a_sequence_ever_misses_the_truth_in_at_most_five_percent() -> None:
    generator = np.random.default_rng(3)
    misses = 0
    for _ in range(400):
        values = generator.normal(0, 1, 30)
        means = np.cumsum(values) / np.arange(1, 31)
        sds = [0.0, *(values[:n].std(ddof=1) for n in range(2, 31))]
        misses += any(abs(means[n - 1]) > critical_t(n) * sds[n - 1] / math.sqrt(n) for n in range(2, 31))
    assert misses / 400 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_two_blocks_bound_nothing_and_are_said_to_be_undecided() -> None:
    estimate = sequence_ratio([0.2, 0.21])
    assert (estimate.ci_low, estimate.ci_high, estimate.blocks) == (None, None, 2)
    assert verdict(estimate) == "undecided"
    assert "no bounds before the third" in explain(estimate)


def test_a_sequence_decides_like_an_interval_only_later() -> None:
    values = [0.20, 0.21, 0.19, 0.20, 0.22]
    estimate = sequence_ratio(values)
    plain = ratio_from_logs(values)
    assert estimate.ci_low is not None
    assert plain.ci_low is not None
    assert 1 < estimate.ci_low < plain.ci_low
    assert verdict(estimate) == "pays"
    assert verdict(sequence_ratio([0.001, -0.001, 0.0, 0.001, -0.001, 0.0])) == "equivalent"
    assert verdict(sequence_ratio([0.02, -0.03, 0.01])) == "undecided"


def test_a_block_that_stands_apart_is_named_and_normal_ones_hardly_ever() -> None:
    assert outlying([0.10, 0.11, 0.09, 0.10, 0.60]) == [4]
    assert outlying([0.1, 0.1, 0.9]) == []
    generator = np.random.default_rng(1)
    assert sum(bool(outlying(list(generator.normal(0, 1, 6)))) for _ in range(500)) <= 15
