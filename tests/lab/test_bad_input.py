"""What goes wrong around a campaign, as the user of `breakeven run` meets it: exit code, message, and what is kept.

The parts have tests of their own; these hold the whole together.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from run_helpers import campaign, mock_arm, servers_left
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab import records
from breakeven.lab.records import RunDirectory

CELLS = {"b00-off-coding-c002", "b00-bad-coding-c002"}


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None)
    return result


def run_with(tmp_path: Path, bad: dict[str, Any], **fields: Any) -> tuple[Result, RunDirectory]:
    """`breakeven run` of one block at 2 streams: a sound baseline, and `bad`. No server is left."""
    given = campaign({"off": mock_arm(), "bad": bad}, blocks=1, levels=[2], **fields)
    (tmp_path / "c.yaml").write_text(given.model_dump_json())  # JSON is YAML
    result = invoke("run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run"))
    run = RunDirectory.open(tmp_path / "run")
    assert servers_left(run) == []
    return result, run


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"no_usage": True}, "came without usage"),
        ({"malformed_at": 2, "fault_from": 4}, "is not valid JSON"),
        ({"die_after": 2, "death": "exit", "fault_from": 3}, "the server ended during the cell: exit status 1"),
    ],
)
def test_a_faulty_server_costs_its_own_cells_and_the_run_ends_with_exit_code_1(
    tmp_path: Path, script: dict[str, Any], words: str
) -> None:
    result, run = run_with(tmp_path, mock_arm(script))
    assert result.exit_code == 1, result.output
    assert "invalid: b00-bad-coding-c002" in result.output
    assert words in " ".join(result.output.split())
    assert run.measured_ids() == CELLS  # the invalid cell is on disk with what came, and said to be invalid
    assert {record.key.arm for record in run.read_cells() if not record.invalid} == {"off"}
    assert "Read this first" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_server_that_never_gets_ready_ends_with_exit_code_3_and_how_to_go_on(tmp_path: Path) -> None:
    result, run = run_with(tmp_path, mock_arm({"never_ready": True}, startup_timeout_s=1.0))
    assert result.exit_code == 3, result.output
    assert "the server was not ready within 1 s (startup_timeout_s)" in " ".join(result.output.split())
    assert "breakeven run --resume --out" in result.output
    assert run.measured_ids() == {"b00-off-coding-c002"}


def test_an_arms_port_in_use_ends_with_exit_code_3_and_names_the_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result, run = run_with(tmp_path, mock_arm(port=port))
    assert result.exit_code == 3, result.output
    assert f"port {port} is in use by another program" in " ".join(result.output.split())
    assert run.measured_ids() == {"b00-off-coding-c002"}


@pytest.mark.parametrize("full", ["cell", "journal"])
def test_a_full_disk_ends_with_exit_code_2_says_so_and_keeps_every_finished_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, append = records._write_synced, os.write

    def write_cell(path: Path, data: bytes) -> None:
        if full == "cell" and "b00-bad" in str(path):
            raise no_space
        write(path, data)

    def append_line(file: int, data: bytes) -> int:
        if full == "journal" and b'"cell_finished"' in data and b"b00-bad" in data:
            raise no_space
        return append(file, data)

    monkeypatch.setattr(records, "_write_synced", write_cell)
    monkeypatch.setattr(os, "write", append_line)
    result, run = run_with(tmp_path, mock_arm())
    monkeypatch.undo()
    assert result.exit_code == 2, result.output
    assert "no space is left" in result.output
    assert "b00-off-coding-c002" in run.measured_ids()
    again = invoke("run", "--resume", "--out", str(tmp_path / "run"))
    assert again.exit_code == 0, again.output
    assert run.measured_ids() == CELLS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arms: [\n", "not YAML"),
        ("arms:\n  off: {type: embedded}\n  on: {type: embedded, speculatoin: off}\nbaseline: off\n", "speculatoin"),
        ("arms:\n  off: {type: embedded}\n  on: {type: embedded}\nbaseline: none\n", "not one of the arms"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_malformed_campaign_ends_with_exit_code_2_its_line_and_no_directory(
    tmp_path: Path, command: str, text: str, words: str
) -> None:
    file, out = tmp_path / "c.yaml", tmp_path / "run"
    file.write_text(text)
    result = invoke(command, str(file), *(("--out", str(out)) if command == "run" else ()))
    assert result.exit_code == 2
    assert words in result.output
    assert "c.yaml" in result.output
    assert not out.exists()
