"""Damaged files, set clocks, full and read-only disks: clear errors, and what was measured stays readable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
from run_helpers import campaign, execute, mock_arm
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab import gates, runner
from breakeven.lab.analysis import analyse
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import CellKey, RecordError, RunDirectory

VICTIM = "b01-ngram-coding-c005"


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None)
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    given = synthetic.campaign(levels=(1, 5), blocks=3, workload={"domains": ("coding",), "max_tokens": 48})
    return synthetic.write(tmp_path_factory.mktemp("run") / "run", given, synthetic.cells(given, synthetic.by_level()))


@pytest.fixture
def run(whole: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of a run, to be damaged."""
    shutil.copytree(whole.path, tmp_path / "run")
    return RunDirectory.open(tmp_path / "run")


@pytest.mark.parametrize("name", ["requests.parquet", "chunks.parquet", "cell.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "garbage", "flipped"])
def test_one_damaged_file_costs_its_cell_and_the_rest_is_reported(run: RunDirectory, name: str, damage: str) -> None:
    path = run.cells_path / VICTIM / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(bytes(byte ^ 0xFF if 40 <= at < 60 else byte for at, byte in enumerate(data)))
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "garbage": os.urandom(300)}[damage])
    summary = analyse(run)
    (invalid,) = summary.invalid
    assert invalid.cell == VICTIM
    (reason,) = invalid.reasons
    assert name in reason or "not of one cell" in reason
    assert "to measure it again" in reason
    assert summary.run.cells_finished == 12
    blocks = {c.level: c.blocks for c in summary.comparisons if (c.metric, c.condition) == ("throughput", "all")}
    assert blocks == {1: 3, 5: 2}


def test_a_report_of_a_damaged_run_says_so_first_and_gives_verdicts_all_the_same(run: RunDirectory) -> None:
    (run.cells_path / VICTIM / "chunks.parquet").write_bytes(b"PAR1")
    result = invoke("report", str(run.path))
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "1 of 12 cells is invalid" in words
    assert "pays" in words
    assert "Read this first" in (run.path / "report.html").read_text(encoding="utf-8")


def test_a_cell_moved_away_is_the_one_that_a_resumption_would_measure(run: RunDirectory) -> None:
    (run.cells_path / VICTIM / "cell.json").write_bytes(b"{")
    with pytest.raises(RecordError, match="move its folder away, and the cell is measured again"):
        run.measured_ids()
    shutil.move(run.cells_path / VICTIM, run.path / "damaged")
    assert len(run.measured_ids()) == 11
    assert analyse(run).missing == [VICTIM]


def test_a_folder_under_another_cells_name_is_not_taken_for_it(run: RunDirectory) -> None:
    shutil.rmtree(run.cells_path / VICTIM)
    shutil.copytree(run.cells_path / "b01-off-coding-c005", run.cells_path / VICTIM)
    (invalid,) = analyse(run).invalid
    assert "holds the cell b01-off-coding-c005" in invalid.reasons[0]


