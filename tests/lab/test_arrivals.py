"""Arrival processes: the rate that was asked for, the shape that was asked for, the same on every machine."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.lab.client.types import RequestResult
from breakeven.lab.load import load_figures, open_window
from breakeven.lab.workload.arrivals import (
    coefficient_of_variation,
    gamma_gaps,
    offered_rate,
    schedule,
    trace_gaps,
    uniforms,
)
from breakeven.lab.workload.prompt import PromptError
from breakeven.lab.workload.traces import read_trace

_ramps = st.tuples(st.floats(0, 5), st.floats(0, 5)).filter(lambda r: sum(r) > 0.01)
_traces = (
    st.lists(st.floats(0, 100, allow_nan=False), min_size=2, max_size=20).map(sorted).filter(lambda t: t[-1] > t[0])
)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.01, 1000),
    st.integers(0, 40),
    st.integers(0, 2**31),
    st.sampled_from(["poisson", "gamma", "constant", "trace"]),
    st.floats(0.1, 4),
    _traces,
    _ramps,
)
def test_any_schedule_is_in_order_within_its_time_and_the_same_again(
    rate: float, count: int, seed: int, process: Any, cv: float, trace: list[float], ramp: tuple[float, float]
) -> None:
    options: dict[str, Any] = {"process": process, "cv": cv, "trace": trace, "ramp": ramp}
    offsets = schedule(rate, count, seed, **options)
    assert len(offsets) == count
    assert all(0 <= t < count / rate for t in offsets)
    assert all(a <= b for a, b in pairwise(offsets))
    assert schedule(rate, count, seed, **options) == offsets


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 100), st.integers(2, 30), st.integers(0, 99), _ramps)
def test_a_ramp_is_the_same_process_on_another_clock(
    rate: float, count: int, seed: int, ramp: tuple[float, float]
) -> None:
    """The cumulative rate of a ramped schedule, at each arrival, is the position of the even process's arrival."""
    even = schedule(rate, count, seed)
    ramped = schedule(rate, count, seed, ramp=ramp)
    duration = count / rate
    a, b = (2 * rate * value / sum(ramp) for value in ramp)
    cumulative = [a * t + (b - a) * t * t / (2 * duration) for t in ramped]
    assert cumulative == pytest.approx([rate * t for t in even], rel=1e-6, abs=1e-6 * count)


def test_poisson_arrivals_are_sorted_uniform_draws() -> None:
    """Given their number, so the Kolmogorov–Smirnov distance from uniform is that of 4000 draws (5% point: 0.0215)."""
    times = np.asarray(schedule(10.0, 4000, 3))
    grid = (np.arange(4000) + 0.5) / 4000
    assert np.abs(times / 400 - grid).max() < 0.0258  # the 1% point
    assert coefficient_of_variation(times.tolist()) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("cv", [0.3, 2.0])
