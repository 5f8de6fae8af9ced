"""The pure parts of benchmarks/client_against_others.py: the files of other clients, and the rule of the ladder."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "benchmarks/client_against_others.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("client_against_others", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


others = load()
MS = 1_000_000
CPU = [(0, 3.0), (1000 * MS, 4.0)]  # a second of CPU in a second


def record(name: str, begin: int, chunks: int = 3, gap_ms: int = 20, **more: Any) -> dict[str, Any]:
    """What the mock notes of a request that came at `begin` ms: first chunk 50 ms later."""
    sends = [(begin + 50 + i * gap_ms) * MS for i in range(chunks)]
    return {"user": None, "request_id": name, "received_ns": begin * MS, "chunk_ns": sends} | more


def aiperf(name: str, phase: str = "profiling", unit: str = "ms", **more: Any) -> str:
    metrics = {
        "time_to_first_token": {"value": 57.5, "unit": unit},
        "inter_chunk_latency": {"value": [19.0, 21.0], "unit": unit},
    }
    metadata = {"x_request_id": name, "benchmark_phase": phase, "was_cancelled": False}
    return json.dumps({"metadata": metadata, "metrics": metrics} | more)


def test_times_of_a_detailed_result_of_vllm_without_the_failed_requests() -> None:
    result = {"ttfts": [0.051, 0.0, 0.06], "itls": [[0.02, 0.021], [], [0.02, 0.02]], "errors": ["", "refused", ""]}
    found = others.parse_vllm(result, "v-")
    assert found.ttft == {"v-0": pytest.approx(51), "v-2": pytest.approx(60)}
    assert found.gaps["v-0"] == pytest.approx([20, 21])


def test_a_result_of_vllm_without_details_is_refused() -> None:
    with pytest.raises(ValueError, match="--save-detailed"):
        others.parse_vllm({"mean_ttft_ms": 51.0}, "v-")


def test_a_result_of_vllm_in_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        others.parse_vllm([], "v-")
    for result in ({"ttfts": [None], "itls": [[]]}, {"ttfts": [0.05], "itls": [0.02]}):
        with pytest.raises(ValueError, match="else than times"):
            others.parse_vllm(result, "v-")


def test_times_of_aiperfs_records_without_warm_up_and_failures() -> None:
    lines = [aiperf("a"), aiperf("w", phase="warmup"), "\n", aiperf("f", error={"message": "reset"})]
    found = others.parse_aiperf(lines)
    assert found.ttft == {"a": 57.5}
    assert found.gaps == {"a": [19.0, 21.0]}


def test_a_record_of_aiperf_in_another_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="not in ms"):
        others.parse_aiperf([aiperf("a", unit="s")])
    with pytest.raises(ValueError, match="no record"):
        others.parse_aiperf(['{"request_count": 1}'])


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"time_to_first_token": 57.5, "inter_chunk_latency": [19.0]}},
        {"metrics": {"time_to_first_token": {"value": 57.5}, "inter_chunk_latency": {"value": [19.0]}}},
        {"metrics": {"time_to_first_token": {"value": None, "unit": "ms"},
                     "inter_chunk_latency": {"value": 19.0, "unit": "ms"}}},
        {"metadata": {"benchmark_phase": "profiling"}},
        {"metadata": None},
    ],
)  # fmt: skip
def test_a_record_of_aiperf_in_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no record of AIPerf"):
        others.parse_aiperf([aiperf("a", **change)])


def test_a_line_that_is_no_object_is_no_record_of_aiperf() -> None:
    for line in ("[]", "3", "null"):
        with pytest.raises(ValueError, match="no record of AIPerf"):
            others.parse_aiperf([line])


def test_errors_are_against_what_the_server_did_and_not_against_its_plan() -> None:
    late = [record("a", 0), record("b", 10)]
    for one in late:  # a server that is 30 ms late everywhere, which the client reports truly but for 2 ms
        one["chunk_ns"] = [t + 30 * MS for t in one["chunk_ns"]]
    said = others.Reported({"a": 82.0, "b": 82.0}, {"a": [20.0, 21.0], "b": [20.0, 21.0]}, {})
    row = others.compare("x", 1, 3, 0, said, late, 1.0, CPU)
    assert row.ttft_error_ms == pytest.approx(2)
    assert row.server_late_ms == pytest.approx(30)
    assert row.gap_error == pytest.approx(0.5 / 20)
    assert row.server_gap_error == pytest.approx(0)
    assert (row.reached, row.missing) == (2, 1)


def test_the_event_that_ends_an_answer_is_no_chunk() -> None:
    said = others.Reported({"a": 50.0}, {"a": [20.0, 20.0, 0.01]}, {})
    assert others.compare("x", 1, 1, 0, said, [record("a", 0)], 1.0, CPU).gap_error == pytest.approx(0)


def test_a_request_with_chunks_missing_is_not_compared() -> None:
    said = others.Reported({"a": 50.0, "b": 50.0}, {"a": [20.0], "b": [20.0, 20.0]}, {})
    assert others.compare("x", 1, 2, 0, said, [record("a", 0), record("b", 0)], 1.0, CPU).missing == 1
    with pytest.raises(ValueError, match="none of"):
        others.compare("x", 1, 2, 0, said, [record("c", 0)], 1.0, CPU)


def test_the_rate_of_a_paced_step_is_taken_while_streams_begin_and_end() -> None:
    truth = [record(f"r{i}", 10 * i) for i in range(100)]  # a request every 10 ms, 3 chunks each: 300 events/s
    said = others.Reported({r["request_id"]: 50.0 for r in truth}, {r["request_id"]: [20.0, 20.0] for r in truth}, {})
    row = others.compare("x", 1, 100, 300, said, truth, 1.0, CPU)
    assert row.achieved_per_s == pytest.approx(300, rel=0.01)
    assert row.sustained


def test_a_request_that_the_client_does_not_report_is_no_part_of_the_load() -> None:
    truth = [record(f"r{i}", 500 + 10 * i) for i in range(40)]
    said = others.Reported({r["request_id"]: 50.0 for r in truth}, {r["request_id"]: [20.0, 20.0] for r in truth}, {})
    test_request = record("", 0, gap_ms=300)  # before the load, and still running when it begins
    for rate in (0, 300):
        alone, with_it = (others.compare("x", 1, 40, rate, said, t, 1.0, CPU) for t in (truth, [test_request, *truth]))
        assert with_it == alone


@pytest.mark.parametrize(
    "change",
    [
        {"ttft_error_ms": 5.1},
        {"ttft_error_ms": -5.1},
        {"gap_error": 0.051},
        {"missing": 1},
        {"achieved_per_s": 9_600.0},
    ],
)
def test_each_part_of_the_rule_can_break_it(change: dict[str, float]) -> None:
    row = others.Row("x", 1, 400, 10_000, 9_750, 4.9, 0.049, 21, 20, 200, 0, 0, 0, 1, 1, {})
    assert row.sustained
    assert not replace(row, **change).sustained


@given(st.integers(1, 20), st.data())
def test_the_ladder_finds_the_highest_sustained_rate_from_any_start(count: int, data: st.DataObject) -> None:
    start, limit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count))
    tried: dict[int, bool] = {}
    while (index := others.next_rate(tried, count, start)) is not None:
        assert index not in tried
        assert 0 <= index < count
        tried[index] = index < limit
    assert max((i for i, kept in tried.items() if kept), default=-1) == limit - 1


def test_cpu_per_event_is_that_of_the_load_with_the_parsing_and_medians_are_over_rounds() -> None:
    burst = others.Row("x", 1, 250, 0, 0, 10, 0, 21, 20, 250, 0, 0, 0, 9.0, 2.0, {"receiving": 2.0, "parsing": 0.5})
    rows = []
    for number, error in ((1, 10.0), (2, 30.0), (3, 20.0)):
        rows.append(replace(burst, round=number, ttft_error_ms=error))
        rows.append(replace(burst, round=number, requests=1000, load_cpu_s=50.0))
        rows.append(replace(burst, round=number, requested_per_s=1_000, achieved_per_s=999 + number, ttft_error_ms=0))
        rows.append(replace(burst, round=number, requested_per_s=2_000, achieved_per_s=2_000, ttft_error_ms=9))
    found = others.summarise(rows)
    assert found["cpu_us_per_event"] == pytest.approx(100)
    assert found["parsing_us_per_event"] == pytest.approx(20)
    assert found["bursts"][250]["ttft_error_ms"] == 20
    assert found["sustained_per_s"] == 1001


def test_cpu_is_taken_between_two_moments() -> None:
    now = 1_790_000_000 * 10**9
    samples = [(now, 5.0), (now + 100 * MS, 5.0), (now + 200 * MS, 5.1)]
    assert others.cpu_between(samples, now + 50 * MS, now + 150 * MS) == pytest.approx(0.05)


BURST = others.Row("x", 1, 250, 0, 0, 10, 0, 21, 20, 250, 0, 0, 0, 9.0, 2.0, {})


class Scripted(others.Contest):
    """A client that sustains rates below one and ends with an error from there on."""

    def __init__(self, below: float) -> None:
        super().__init__(argparse.Namespace(), None, 0, Path())
        self._below = below

    def measure(self, client: str, number: int, requests: int, rate: float) -> Any:
        if rate >= self._below:
            raise RuntimeError("ended with status 1")
        self.rows.append(replace(BURST, requested_per_s=rate, achieved_per_s=rate, ttft_error_ms=0))
        return self.rows[-1]


@pytest.mark.parametrize("start", [0, 5, len(others.RATES) - 1])
def test_a_rate_at_which_a_client_fails_is_not_sustained_and_is_marked(
    start: int, capsys: pytest.CaptureFixture[str]
) -> None:
    contest = Scripted(20_000)
    assert others.RATES[contest.ladder("x", 1, start, 4.0)] == 15_000
    assert 20_000 in [failure.requested_per_s for failure in contest.failures]
    found = others.summaries(contest.rows, contest.failures)
    assert found["x"]["sustained_per_s"] == 15_000
    others.print_table(found)
    told = capsys.readouterr().out
    assert "| x | 15,000 \\* |" in told
    assert "x failed in some round at " in told
    assert "round 1, x, 20,000/s: ended with status 1" in told


def test_a_round_in_which_every_rate_failed_counts_as_none() -> None:
    paced = replace(BURST, requested_per_s=4_000, achieved_per_s=4_000, ttft_error_ms=0)
    failures = [others.Failure("x", number, 160, 4_000, "gone") for number in (2, 3)]
    assert others.summarise([paced], failures)["sustained_per_s"] == 0


def test_a_client_that_failed_at_a_burst_in_every_round_has_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [BURST, replace(BURST, client="y"), replace(BURST, client="y", requests=1000)]
    failures = [others.Failure("x", 1, 1000, 0, "gone"), others.Failure("z", 1, 250, 0, "gone")]
    others.print_table(others.summaries(rows, failures))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| x | - |")
    assert lines[2].endswith("| 250 of 250 | - | - | - |")
    assert lines[4] == "| z | - | - | - | - | - | - | - | - |"


class Sleeper(others.Contest):
    """A client that never ends."""

    def __init__(self, folder: Path) -> None:
        class Mock:
            def play(self, script: object) -> None: ...

        super().__init__(argparse.Namespace(), Mock(), min(os.sched_getaffinity(0)), folder)

    def _command(self, client: str, requests: int, rate: float, folder: Path) -> tuple[list[str], dict[str, str]]:
        return ["sleep", "600"], {}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the script pins its clients, as Linux does")
@pytest.mark.parametrize("cause", [KeyboardInterrupt, subprocess.TimeoutExpired("sleep", 120)])
def test_no_client_is_left_running(cause: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:  # after the kill
            return wait(process)
        started.append(process.pid)
        raise cause

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    contest = Sleeper(tmp_path)
    if cause is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            contest.attempt("x", 1, 1, 4_000)
    else:
        assert contest.attempt("x", 1, 1, 4_000) is None
        assert "took longer than 120 s" in contest.failures[0].problem
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
