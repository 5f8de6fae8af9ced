"""The client's workers as actors of a real Ray cluster: several nodes, which here share one machine.

pip install -c constraints.txt -e '.[ray]'
python -m pytest -m "slow and engines" tests/lab/test_ray_client.py
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_helpers import campaign, execute, mock_arm
from test_load_client import QUICK, endpoint, errors, mock, specs

from breakeven.lab.analysis import analyse
from breakeven.lab.client import LoadClient, LoadResult, WorkerError
from breakeven.lab.client.generator import STREAM_SPACING_NS
from breakeven.lab.client.partition import closed_shares
from breakeven.lab.client.ray_backend import RayClient
from breakeven.lab.mock import MockScript

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'breakeven[ray]'"),
]
NODES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes with two cores each, by their own account."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(NODES - 1):
        found.add_node(**{name: value for name, value in node.items() if name != "include_dashboard"})
    yield found
    found.shutdown()


@pytest.fixture
def three(cluster: Any) -> Iterator[RayClient]:
    with RayClient(3, cluster.address) as client:
        yield client


def by_stream(result: LoadResult) -> dict[int, int]:
    return dict(Counter(e.stream for e in result.exchanges))


def test_each_node_has_a_worker_and_the_result_is_of_the_form_of_a_local_one(three: RayClient) -> None:
    assert len(set(three.nodes)) == NODES
    reports: list[tuple[int, int]] = []
    with mock(QUICK) as server, LoadClient(3) as local_client:
        found = three.closed_loop(
            endpoint(server), specs(60), 7, on_progress=lambda done, failed: reports.append((done, failed))
        )
        local = local_client.closed_loop(endpoint(server), specs(60), 7)
    assert errors(found) == errors(local) == {None}
    assert sorted(e.request_id for e in found.exchanges) == sorted(e.request_id for e in local.exchanges)
    assert set(by_stream(found)) == set(by_stream(local)) == set(range(7))
    assert len(found.worker_cpu_s) == len(local.worker_cpu_s) == 3
    assert set(asdict(found)) == set(asdict(local))
    assert reports[-1] == (60, 0)
    assert found.clock.startswith(local.clock)
    # One clock after the mapping: what was planned for every stream is seen, to within what is known of the clocks.
    known_ns = 1e6 * max(clock.bound_ms for clock in found.clocks)
    first = {e.stream: e.intended_send_ns for e in sorted(found.exchanges, key=lambda e: -e.intended_send_ns)}
    for stream in range(7):
        assert abs(first[stream] - found.start_ns - stream * STREAM_SPACING_NS) <= 2 * known_ns
        own = sorted((e for e in found.exchanges if e.stream == stream), key=lambda e: e.send_ns)
        assert all(abs(b.intended_send_ns - a.end_ns) <= 2 * known_ns for a, b in itertools.pairwise(own))


def test_clocks_of_one_machine_agree_within_the_bound(three: RayClient) -> None:
    with mock(QUICK) as server:
        result = three.closed_loop(endpoint(server), specs(6), 3)
    assert [clock.worker for clock in result.clocks] == [0, 1, 2]
    assert {clock.node for clock in result.clocks} == set(three.nodes)
    for clock in result.clocks:  # it is the same clock, so the truth is zero
        assert abs(clock.offset_ms) <= clock.bound_ms
        assert clock.bound_ms > 0


def test_an_open_loop_keeps_its_schedule(three: RayClient) -> None:
    offsets = [i * 0.01 for i in range(30)]
    with mock(QUICK) as server:
        result = three.open_loop(endpoint(server), specs(offsets), connections=6)
    assert errors(result) == {None}
    known_ns = 1e6 * max(clock.bound_ms for clock in result.clocks)
    for exchange in result.exchanges:
        planned = offsets[int(exchange.request_id[1:])] * 1e9
        assert abs(exchange.intended_send_ns - result.start_ns - planned) <= 2 * known_ns + 1
    busy: dict[int, int] = {}
    for exchange in sorted(result.exchanges, key=lambda e: e.send_ns):
        assert busy.get(exchange.stream, 0) <= exchange.send_ns + 2 * known_ns
        busy[exchange.stream] = exchange.end_ns


def test_a_run_can_be_stopped_and_bad_arguments_are_told_apart(three: RayClient) -> None:
    with mock(MockScript(first_chunk_s=0.05, chunks=1)) as server:
        result = three.closed_loop(endpoint(server), specs(3000), 3, should_stop=lambda: True)
        assert 3 <= len(result.exchanges) < 1500
        assert errors(result) == {None}
        with pytest.raises(ValueError, match="has a planned send time"):
            three.closed_loop(endpoint(server), specs([0.0]), 1)
        assert errors(three.closed_loop(endpoint(server), specs(3), 3)) == {None}


@pytest.mark.parametrize("workers", [2, 4])
def test_the_deal_is_the_plans_and_does_not_know_the_nodes(cluster: Any, workers: int) -> None:
    """Four workers are two on some node, two are on two nodes: what each sends is what the pure deal says."""
    dealt: dict[int, set[str]] = {}
    with mock(QUICK) as server, RayClient(workers, cluster.address) as client:
        found = client.closed_loop(endpoint(server), specs(24), 6)
        for number, share in enumerate(closed_shares(24, 6, workers)):
            dealt[number] = {e.request_id for e in found.exchanges if e.stream in share.streams}
            assert dealt[number] == {f"r{i}" for i in share.requests}
        assert len(set(client.nodes)) == min(workers, NODES)


def test_more_workers_than_cores_are_refused(cluster: Any) -> None:
    with pytest.raises(WorkerError, match="too small: 7 workers need a processor core each, and the nodes have 6"):
        RayClient(7, cluster.address)


def test_no_cluster_is_said_with_what_to_do() -> None:
    with pytest.raises(WorkerError, match=r"no Ray cluster was reached at 127.0.0.1:9 .*ray start"):
        RayClient(1, "127.0.0.1:9")


def _kill_an_actor_soon(seconds: float) -> threading.Timer:
    def kill() -> None:
        for process in psutil.process_iter(["cmdline"]):
            if "ray::LoadActor" in " ".join(process.info["cmdline"] or []):
                process.send_signal(signal.SIGKILL)
                return

    timer = threading.Timer(seconds, kill)
    timer.start()
    return timer


def test_an_actor_that_dies_ends_the_run_with_its_name_and_leaves_no_other(cluster: Any) -> None:
    client = RayClient(3, cluster.address)
    with mock(MockScript(first_chunk_s=0.2, gap_s=0.1, chunks=100)) as server:
        timer = _kill_an_actor_soon(2.0)
        with pytest.raises(WorkerError, match=r"client actor \d on .* ended: "):
            client.closed_loop(endpoint(server), specs(9), 9)
        timer.join()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _actors_left():
        time.sleep(0.2)
    assert _actors_left() == 0
    with pytest.raises(WorkerError, match="make a new client"):
        client.closed_loop(endpoint(server), specs(9), 9)


def _actors_left() -> int:
    return sum("ray::LoadActor" in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def test_a_campaign_runs_over_the_nodes_and_an_actors_death_costs_one_cell(cluster: Any, tmp_path: Path) -> None:
    slow = {"first_chunk_s": 0.01, "gap_s": 0.05, "chunks": 30}
    given = campaign(
        {"off": mock_arm(slow), "on": mock_arm(slow)},
        blocks=1,
        levels=[3],
        client={"backend": "ray", "workers": 3, "address": cluster.address, "calibration": "quick"},
    )
    timers: list[threading.Timer] = []

    def on_event(event: Any) -> None:
        if type(event).__name__ == "CellBegan" and not timers:
            timers.append(_kill_an_actor_soon(0.8))

    run, outcome = execute(tmp_path / "run", given, on_event)
    timers[0].join()
    ((_, reasons),) = outcome.invalid.items()
    assert "not measured: the load generator failed: client actor" in reasons[0]
    assert (outcome.cells, outcome.measured) == (2, 1)
    run, outcome = execute(tmp_path / "run", given)
    assert (outcome.invalid, outcome.measured) == ({}, 2)
    for record in run.read_cells():
        assert len(set(record.extra["client"]["nodes"])) == NODES
        assert len(record.extra["client"]["clocks"]) == 3
        assert record.extra["client"]["backend"] == "ray"
    assert analyse(run).cells
    assert {event["event"] for event in run.read_journal()} >= {"client_started", "client_failed", "client_calibrated"}