def test_gamma_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps = gamma_gaps(4000, cv, "test")
    assert gaps.mean() == pytest.approx(1.0, abs=4 * cv / math.sqrt(4000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_constant_arrivals_are_even_and_begin_at_once() -> None:
    assert schedule(4.0, 5, 1, process="constant") == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert offered_rate((0.0, 0.25, 0.5)) == 4.0


def test_a_trace_keeps_its_shape_at_another_rate() -> None:
    times = (0.0, 1.0, 1.5, 4.0)
    offsets = schedule(10.0, 3, 0, process="trace", trace=times)
    gaps = trace_gaps(times, 4, 0)
    assert sorted(gaps[:3]) == [0.5, 1.0, 2.5]
    ratios = np.diff((0.0, *offsets)) / np.diff((0.0, *offsets)).max()
    assert any(np.allclose(ratios, np.roll(gaps[:3], k) / np.roll(gaps[:3], k).max()) for k in range(3))


def test_another_seed_gives_another_schedule() -> None:
    assert schedule(1.0, 5, 1) != schedule(1.0, 5, 2)
    assert uniforms(3, "a").tolist() != uniforms(3, "b").tolist()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0.0, 3, 1), {}, "rate must be positive"),
        ((1.0, -1, 1), {}, "must not be negative"),
        ((1.0, 3, 1), {"process": "gamma", "cv": 0.0}, "coefficient of variation must be positive"),
        ((1.0, 3, 1), {"process": "trace"}, "needs a trace"),
        ((1.0, 3, 1), {"process": "trace", "trace": [2.0, 1.0]}, "in order"),
        ((1.0, 3, 1), {"process": "trace", "trace": [2.0, 2.0]}, "not all at the same time"),
        ((1.0, 3, 1), {"ramp": (0.0, 0.0)}, "a ramp needs"),
    ],
)
def test_what_gives_no_schedule_is_refused(arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedule(*arguments, **options)


# Traces


@pytest.mark.parametrize(
    ("text", "kind", "times"),
    [
        ('{"timestamp": 1000, "input_length": 9}\n{"timestamp": 2500, "input_length": 7}\n', "mooncake", (0.0, 1.5)),
        ("Timestamp,Model,Request tokens\n5,ChatGPT,472\n45,ChatGPT,1087\n", "burstgpt", (0.0, 40.0)),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
            "2023-11-16 18:17:04.0319600,3180,8\n",
            "azure",
            (0.0, 0.052),
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
            "2024-05-10 00:00:01.017335+00:00,2399,6\n",
            "azure",
            (0.0, 1.007405),
        ),
        ("0.5\n\n3\n2\n", "plain", (0.0, 1.5, 2.5)),
    ],
)
def test_each_format_is_recognised_and_its_times_are_seconds(
    tmp_path: Path, text: str, kind: str, times: tuple[float, ...]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    trace = read_trace(path)
    assert trace.format == kind
    assert trace.times_s == pytest.approx(times, abs=1e-7)
    assert trace.rate == pytest.approx((len(times) - 1) / times[-1], rel=1e-4)
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(packed).sha256 == trace.sha256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no arrivals"),
        ("1.5\n", "at least two"),
        ("1\n1\n", "same time"),
        ("1\nx\n", "line 2: 'x' is not a number"),
        ("a,b\n1,2\n", "line 1: no column 'timestamp'"),
        ("Timestamp,b\n1,2\nlater,2\n", "line 3: 'later' is neither"),
        ('{"timestamp": 1}\n{"time": 2}\n', "line 2: 'timestamp'"),
        ('{"timestamp": 1}\n{', "line 2: not JSON"),
    ],
)
def test_a_file_that_is_no_trace_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(PromptError, match=words):
        read_trace(path)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="none: cannot be read"):
        read_trace(tmp_path / "none")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(list(range(999))).encode())[:40])
    with pytest.raises(PromptError, match="cut short"):
        read_trace(cut)


# Load figures


def _request(intended: int, send: int, end: int) -> RequestResult:
    return RequestResult("r", "p", 0, intended, send, None, end, 200, (), "", None, None, None, None, None)


_SECOND = 1_000_000_000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=12))
def test_streams_in_flight_match_a_count_at_every_moment(times: list[tuple[int, int, int]]) -> None:
    requests = [_request(a * _SECOND, (a + b) * _SECOND, (a + b + c) * _SECOND) for a, b, c in times]
    found = load_figures(requests)
    moments = [m + 0.5 for m in range(100)]
    counts = [sum(a + b < m < a + b + c for a, b, c in times) for m in moments]
    assert found.in_flight_max >= max(counts)
    if all(c for _, _, c in times):
        assert found.in_flight_max == max(counts)
    begin, end = min(a + b for a, b, _ in times), max(sum(t) for t in times)
    if end > begin:
        assert found.in_flight_mean == pytest.approx(sum(counts) / (end - begin))


def test_a_rate_that_falls_short_shows_against_the_one_offered() -> None:
    requests = [_request(i * _SECOND, 2 * i * _SECOND, (2 * i + 1) * _SECOND) for i in range(5)]
    found = load_figures(requests)
    assert (found.offered_per_s, found.sent_per_s) == (1.0, 0.5)
    assert found.completed_per_s == pytest.approx(5 / 9)
    window = open_window(requests)
    assert window is not None
    assert (window.start_ns, window.end_ns) == (round(0.8 * _SECOND), 4 * _SECOND)
    assert open_window(requests[:1]) is None
    assert load_figures([]).in_flight_max == 0