def test_names_with_dashes_are_told_apart(tmp_path: Path) -> None:
    arms = {name: {"type": "embedded"} for name in ("a", "a-b")}
    given = synthetic.campaign(
        arms=arms, baseline="a", workload={"domains": ("b-c", "c"), "max_tokens": 48}, levels=(1,)
    )
    run = RunDirectory.create(tmp_path / "run", given, "", {})
    for key in (CellKey(0, "a", "b-c", 1), CellKey(12, "a-b", "c", 1)):
        run.write_cell(synthetic.cell(key, 30.0))
    assert [(record.key.arm, record.key.condition) for record in run.readable_cells()] == [("a", "b-c"), ("a-b", "c")]


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_journal_cut_in_mid_line_neither_stops_a_report_nor_a_resumption(tmp_path: Path, cut: int) -> None:
    given = campaign({"off": mock_arm(), "on": mock_arm()}, blocks=1, levels=[1])
    run, _ = execute(tmp_path / "run", given)
    data = run.journal_path.read_bytes()
    run.journal_path.write_bytes(data[:-cut])
    before = analyse(run).to_json()
    _, outcome = execute(tmp_path / "run", given)
    assert (outcome.measured, outcome.invalid) == (2, {})
    assert run.finished
    assert analyse(run).to_json() == before


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00" * 50, b'[]\n1\n"x"\n', b'{"event": 3}\n{"event": "arm_started", "pid": "x"}\n']
)
def test_a_journal_of_anything_at_all_neither_stops_a_report_nor_a_resumption(tmp_path: Path, content: bytes) -> None:
    given = campaign({"off": mock_arm(), "on": mock_arm()}, blocks=1, levels=[1])
    schedule_cells = {"b00-off-coding-c001", "b00-on-coding-c001"}
    schedule = build_schedule(given, load_suites(given))
    run = RunDirectory.create(tmp_path / "run", given, "", runner.prepare(given, schedule))
    for name in schedule_cells:
        run.write_cell(synthetic.cell(CellKey(0, name.split("-")[1], "coding", 1), 30.0))
    run.journal_path.write_bytes(content)
    _, outcome = execute(tmp_path / "run", given)
    assert outcome.measured == 2
    assert len(analyse(run).cells) == 2


# Clocks


@pytest.mark.parametrize(
    ("wall_s", "steady_s", "step"),
    [
        (10.0, 10.0, 0),
        (10.005, 10.0, 0),
        (100.05, 100.0, 0),
        (3610.0, 10.0, 3600),
        (9.5, 10.0, -0.5),
        (-50.0, 10.0, -60),
    ],
)
def test_a_clock_that_was_set_is_told_from_one_that_is_slewed(wall_s: float, steady_s: float, step: float) -> None:
    words = gates.clock_step(round(wall_s * 1e9), round(steady_s * 1e9))
    assert (f"set by {step * 1000:+.0f} ms" in words) if step else words == ""


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_set_during_a_cell_makes_it_invalid_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    readings: list[int] = []
    real = runner._clocks

    def clocks() -> tuple[int, int]:
        readings.append(1)  # two a cell: the clock is set between those of the second
        wall, steady = real()
        return wall + (step_s * 10**9 if len(readings) >= 4 else 0), steady

    monkeypatch.setattr(runner, "_clocks", clocks)
    given = campaign({"off": mock_arm(), "on": mock_arm()}, blocks=1, levels=[1, 2])
    run, outcome = execute(tmp_path / "run", given)
    assert (outcome.measured, len(outcome.invalid)) == (4, 1)
    assert f"the machine's clock was set by {step_s * 1000:+d} ms" in str(outcome.invalid)
    assert len(analyse(run).invalid) == 1


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 512 KiB; skips where mounting is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.system(f"mount -t tmpfs -o size=512k none {place} 2>/dev/null") != 0:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield place
    finally:
        os.system(f"umount {place}")


def test_a_disk_that_really_fills_ends_with_a_message_and_keeps_every_finished_cell(
    small_disk: Path, tmp_path: Path
) -> None:
    given = campaign({"off": mock_arm(), "on": mock_arm()}, blocks=2, levels=[1, 2])
    (tmp_path / "c.yaml").write_text(given.model_dump_json())  # JSON is YAML
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    result = invoke("run", str(tmp_path / "c.yaml"), "--out", str(small_disk / "run"))
    assert result.exit_code == 2, result.output
    assert "no space is left" in result.output
    run = RunDirectory.open(small_disk / "run")
    kept = run.measured_ids()
    assert all(record.requests for record in run.read_cells())
    ballast.unlink()
    done = invoke("run", "--resume", "--out", str(small_disk / "run"))
    assert kept < run.measured_ids()
    assert done.exit_code in (0, 2), done.output
