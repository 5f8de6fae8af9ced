"""Ratios, robust and bootstrap estimates, quantiles: against definitions, scipy, and simulated truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from breakeven.lab.stats.bootstrap import (
    expanded_percentiles,
    expansion_of,
    hierarchical_bootstrap,
    resampled_quantile_logs,
)
from breakeven.lab.stats.quantile import quantile_ratio, requests_floor
from breakeven.lab.stats.ratio import paired_ratio, ratio_from_logs
from breakeven.lab.stats.robust import hodges_lehmann, signed_rank_distribution

logs_of_blocks = st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=2, max_size=12)


@given(logs_of_blocks, st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_paired_interval_and_p_value_are_scipys(logs: list[float], confidence: float) -> None:
    estimate = ratio_from_logs(logs, confidence)
    assert estimate.ratio == pytest.approx(math.exp(np.mean(logs)))
    if np.std(logs) < 1e-9:
        return
    test = stats.ttest_1samp(logs, 0)
    interval = test.confidence_interval(confidence)
    assert estimate.ci_low == pytest.approx(math.exp(interval.low))
    assert estimate.ci_high == pytest.approx(math.exp(interval.high))
    assert estimate.p_value == pytest.approx(test.pvalue, abs=1e-12)
    assert estimate.interval(confidence) == pytest.approx((estimate.ci_low, estimate.ci_high))


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=2, max_size=8))
def test_exchanging_the_arms_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    forth, back = paired_ratio(a, b), paired_ratio(b, a)
    assert forth.ratio == pytest.approx(1 / back.ratio)
    assert forth.p_value == pytest.approx(back.p_value, abs=1e-9)


def test_one_block_has_a_ratio_and_never_an_interval() -> None:
    one = paired_ratio([100], [150])
    assert (one.ratio, one.ci_low, one.ci_high, one.p_value, one.sd_log) == (pytest.approx(1.5), None, None, None, None)
    assert one.interval(0.9) is None
    assert hodges_lehmann([0.4]).ci_low is None
    assert hierarchical_bootstrap([[1.0]], [[2.0]], np.mean, seed=0).ci_low is None


@pytest.mark.parametrize(("a", "b"), [([], []), ([1], [1, 2]), ([0], [1]), ([1], [math.nan]), ([1], [-2])])
def test_values_without_a_ratio_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"block|paired"):
        paired_ratio(a, b)


def test_a_bad_confidence_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence"):
        ratio_from_logs([0.1, 0.2], 95)


@pytest.mark.parametrize("blocks", [2, 3, 5, 9])
def test_the_t_interval_covers_the_true_ratio_as_often_as_it_says(blocks: int) -> None:
    generator = np.random.default_rng(blocks)
    hits = 0
    for logs in generator.normal(0.1, 0.05, size=(1500, blocks)):
        estimate = ratio_from_logs(logs)
        assert estimate.ci_low is not None
        assert estimate.ci_high is not None
        hits += estimate.ci_low <= math.exp(0.1) <= estimate.ci_high
    assert 0.93 <= hits / 1500 <= 0.97


@given(st.integers(1, 9))
def test_the_signed_rank_distribution_is_that_of_all_sign_patterns(blocks: int) -> None:
    counts = np.zeros(blocks * (blocks + 1) // 2 + 1)
    for signs in itertools.product((0, 1), repeat=blocks):
        counts[sum(rank * sign for rank, sign in enumerate(signs, 1))] += 1
    assert signed_rank_distribution(blocks) == pytest.approx(counts / 2**blocks)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=9))
def test_hodges_lehmann_is_the_median_of_pairwise_means(logs: list[float]) -> None:
    means = [(a + b) / 2 for i, a in enumerate(logs) for b in logs[i:]]
    estimate = hodges_lehmann(logs)
    assert estimate.ratio == pytest.approx(math.exp(np.median(means)))
    if len(logs) <= 5:
        assert estimate.ci_low is None
    else:
        assert estimate.achieved_confidence is not None
        assert estimate.achieved_confidence >= 0.95
        assert estimate.ci_low <= estimate.ratio * (1 + 1e-12)
        assert estimate.ratio <= estimate.ci_high * (1 + 1e-12)


@settings(max_examples=30)
@given(st.lists(st.integers(-1000, 1000), min_size=6, max_size=8, unique_by=abs))
def test_the_hodges_lehmann_interval_is_what_the_signed_rank_test_does_not_reject(values: list[int]) -> None:
    logs = np.asarray(values) / 1000
    estimate = hodges_lehmann(logs)
    assert estimate.ci_low is not None
    assert estimate.ci_high is not None
    for edge, outward in ((math.log(estimate.ci_low), -1), (math.log(estimate.ci_high), 1)):
        inside = stats.wilcoxon(logs - (edge - outward * 1e-7), method="exact").pvalue
        outside = stats.wilcoxon(logs - (edge + outward * 1e-7), method="exact").pvalue
        assert outside <= 0.05 < inside


def test_one_outlying_launch_does_not_move_hodges_lehmann_far() -> None:
    logs = [0.10, 0.11, 0.09, 0.10, 0.12, 0.08, 0.10]
    spoiled = [*logs[:-1], -3.0]
    assert abs(math.log(hodges_lehmann(spoiled).ratio) - 0.1) < 0.02
    assert abs(math.log(ratio_from_logs(spoiled).ratio) - 0.1) > 0.3


# --- bootstrap and quantiles


def test_the_bootstrap_is_reproducible_and_contains_the_truth_of_a_constant_shift() -> None:
    base = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [1.5, 2.5, 4.5]]
    arm = [[2 * value for value in block] for block in base]
    first = hierarchical_bootstrap(base, arm, np.mean, seed=3, resamples=200, paired=True)
    assert first == hierarchical_bootstrap(base, arm, np.mean, seed=3, resamples=200, paired=True)
    assert (first.ratio, first.ci_low, first.ci_high) == pytest.approx((2, 2, 2))
    loose = hierarchical_bootstrap(base, arm, np.mean, seed=3, resamples=200)
    assert loose.ci_low is not None
    assert loose.ci_high is not None
    assert loose.ci_low < 2 < loose.ci_high


def test_the_spread_between_launches_widens_the_interval_whatever_the_number_of_requests() -> None:
    generator = np.random.default_rng(0)
    shift = [-0.3, 0.3, -0.2, 0.2, 0.0]
    base = [np.exp(generator.normal(0, 0.01, 400)) for _ in shift]
    arm = [np.exp(s + generator.normal(0, 0.01, 400)) for s in shift]
    estimate = hierarchical_bootstrap(base, arm, np.median, seed=1, resamples=300)
    assert estimate.ci_low is not None
    assert estimate.ci_high is not None
    assert estimate.ci_high / estimate.ci_low > 1.3


def test_few_blocks_widen_the_percentiles() -> None:
    assert expansion_of(0.95, 3) > expansion_of(0.95, 10) > expansion_of(0.95, 1000) > 0.95
    values = np.arange(10_001.0)
    low, high = expanded_percentiles(values, 10, 0.95)
    assert low < 250
    assert high > 9750


@pytest.mark.parametrize(("base", "arm"), [([], []), ([[1.0]], [[]]), ([[1.0]], [[math.inf]]), ([[0.0]], [[1.0]])])
def test_the_bootstrap_refuses_what_has_no_ratio(base: list[list[float]], arm: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"block|positive"):
        hierarchical_bootstrap(base, arm, np.mean, seed=0)


@pytest.mark.parametrize(("quantile", "floor"), [(0.9, 64), (0.99, 662), (0.999, 6636)])
def test_the_formula_gives_loadgens_floors(quantile: float, floor: int) -> None:
    assert requests_floor(quantile) == floor


@given(st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_floor_is_the_first_number_that_satisfies_the_binomial(quantile: float) -> None:
    floor = requests_floor(quantile)
    assert stats.binom.cdf(1, floor, 1 - quantile) <= 0.01 < stats.binom.cdf(1, floor - 1, 1 - quantile)


def test_a_tail_quantile_under_its_floor_is_refused_with_the_reason() -> None:
    few = [list(range(1, 331))] * 2
    refused = quantile_ratio(few, few, 0.99, seed=0)
    assert refused.ratio is None
    assert "662" in refused.note
    assert "660" in refused.note
    enough = [list(range(1, 332))] * 2
    assert quantile_ratio(enough, enough, 0.99, seed=0, resamples=50).ratio == pytest.approx(1)
    assert "6,636" in quantile_ratio(enough, enough, 0.999, seed=0).note


def test_a_quantile_ratio_is_the_geometric_mean_of_the_blocks_ratios_with_its_t_interval() -> None:
    generator = np.random.default_rng(5)
    base = [generator.exponential(1, 50) + 1 for _ in range(4)]
    arm = [generator.exponential(2, 50) + 1 for _ in range(4)]
    found = quantile_ratio(base, arm, 0.9, seed=2, resamples=200)
    each = [np.quantile([b, a], 0.9, axis=1, method="weibull") for b, a in zip(base, arm, strict=True)]
    expected = ratio_from_logs([math.log(a / b) for b, a in each])
    wanted = (expected.ratio, expected.ci_low, expected.ci_high, expected.p_value)
    assert (found.ratio, found.ci_low, found.ci_high, found.p_value) == pytest.approx(wanted)
    assert (found.method, found.requests) == ("blocks", 200)
    assert found.bootstrap_low is not None
    assert found.bootstrap_high is not None
    assert found.bootstrap_low < expected.ratio < found.bootstrap_high
    assert quantile_ratio(base, arm, 0.9, seed=2, resamples=0).bootstrap_low is None


def test_blocks_that_are_too_small_for_the_quantile_are_pooled_and_bootstrapped() -> None:
    generator = np.random.default_rng(6)
    base = [generator.exponential(1, 60) + 1 for _ in range(12)]
    arm = [1.5 * block for block in base]
    found = quantile_ratio(base, arm, 0.99, seed=1, resamples=200)
    assert found.method == "bootstrap"
    assert found.ratio == pytest.approx(1.5)
    assert (found.ci_low, found.ci_high) == (found.bootstrap_low, found.bootstrap_high)
    assert "100 requests" in found.note


def test_the_bootstrap_of_a_quantile_in_arrays_is_the_one_of_the_general_function() -> None:
    generator = np.random.default_rng(7)
    base = [np.exp(generator.normal(0, 0.2, n)) for n in (20, 33, 27)]
    arm = [np.exp(generator.normal(0.1, 0.2, n)) for n in (25, 20, 31)]
    fast = resampled_quantile_logs(base, arm, 0.8, seed=1, resamples=3000)
    general = hierarchical_bootstrap(
        base, arm, lambda v: float(np.quantile(v, 0.8, method="inverted_cdf")), seed=2, resamples=1500
    )
    low, high = expanded_percentiles(fast, 3, 0.95)
    assert general.ci_low is not None
    assert general.ci_high is not None
    assert math.exp(np.median(fast)) == pytest.approx(general.ratio, rel=0.03)
    assert (math.exp(low), math.exp(high)) == pytest.approx((general.ci_low, general.ci_high), rel=0.06)
