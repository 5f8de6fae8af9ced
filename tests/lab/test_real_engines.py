"""Campaigns and faults on real servers: vLLM on a CPU, and llama.cpp's.

BREAKEVEN_VLLM names the `vllm` program and BREAKEVEN_VLLM_MODEL a Hugging Face directory of SmolLM2-135M-Instruct;
BREAKEVEN_LLAMA_SERVER names `llama-server`, BREAKEVEN_LLAMA_MODEL the same model as a .gguf in float32 and
BREAKEVEN_LLAMA_DRAFTER the drafter in the box, converted with it. What is not named is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import synthetic
from run_helpers import campaign, execute, servers_left
from typer.testing import CliRunner

import breakeven
from breakeven.cli.main import app
from breakeven.lab import front_end
from breakeven.lab.analysis import analyse
from breakeven.lab.arms import make_arm
from breakeven.lab.campaign import Campaign
from breakeven.lab.events import CellBegan, Event, LaunchBegan, LaunchReady
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


MARK = "BREAKEVEN_TEST_SERVER"  # a variable that every process which a test starts inherits, and no other has


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    made = uuid.uuid4().hex
    monkeypatch.setenv(MARK, made)
    return made


def processes_left(run: RunDirectory) -> list[str]:
    """Whatever lives in a session that a server was started in, or carries this test's mark, by its name."""
    sessions = {e["pid"] for e in run.read_journal() if e["event"] == "arm_started"}
    left = []
    for process in psutil.process_iter(["name", "pid", "status"]):
        if process.pid == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        with suppress(psutil.Error, OSError):
            marked = process.environ().get(MARK) == os.environ[MARK]
            if marked or os.getsid(process.pid) in sessions:
                left.append(f"{process.pid} {process.info['name']}")
    return left


def nothing_is_left(run: RunDirectory) -> None:
    assert servers_left(run) == []
    assert processes_left(run) == []
    events = run.read_journal()
    stopped = [e for e in events if e["event"] == "arm_stopped"]
    assert [e["pid"] for e in stopped if e["pid"]] == [e["pid"] for e in events if e["event"] == "arm_started"]
    # Memory is shared with whatever else runs on the machine.
    assert [p for e in stopped for p in e["problems"] if "less memory is free" not in p] == []


def resumed(path: Path) -> int:
    """What `breakeven run --resume` on a run's directory ends with."""
    return CliRunner().invoke(app, ["run", "--resume", "--out", str(path)]).exit_code


def is_whole(run: RunDirectory, invalid: tuple[str, ...] = ()) -> Summary:
    """Every planned cell is there and valid, but for those that are named."""
    summary = analyse(run)
    assert summary.missing == []
    assert sorted(row.cell for row in summary.invalid) == sorted(invalid)
    nothing_is_left(run)
    return summary


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
    # Its engine tells its own time for exactly the cell's requests, and so slow a model is heard at once.
    lags = [front_end.lag(record) for record in run.read_cells()]
    print("from send to end over the engine's own time:", lags)
    known = [found for found in lags if found is not None]
    assert len(known) == len(lags)
    assert 1.0 <= statistics.median(known) < 1.25


@needs_llama
def test_llamacpp_runs_a_campaign_off_ngram_and_eagle3(tmp_path: Path) -> None:
    arms = {
        "off": arm("llamacpp"),
        "ngram": arm("llamacpp", {"method": "ngram", "num_steps": 3, "ngram_max": 3}),
        "eagle3": arm("llamacpp", eagle3("llamacpp"), flags=("--no-spec-draft-backend-sampling",)),
        "default": arm("llamacpp", eagle3("llamacpp")),
    }
    run, _ = execute(tmp_path / "run", small(arms))
    lengths = check(analyse(run), run, arms)
    print(json.dumps(lengths, indent=1))
    assert lengths["eagle3 at 1"] > 1.5
    # The trap: the same drafts for one stream, and far worse ones for several, where the backend samples them.
    assert lengths["default at 1"] == lengths["eagle3 at 1"]
    assert lengths["default at 4"] < 0.8 * lengths["eagle3 at 4"]
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


