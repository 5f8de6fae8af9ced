"""Campaigns and faults on real servers: vLLM on a CPU, and llama.cpp's.

BREAKEVEN_VLLM names the `vllm` program and BREAKEVEN_VLLM_MODEL a Hugging Face directory of SmolLM2-135M-Instruct;
BREAKEVEN_LLAMA_SERVER names `llama-server`, BREAKEVEN_LLAMA_MODEL the same model as a .gguf in float32 and
BREAKEVEN_LLAMA_DRAFTER the drafter in the box, converted with it. What is not named is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_helpers import campaign, execute, servers_left

import breakeven
from breakeven.lab.analysis import analyse
from breakeven.lab.arms import Probe, StartError, make_arm
from breakeven.lab.campaign import Campaign
from breakeven.lab.events import CellBegan, Event
from breakeven.lab.records import RunDirectory
from breakeven.lab.summary import ALL, Summary

VLLM, VLLM_MODEL = os.environ.get("BREAKEVEN_VLLM", ""), os.environ.get("BREAKEVEN_VLLM_MODEL", "")
LLAMA, LLAMA_MODEL = os.environ.get("BREAKEVEN_LLAMA_SERVER", ""), os.environ.get("BREAKEVEN_LLAMA_MODEL", "")
LLAMA_DRAFTER = os.environ.get("BREAKEVEN_LLAMA_DRAFTER", "")
DRAFTER = Path(breakeven.__file__).parent / "engine" / "drafters" / "smollm2-135m"
BLOCKS = int(os.environ.get("BREAKEVEN_ENGINE_BLOCKS", "2"))

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
needs_vllm = pytest.mark.skipif(
    not (VLLM and VLLM_MODEL), reason="BREAKEVEN_VLLM and BREAKEVEN_VLLM_MODEL name no vLLM and no model"
)
needs_llama = pytest.mark.skipif(
    not (LLAMA and LLAMA_MODEL and LLAMA_DRAFTER),
    reason="BREAKEVEN_LLAMA_SERVER, BREAKEVEN_LLAMA_MODEL and BREAKEVEN_LLAMA_DRAFTER name no llama.cpp with models",
)
ENGINES = [pytest.param("vllm", marks=needs_vllm), pytest.param("llamacpp", marks=needs_llama)]


def arm(engine: str, speculation: Any = "off", flags: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    if engine == "vllm":
        engine_fields = {
            "model": VLLM_MODEL,
            "executable": VLLM,
            "served_model_name": "smol",
            "dtype": "float32",
            "flags": ["--max-num-seqs", "8", "--enforce-eager", *flags],
            "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            "startup_timeout_s": 1200,
        }
    else:
        engine_fields = {
            "model": LLAMA_MODEL,
            "executable": LLAMA,
            "slots": 4,
            "threads": 1,
            "flags": list(flags),
            "startup_timeout_s": 60,
        }
    return {"type": engine, "max_model_len": 1024, "speculation": speculation, **engine_fields, **fields}


def eagle3(engine: str, **fields: Any) -> dict[str, Any]:
    return {
        "method": "eagle3",
        "draft_model_path": str(DRAFTER) if engine == "vllm" else LLAMA_DRAFTER,
        "num_steps": 3,
        **fields,
    }


def small(arms: dict[str, Any], **fields: Any) -> Campaign:
    given: dict[str, Any] = {
        "baseline": "off",
        "levels": [1, 4],
        "blocks": BLOCKS,
        "workload": {"domains": ["coding"], "max_tokens": 48, "request_timeout_s": 300.0},
        "requests": {"requests_per_stream": 1, "min_requests": 4},
    }
    return campaign(arms, **{**given, **fields})


def nothing_is_left(run: RunDirectory) -> None:
    assert servers_left(run) == []
    events = run.read_journal()
    stopped = [e for e in events if e["event"] == "arm_stopped"]
    assert len(stopped) == sum(e["event"] == "arm_started" for e in events)
    # Memory is shared with whatever else runs on the machine.
    assert [p for e in stopped for p in e["problems"] if "less memory is free" not in p] == []
    ours = {str(Path(name).resolve()) for name in (VLLM, LLAMA) if name}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        assert not any(part and str(Path(part).resolve()) in ours for part in command[:2])


# Campaigns


def check(summary: Summary, run: RunDirectory, arms: dict[str, Any]) -> dict[str, float]:
    """What every campaign here must show; returns the acceptance length of each arm that drafts, by arm and level."""
    assert summary.invalid == []
    assert summary.missing == []
    nothing_is_left(run)
    for row in summary.agreement:  # float32: the same text with speculation and without
        assert row.identical == row.pairs, f"{row.arm} at {row.level}: {row.identical} of {row.pairs} texts agree"
    for comparison in summary.comparisons:
        assert comparison.ratio is not None
        assert comparison.blocks == BLOCKS
    told = summary.environment["servers"]
    assert set(told) == set(arms)
    assert all(told[name]["arguments"] for name in arms)
    versions = {record.extra["server_version"] for record in run.read_cells()}
    assert len(versions) == 1
    assert None not in versions
    return {f"{row.arm} at {row.level}": row.length.value or 0.0 for row in summary.acceptance if row.condition == ALL}


def drafted_per_round(summary: Summary, arm: str, level: int) -> float:
    cells = [c for c in summary.cells if c.arm == arm and c.level == level]
    return sum(c.counters["num_draft_tokens"] for c in cells) / sum(c.counters["num_drafts"] for c in cells)


@needs_vllm
def test_vllm_runs_a_campaign_off_ngram_eagle3_and_by_a_schedule(tmp_path: Path) -> None:
    schedule = [[1, 2, 3], [3, 8, 1]]
    arms = {
        "off": arm("vllm"),
        "ngram": arm("vllm", {"method": "ngram", "num_steps": 4, "ngram_min": 2, "ngram_max": 4}),
        "eagle3": arm("vllm", eagle3("vllm")),
        "scheduled": arm("vllm", eagle3("vllm", schedule=schedule)),
    }
    run, _ = execute(tmp_path / "run", small(arms))
    summary = analyse(run)
    lengths = check(summary, run, arms)
    print(json.dumps(lengths, indent=1))
    assert lengths["eagle3 at 1"] > 1.5
    assert drafted_per_round(summary, "eagle3", 1) == 3
    assert drafted_per_round(summary, "eagle3", 4) == 3
    # The schedule is obeyed: 3 at one stream, and mostly 1 at four (the last requests of a cell run by themselves).
    assert drafted_per_round(summary, "scheduled", 1) == 3
    assert drafted_per_round(summary, "scheduled", 4) < 2.5
    assert {record.extra["cache"] for record in run.read_cells()} == {"reset"}


@needs_llama
def test_llamacpp_runs_a_campaign_off_ngram_and_eagle3(tmp_path: Path) -> None:
    arms = {
        "off": arm("llamacpp"),
        "ngram": arm("llamacpp", {"method": "ngram", "num_steps": 3, "ngram_max": 3}),
        "eagle3": arm("llamacpp", eagle3("llamacpp")),
    }
    run, _ = execute(tmp_path / "run", small(arms))
    lengths = check(analyse(run), run, arms)
    print(json.dumps(lengths, indent=1))
    assert lengths["eagle3 at 1"] > 1.5
    assert {record.extra["cache"] for record in run.read_cells()} == {"salted"}


@needs_llama
def test_llamacpps_synthetic_acceptance_is_a_condition_and_no_result(tmp_path: Path) -> None:
    arms = {
        "off": arm("llamacpp"),
        "set": arm("llamacpp", eagle3("llamacpp", synthetic_acceptance_length=2.5)),
    }
    run, _ = execute(tmp_path / "run", small(arms))
    summary = analyse(run)
    assert all(c.synthetic and c.verdict == "undecided" and c.ratio is not None for c in summary.comparisons)
    rows = [row for row in summary.acceptance if row.condition == ALL]
    assert all(row.length.value == pytest.approx(2.5, abs=0.5) and not row.valid for row in rows)
    nothing_is_left(run)


# Faults


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_flag_is_told_in_the_engines_own_words(engine: str, tmp_path: Path) -> None:
    given = small({"off": arm(engine, flags=("--no-such-flag",)), "on": arm(engine, flags=("--no-such-flag",))})
    run, outcome = execute(tmp_path / "run", given.model_copy(update={"blocks": 1}))
    assert outcome.start_failures
    assert all("--no-such-flag" in message for message in outcome.start_failures)
    assert outcome.measured == 0
    nothing_is_left(run)
    again, second = execute(tmp_path / "run", given.model_copy(update={"blocks": 1}))  # can be tried again
    assert second.start_failures == outcome.start_failures
    nothing_is_left(again)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_port_that_is_taken_is_told_before_anything_starts(engine: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = small({"off": arm(engine, port=port), "on": arm(engine, port=port)}, blocks=1)
        run, outcome = execute(tmp_path / "run", given)
        assert all(f"port {port} is in use by another program" in message for message in outcome.start_failures)
        assert not any(e["event"] == "arm_started" for e in run.read_journal())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_is_not_ready_in_time_is_ended(engine: str, tmp_path: Path) -> None:
    hurried = make_arm("a", small({"off": arm(engine, startup_timeout_s=0.2), "on": arm(engine)}).arms["off"])
    try:
        identity = hurried.start(tmp_path / "log")
        assert identity is not None
        with pytest.raises(StartError, match=r"was not ready within 0\.2 s"):
            hurried.wait_ready(Probe("/v1/chat/completions", lambda model: b"{}"))
    finally:
        report = hurried.stop()
    assert not psutil.pid_exists(identity.pid)
    assert [p for p in report.problems if "less memory" not in p] == []


def killing(run_path: Path, wanted: Callable[[Event], bool], after_s: float) -> Callable[[Event], None]:
    """Kills the server that the journal names last, some time after the first event that is wanted."""
    armed = threading.Event()

    def kill() -> None:
        time.sleep(after_s)
        started = [e for e in RunDirectory(run_path).read_journal() if e["event"] == "arm_started"]
        os.kill(started[-1]["pid"], signal.SIGKILL)

    def on_event(event: Event) -> None:
        if wanted(event) and not armed.is_set():
            armed.set()
            threading.Thread(target=kill, daemon=True).start()

    return on_event


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_killed_in_a_cell_costs_that_cell_and_the_campaign_goes_on(engine: str, tmp_path: Path) -> None:
    workload = {"domains": ["coding"], "max_tokens": 96, "request_timeout_s": 300.0}
    given = small({"off": arm(engine), "on": arm(engine)}, blocks=1, levels=[1, 2], workload=workload)
    path = tmp_path / "run"
    run, outcome = execute(path, given, killing(path, lambda event: isinstance(event, CellBegan), 1.0))
    assert outcome.measured == 4
    ((cell, reasons),) = outcome.invalid.items()
    assert reasons[0].startswith("the server ended during the cell: killed by SIGKILL; its log")
    summary = analyse(run)
    assert [row.cell for row in summary.invalid] == [cell]
    assert summary.invalid[0].reasons == list(reasons)
    nothing_is_left(run)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_killed_while_it_starts_is_told(engine: str, tmp_path: Path) -> None:
    victim = make_arm("a", small({"off": arm(engine), "on": arm(engine)}).arms["off"])
    identity = victim.start(tmp_path / "log")
    assert identity is not None
    threading.Timer(0.3, lambda: os.kill(identity.pid, signal.SIGKILL)).start()
    try:
        with pytest.raises(StartError, match="the server ended before it was ready: killed by SIGKILL"):
            victim.wait_ready(Probe("/v1/chat/completions", lambda model: b"{}"))
    finally:
        victim.stop()
    assert not psutil.pid_exists(identity.pid)


@needs_vllm
def test_vllms_crash_by_synthetic_acceptance_on_a_cpu_is_told_with_its_cause(tmp_path: Path) -> None:
    given = arm("vllm", eagle3("vllm", synthetic_acceptance_length=2.5))
    run, outcome = execute(tmp_path / "run", small({"off": given, "on": given}, blocks=1, on_server_death="stop"))
    assert outcome.stopped
    (message,) = outcome.start_failures
    assert "Synthetic acceptance not supported with CPU sampling" in message
    nothing_is_left(run)


@needs_llama
def test_starting_and_stopping_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ten starts and stops of a real server leave no process, no port and no open file."""
    config = small({"off": arm("llamacpp"), "on": arm("llamacpp")}).arms["off"]
    before = psutil.Process().num_fds()
    for _ in range(10):
        server = make_arm("a", config)
        identity = server.start(tmp_path / "log")
        assert identity is not None
        report = server.stop()
        assert not psutil.pid_exists(identity.pid)
        assert not report.killed
    assert psutil.Process().num_fds() == before
