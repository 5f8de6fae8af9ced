"""A client on several machines: who sends what, whose clock is how far off, and what is said when a worker dies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from run_helpers import campaign, execute

from breakeven.lab import runner
from breakeven.lab.analysis import analyse
from breakeven.lab.calibration import CalibrationError
from breakeven.lab.campaign import Client
from breakeven.lab.client import Endpoint, LoadClient, LoadResult, RawExchange, RequestSpec, WorkerError, ray_backend
from breakeven.lab.client.clocks import ClockMap, Offset, RoundTrip, estimate
from breakeven.lab.client.make import make_client
from breakeven.lab.client.partition import closed_shares, open_shares, place
from breakeven.lab.client.ray_backend import LoadActor, RayClient, reachable
from breakeven.lab.client.types import WorkerClock
from breakeven.lab.gates import node_clocks

# Who sends what


@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 40))
def test_every_request_and_stream_is_dealt_to_exactly_one_worker(requests: int, streams: int, workers: int) -> None:
    shares = closed_shares(requests, streams, workers)
    busy = min(requests, streams)
    assert sorted(i for share in shares for i in share.requests) == list(range(requests))
    assert sorted(s for share in shares for s in share.streams) == list(range(busy))
    assert len(shares) == min(workers, busy)
    for share in shares:
        assert 1 <= len(share.streams) <= len(share.requests)
        # As with one queue for all, stream s begins with request s.
        assert list(share.requests)[: len(share.streams)] == list(share.streams)
    for size in ([len(s.requests) for s in shares], [len(s.streams) for s in shares]):
        assert not size or max(size) - min(size) <= 1


@given(st.integers(0, 400), st.integers(1, 40))
def test_an_open_loops_requests_are_dealt_out_whole(requests: int, workers: int) -> None:
    shares = open_shares(requests, workers)
    assert sorted(i for share in shares for i in share) == list(range(requests))
    assert len(shares) == min(requests, workers)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.data())
def test_workers_are_spread_evenly_and_no_node_is_overfull(slots: list[int], data: st.DataObject) -> None:
    workers = data.draw(st.integers(0, sum(slots)))
    placed = place(workers, slots)
    used = [placed.count(node) for node in range(len(slots))]
    assert len(placed) == workers
    assert all(count <= slot for count, slot in zip(used, slots, strict=True))
    open_nodes = [count for count, slot in zip(used, slots, strict=True) if count < slot]
    assert not open_nodes or max(used) - min(open_nodes) <= 1


def test_too_many_workers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"5 workers need .* have 3 together"):
        place(5, [1, 2])
    with pytest.raises(ValueError, match="cannot be dealt out"):
        closed_shares(3, 0, 1)
    with pytest.raises(ValueError, match="cannot be dealt out"):
        open_shares(3, 0)


# Clocks

_NS = st.integers(0, 10**9)


@st.composite
def _trip(draw: st.DrawFn, offset: int, start: int) -> RoundTrip:
    """A round trip with the ways there and back as long as they please, seen by a clock that is `offset` ahead."""
    there, work, back = draw(_NS), draw(_NS), draw(_NS)
    heard = start + there + offset
    return RoundTrip(start, heard, heard + work, start + there + work + back)


@given(st.integers(-(10**15), 10**15), st.data())
def test_the_true_offset_is_within_the_bound_whatever_the_network_does(offset: int, data: st.DataObject) -> None:
    trips = data.draw(st.lists(_trip(offset, data.draw(_NS)), min_size=1, max_size=8))
    found = estimate(trips)
    assert abs(found.offset_ns - offset) <= found.bound_ns
    assert found.bound_ns <= min(trip.delay_ns for trip in trips) / 2 + 2  # the quickest one is kept


def test_ntps_own_example_of_a_symmetric_way_is_exact() -> None:
    found = estimate([RoundTrip(1_000, 6_500, 6_600, 2_100), RoundTrip(0, 9_999, 10_000, 90_000)])
    assert (found.offset_ns, found.bound_ns, found.at_ns) == (5_000, 501, 1_550)


def test_round_trips_in_which_time_ran_backwards_tell_nothing() -> None:
    with pytest.raises(ValueError, match="clock was set"):
        estimate([RoundTrip(100, 500, 600, 110)])


@given(
    st.integers(-(10**12), 10**12), st.integers(-(10**7), 10**7), st.integers(0, 10**6), st.integers(0, 10**6),
    st.floats(0, 1), st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6),
)  # fmt: skip
def test_a_time_is_mapped_within_the_bound_while_the_clock_drifts(
    offset: int, drift: int, bound_before: int, bound_after: int, share: float, off_before: int, off_after: int
) -> None:
    span = 10**10
    # The comparisons are off by no more than their bounds, and the true offset goes from one end to the other.
    before = Offset(0, offset + max(-bound_before, min(bound_before, off_before)), bound_before)
    after = Offset(span, offset + drift + max(-bound_after, min(bound_after, off_after)), bound_after)
    clock = ClockMap(before, after)
    ours = int(share * span)
    true_offset = offset + int(drift * share)
    theirs = ours + true_offset
    assert abs((theirs - clock.offset_at(theirs)) - ours) <= clock.bound_ns + 1


def _exchange(name: str, at: int) -> RawExchange:
    return RawExchange(name, "p", 0, at, at + 5, [(at + 20, 3), (at + 30, 6)], b"abcdef", at + 40)


def test_what_a_request_took_stays_as_its_own_clock_has_it() -> None:
    clock = ClockMap(Offset(0, 1_000, 10), Offset(1_000_000, 3_000, 20))
    theirs = LoadResult([_exchange("a", 1_000), _exchange("b", 502_000)], 1_000, 600_000, 0.5, "clock", (0.5,))
    ours = clock.result(theirs, 3, "node")
    assert [e.intended_send_ns for e in ours.exchanges] == [0, 499_998]  # offsets 1,000 and 2,002: the drift so far
    for mine, other in zip(ours.exchanges, theirs.exchanges, strict=True):
        assert mine.end_ns - mine.intended_send_ns == other.end_ns - other.intended_send_ns
        assert [t - mine.send_ns for t, _ in mine.reads] == [t - other.send_ns for t, _ in other.reads]
        assert (mine.data, mine.request_id) == (other.data, other.request_id)
    assert ours.end_ns >= max(e.end_ns for e in ours.exchanges)
    assert ours.clocks == (WorkerClock(3, "node", 0.001, 0.00202, 0.002),)
    assert ours.worker_cpu_s == (0.5,)


def test_a_clock_that_was_set_invalidates_a_cell_and_one_that_is_only_ill_known_does_not() -> None:
    steady = WorkerClock(0, "a", 3.0, 0.7, 0.1)
    jumped = WorkerClock(1, "b", 3.0, 250.7, 250.0)
    unsure = WorkerClock(2, "c", 3.0, 140.0, 60.0)  # known to within 80 ms at either end
    assert node_clocks([steady, unsure], 10.0) == ()
    (sentence,) = node_clocks([steady, jumped, jumped], 10.0)
    assert "clock of b moved by +250 ms" in sentence


# The campaign


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", "a b:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="is not HOST:PORT"):
        Client(backend="ray", address=address)


def test_an_address_is_for_ray_only_and_the_usual_forms_pass() -> None:
    with pytest.raises(ValidationError, match="set backend: ray"):
        Client(address="10.0.0.1:6379")
    assert [Client(backend="ray", address=a).address for a in ("10.0.0.1:6379", "[fd00::1]:6379")]


def test_without_ray_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(ray_backend.importlib, "import_module", missing)
    with pytest.raises(WorkerError, match=r"pip install 'breakeven\[ray\]'"):
        make_client(Client(backend="ray", workers=2))
    with pytest.raises(ValueError, match="workers must be at least 1"):
        RayClient(0)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:8000/v1/completions", "http://10.0.0.7:8000/v1/completions"),
        ("http://localhost:8000/v1", "http://10.0.0.7:8000/v1"),
        ("http://[::1]:8000/v1", "http://10.0.0.7:8000/v1"),
        ("http://0.0.0.0:8000/v1", "http://10.0.0.7:8000/v1"),
        ("https://api.example.com/v1", "https://api.example.com/v1"),
        ("http://10.0.0.9:8000/v1", "http://10.0.0.9:8000/v1"),
    ],
)
def test_other_machines_reach_a_loopback_server_by_this_ones_address(url: str, seen: str) -> None:
    assert reachable(Endpoint(url), "10.0.0.7").url == seen


def test_an_actor_runs_only_what_was_prepared() -> None:
    actor = LoadActor()
    with pytest.raises(RuntimeError, match="nothing was prepared"):
        actor.run(0, None)
    heard, answered = actor.clock()
    assert heard <= answered


class _FailsOnce:
    """A client whose worker dies in the second run of its first life; `clocks` are those of the cells it measures."""

    lives = 0

    def __init__(self, clocks: tuple[WorkerClock, ...] = ()) -> None:
        type(self).lives += 1
        self.workers = 2
        self.nodes = ("a", "b")
        self._inner = LoadClient(1)
        self._runs = 0
        self._clocks = clocks

    def closed_loop(
        self, endpoint: Endpoint, requests: Sequence[RequestSpec], concurrency: int, **options: Any
    ) -> LoadResult:
        self._runs += 1
        if type(self).lives == 1 and self._runs == 2:
            raise WorkerError("client actor 1 on b ended: its node died")
        return replace(self._inner.closed_loop(endpoint, requests, concurrency, **options), clocks=self._clocks)

    def open_loop(self, *arguments: Any, **options: Any) -> LoadResult:
        raise AssertionError("not an open loop")

    def close(self) -> None:
        self._inner.close()


def test_a_worker_that_dies_costs_its_cell_and_the_run_goes_on_and_can_measure_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _FailsOnce.lives = 0
    clocks = (WorkerClock(0, "a", 1.0, 0.5, 0.0), WorkerClock(1, "b", -4.0, 9.0, 0.0))
    monkeypatch.setattr(runner, "make_client", lambda config: _FailsOnce(clocks))
    given_campaign = campaign(blocks=1, client={"backend": "ray", "workers": 2, "calibration": "off"})
    run, outcome = execute(tmp_path / "run", given_campaign)
    ((cell, reasons),) = outcome.invalid.items()
    assert "client actor 1 on b ended: its node died" in reasons[0]
    assert outcome.measured == outcome.cells - 1
    assert _FailsOnce.lives == 2
    summary = analyse(run)
    (lint,) = [lint for lint in summary.lints if "clocks of the client's nodes" in lint.message]
    assert "within 9.0 ms only (limit: 5 ms" in lint.message
    assert cell not in lint.cells
    assert len(lint.cells) == outcome.measured

    run, outcome = execute(tmp_path / "run", given_campaign)  # resumed: only the cell that is left
    assert (outcome.invalid, outcome.measured) == ({}, outcome.cells)
    written = json.loads((run.cells_path / cell / "cell.json").read_text())
    assert "a" in json.dumps(written["extra"]["client"]["nodes"])


class _FailsInTheWarmUp(_FailsOnce):
    """A client whose first lives, `dies` of them, end in their first run."""

    dies = 0
    first_runs: tuple[str, ...] = ()

    def closed_loop(
        self, endpoint: Endpoint, requests: Sequence[RequestSpec], concurrency: int, **options: Any
    ) -> LoadResult:
        kind = type(self)
        if not self._runs:
            kind.first_runs = (*kind.first_runs, requests[0].request_id)
        self._runs += 1
        if kind.lives <= kind.dies:
            raise WorkerError("client actor 1 on b ended: its node died")
        return self._inner.closed_loop(endpoint, requests, concurrency, **options)


@pytest.mark.parametrize("dies", [1, 2])
def test_no_launch_is_measured_without_its_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: int) -> None:
    _FailsInTheWarmUp.lives, _FailsInTheWarmUp.dies, _FailsInTheWarmUp.first_runs = 0, dies, ()
    monkeypatch.setattr(runner, "make_client", lambda config: _FailsInTheWarmUp())
    _, outcome = execute(tmp_path / "run", campaign(blocks=1, client={"calibration": "off"}))
    assert _FailsInTheWarmUp.first_runs == ("warmup-0",) * (dies + 1)
    if dies == 1:
        assert (outcome.invalid, outcome.measured) == ({}, outcome.cells)
    else:
        (message,) = outcome.start_failures
        assert "the warm-up was broken off twice: the load generator failed: client actor 1 on b ended" in message
        assert outcome.measured == outcome.cells // 2 == len(outcome.invalid)


def test_workers_that_died_in_the_calibration_are_replaced_before_the_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(client: LoadClient) -> None:
        raise CalibrationError("the client could not be calibrated: client process 1 ended")

    _FailsOnce.lives = 0
    monkeypatch.setattr(runner, "make_client", lambda config: _FailsOnce())
    monkeypatch.setattr(runner, "quick", broken)
    run, outcome = execute(tmp_path / "run", campaign(blocks=1, levels=[1], client={"calibration": "quick"}))
    assert (outcome.invalid, _FailsOnce.lives) == ({}, 2)
    assert {record.extra["client"]["note"] for record in run.read_cells()} == {
        "the client could not be calibrated: client process 1 ended"
    }


def test_a_client_that_cannot_be_had_again_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _FailsOnce.lives = 0

    def once(config: Client) -> _FailsOnce:
        if _FailsOnce.lives:
            raise WorkerError("the Ray cluster is too small")
        return _FailsOnce()

    monkeypatch.setattr(runner, "make_client", once)
    with pytest.raises(ValueError, match="could not be started: the Ray cluster is too small"):
        execute(tmp_path / "run", campaign(blocks=1, client={"backend": "ray", "calibration": "off"}))
