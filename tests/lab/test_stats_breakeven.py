"""Break-even: the fit by brute force, the interval by simulated truth, open ends and non-monotone data by example."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.lab.stats.breakeven import break_even, describe_ranges, resampled_interval
from breakeven.lab.stats.isotonic import non_increasing_fit
from breakeven.lab.stats.student import t_quantile

LEVELS = [1, 2, 5, 10, 30, 70, 100, 250]


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_the_isotonic_fit_is_the_best_of_all_partitions_into_pools(pairs: list[tuple[int, int]]) -> None:
    values, weights = [float(v) for v, _ in pairs], [float(w) for _, w in pairs]
    best: tuple[float, list[float]] | None = None
    for cuts in itertools.product((False, True), repeat=len(values) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(values)]
        fit: list[float] = []
        for a, b in itertools.pairwise(edges):
            fit += [float(np.average(values[a:b], weights=weights[a:b]))] * (b - a)
        if all(x >= y for x, y in itertools.pairwise(fit)):
            loss = sum(w * (v - f) ** 2 for v, f, w in zip(values, fit, weights, strict=True))
            if best is None or loss < best[0] - 1e-12:
                best = (loss, fit)
    assert best is not None
    assert non_increasing_fit(values, weights) == pytest.approx(best[1])


def falling(at: float, slope: float, levels: list[int] = LEVELS) -> np.ndarray:
    """Log ratio linear in log load, 0 at load `at`."""
    return -slope * np.log(np.asarray(levels) / at)


def test_the_crossing_is_found_on_the_log_scale() -> None:
    logs = [falling(40, 0.2) + shift for shift in (-0.01, 0.0, 0.01)]
    found = break_even(LEVELS, logs)
    assert found.level == pytest.approx(40)
    assert found.ci_low is not None
    assert found.ci_high is not None
    assert found.ci_low < 40 < found.ci_high
    half = t_quantile(0.975, 2) * 0.01 / math.sqrt(3)  # parallel lines: the interval of the shift over the slope
    assert (found.ci_low, found.ci_high) == pytest.approx((40 * math.exp(-half / 0.2), 40 * math.exp(half / 0.2)))
    assert found.note == ""
    assert found.pays == ((None, pytest.approx(40)),)


@given(st.permutations(range(8)), st.integers(0, 1000))
def test_the_order_of_levels_does_not_matter(order: list[int], seed: int) -> None:
    logs = falling(40, 0.2) + np.random.default_rng(seed).normal(0, 0.05, (4, 8))
    shuffled = break_even([LEVELS[i] for i in order], logs[:, order])
    straight = break_even(LEVELS, logs)
    assert (shuffled.level, shuffled.ci_low, shuffled.ci_high) == pytest.approx(
        (straight.level, straight.ci_low, straight.ci_high), nan_ok=True
    )


@settings(max_examples=80)
@given(st.integers(2, 6), st.integers(2, 5), st.integers(0, 10_000))
def test_the_interval_spans_all_loads_at_which_zero_is_not_rejected(blocks: int, levels: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    loads = np.asarray(LEVELS[:levels], dtype=float)
    logs = falling(float(loads[-1]) / 2, 0.2, LEVELS[:levels]) + generator.normal(0, 0.1, (blocks, levels))
    found = break_even(loads, logs)
    if not found.monotone:
        return
    grid = np.linspace(0, math.log(loads[-1]), 400)
    values = np.vstack([np.interp(grid, np.log(loads), row) for row in logs])
    half = t_quantile(0.975, blocks - 1) * values.std(axis=0, ddof=1) / math.sqrt(blocks)
    inside = np.abs(values.mean(axis=0)) < half * (1 - 1e-9)
    for x in np.exp(grid[inside]):
        assert found.low_open or found.ci_low <= x * (1 + 1e-9)
        assert found.high_open or found.ci_high >= x * (1 - 1e-9)
    if found.level is not None:
        assert found.low_open or found.ci_low <= found.level
        assert found.high_open or found.ci_high >= found.level


@pytest.mark.parametrize("blocks", [3, 6])
def test_the_interval_covers_the_true_break_even(blocks: int) -> None:
    """Launch effects (a shift per block) and noise per cell; 400 campaigns."""
    generator = np.random.default_rng(blocks)
    hits = 0
    for _ in range(400):
        shift = generator.normal(0, 0.03, (blocks, 1))
        found = break_even(LEVELS, falling(40, 0.1) + shift + generator.normal(0, 0.03, (blocks, 8)))
        low_ok = found.low_open or (found.ci_low is not None and found.ci_low <= 40)
        hits += low_ok and (found.high_open or (found.ci_high is not None and found.ci_high >= 40))
    assert hits / 400 >= 0.93


def test_an_arm_that_always_pays_breaks_even_above_the_last_level() -> None:
    found = break_even([1, 10, 250], [[0.5, 0.4, 0.3], [0.52, 0.41, 0.29]])
    assert (found.level, found.ci_high, found.high_open) == (None, None, True)
    assert found.ci_low == 250
    assert found.note == "above 250"
    assert found.pays == ((None, None),)


def test_an_arm_that_never_pays_breaks_even_below_the_first_level() -> None:
    found = break_even([1, 10], [[-0.5, -0.6], [-0.52, -0.61]])
    assert (found.level, found.ci_low, found.low_open, found.ci_high) == (None, None, True, 1)
    assert found.note == "below 1"
    assert found.pays == ()


def test_data_that_do_not_bound_the_break_even_leave_it_open() -> None:
    found = break_even([1, 10], [[0.5, -0.5], [-0.5, 0.4], [0.3, -0.2]])
    assert found.low_open
    assert found.high_open
    assert "open at both ends" in found.note


def test_a_point_above_the_last_level_may_have_a_bound_below_it() -> None:
    found = break_even([1, 10, 100], [[0.50, 0.30, 0.06], [0.52, 0.31, -0.05], [0.51, 0.29, 0.03]])
    assert found.level is None
    assert found.note == "above 100"
    assert found.ci_low is not None
    assert 10 < found.ci_low < 100


def test_one_block_has_a_point_and_no_interval() -> None:
    found = break_even(LEVELS, [falling(40, 0.2)])
    assert found.level == pytest.approx(40)
    assert (found.ci_low, found.ci_high, found.low_open, found.high_open) == (None, None, False, False)
    assert found.note == "one block: no interval"
    assert resampled_interval(LEVELS, [falling(40, 0.2)], seed=0) is None


def test_data_that_reject_monotonicity_give_ranges_of_load_in_place_of_a_break_even() -> None:
    shape = np.asarray([0.3, -0.3, 0.3])
    found = break_even([1, 10, 100], [shape, shape + 0.01, shape - 0.01, shape + 0.005])
    assert not found.monotone
    assert (found.level, found.ci_low, found.ci_high) == (None, None, None)
    assert found.pays[0][0] is None
    assert found.pays[0][1] == pytest.approx(math.sqrt(10), rel=0.03)
    assert found.pays[1][1] is None
    assert "does not fall steadily" in found.note
    assert describe_ranges(found.pays, found.levels).startswith("from 1 and below to 3.")


def test_a_monotone_truth_is_called_non_monotone_in_at_most_one_of_twenty_campaigns() -> None:
    generator = np.random.default_rng(8)
    flat = [break_even([1, 2, 5, 10], generator.normal(0, 0.05, (5, 4))) for _ in range(300)]
    assert sum(not found.monotone for found in flat) / 300 <= 0.07


def test_an_invalid_cell_is_left_out_and_a_level_without_any_is_refused() -> None:
    logs = np.vstack([falling(40, 0.2) + shift for shift in (-0.01, 0.0, 0.01)])
    logs[0, 3] = math.nan
    assert break_even(LEVELS, logs).level == pytest.approx(40, rel=0.05)
    logs[:, 3] = math.nan
    with pytest.raises(ValueError, match="level 10"):
        break_even(LEVELS, logs)


def test_a_single_level_says_on_which_side_break_even_lies() -> None:
    assert break_even([10], [[0.2], [0.21]]).note == "above 10"
    assert break_even([10], [[-0.2], [-0.21]]).note == "below 10"


@pytest.mark.parametrize(
    ("levels", "logs"), [([], [[]]), ([1, 1], [[0, 0]]), ([0, 1], [[0, 0]]), ([1, 2], []), ([1, 2], [[0.1]])]
)
def test_malformed_tables_are_refused(levels: list[float], logs: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"levels|log ratios"):
        break_even(levels, logs)


def test_the_resampled_interval_is_reproducible_contains_the_point_and_opens_at_the_ends() -> None:
    generator = np.random.default_rng(4)
    for blocks in (4, 8):
        logs = falling(40, 0.2) + generator.normal(0, 0.03, (blocks, 8))
        interval = resampled_interval(LEVELS, logs, seed=1, resamples=500)
        assert interval is not None
        assert interval == resampled_interval(LEVELS, logs, seed=1, resamples=500)
        low, high = interval
        point = break_even(LEVELS, logs).level
        assert low is not None
        assert high is not None
        assert point is not None
        assert low <= point <= high
    assert resampled_interval([1, 10], [[0.5, 0.4], [0.6, 0.4]], seed=0) == (None, None)
