"""Sign-flip, multiplicity, equivalence and power: against enumeration, definitions and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.lab.stats import power
from breakeven.lab.stats.equivalence import tost
from breakeven.lab.stats.multiplicity import benjamini_hochberg, holm
from breakeven.lab.stats.ratio import ratio_from_logs
from breakeven.lab.stats.signflip import blocks_for_holm, max_t, sign_flip, smallest_p

whole_logs = st.integers(-20, 20).map(lambda k: k / 16)  # exact in binary, so that ties are ties


@given(st.lists(whole_logs, min_size=1, max_size=8))
def test_the_sign_flip_p_is_the_share_of_all_patterns_at_least_as_extreme(logs: list[float]) -> None:
    sums = [
        abs(sum(s * x for s, x in zip(signs, logs, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(logs))
    ]
    result = sign_flip(logs)
    assert result.exact
    assert result.p_value == pytest.approx(sum(s >= abs(sum(logs)) for s in sums) / len(sums))


def test_the_smallest_p_is_two_over_two_to_the_blocks() -> None:
    assert sign_flip([0.1, 0.2, 0.3, 0.4]).p_value == smallest_p(4) == 2 / 16
    assert smallest_p(1) == 1
    assert blocks_for_holm(8) == 9
    assert blocks_for_holm(1) == 6


def test_many_blocks_are_sampled_with_the_given_seed_and_p_is_never_zero() -> None:
    logs = [0.1] * 20
    result = sign_flip(logs, seed=4, patterns=999)
    assert not result.exact
    assert result == sign_flip(logs, seed=4, patterns=999)
    assert result.p_value == pytest.approx(1 / 1000)
    noise = list(np.random.default_rng(1).normal(0, 1, 16))
    exact = sign_flip(noise).p_value
    assert sign_flip([*noise, 0.0], patterns=20_000).p_value == pytest.approx(exact, abs=0.02)


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_max_t_is_the_step_down_maximum_over_all_patterns(blocks: int, levels: int, data: st.DataObject) -> None:
    logs = np.asarray(
        data.draw(st.lists(st.lists(whole_logs, min_size=levels, max_size=levels), min_size=blocks, max_size=blocks))
    )

    def statistics_of(x: np.ndarray) -> list[float]:
        scale = [math.sqrt((column**2).mean()) for column in x.T]
        return [abs(column.mean()) / s if s else 0.0 for column, s in zip(x.T, scale, strict=True)]

    observed = statistics_of(logs)
    everything = [statistics_of(logs * np.asarray(s)[:, None]) for s in itertools.product((1, -1), repeat=blocks)]
    order = sorted(range(levels), key=lambda level: -observed[level])
    running, expected = 0.0, [0.0] * levels
    for rank, level in enumerate(order):
        hits = sum(max(row[k] for k in order[rank:]) >= observed[level] - 1e-9 for row in everything)
        running = max(running, hits / len(everything))
        expected[level] = running
    assert max_t(logs.tolist()) == pytest.approx(expected)


def test_max_t_with_one_level_is_the_sign_flip_test_and_copies_of_a_level_cost_nothing() -> None:
    logs = [0.3, -0.1, 0.2, 0.4, 0.1]
    p = sign_flip(logs).p_value
    assert max_t([[x] for x in logs]) == [p]
    assert max_t([[x, x, 2 * x] for x in logs]) == [p, p, p]


def test_incomplete_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="incomplete"):
        max_t([[0.1, math.nan], [0.1, 0.2]])


p_lists = st.lists(st.floats(0, 1), max_size=9)


@given(p_lists, st.floats(0.001, 0.5))
def test_holm_rejects_what_its_definition_rejects(p_values: list[float], alpha: float) -> None:
    rejected: set[int] = set()
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] * (len(p_values) - rank) > alpha:
            break
        rejected.add(index)
    assert {i for i, p in enumerate(holm(p_values)) if p <= alpha} == rejected


@given(p_lists, st.floats(0.001, 0.5))
def test_benjamini_hochberg_rejects_what_its_definition_rejects(p_values: list[float], alpha: float) -> None:
    count = len(p_values)
    order = sorted(range(count), key=lambda i: p_values[i])
    last = max((k for k, i in enumerate(order, 1) if count / k * p_values[i] <= alpha), default=0)
    adjusted = benjamini_hochberg(p_values)
    assert {i for i, p in enumerate(adjusted) if p <= alpha} == set(order[:last])


def test_p_values_outside_zero_to_one_are_refused() -> None:
    with pytest.raises(ValueError, match="p-value 1"):
        holm([0.2, 1.2])


@given(
    st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=10), st.floats(0.005, 0.2), st.sampled_from([0.05, 0.025, 0.1])
)
def test_two_one_sided_tests_are_the_wider_interval_within_the_margin(
    logs: list[float], margin: float, alpha: float
) -> None:
    estimate = ratio_from_logs(logs)
    interval = estimate.interval(1 - 2 * alpha)
    assert interval is not None
    low, high = interval
    gap = min(abs(low - 1 / (1 + margin)), abs(high - (1 + margin)))
    if gap > 1e-9:
        assert tost(estimate, margin).shown(alpha) == (low >= 1 / (1 + margin) and high <= 1 + margin)


def test_one_block_shows_no_equivalence_and_the_margin_must_be_positive() -> None:
    assert not tost(ratio_from_logs([0.0]), 0.03).shown(0.05)
    with pytest.raises(ValueError, match="margin"):
        tost(ratio_from_logs([0.0, 0.1]), 0)


# --- power


@pytest.mark.parametrize(("effect", "blocks"), [(0.05, 4), (0.03, 9)])
def test_the_power_of_the_t_test_is_what_simulation_finds(effect: float, blocks: int) -> None:
    logs = np.random.default_rng(2).normal(effect, 0.03, size=(20_000, blocks))
    from scipy.stats import t

    half = t.ppf(0.975, blocks - 1) * logs.std(axis=1, ddof=1) / math.sqrt(blocks)
    found = (logs.mean(axis=1) > half).mean()
    assert power.superiority_power(effect, 0.03, blocks) == pytest.approx(found, abs=0.015)


def test_equivalence_power_is_a_lower_bound_that_is_tight_where_it_matters() -> None:
    from scipy.stats import t

    sd, blocks, margin = 0.015, 8, 0.03
    logs = np.random.default_rng(3).normal(0.005, sd, size=(20_000, blocks))
    half = t.ppf(0.95, blocks - 1) * logs.std(axis=1, ddof=1) / math.sqrt(blocks)
    mean = logs.mean(axis=1)
    found = ((mean - half > -math.log1p(margin)) & (mean + half < math.log1p(margin))).mean()
    stated = power.equivalence_power(0.005, sd, blocks, margin)
    assert stated <= found + 0.01
    assert stated == pytest.approx(found, abs=0.05)


@given(st.floats(0.001, 0.3), st.integers(2, 40))
def test_the_smallest_detectable_effect_is_detected_with_the_stated_power(sd: float, blocks: int) -> None:
    effect = power.smallest_detectable(sd, blocks)
    assert effect is not None
    assert power.superiority_power(math.log1p(effect), sd, blocks) == pytest.approx(0.8, abs=1e-4)


@given(st.floats(0.002, 0.2), st.floats(0.01, 0.5))
def test_blocks_needed_is_the_first_number_with_enough_power(sd: float, effect: float) -> None:
    blocks = power.blocks_needed(sd, effect)
    assert blocks is not None
    assert power.superiority_power(math.log1p(effect), sd, blocks) >= 0.8
    assert blocks == 2 or power.superiority_power(math.log1p(effect), sd, blocks - 1) < 0.8


def test_at_the_margin_no_number_of_blocks_gives_a_verdict_and_near_it_many_are_needed() -> None:
    assert power.blocks_for_verdict(0.02, 1.03, 0.03) is None
    near, far = power.blocks_for_verdict(0.02, 1.035, 0.03), power.blocks_for_verdict(0.02, 1.3, 0.03)
    assert near is not None
    assert far is not None
    assert near > 10 > far
    equal = power.blocks_for_verdict(0.02, 1.0, 0.03)
    assert equal is not None
    assert power.equivalence_power(0.0, 0.02, equal, 0.03) >= 0.8 > power.equivalence_power(0.0, 0.02, equal - 1, 0.03)
    assert power.blocks_needed(0.02, 0.0) is None


def test_the_noise_floor_is_half_the_interval_and_one_block_has_none() -> None:
    estimate = ratio_from_logs([0.02, -0.02, 0.01, -0.01])
    assert estimate.sd_log is not None
    assert power.noise_floor(estimate.sd_log, 4) == pytest.approx(estimate.ci_high - 1)
    assert power.noise_floor(0.02, 1) is None
    assert power.smallest_detectable(0.02, 1) is None


@pytest.mark.parametrize("sd", [-0.1, math.nan])
def test_an_impossible_spread_is_refused(sd: float) -> None:
    with pytest.raises(ValueError, match="standard deviation"):
        power.blocks_needed(sd, 0.05)
