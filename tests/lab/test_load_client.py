"""Open loop, and the load generator over several processes: the schedule is kept, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import campaign, execute
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab import calibration
from breakeven.lab.analysis import analyse
from breakeven.lab.calibration import CalibrationError, Step, calibrate, read_capacity
from breakeven.lab.campaign_file import load_campaign
from breakeven.lab.client import (
    Endpoint,
    LoadClient,
    LoadResult,
    RawExchange,
    RequestSpec,
    WorkerError,
    parse_exchange,
    run_open_loop,
)
from breakeven.lab.client.generator import STREAM_SPACING_NS
from breakeven.lab.client.workers import merge
from breakeven.lab.load import busiest_second
from breakeven.lab.mock import MockScript, MockServer
from breakeven.lab.plan import build_schedule, load_suites

QUICK = MockScript(first_chunk_s=0.01, gap_s=0.002, chunks=4, tokens_per_chunk=(1, 3), bytes_per_chunk=0)


@contextmanager
def mock(script: MockScript) -> Iterator[MockServer]:
    server = MockServer(script)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)
        assert not thread.is_alive()


def endpoint(server: MockServer) -> Endpoint:
    return Endpoint(f"{server.url}/v1/completions")


def specs(offsets: list[float] | int) -> list[RequestSpec]:
    planned: list[float | None] = [None] * offsets if isinstance(offsets, int) else list(offsets)
    options = {"include_usage": True, "continuous_usage_stats": True}
    bodies = [
        json.dumps({"prompt": "x", "stream": True, "stream_options": options, "user": f"r{i}"}).encode()
        for i in range(len(planned))
    ]
    return [RequestSpec(f"r{i}", f"p{i}", body, at) for i, (body, at) in enumerate(zip(bodies, planned, strict=True))]


def errors(result: LoadResult) -> set[str | None]:
    return {parse_exchange(exchange).error for exchange in result.exchanges}


# Open loop


def test_each_request_has_its_own_moment_on_an_absolute_schedule() -> None:
    offsets = [0.0, 0.05, 0.01, 0.05, 0.12]
    with mock(QUICK) as server:
        result = run_open_loop(endpoint(server), specs(offsets))
    assert errors(result) == {None}
    intended = {e.request_id: e.intended_send_ns - result.start_ns for e in result.exchanges}
    assert intended == {f"r{i}": round(at * 1e9) for i, at in enumerate(offsets)}
    assert all(e.send_ns >= e.intended_send_ns for e in result.exchanges)


def test_a_slow_server_does_not_thin_out_the_load() -> None:
    """Every request is sent before the first one is answered: an open loop does not wait for anybody."""
    with mock(MockScript(first_chunk_s=0.5, chunks=1)) as server:
        result = run_open_loop(endpoint(server), specs([i * 0.005 for i in range(20)]), connections=3)
    assert errors(result) == {None}
    assert max(e.send_ns for e in result.exchanges) < min(e.end_ns for e in result.exchanges)
    assert len({e.stream for e in result.exchanges}) == 20


def test_a_connection_that_is_free_again_is_used_again() -> None:
    with mock(MockScript(first_chunk_s=0.001, gap_s=0.0, chunks=1)) as server:
        result = run_open_loop(endpoint(server), specs([i * 0.1 for i in range(4)]), connections=1)
    assert errors(result) == {None}
    assert {e.stream for e in result.exchanges} == {0}


def test_after_the_deadline_nothing_is_sent_and_what_is_in_flight_is_awaited() -> None:
    with mock(MockScript(first_chunk_s=0.3, chunks=1)) as server:
        result = run_open_loop(endpoint(server), specs([0.0, 0.01, 5.0]), deadline_s=0.15)
    assert sorted(e.request_id for e in result.exchanges) == ["r0", "r1"]
    assert errors(result) == {None}
    assert result.end_ns - result.start_ns < 4e9


@pytest.mark.parametrize("offsets", [1, [-0.1], [float("inf")]])
def test_a_request_without_a_possible_moment_is_refused(offsets: list[float] | int) -> None:
    with pytest.raises(ValueError, match="no planned send time"):
        run_open_loop(Endpoint("http://127.0.0.1:9/v1/completions"), specs(offsets))


def test_a_refused_connection_fails_its_request_and_not_the_run() -> None:
    result = run_open_loop(Endpoint("http://127.0.0.1:9/v1/completions"), specs([0.0, 0.01]))
    assert len(result.exchanges) == 2
    assert all("connection refused" in str(e.error) for e in result.exchanges)


# Workers


@pytest.fixture(scope="module")
def pair() -> Iterator[LoadClient]:
    with LoadClient(2) as client:
        yield client


def test_two_processes_share_one_queue_and_every_stream_has_its_number(pair: LoadClient) -> None:
    reports: list[tuple[int, int]] = []
    with mock(QUICK) as server:
        result = pair.closed_loop(
            endpoint(server), specs(40), 5, on_progress=lambda done, failed: reports.append((done, failed))
        )
    assert errors(result) == {None}
    assert Counter(e.request_id for e in result.exchanges) == Counter(f"r{i}" for i in range(40))
    assert {e.stream for e in result.exchanges} == set(range(5))
    first = {e.stream: e for e in sorted(result.exchanges, key=lambda e: -e.intended_send_ns)}
    assert {s: e.intended_send_ns - result.start_ns for s, e in first.items()} == {
        s: s * STREAM_SPACING_NS for s in range(5)
    }
    for stream in range(5):  # one request at a time, each intended when the last one ended
        own = sorted((e for e in result.exchanges if e.stream == stream), key=lambda e: e.send_ns)
        assert [e.intended_send_ns for e in own[1:]] == [e.end_ns for e in own[:-1]]
    assert len(result.worker_cpu_s) == 2
    assert result.client_cpu_s == pytest.approx(sum(result.worker_cpu_s))
    assert reports[-1] == (40, 0)


def test_two_processes_keep_one_schedule(pair: LoadClient) -> None:
    offsets = [i * 0.003 for i in range(15)]
    with mock(QUICK) as server:
        result = pair.open_loop(endpoint(server), specs(offsets), connections=4)
    assert errors(result) == {None}
    intended = {e.request_id: e.intended_send_ns - result.start_ns for e in result.exchanges}
    assert intended == {f"r{i}": round(at * 1e9) for i, at in enumerate(offsets)}
    busy: dict[int, int] = {}
    for exchange in sorted(result.exchanges, key=lambda e: e.send_ns):  # no slot has two requests at a time
        assert busy.get(exchange.stream, 0) <= exchange.send_ns
        busy[exchange.stream] = exchange.end_ns


def test_a_run_over_processes_can_be_stopped(pair: LoadClient) -> None:
    with mock(MockScript(first_chunk_s=0.05, chunks=1)) as server:
        result = pair.closed_loop(endpoint(server), specs(1000), 2, should_stop=lambda: True)
    assert 2 <= len(result.exchanges) < 200
    assert errors(result) == {None}


def test_arguments_that_cannot_be_right_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1"):
        LoadClient(0)
    with LoadClient(2) as client, pytest.raises(ValueError, match="must begin with http"):
        client.closed_loop(Endpoint("ftp://x"), specs(4), 2)


def test_a_worker_that_ends_is_named() -> None:
    client = LoadClient(2)
    os.kill(client._processes[1].pid, 9)
    with mock(QUICK) as server, pytest.raises(WorkerError, match="client process 1 ended"):
        client.closed_loop(endpoint(server), specs(8), 4)
    client.close()
    client.close()


def _result(ends: list[int], cpu: float) -> LoadResult:
    exchanges = [RawExchange(f"r{e}", "p", 0, 0, 1, [], b"", e) for e in ends]
    return LoadResult(exchanges, min(ends), max(ends), cpu, "clock", (cpu,))


def test_merging_joins_and_loses_nothing() -> None:
    merged = merge([_result([5, 9], 0.25), _result([3, 7], 0.5)])
    assert [e.end_ns for e in merged.exchanges] == [3, 5, 7, 9]
    assert (merged.start_ns, merged.end_ns, merged.client_cpu_s) == (3, 9, 0.75)
    assert merged.worker_cpu_s == (0.25, 0.5)
    assert merged.clock == "clock"
    with pytest.raises(ValueError, match="no results"):
        merge([])


# A campaign's cells


def test_an_open_loop_campaign_keeps_its_schedule_and_records_its_load(tmp_path: Path) -> None:
    given = campaign(
        blocks=1,
        levels=[20, 40],
        arrivals={"process": "gamma", "cv": 2.0, "duration_s": 0.4},
        client={"workers": 2, "calibration": "quick"},
    )
    run, outcome = execute(tmp_path / "run", given)
    assert outcome.invalid == {}
    records = {record.key: record for record in run.read_cells()}
    assert {key.level: len(record.requests) for key, record in records.items()} == {20: 8, 40: 16}
    for key, record in records.items():
        load, client = record.extra["load"], record.extra["client"]
        planned = [r.intended_send_ns - record.started_ns for r in record.requests]
        assert planned == sorted(planned)
        assert max(planned) < 0.4e9
        other = records[replace(key, arm="off" if key.arm == "on" else "on")]  # the same schedule for every arm
        assert planned == [r.intended_send_ns - other.started_ns for r in other.requests]
        assert load["events"] == sum(len(r.chunks) for r in record.requests)
        assert load["in_flight_max"] >= 1
        assert client["headroom"] == pytest.approx(client["capacity_per_s"] / client["events_per_s"])
        assert client["workers"] == 2
    (calibrated,) = [e for e in run.read_journal() if e["event"] == "client_calibrated"]
    assert calibrated["method"] == "cpu"
    assert calibrated["parse_us_per_event"] > 0
    summary = analyse(run)
    assert all(cell.metrics["client_headroom"].value for cell in summary.cells)
    assert all(cell.metrics["throughput"].value for cell in summary.cells)
    assert any("open loop, gamma arrivals" in lint.message for lint in summary.lints)


def test_a_schedule_of_arrivals_is_a_part_of_what_is_resumed() -> None:
    def sha(**arrivals: Any) -> str:
        given = campaign(arrivals=arrivals)
        return build_schedule(given, load_suites(given)).sha256

    assert sha(process="poisson", duration_s=1.0) == sha(process="poisson", duration_s=1.0)
    assert len({sha(), sha(process="poisson", duration_s=1.0), sha(process="constant", duration_s=1.0)}) == 3


def test_a_recorded_trace_drives_a_cell_and_paths_count_from_the_campaign_file(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("Timestamp,Model\n0,m\n1,m\n1.5,m\n9,m\n")
    given = campaign(arrivals={"process": "trace", "trace": "trace.csv", "duration_s": 2.0})
    path = tmp_path / "c.yaml"
    path.write_text(given.model_dump_json())
    loaded = load_campaign(path).campaign
    assert loaded.arrivals.trace == str(tmp_path / "trace.csv")
    cells = list(build_schedule(loaded, load_suites(loaded)).cells())
    assert all(cell.offsets is not None and len(cell.offsets) == len(cell.prompt_ids) for cell in cells)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arrivals": {"process": "trace"}}, "belong together"),
        ({"arrivals": {"cv": 3.0}}, "cv means nothing in closed loop"),
        ({"arrivals": {"process": "poisson", "ramp": [-1.0, 2.0]}}, "a ramp is two"),
        ({"workload": {"files": [{"path": "x", "format": "parquet"}]}}, "not a format that can be read"),
        ({"workload": {"files": [{"path": "x"}], "prompts_file": "y"}}, "not both"),
    ],
)
def test_a_campaign_that_contradicts_itself_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        campaign(**fields)


# Calibration


def test_a_calibration_counts_events_errors_and_the_cost_of_parsing(tmp_path: Path) -> None:
    seen: list[Step] = []
    found = calibrate(bursts=(20,), rates=(2000,), streams=20, step_s=0.2, repeats=1, on_step=seen.append)
    (burst,) = found.bursts
    assert (burst.streams, burst.events, burst.failed) == (20, 2000, 0)
    assert seen == list(found.ladder)
    assert seen[0].parse_us_per_event > 0
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(found.to_json()))
    if found.events_per_s:  # on a machine too busy for 2000 events/s there is none
        capacity = read_capacity(path)
        assert (capacity.events_per_s, capacity.method, capacity.workers) == (found.events_per_s, "ladder", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not a calibration"), ("[]", "is not a calibration"), ('{"workers": 1}', "bench-client")],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=words):
        read_capacity(path)
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_capacity(tmp_path / "none.json")


def test_bench_client_prints_the_table_and_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(workers: int, *, rates: Any, step_s: Any, repeats: Any, **hooks: Any) -> Any:
        return calibrate(workers, bursts=(5,), rates=(500,), streams=5, step_s=0.1, repeats=1, **hooks)

    monkeypatch.setattr(calibration, "calibrate", small)
    result = CliRunner().invoke(app, ["bench-client", "--json", str(tmp_path / "c.json")])
    assert result.exit_code == 0, result.output
    assert "Sustained:" in result.output
    assert "parse µs" in result.output
    assert json.loads((tmp_path / "c.json").read_text())["kind"] == "breakeven client calibration"


def _busiest(times: list[int]) -> float:
    return max((sum(start <= t < start + 10**9 for t in times) for start in times), default=0)


@given(st.lists(st.integers(0, 5 * 10**9), max_size=30))
def test_the_busiest_second_is_that_of_a_count_at_every_event(times: list[int]) -> None:
    assert busiest_second(times) == _busiest(times)
