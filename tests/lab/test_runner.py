"""Whole campaigns on mock servers: measured, interrupted, killed, starved of disk, resumed; faults become reasons."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from run_helpers import campaign, execute, mock_arm, servers_left, start_in_process
from typer.testing import CliRunner

from breakeven.cli import lab as cli
from breakeven.cli.main import app
from breakeven.lab import records
from breakeven.lab.analysis import analyse
from breakeven.lab.arms.launched import LaunchedArm
from breakeven.lab.events import CellBegan, CellEnded, CellProgress, Event, LaunchFailed, RunBegan
from breakeven.lab.mock import MockProcess, MockScript
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.progress import Progress, duration
from breakeven.lab.records import DiskFullError, RecordError, RunDirectory, RunLockedError
from breakeven.lab.runner import CampaignRunner, prepare


def _planned(given: Any) -> set[str]:
    return {cell.key.id for cell in build_schedule(given, load_suites(given)).cells()}


def _contents(run: RunDirectory) -> dict[str, str]:
    """The cells on disk and a hash of all that they hold."""
    return {
        name: hashlib.sha256(
            b"".join((run.cells_path / name / f).read_bytes() for f in ("cell.json", "requests.parquet"))
        ).hexdigest()
        for name in sorted(run.measured_ids())
    }


def test_a_campaign_measures_every_cell_as_planned_and_leaves_no_server(tmp_path: Path) -> None:
    given = campaign()
    events: list[Event] = []
    run, outcome = execute(tmp_path / "run", given, events.append)
    assert (outcome.cells, outcome.measured, outcome.invalid, outcome.stopped) == (8, 8, {}, False)
    assert servers_left(run) == []
    assert run.finished
    schedule = build_schedule(given, load_suites(given))
    planned = {cell.key: cell for cell in schedule.cells()}
    cells = list(run.read_cells())
    assert {record.key for record in cells} == set(planned)
    for record in cells:
        assert record.invalid == ()
        assert tuple(r.prompt_id for r in record.requests) == planned[record.key].prompt_ids
        assert all(r.completion_tokens for r in record.requests)
        assert max(r.stream for r in record.requests) < record.key.level
        assert record.extra["cache"] == "reset"
        assert record.extra["salt"] is None
    on = [record for record in cells if record.key.arm == "on"]
    # 6 chunks of 1, 3, 1, 3, … tokens: five rounds each, in which 2, 0, 2, 0 and 2 of 3 drafts are accepted
    assert all(r.counters["num_drafts"] == 5 * len(r.requests) for r in on)
    assert all(r.counters["num_accepted_tokens"] == 6 * len(r.requests) for r in on)
    off = [record for record in cells if record.key.arm == "off"]
    assert all(r.counters == {} for r in off)
    by_arm = {(r.key.block, r.key.level, r.key.arm): r.extra["bodies_sha256"] for r in cells}
    assert by_arm[0, 1, "off"] == by_arm[0, 1, "on"]
    assert sum(isinstance(e, CellEnded) for e in events) == 8
    assert isinstance(events[0], RunBegan)


def test_a_finished_run_that_is_resumed_measures_nothing_and_starts_no_server(tmp_path: Path) -> None:
    given = campaign(blocks=1)
    run, _ = execute(tmp_path / "run", given)
    before = _contents(run)
    events: list[Event] = []
    execute(tmp_path / "run", given, events.append)
    assert events == [RunBegan(4, 4, 0)]
    assert _contents(run) == before


def test_killed_at_random_moments_and_resumed_no_finished_cell_is_lost_or_repeated(tmp_path: Path) -> None:
    given = campaign()
    path = tmp_path / "run"
    chance = random.Random(4)
    kept: dict[str, str] = {}
    for _ in range(3):
        runner = start_in_process(path, given)
        deadline = time.monotonic() + 30
        target = len(kept) + chance.randint(0, 2)
        while runner.poll() is None and time.monotonic() < deadline:
            done = len(RunDirectory.open(path).cell_ids()) if RunDirectory.is_run(path) else -1
            if done >= target:
                break
            time.sleep(0.005)
        time.sleep(chance.random() * 0.15)
        runner.kill()
        runner.wait()
        now = _contents(RunDirectory.open(path))
        assert kept.items() <= now.items()
        kept = now
    run, outcome = execute(path, given)
    final = _contents(run)
    assert kept.items() <= final.items()
    assert set(final) == _planned(given)
    assert (outcome.measured, outcome.invalid) == (8, {})
    assert servers_left(run) == []
    finished = [e["cell"] for e in run.read_journal() if e["event"] == "cell_finished"]
    assert len(finished) == len(set(finished))


def _interrupt_at(number: int) -> Callable[[Event], None]:
    count = 0

    def on_event(event: Event) -> None:
        nonlocal count
        if isinstance(event, (CellBegan, CellProgress)):
            count += 1
            if count == number:
                raise KeyboardInterrupt

    return on_event


@pytest.mark.parametrize("moment", [1, 4])
def test_ctrl_c_stops_the_server_and_the_run_goes_on_where_it_was(tmp_path: Path, moment: int) -> None:
    given = campaign(blocks=1)
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "run", given, _interrupt_at(moment))
    run = RunDirectory.open(tmp_path / "run")
    assert servers_left(run) == []
    assert not run.finished
    before = _contents(run)
    _, outcome = execute(tmp_path / "run", given)
    assert outcome.measured == 4
    assert before.items() <= _contents(run).items()


def test_a_full_disk_loses_no_finished_cell_and_the_run_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = campaign(blocks=1)
    write = records._write_synced

    def full(path: Path, data: bytes) -> None:
        if "b00-on" in str(path) or (tmp_path / "run" / "cells" / "b00-off-coding-c003").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(records, "_write_synced", full)
    with pytest.raises(DiskFullError, match="no space is left"):
        execute(tmp_path / "run", given)
    monkeypatch.undo()
    run = RunDirectory.open(tmp_path / "run")
    assert servers_left(run) == []
    before = _contents(run)
    _, outcome = execute(tmp_path / "run", given)
    assert outcome.measured == 4
    assert before.items() <= _contents(run).items()


def test_no_cell_begins_without_the_space_to_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    events: list[Event] = []
    with pytest.raises(DiskFullError):
        execute(tmp_path / "run", campaign(blocks=1), events.append)
    assert not any(isinstance(event, CellBegan) for event in events)


# Faults of servers


def _one_bad(script: dict[str, Any], **fields: Any) -> Any:
    return campaign({"off": mock_arm(), "bad": mock_arm(script)}, blocks=1, **fields)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"no_usage": True}, "came without usage"),
        ({"malformed_at": 2, "fault_from": 4}, "requests failed"),
        ({"die_after": 2, "death": "reset", "fault_from": 4}, "requests failed"),
        ({"cut_after": 2, "fault_from": 4}, "the stream was cut"),
        ({"usage_offset": 100}, "longer than max_tokens"),
        ({"cached_tokens": 30, "prompt_tokens": 32}, "in the server's prefix cache"),
        ({"error_event_at": 1, "fault_from": 4}, "the mock broke off"),
    ],
)
def test_a_faulty_server_makes_its_cells_invalid_and_only_its(
    tmp_path: Path, script: dict[str, Any], words: str
) -> None:
    run, outcome = execute(tmp_path / "run", _one_bad(script, levels=[2]))
    assert list(outcome.invalid) == ["b00-bad-coding-c002"]
    assert words in "; ".join(outcome.invalid["b00-bad-coding-c002"])
    assert outcome.measured == 2
    assert run.finished


def test_a_server_that_dies_in_a_cell_makes_that_one_invalid_and_is_launched_again(tmp_path: Path) -> None:
    # Each launch: probe and warm-up are requests 0 and 1, then three to a cell.
    given = _one_bad({"die_after": 2, "death": "exit", "fault_from": 6}, levels=[1, 2, 3])
    events: list[Event] = []
    run, outcome = execute(tmp_path / "run", given, events.append)
    assert outcome.measured == 6
    assert len(outcome.invalid) == 1
    (reasons,) = outcome.invalid.values()
    assert reasons[0].startswith("the server ended during the cell: exit status 1; its log ends:")
    assert [e for e in run.read_journal() if e["event"] == "arm_failed"]
    starts = [e["launch"] for e in run.read_journal() if e["event"] == "arm_started" and e["arm"] == "bad"]
    assert starts == [1, 2]
    assert servers_left(run) == []


def test_a_server_that_takes_a_moment_to_end_ended_in_the_cell_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_dead: list[bool] = []
    alive = LaunchedArm.alive

    def lagging(arm: LaunchedArm) -> bool:
        if alive(arm):
            return True
        seen_dead.append(True)
        return len(seen_dead) == 1  # its sockets are closed, and it has not quite ended

    monkeypatch.setattr(LaunchedArm, "alive", lagging)
    given = _one_bad({"die_after": 2, "death": "exit", "fault_from": 6}, levels=[1, 2, 3])
    _, outcome = execute(tmp_path / "run", given)
    assert len(seen_dead) >= 2
    (reasons,) = outcome.invalid.values()
    assert reasons[0].startswith("the server ended during the cell: exit status 1; its log ends:")


def _kills_after(path: Path, cells: int) -> Callable[[Event], None]:
    """Kills the server that runs, once, when so many cells have ended; it has died when this returns."""
    ended: list[Event] = []

    def on_event(event: Event) -> None:
        if isinstance(event, CellEnded):
            ended.append(event)
            if len(ended) == cells:
                started = [e for e in RunDirectory(path).read_journal() if e["event"] == "arm_started"]
                server = psutil.Process(started[-1]["pid"])
                server.kill()
                while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)

    return on_event


def test_a_server_that_dies_between_cells_costs_none(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run, outcome = execute(path, campaign(levels=[1, 2, 3], blocks=1), _kills_after(path, 1))
    assert (outcome.measured, outcome.invalid) == (6, {})
    (failed,) = [e for e in run.read_journal() if e["event"] == "arm_failed"]
    assert "the server ended between cells: killed by SIGKILL" in failed["reason"]
    starts = [e["launch"] for e in run.read_journal() if e["event"] == "arm_started" and e["arm"] == failed["arm"]]
    assert starts == [1, 2]
    assert servers_left(run) == []


@pytest.mark.parametrize("lags", [1, 2])
def test_a_cell_whose_server_was_found_dead_before_it_is_measured_by_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lags: int
) -> None:
    seen_dead: list[bool] = []
    alive = LaunchedArm.alive

    def lagging(arm: LaunchedArm) -> bool:
        if alive(arm):
            return True
        seen_dead.append(True)
        return len(seen_dead) <= lags  # between the cells nothing shows; then its cache cannot be reset

    monkeypatch.setattr(LaunchedArm, "alive", lagging)
    path = tmp_path / "run"
    run, outcome = execute(path, campaign(levels=[1, 2, 3], blocks=1), _kills_after(path, 1))
    assert (outcome.measured, outcome.invalid) == (6, {})
    (failed,) = [e for e in run.read_journal() if e["event"] == "arm_failed"]
    assert "killed by SIGKILL" in failed["reason"]
    assert all(record.measured and not record.invalid for record in run.read_cells())


def test_a_server_that_takes_a_moment_to_end_in_its_warm_up_costs_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_dead: list[bool] = []
    alive = LaunchedArm.alive

    def lagging(arm: LaunchedArm) -> bool:
        if alive(arm):
            return True
        seen_dead.append(True)
        return len(seen_dead) <= 2  # once for the load generator, which then breaks off, and once more

    monkeypatch.setattr(LaunchedArm, "alive", lagging)
    given = _one_bad({"die_after": 2, "death": "exit", "fault_from": 1}, on_server_death="stop")
    run, outcome = execute(tmp_path / "run", given)
    assert len(seen_dead) > 2
    (message,) = outcome.start_failures
    assert "the server ended during the warm-up: exit status 1" in message
    assert not any(record.measured for record in run.read_cells() if record.key.arm == "bad")


def test_a_campaign_that_says_so_stops_when_a_server_dies(tmp_path: Path) -> None:
    given = _one_bad({"die_after": 2, "death": "exit", "fault_from": 3}, on_server_death="stop")
    run, outcome = execute(tmp_path / "run", given)
    assert outcome.stopped
    assert not run.finished
    assert outcome.measured < outcome.cells


def test_a_server_that_never_starts_leaves_its_cells_unmeasured_until_it_does(tmp_path: Path) -> None:
    flag = tmp_path / "mended"
    value = mock_arm()
    value["command"] = [
        "sh",
        "-c",
        f'test -e {flag} || {{ echo cannot start; exit 9; }}; exec "$0" "$@"',
        *value["command"],
    ]
    given = campaign({"off": mock_arm(), "bad": value}, blocks=1)
    events: list[Event] = []
    run, outcome = execute(tmp_path / "run", given, events.append)
    assert (outcome.measured, len(outcome.invalid), len(outcome.start_failures)) == (2, 2, 1)
    assert "exit status 9; its log ends:\ncannot start" in outcome.start_failures[0]
    assert any(isinstance(event, LaunchFailed) for event in events)
    assert all(not r.measured and "cannot start" in r.invalid[0] for r in run.read_cells() if r.key.arm == "bad")
    flag.touch()
    _, outcome = execute(tmp_path / "run", given)
    assert (outcome.measured, outcome.invalid, outcome.start_failures) == (4, {}, ())


def test_counters_that_start_again_within_a_cell_make_it_invalid(tmp_path: Path) -> None:
    with MockProcess(MockScript(first_chunk_s=0.01, gap_s=0.001, chunks=4, draft_tokens=3)) as mock:
        url = mock.url

        def on_event(event: Event) -> None:
            if isinstance(event, CellBegan):
                mock.post("/mock/counters", {"num_drafts": 1000})
            elif isinstance(event, CellProgress):
                mock.post("/mock/counters", {"num_drafts": 1})

        arms = {
            name: {"type": "attach", "url": url, "reset_url": url + "/reset_prefix_cache"} for name in ("off", "on")
        }
        _, outcome = execute(tmp_path / "run", campaign(arms, blocks=1, levels=[1]), on_event)
    assert len(outcome.invalid) == 2
    assert all("ran backwards" in "; ".join(reasons) for reasons in outcome.invalid.values())


def test_without_a_reset_prompts_are_salted_and_the_salt_is_recorded(tmp_path: Path) -> None:
    with MockProcess(MockScript(first_chunk_s=0.002, gap_s=0.001, chunks=3)) as mock:
        arms = {name: {"type": "attach", "url": mock.url} for name in ("off", "on")}
        run, outcome = execute(tmp_path / "run", campaign(arms, blocks=1))
        truth = mock.truth()
    assert outcome.measured == 4
    salts = [record.extra["salt"] for record in run.read_cells()]
    assert len(set(salts)) == 4
    assert {record.extra["cache"] for record in run.read_cells()} == {"salted"}
    assert truth["prefix_cache_resets"] == 0


def test_a_reset_that_fails_leaves_the_cell_unmeasured_with_the_reason(tmp_path: Path) -> None:
    given = campaign({"off": mock_arm(), "bad": mock_arm(reset_url="/nothing")}, blocks=1, levels=[1])
    run, outcome = execute(tmp_path / "run", given)
    assert "resetting the prefix cache failed" in outcome.invalid["b00-bad-coding-c001"][0]
    assert outcome.measured == 1
    assert servers_left(run) == []


def test_of_a_cell_that_was_tried_twice_the_last_try_counts(tmp_path: Path) -> None:
    given = campaign(blocks=1, levels=[1])
    run, outcome = execute(tmp_path / "run", given)
    assert outcome.invalid == {}
    tried = min(run.cell_ids())
    for event, reasons in (("cell_invalid", ["first"]), ("cell_invalid", ["second"]), ("cell_finished", [])):
        run.journal(event, cell=tried, reasons=reasons)
        _, outcome = execute(tmp_path / "run", given)
        assert outcome.invalid == ({tried: tuple(reasons)} if reasons else {})


# Progress


def test_a_cell_that_is_tried_again_is_not_done_meanwhile(tmp_path: Path) -> None:
    given = campaign(blocks=1, levels=[3])
    schedule = build_schedule(given, load_suites(given))
    run = RunDirectory.create(tmp_path / "run", given, "", prepare(given, schedule))
    console = Console(file=io.StringIO(), width=200)
    progress = Progress(run, schedule, console)

    def shown() -> str:
        with console.capture() as captured:
            console.print(progress._draw())
        return captured.get()

    first, second = (cell.key for cell in schedule.cells())
    progress(CellBegan(first, 3))
    progress(CellEnded(first, 1.0, 3, 9, ()))
    progress(CellBegan(second, 3))
    progress(CellEnded(second, 0.1, 0, 0, ("the server ended during the cell",)))
    assert "2/2 cells" in shown()
    assert "1 invalid" in shown()
    progress(CellBegan(second, 3))
    assert "1/2 cells" in shown()
    assert " left" in shown()
    assert "invalid" not in shown()
    progress(CellEnded(second, 1.0, 3, 9, ()))
    assert "2/2 cells" in shown()
    assert "all cells measured" in shown()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_tells_block_arm_level_and_what_is_left(tmp_path: Path, terminal: bool) -> None:
    given = campaign({"off": mock_arm(), "bad": mock_arm({"no_usage": True})}, blocks=1, levels=[3])
    schedule = build_schedule(given, load_suites(given))
    run = RunDirectory.create(tmp_path / "run", given, "", prepare(given, schedule))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=200)
    with Progress(run, schedule, console) as progress:
        CampaignRunner(run, given, schedule, on_event=progress).execute()
    text = shown.getvalue()
    assert "2 cells in 2 launches, about" in text
    assert "block 1/1, off, coding, 3 streams: 3 requests, 18 tokens in" in text
    assert "block 1/1, bad, coding, 3 streams: invalid: 3 of 3 answers came without usage" in text
    assert ("/2 cells" in text) == terminal  # the live bar


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (-3, "0 s")]
)
def test_durations_are_written_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# What must not be mixed


def test_another_campaign_does_not_resume_into_a_run(tmp_path: Path) -> None:
    execute(tmp_path / "run", campaign(blocks=1, levels=[1]))
    with pytest.raises(RecordError, match=r"another campaign \(changed since: seed\)"):
        execute(tmp_path / "run", campaign(blocks=1, levels=[1], seed=3))


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    given = campaign(blocks=1, levels=[1])
    run, _ = execute(tmp_path / "run", given)
    # flock belongs to the open file, so a second one of the same process counts as another's.
    with run.lock(), pytest.raises(RunLockedError, match="is being run by process"):
        execute(tmp_path / "run", given)


# The command line


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def _file(tmp_path: Path, given: Any) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(given.model_dump_json())  # JSON is YAML
    return path


def test_plan_shows_commands_schedule_and_duration_and_starts_nothing(tmp_path: Path) -> None:
    result = _invoke("plan", str(_file(tmp_path, campaign())))
    assert result.exit_code == 0, result.output
    assert "4 launches, 8 cells, 24 requests" in result.output
    assert "breakeven.lab.mock" in result.output
    assert "Expected duration: about" in result.output
    assert "Smallest change of throughput that 2 blocks show" in result.output
    assert "Requests in a cell, by streams: 3 at 1, 3 at 3" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "none.yaml"], "none.yaml: cannot be read"),
        (["run", "none.yaml", "--out", "x"], "none.yaml: cannot be read"),
        (["run"], "--out is missing"),
        (["run", "--out", "x"], "give a campaign file, or --resume"),
        (["run", "--out", "x", "--resume"], "is not a directory"),
        (["report", "x"], "is not a directory"),
    ],
)
def test_bad_input_gives_a_message_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workload": {"domains": ["none"]}}, "there is no suite for the domain 'none'"),
        ({"workload": {"extra_body": {"stream": False}}}, "'stream' is set by the lab itself"),
        ({"workload": {"prompts_file": "gone.jsonl"}}, "gone.jsonl: cannot be read"),
    ],
)
def test_a_campaign_that_cannot_be_laid_out_is_bad_input(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    result = _invoke("plan", str(_file(tmp_path, campaign(**change))))
    assert result.exit_code == 2
    assert words in result.output


def test_a_server_that_cannot_start_gives_exit_code_3_and_its_last_words(tmp_path: Path) -> None:
    bad = {"type": "command", "command": ["sh", "-c", "echo boom {port}; exit 4"]}
    path = _file(tmp_path, campaign({"off": bad, "on": bad}, blocks=1, levels=[1]))
    result = _invoke("run", str(path), "--out", str(tmp_path / "run"))
    assert result.exit_code == 3, result.output
    assert "boom" in result.output
    assert "breakeven run --resume --out" in result.output


def test_a_run_is_not_continued_by_accident(tmp_path: Path) -> None:
    given = campaign(blocks=1, levels=[1])
    execute(tmp_path / "run", given)
    result = _invoke("run", str(_file(tmp_path, given)), "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert "continue it with --resume" in result.output


def test_an_interrupted_run_says_how_to_go_on_and_gives_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: CampaignRunner) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CampaignRunner, "execute", interrupted)
    result = _invoke("run", str(_file(tmp_path, campaign())), "--out", str(tmp_path / "run"))
    assert result.exit_code == 130
    assert f"breakeven run --resume --out {tmp_path / 'run'}" in result.output


def test_the_quickstart_continues_its_own_unfinished_run_and_leaves_a_finished_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, bool]] = []

    def execute_instead(given: Any, text: str, out: Path, *, resume: bool, schedule: Any = None) -> None:
        taken.append((out.name, resume))
        if not resume:
            RunDirectory.create(out, given, text, {})

    monkeypatch.setattr(cli, "_execute", execute_instead)
    out = tmp_path / "q"
    assert _invoke("quickstart", "--out", str(out)).exit_code == 0
    assert _invoke("quickstart", "--out", str(out)).exit_code == 0
    run = RunDirectory.open(out)
    run.journal("run_started")
    run.journal("run_finished")
    assert "this one goes to" in _invoke("quickstart", "--out", str(out)).output
    assert _invoke("quickstart", "--out", str(out), "--blocks", "9").exit_code == 0
    assert taken == [("q", False), ("q", True), ("q-2", False), ("q-3", False)]


def test_a_campaign_ends_at_its_declared_confidence_sequence_and_stays_ended(tmp_path: Path) -> None:
    arms = {"off": mock_arm(), "on": mock_arm({"gap_s": 0.03})}
    given = campaign(arms, levels=[1], blocks=8, stop={"rule": "confidence_sequence", "min_blocks": 3}, margin=0.5)
    run, outcome = execute(tmp_path / "run", given)
    done = outcome.measured
    assert 6 <= done < outcome.cells == 16
    assert not outcome.stopped
    assert run.finished
    (line,) = [e for e in run.read_journal() if e["event"] == "run_decided"]
    assert 2 * line["blocks"] == done
    summary = analyse(run)
    assert summary.missing == []
    assert summary.run.cells_planned == done
    _, again = execute(tmp_path / "run", given)
    assert again.measured == done


def test_a_campaign_with_its_controls_runs_them_and_reports_them(tmp_path: Path) -> None:
    given = campaign(levels=[1], blocks=2, aa=True, sentinel={"requests": 2})
    run, outcome = execute(tmp_path / "run", given)
    assert (outcome.cells, outcome.measured, outcome.invalid) == (12, 12, {})
    summary = analyse(run)
    assert summary.aa is not None
    assert [row.level for row in summary.aa.levels] == [1]
    assert [len(row.points) for row in summary.sentinel] == [2, 2, 2]
    assert summary.campaign.conditions == ["coding"]
    assert summary.missing == []
    sentinels = [record for record in run.read_cells() if record.key.condition == "sentinel"]
    assert len({tuple(r.prompt_id for r in record.requests) for record in sentinels}) == 1
    assert len({record.extra["bodies_sha256"] for record in sentinels}) == 1