# As little as shows that a campaign went on to its end
BRIEF: dict[str, Any] = {
    "blocks": 1,
    "levels": [1],
    "workload": {"domains": ["coding"], "max_tokens": 16, "request_timeout_s": 300.0},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_port_that_is_taken_is_told_and_once_it_is_free_the_run_goes_on(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = small({"off": arm(engine, port=port), "on": arm(engine, port=port)}, **BRIEF)
        run, outcome = execute(path, given)
        assert len(outcome.start_failures) == 2
        assert all(f"port {port} is in use by another program" in message for message in outcome.start_failures)
        assert not any(e["event"] == "arm_started" for e in run.read_journal())
    assert resumed(path) == 0
    is_whole(run)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_is_not_ready_in_time_is_ended(engine: str, tmp_path: Path) -> None:
    late = arm(engine, startup_timeout_s=0.2)
    path = tmp_path / "run"
    run, outcome = execute(path, small({"off": late, "on": late}, **BRIEF))
    assert len(outcome.start_failures) == 2
    assert all("was not ready within 0.2 s" in message for message in outcome.start_failures)
    assert outcome.measured == 0
    nothing_is_left(run)
    assert resumed(path) == 3  # tried again: a server failed
    assert sum(e["event"] == "arm_started" for e in run.read_journal()) == 4
    nothing_is_left(run)


def the_server(process: psutil.Process) -> psutil.Process:
    return process


def its_engine(process: psutil.Process) -> psutil.Process:
    """The process that holds the model: vLLM's API server has it as a child."""
    everyone = [process, *process.children(recursive=True)]
    return max(everyone, key=lambda member: int(member.memory_info().rss))


def killing(
    run_path: Path,
    wanted: Callable[[Event], bool],
    after_s: float,
    victim: Callable[[psutil.Process], psutil.Process] = the_server,
) -> Callable[[Event], None]:
    """Kills a process of the server that is then started or running, some time after the first event wanted."""
    armed = threading.Event()

    def started() -> list[dict[str, Any]]:
        return [e for e in RunDirectory(run_path).read_journal() if e["event"] == "arm_started"]

    def kill(before: int) -> None:
        deadline = time.monotonic() + 10.0
        while len(found := started()) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(after_s)
        victim(psutil.Process(found[-1]["pid"])).kill()

    def on_event(event: Event) -> None:
        if wanted(event) and not armed.is_set():
            armed.set()
            before = len(started()) if isinstance(event, LaunchBegan) else len(started()) - 1
            threading.Thread(target=kill, args=(before,), daemon=True).start()

    return on_event


# Long enough that a cell lasts until its server is killed
LONG = {"domains": ["coding"], "max_tokens": 96, "request_timeout_s": 300.0}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_killed_in_a_cell_costs_that_cell_and_the_campaign_goes_on(engine: str, tmp_path: Path) -> None:
    given = small({"off": arm(engine), "on": arm(engine)}, blocks=1, levels=[1, 2], workload=LONG)
    path = tmp_path / "run"
    run, outcome = execute(path, given, killing(path, lambda event: isinstance(event, CellBegan), 1.0))
    assert outcome.measured == 4
    ((cell, reasons),) = outcome.invalid.items()
    assert reasons[0].startswith("the server ended during the cell: killed by SIGKILL; its log")
    assert is_whole(run, (cell,)).invalid[0].reasons == list(reasons)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_campaign_that_stopped_at_its_engines_death_is_finished_by_resuming(engine: str, tmp_path: Path) -> None:
    """What dies is the process that holds the model, as when the kernel takes it for its memory."""
    given = small(
        {"off": arm(engine), "on": arm(engine)}, blocks=1, levels=[1, 2], workload=LONG, on_server_death="stop"
    )
    path = tmp_path / "run"
    run, outcome = execute(path, given, killing(path, lambda event: isinstance(event, CellBegan), 1.0, its_engine))
    assert outcome.stopped
    assert outcome.measured == 1
    ((cell, reasons),) = outcome.invalid.items()
    assert reasons[0].startswith("the server ended during the cell: ")
    assert ("died unexpectedly" if engine == "vllm" else "killed by SIGKILL") in reasons[0]
    nothing_is_left(run)
    assert resumed(path) == 1  # a cell is invalid
    is_whole(run, (cell,))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_killed_while_it_starts_is_told_and_its_cells_are_measured_by_resuming(
    engine: str, tmp_path: Path
) -> None:
    given = small({"off": arm(engine), "on": arm(engine)}, **BRIEF, on_server_death="stop")
    path = tmp_path / "run"
    run, outcome = execute(path, given, killing(path, lambda event: isinstance(event, LaunchBegan), 0.2))
    assert outcome.stopped
    (message,) = outcome.start_failures
    assert "the server ended before it was ready: killed by SIGKILL" in message
    assert outcome.measured == 0
    nothing_is_left(run)
    assert resumed(path) == 0
    is_whole(run)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_killed_as_it_becomes_ready_is_told(engine: str, tmp_path: Path) -> None:
    """Between its first token and its first cell."""
    given = small({"off": arm(engine), "on": arm(engine)}, **BRIEF, on_server_death="stop")
    path = tmp_path / "run"
    run, outcome = execute(path, given, killing_at_once(path, lambda event: isinstance(event, LaunchReady)))
    assert outcome.stopped
    (message,) = outcome.start_failures
    assert "the server ended during the warm-up: killed by SIGKILL" in message
    nothing_is_left(run)
    assert resumed(path) == 0
    is_whole(run)


def killing_at_once(run_path: Path, wanted: Callable[[Event], bool]) -> Callable[[Event], None]:
    """Kills the server before the first event wanted has been told to its end."""
    done = threading.Event()

    def on_event(event: Event) -> None:
        if wanted(event) and not done.is_set():
            done.set()
            started = [e for e in RunDirectory(run_path).read_journal() if e["event"] == "arm_started"]
            os.kill(started[-1]["pid"], signal.SIGKILL)

    return on_event


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(
            lambda: arm("vllm", env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4000"}),
            "is less than requested memory for kv (4000.0 GiB)",
            id="vllm-more than the machine has",
            marks=needs_vllm,
        ),
        pytest.param(
            lambda: arm("vllm", flags=("--kv-cache-memory-bytes", "8000000"), env={"HF_HUB_OFFLINE": "1"}),
            "KV cache is needed, which is larger than the available KV cache memory",
            id="vllm-less than a request needs",
            marks=needs_vllm,
        ),
        pytest.param(
            # An address space of 3 GB, so that the machine's own memory is out of danger
            lambda: arm("llamacpp", executable=["prlimit", "--as=3000000000", LLAMA], max_model_len=65536),
            "failed to allocate buffer for kv cache",
            id="llamacpp-more than it is given",
            marks=[
                needs_llama,
                pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit to limit memory with"),
            ],
        ),
    ],
)
def test_memory_that_does_not_suffice_is_told_in_the_engines_own_words(
    given: Callable[[], dict[str, Any]], words: str, tmp_path: Path
) -> None:
    run, outcome = execute(tmp_path / "run", small({"off": given(), "on": given()}, **BRIEF, on_server_death="stop"))
    assert outcome.stopped
    (message,) = outcome.start_failures
    assert words in message
    assert outcome.measured == 0
    nothing_is_left(run)


@needs_vllm
def test_vllms_crash_by_synthetic_acceptance_on_a_cpu_is_told_with_its_cause(tmp_path: Path) -> None:
    given = arm("vllm", eagle3("vllm", synthetic_acceptance_length=2.5))
    run, outcome = execute(tmp_path / "run", small({"off": given, "on": given}, blocks=1, on_server_death="stop"))
    assert outcome.stopped
    (message,) = outcome.start_failures
    assert "Synthetic acceptance not supported with CPU sampling" in message
    nothing_is_left(run)


# The prefix cache


@needs_vllm
def test_vllm_tells_how_much_of_a_prompt_was_cached(tmp_path: Path) -> None:
    plain = arm("vllm", flags=("--block-size", "32"))
    given = small({"off": plain, "on": plain}, **BRIEF, conditions={"cache": ["cold", "warm"]})
    run, _ = execute(tmp_path / "run", given)
    is_whole(run)
    cells = {record.key.condition: record for record in run.read_cells() if record.key.arm == "on"}
    assert set(cells) == {"coding+cold", "coding+warm"}
    assert [r.cached_tokens for r in cells["coding+cold"].requests] == [0] * 4
    for request in cells["coding+warm"].requests:  # whole pages, and never the whole prompt
        assert request.cached_tokens is not None
        assert request.prompt_tokens is not None
        assert 0 < request.cached_tokens < request.prompt_tokens
        assert request.cached_tokens % 32 == 0
    assert cells["coding+cold"].extra["cached_share"] == 0
    assert cells["coding+warm"].extra["cached_share"] > 0.5


# A policy on the server that it is for

OFF_FROM = 5
SCHEDULE = [[1, 2, 3], [3, 4, 1], [OFF_FROM, 256, 0]]
PAYS = {"deep": {2: 1.5, 4: 0.8, 5: 0.6}, "shallow": {2: 1.2, 4: 1.3, 5: 0.8}}


def exported_flags(path: Path) -> list[str]:
    """What `breakeven policy` prints for vLLM, of a run in which 3 tokens pay up to 2 streams and 1 up to 4."""
    arms = {
        "off": arm("vllm"),
        "deep": arm("vllm", eagle3("vllm", num_steps=3)),
        "shallow": arm("vllm", eagle3("vllm", num_steps=1)),
    }
    workload = {"domains": ("coding",), "max_tokens": 48}
    made = synthetic.campaign(arms=arms, levels=(2, 4, 5), blocks=4, workload=workload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("synthetic.BASE", dict.fromkeys((2, 4, 5), 100.0))
        ratio: synthetic.Ratio = lambda name, _, level: 1.0 if name == "off" else PAYS[name][level]  # noqa: E731
        synthetic.write(path, made, synthetic.cells(made, ratio, noise=0.003))
    shown = CliRunner().invoke(app, ["policy", str(path), "--engine", "vllm"])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.output.splitlines() if line.startswith("--speculative-config")]
    return shlex.split(line)


@dataclass(frozen=True)
class Scrape:
    """What vLLM's metrics say at one moment, and which level the lab measured then."""

    level: int
    running: float
    waiting: float
    generated: float
    drafts: float
    drafted: float


class Watch:
    """Reads a server's metrics over and over while the lab measures, from the first cell of `arm` on."""

    _NAMES = (
        "num_requests_running",
        "num_requests_waiting",
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
    )

    def __init__(self, port: int, arm: str) -> None:
        self.scrapes: list[Scrape] = []
        self._url, self._arm, self._level = f"http://127.0.0.1:{port}/metrics", arm, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def on_event(self, event: Event) -> None:
        if isinstance(event, CellBegan):
            self._level = event.key.level if event.key.arm == self._arm else 0
            if self._level and not self._thread.is_alive():
                self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _read(self) -> None:
        while not self._over.wait(0.1):
            level = self._level
            with suppress(OSError), urllib.request.urlopen(self._url, timeout=10) as answer:
                text = answer.read().decode()
                values = [self._value(text, name) for name in self._NAMES]
                if level == self._level:
                    self.scrapes.append(Scrape(level, *values))

    @staticmethod
    def _value(text: str, name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))

    def steady(self, level: int) -> tuple[Scrape, Scrape]:
        """Two scrapes between which all streams of the level's cell ran, and a round had passed before the first."""
        own = [s for s in self.scrapes if s.level == level and s.running == level and not s.waiting]
        assert own, f"no scrape saw {level} requests running"
        # Drafts are counted when they are verified, so what the round before proposed is let pass.
        settled = [s for s in own if s.generated >= own[0].generated + 8 * level]
        assert len(settled) > 1, f"{level} requests ran together too briefly"
        return settled[0], settled[-1]


