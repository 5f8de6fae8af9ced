"""The verdict rule is coherent, exclusive and exhaustive, and explained in plain words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.stats.ratio import RatioEstimate, ratio_from_logs
from breakeven.lab.verdict import explain, more_blocks, verdict


def estimate(percent: float, sd: float, blocks: int) -> RatioEstimate:
    """An estimate with exactly this ratio and spread."""
    shape = np.linspace(-1, 1, blocks)
    return ratio_from_logs(math.log1p(percent / 100) + shape / shape.std(ddof=1) * sd)


blocks_logs = st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=9)
margins = st.sampled_from([0.01, 0.03, 0.1])


@given(blocks_logs, margins)
def test_exactly_the_rows_of_the_table_hold(logs: list[float], margin: float) -> None:
    e = ratio_from_logs(logs)
    wide = e.interval(0.9)
    assert wide is not None
    assert e.ci_low is not None
    assert e.ci_high is not None
    edges = (e.ratio * (1 + margin), e.ratio / (1 + margin), wide[0] * (1 + margin), wide[1] / (1 + margin))
    if min(abs(edge - 1) for edge in edges) < 1e-9:
        return
    rows = {
        "pays": e.ratio > 1 + margin and e.ci_low > 1,
        "hurts": e.ratio < 1 / (1 + margin) and e.ci_high < 1,
        "equivalent": wide[0] >= 1 / (1 + margin) and wide[1] <= 1 + margin,
    }
    assert sum(rows.values()) <= 1
    assert verdict(e, margin) == next((name for name, holds in rows.items() if holds), "undecided")


@given(blocks_logs, margins)
def test_exchanging_the_arms_exchanges_pays_and_hurts(logs: list[float], margin: float) -> None:
    opposite = {"pays": "hurts", "hurts": "pays", "equivalent": "equivalent", "undecided": "undecided"}
    forth = verdict(ratio_from_logs(logs), margin)
    assert verdict(ratio_from_logs([-x for x in logs]), margin) == opposite[forth]
    assert verdict(ratio_from_logs(logs), margin, higher_is_better=False) == opposite[forth]


@given(st.floats(-20, 20), st.floats(0.001, 0.2), st.integers(2, 6))
def test_more_blocks_of_the_same_kind_never_turn_one_verdict_into_another(
    percent: float, sd: float, blocks: int
) -> None:
    seen = [verdict(estimate(percent, sd, blocks * 2**k)) for k in range(8)]
    decided = [v for v in seen if v != "undecided"]
    assert len(set(decided)) <= 1
    assert seen == ["undecided"] * (len(seen) - len(decided)) + decided


def test_one_block_is_always_undecided_and_says_so() -> None:
    one = ratio_from_logs([1.0])
    assert verdict(one) == "undecided"
    assert more_blocks(one) is None
    assert "one block has no interval" in explain(one)


def test_not_significant_is_not_equivalent() -> None:
    assert verdict(estimate(0.5, 0.05, 4)) == "undecided"
    assert verdict(estimate(0.5, 0.005, 4)) == "equivalent"


def test_a_real_effect_within_the_margin_is_equivalent_and_beyond_it_pays() -> None:
    assert verdict(estimate(2, 0.002, 6)) == "equivalent"
    assert verdict(estimate(4, 0.002, 6)) == "pays"
    assert verdict(estimate(-4, 0.002, 6)) == "hurts"


def test_false_verdicts_are_as_rare_as_stated() -> None:
    generator = np.random.default_rng(6)
    none = [verdict(ratio_from_logs(generator.normal(0, 0.05, 3))) for _ in range(1500)]
    assert sum(v in ("pays", "hurts") for v in none) / 1500 <= 0.06
    edge = [verdict(ratio_from_logs(generator.normal(math.log(1.03), 0.01, 5))) for _ in range(1500)]
    assert sum(v == "equivalent" for v in edge) / 1500 <= 0.06


def test_the_number_of_blocks_named_reaches_the_verdict_with_the_stated_probability() -> None:
    undecided = estimate(8, 0.06, 3)
    assert verdict(undecided) == "undecided"
    more = more_blocks(undecided)
    assert more is not None
    generator = np.random.default_rng(9)
    runs = generator.normal(math.log(1.08), 0.06, size=(600, 3 + more))
    reached = sum(verdict(ratio_from_logs(logs)) == "pays" for logs in runs) / 600
    assert 0.74 <= reached <= 0.9


def test_the_sentences_say_what_how_sure_and_what_it_would_take() -> None:
    pays = explain(estimate(30, 0.02, 5), arm="ngram", baseline="off")
    assert pays.startswith("ngram pays: throughput of ngram against off is +30.0% [")
    assert "5 blocks" in pays
    undecided = explain(estimate(8, 0.06, 3), arm="ngram")
    assert f"about {more_blocks(estimate(8, 0.06, 3))} more blocks would show that it pays" in undecided
    assert "is equivalent" in explain(estimate(0, 0.05, 3))
    assert "sits at the margin" in explain(estimate(3, 0.05, 3))
    assert "within the margin of 3%" in explain(estimate(0, 0.001, 3))
    slower = explain(estimate(40, 0.02, 5), metric="TTFT", arm="ngram", higher_is_better=False)
    assert slower.startswith("ngram hurts: TTFT")
    assert more_blocks(estimate(30, 0.02, 5)) == 0


def test_a_margin_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        verdict(estimate(1, 0.1, 3), 0)
