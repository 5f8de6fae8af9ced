"""`kill -9` at random moments: every cell measured once, none lost or doubled; statistics equal those of the events.

Two runs of one campaign never measure the same times. So the finished run's events are written afresh, in the planned
order, into a directory that was never interrupted: both must give the same summary, to the byte.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from run_helpers import campaign, execute, mock_arm, servers_left, start_in_process

from breakeven.lab.analysis import analyse
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import RunDirectory


def _written_afresh(run: RunDirectory, path: Path) -> RunDirectory:
    """The same cells in a run that nothing ever interrupted."""
    fresh = RunDirectory.create(path, run.campaign, "", run.environment)
    schedule = build_schedule(run.campaign, load_suites(run.campaign))
    fresh.journal("run_started")
    for cell in schedule.cells():
        fresh.write_cell(run.read_cell(cell.key.id))
        fresh.journal("cell_finished", cell=cell.key.id)
    fresh.journal("run_finished")
    return fresh


def _kill_and_resume(tmp_path: Path, given: Any, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "run"
    planned = {cell.key.id for cell in build_schedule(given, load_suites(given)).cells()}
    kept: dict[str, bytes] = {}
    done = 0
    for _ in range(kills):
        runner = start_in_process(path, given)
        # A moment anywhere from the interpreter's start over a launch's to the middle of a cell or of its writing, but
        # leaving cells for the kills that are to come.
        deadline = time.monotonic() + chance.uniform(0.3, 1.6)
        while runner.poll() is None and time.monotonic() < deadline:
            if RunDirectory.is_run(path) and len(RunDirectory(path).cell_ids()) > len(planned) - 2:
                break
            time.sleep(0.002)
        finished = runner.poll() is not None
        runner.kill()
        runner.wait()
        done += not finished
        if not RunDirectory.is_run(path):
            continue
        run = RunDirectory.open(path)
        now = {name: (run.cells_path / name / "requests.parquet").read_bytes() for name in run.measured_ids()}
        assert kept.items() <= now.items()  # nothing that was there is lost or measured again
        assert set(now) <= planned
        analysed = list(run.read_cells())  # whatever is there is whole
        assert {record.key.id for record in analysed} >= set(now)
        kept = now
    assert done >= kills - 1
    run, outcome = execute(path, given)
    final = {name: (run.cells_path / name / "requests.parquet").read_bytes() for name in run.measured_ids()}
    assert kept.items() <= final.items()
    assert set(final) == planned
    assert (outcome.measured, dict(outcome.invalid)) == (len(planned), {})
    assert servers_left(run) == []
    finished_events = [e["cell"] for e in run.read_journal() if e["event"] == "cell_finished"]
    assert len(finished_events) == len(set(finished_events))
    assert sorted(p.name for p in run.cells_path.iterdir()) == sorted(planned)
    interrupted, uninterrupted = analyse(run), analyse(_written_afresh(run, tmp_path / "fresh"))
    assert interrupted.to_json() == uninterrupted.to_json()
    assert interrupted.missing == []
    assert json.loads(interrupted.to_json())["run"]["cells_finished"] == len(planned)


def _arms() -> dict[str, Any]:
    return {"off": mock_arm(), "on": mock_arm({"draft_tokens": 3, "tokens_per_chunk": [1, 3]})}


def test_killed_three_times_a_run_is_whole_and_its_statistics_are_those_of_its_events(tmp_path: Path) -> None:
    _kill_and_resume(tmp_path, campaign(_arms(), blocks=3), kills=3, seed=8)


@pytest.mark.slow
def test_killed_at_20_random_moments_a_run_is_whole_and_its_statistics_are_those_of_its_events(tmp_path: Path) -> None:
    domains = {"domains": ["coding", "chat"], "max_tokens": 32, "request_timeout_s": 20.0}
    _kill_and_resume(tmp_path, campaign(_arms(), blocks=10, workload=domains), kills=20, seed=20)
