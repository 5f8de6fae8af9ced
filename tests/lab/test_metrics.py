"""Each quantity by its definition, from events whose truth is known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.client.types import Chunk, RequestResult
from breakeven.lab.metrics import Provenance, agreement, cell_metrics, is_looping, request_metrics
from breakeven.lab.window import Window, steady_window, tokens_within, uses_steady_window, whole_window

MS = 1_000_000


def request(
    chunks: Sequence[tuple[float, int | None]],
    *,
    intended: float = 0,
    send: float | None = None,
    end: float | None = None,
    tokens: int | str | None = "sum",
    stream: int = 0,
    **others: Any,
) -> RequestResult:
    """Times in ms; `chunks`: (arrival, tokens)."""
    total = sum(n or 0 for _, n in chunks) if tokens == "sum" else tokens
    last = chunks[-1][0] if chunks else intended
    values: dict[str, Any] = {
        "request_id": "r",
        "prompt_id": "p",
        "stream": stream,
        "intended_send_ns": int(intended * MS),
        "send_ns": int((intended if send is None else send) * MS),
        "first_byte_ns": None,
        "end_ns": int((last if end is None else end) * MS),
        "http_status": 200,
        "chunks": tuple(Chunk(int(at * MS), n, 4) for at, n in chunks),
        "text": "some text",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": total,
        "cached_tokens": 0,
        "error": None,
    }
    return RequestResult(**(values | others))


def cell(requests: Sequence[RequestResult], level: int = 1, counters: Mapping[str, float] | None = None, **more: Any):
    end = max((r.end_ns for r in requests), default=MS)
    return cell_metrics(requests, counters or {}, 0, end, level, **more)


# --- one request


def test_times_count_from_the_intended_send_and_the_lag_is_apart() -> None:
    m = request_metrics(request([(150, 1), (200, 1)], intended=100, send=130, end=210))
    assert (m.ttft_ms, m.latency_ms, m.send_lag_ms) == (50, 110, 30)


def test_tpot_divides_by_the_tokens_after_the_first_chunk() -> None:
    m = request_metrics(request([(100, 3), (160, 4), (220, 2)]))
    assert m.tpot_ms == pytest.approx(120 / 6)
    assert m.tpot_provenance is Provenance.DERIVED
    assert list(m.inter_chunk_ms) == [60, 60]
    assert m.token_gap_ms is not None
    assert list(m.token_gap_ms) == [15] * 4 + [30] * 2


def test_without_counts_per_chunk_tpot_is_estimated_and_the_token_gap_unavailable() -> None:
    m = request_metrics(request([(100, None), (200, None)], tokens=5))
    assert m.tpot_ms == 25
    assert m.tpot_provenance is Provenance.ESTIMATED
    assert m.token_gap_ms is None
    whole = cell([request([(100, None), (200, None)], tokens=5)])
    assert whole.token_gap.mean.value is None
    assert "unavailable" in whole.token_gap.mean.note
    assert whole.tpot.mean.provenance is Provenance.ESTIMATED


@pytest.mark.parametrize("r", [request([(100, 5)]), request([]), request([(1, 2), (2, 0)])])
def test_tpot_is_undefined_without_tokens_after_the_first_chunk(r: RequestResult) -> None:
    assert request_metrics(r).tpot_ms is None


def test_a_chunk_without_a_token_lends_its_gap_to_the_next() -> None:
    m = request_metrics(request([(0, 1), (10, 0), (30, 2)]))
    assert m.token_gap_ms is not None
    assert list(m.token_gap_ms) == [15, 15]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 6)), min_size=2, max_size=30))
def test_token_gaps_and_tpot_account_for_the_same_time(steps: list[tuple[int, int]]) -> None:
    at, chunks = 0, []
    for gap, tokens in steps:
        at += gap
        chunks.append((at, tokens))
    chunks.append((at + 7, 1))
    m = request_metrics(request(chunks))
    assert m.token_gap_ms is not None
    assert m.tpot_ms is not None
    assert float(m.token_gap_ms.sum()) == pytest.approx(chunks[-1][0] - chunks[0][0])
    assert m.tpot_ms == pytest.approx(float(m.token_gap_ms.mean()))


# --- windows and throughput


def test_tokens_at_the_edges_of_a_window_are_interpolated_between_arrivals() -> None:
    r = request([(100, 1), (200, 4)], end=300, tokens=6)  # one token (EOS) without a chunk
    assert tokens_within(r, Window("steady", 0, 300 * MS)) == pytest.approx(6)
    assert tokens_within(r, Window("steady", 150 * MS, 200 * MS)) == pytest.approx(2)
    assert tokens_within(r, Window("steady", 250 * MS, 900 * MS)) == pytest.approx(0.5)
    assert tokens_within(r, Window("steady", 400 * MS, 900 * MS)) == 0


@given(
    st.lists(st.tuples(st.integers(1, 50), st.one_of(st.none(), st.integers(0, 5))), max_size=12),
    st.integers(0, 60),
    st.lists(st.integers(-50, 900), min_size=2, max_size=6, unique=True),
)
def test_adjacent_windows_add_up_to_the_whole_and_none_is_negative(
    steps: list[tuple[int, int | None]], total: int, cuts: list[int]
) -> None:
    at, chunks = 0, []
    for gap, tokens in steps:
        at += gap
        chunks.append((at, tokens))
    r = request(chunks, end=at + 5, tokens=total)
    edges = sorted({-100, 1000, *cuts})
    parts = [tokens_within(r, Window("steady", a * MS, b * MS)) for a, b in itertools.pairwise(edges)]
    assert sum(parts) == pytest.approx(total)
    assert min(parts) >= -1e-9


def test_the_steady_window_runs_from_all_streams_busy_to_the_first_idle_one() -> None:
    requests = [
        request([(50, 1), (100, 9)], stream=0),
        request([(60, 1), (200, 19)], stream=1, send=20),
        request([(150, 1), (300, 9)], intended=100, stream=0),
    ]
    assert whole_window(requests) == Window("whole", 0, 300 * MS)
    assert steady_window(requests, 2) == Window("steady", 20 * MS, 200 * MS)
    assert steady_window(requests, 3) is None  # a stream never had a request


@pytest.mark.parametrize(
    ("requests", "level", "steady"), [(4, 1, True), (40, 10, True), (20, 10, True), (19, 10, False)]
)
def test_the_window_is_chosen_by_the_plans_numbers_alone(requests: int, level: int, steady: bool) -> None:
    assert uses_steady_window(requests, level) is steady


def test_constant_streams_give_their_true_rate_in_the_steady_window_in_spite_of_the_drain() -> None:
    """Two streams of 1 token per 10 ms; the second works 500 ms longer: the whole window is diluted, the other not."""
    steady_stream = [[(i * 10.0, 1) for i in range(1, 51)], [(500 + i * 10.0, 1) for i in range(1, 51)]]
    long_stream = [[(i * 10.0, 1) for i in range(1, 51)], [(500 + i * 10.0, 1) for i in range(1, 101)]]
    requests = [
        request(chunks, intended=500 * k, stream=stream)
        for stream, both in enumerate((steady_stream, long_stream))
        for k, chunks in enumerate(both)
    ]
    m = cell(requests, level=2)
    assert m.throughput_window == "steady"
    assert m.throughput_tok_s.value == pytest.approx(200)
    assert m.throughput_whole_tok_s.value == pytest.approx(250 / 1.5)
    assert m.steady_share.value == pytest.approx(200 / 250)


def test_at_one_stream_both_windows_are_the_same() -> None:
    m = cell([request([(10, 1), (90, 7)]), request([(110, 1), (200, 7)], intended=90)])
    assert m.throughput_steady_tok_s.value == pytest.approx(m.throughput_whole_tok_s.value)
    assert m.throughput_tok_s.value == pytest.approx(16 / 0.2)


def test_failed_requests_count_in_time_but_not_in_tokens() -> None:
    m = cell([request([(100, 10)]), request([(300, 5)], intended=100, error="connection reset")])
    assert m.throughput_whole_tok_s.value == pytest.approx(10 / 0.3)
    assert (m.requests, m.failed, m.uncounted) == (2, 1, 0)
    assert any("1 of 2 requests failed" in note for note in m.notes)


def test_a_request_without_usage_takes_the_throughput_away_and_says_why() -> None:
    m = cell([request([(100, 10)]), request([(200, 5)], intended=100, tokens=None)])
    assert m.throughput_tok_s.value is None
    assert "token count" in m.throughput_tok_s.note
    assert m.uncounted == 1


def test_an_empty_cell_has_no_figures_and_no_traceback() -> None:
    m = cell([], level=4)
    assert m.throughput_tok_s.value is None
    assert m.ttft.mean.value is None
    assert m.looping_share.value is None


def test_a_stepped_clock_is_noted() -> None:
    assert any("backwards" in note for note in cell([request([(100, 1), (50, 1)], end=120)]).notes)


def test_the_share_of_cached_prompt_tokens_is_over_tokens_not_requests() -> None:
    m = cell([request([(1, 1)], cached_tokens=10), request([(2, 1)], prompt_tokens=30)])
    assert m.cached_share.value == pytest.approx(10 / 40)
    assert cell([request([(1, 1)], cached_tokens=None)]).cached_share.value is None


# --- acceptance

COUNTERS = {
    "num_drafts": 10,
    "num_draft_tokens": 30,
    "num_accepted_tokens": 15,
    "accepted_pos_0": 8,
    "accepted_pos_1": 5,
    "accepted_pos_2": 2,
}


def test_acceptance_length_is_one_plus_accepted_over_drafts() -> None:
    m = cell([request([(1, 26)])], counters=COUNTERS)
    assert m.acceptance_length.value == pytest.approx(2.5)
    assert [q.value for q in m.acceptance_per_position] == [0.8, 0.5, 0.2]
    assert m.acceptance.draft_share.value == pytest.approx(0.5)
    assert m.acceptance.valid
    assert m.notes == ()


def test_tokens_counted_behind_eos_are_noticed() -> None:
    m = cell([request([(1, 20)])], counters=COUNTERS)
    assert any("over-counted" in note for note in m.notes)


def test_a_last_round_that_was_cut_at_the_longest_answer_is_not_counted_as_behind_eos() -> None:
    """A round of three drafts may bring two tokens more than fit, and three at most."""
    cut = request([(1, 23)], finish_reason="length")
    assert not any("over-counted" in note for note in cell([cut], counters=COUNTERS).notes)
    short = request([(1, 20)], finish_reason="length")
    assert any("over-counted" in note for note in cell([short], counters=COUNTERS).notes)


def test_acceptance_is_not_valid_with_eos_ignored_or_in_loops() -> None:
    assert not cell([request([(1, 26)])], counters=COUNTERS, natural=False).acceptance.valid
    assert not cell([request([(1, 26)], text="again and " * 100)], counters=COUNTERS).acceptance.valid


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_accepted_tokens": 31}, "cannot be"),
        ({"num_drafts": -1}, "reset"),
        ({"accepted_pos_1": 9}, "deeper"),
        ({"accepted_pos_0": 11}, "position"),
        ({"num_draft_tokens": 9, "num_accepted_tokens": 9}, "cannot be"),
    ],
)
def test_impossible_counters_give_no_acceptance(change: dict[str, float], word: str) -> None:
    m = cell([request([(1, 40)])], counters=COUNTERS | change)
    assert m.acceptance_length.value is None
    assert word in m.acceptance_length.note
    assert not m.acceptance.valid


def test_the_requests_own_counters_are_used_and_compared() -> None:
    own = {"num_drafts": 4, "num_accepted_tokens": 4, "num_draft_tokens": 12, "num_steps": 6}
    m = cell([request([(1, 12)], speculation=own)])
    assert m.acceptance_length.value == 2
    assert m.acceptance.tokens_per_step.value == 2
    m = cell([request([(1, 40)], speculation=own)], counters=COUNTERS)
    assert any("own" in note for note in m.notes)


def test_no_drafts_give_no_acceptance_and_no_complaint() -> None:
    m = cell([request([(1, 5)])])
    assert m.acceptance_length.value is None
    assert m.notes == ()


# --- texts


@pytest.mark.parametrize(
    "text",
    [
        "The answer is: " + "I do not know. " * 12,
        "x = 1\n" + "=" * 130,
        "Start. " + "".join(f"Item {i}: the same thing over and over again.\n" for i in range(60)),
    ],
)
def test_repetition_is_recognised(text: str) -> None:
    assert is_looping(text)


@pytest.mark.parametrize(
    "text", ["", "a", "no no no", "=" * 60, __doc__ or "", Path(__file__).read_text(encoding="utf-8")]
)
def test_ordinary_text_and_code_do_not_loop(text: str) -> None:
    assert not is_looping(text)


@given(st.text(min_size=1, max_size=30), st.text(max_size=300), st.integers(1, 29))
def test_a_tail_of_repeated_units_is_always_found(unit: str, head: str, cut: int) -> None:
    assert is_looping(head + unit * (120 // len(unit) + 4) + unit[:cut])


@given(st.lists(st.tuples(st.text("ab", max_size=6), st.text("ab", max_size=6)), max_size=12))
def test_agreement_follows_its_definition(pairs: list[tuple[str, str]]) -> None:
    found = agreement([a for a, _ in pairs], [b for _, b in pairs])
    assert found.identical == sum(a == b for a, b in pairs)
    assert found.length_mismatches == sum(len(a) != len(b) for a, b in pairs)
    starts = sorted(
        max(k for k in range(7) if a[:k] == b[:k] and k <= len(a) and k <= len(b)) for a, b in pairs if a != b
    )
    if starts:
        middle = len(starts) // 2
        median = starts[middle] if len(starts) % 2 else (starts[middle - 1] + starts[middle]) / 2
        assert found.first_divergence_median == median
    else:
        assert found.first_divergence_median is None


def test_agreement_counts_tokens_where_given_and_refuses_unpaired_texts() -> None:
    found = agreement(["abc", "abd"], ["abc", "abe"], [3, 3], [3, 4])
    assert (found.identical_share, found.token_mismatches, found.common_prefix_share) == (0.5, 1, 5 / 6)
    with pytest.raises(ValueError, match="paired"):
        agreement(["a"], [])