@needs_vllm
def test_vllm_accepts_an_exported_policy_and_drafts_by_it_at_each_load(tmp_path: Path) -> None:
    flags = exported_flags(tmp_path / "measured")
    assert json.loads(flags[1])["num_speculative_tokens_per_batch_size"] == SCHEDULE
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    arms = {"off": arm("vllm"), "policy": arm("vllm", flags=tuple(flags), port=port)}
    levels = [1, 2, 3, 4, 5, 7]
    given = small(
        arms,
        blocks=1,
        levels=levels,
        workload={"domains": ["coding"], "max_tokens": 96, "request_timeout_s": 300.0},
        requests={"requests_per_stream": 1, "min_requests": 1},  # none begins when another one ends
        sampling={"ignore_eos": True},  # all end together, as far as drafts let them
    )
    watch = Watch(port, "policy")
    try:
        run, _ = execute(tmp_path / "run", given, watch.on_event)
    finally:
        watch.stop()
    is_whole(run)
    told = {}
    for level in levels:
        first, last = watch.steady(level)
        assert last.generated > first.generated
        rounds = last.drafts - first.drafts
        told[level] = (last.drafted - first.drafted) / rounds if rounds else 0.0
        print(level, told[level], first, last)
    depths = {level: next(k for low, high, k in SCHEDULE if low <= level <= high) for level in levels}
    assert told == depths
    records = {record.key.level: record for record in run.read_cells() if record.key.arm == "policy"}
    # One stream is never in other company, and several are so only while they come and go.
    assert records[1].counters["num_draft_tokens"] == 3 * records[1].counters["num_drafts"] > 0
    for level in levels:
        tokens = sum(request.completion_tokens or 0 for request in records[level].requests)
        if not depths[level]:
            assert records[level].counters["num_draft_tokens"] < 0.2 * tokens


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
