"""What is on disk: whole or not at all, read back exactly, and never silently wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import campaign

from breakeven.lab import records
from breakeven.lab.client.types import Chunk, RequestResult
from breakeven.lab.records import CellKey, CellRecord, DiskFullError, RecordError, RunDirectory, RunLockedError

KEY = CellKey(0, "off", "coding", 4)
_INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
_COUNT = st.none() | st.integers(min_value=0, max_value=2**40)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
_CHUNK = st.builds(Chunk, _INT64, st.none() | st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
_RESULT = st.builds(
    RequestResult,
    request_id=_TEXT,
    prompt_id=_TEXT,
    stream=st.integers(0, 2**31 - 1),
    intended_send_ns=_INT64,
    send_ns=_INT64,
    first_byte_ns=st.none() | _INT64,
    end_ns=_INT64,
    http_status=st.none() | st.integers(100, 599),
    chunks=st.lists(_CHUNK, max_size=5).map(tuple),
    text=_TEXT,
    finish_reason=st.none() | _TEXT,
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    cached_tokens=_COUNT,
    error=st.none() | _TEXT,
    speculation=st.none() | st.dictionaries(_TEXT, st.floats(allow_nan=False), max_size=3),
)


def _result(number: int = 0) -> RequestResult:
    chunks = (Chunk(20, 1, 3), Chunk(30, None, 0))
    return RequestResult(
        f"r{number}", "p", 0, 1, 2, 20, 40, 200, chunks, "hé", "stop", 5, 3, None, None, {"num_drafts": 2.0}
    )


def _record(requests: int = 2, key: CellKey = KEY) -> CellRecord:
    return CellRecord(
        key,
        1_700_000_000_000_000_001,
        1_700_000_000_000_000_009,
        tuple(_result(i) for i in range(requests)),
        invalid=("a reason",),
        counters={"num_drafts": 3.0},
        client_cpu_s=0.1,
        send_lag_p99_ms=0.123456789,
        extra={"salt": None, "list": [1, 2.5]},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", campaign(), "name: x\n", {"host": "h"})


@settings(max_examples=40)
@given(st.lists(_RESULT, max_size=5).map(tuple), st.lists(_TEXT, max_size=2).map(tuple))
def test_a_cell_reads_back_exactly_as_it_was_written(
    requests: tuple[RequestResult, ...], invalid: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder) / "run", campaign(), "", {})
        record = replace(_record(0), requests=requests, invalid=invalid)
        run.write_cell(record)
        assert list(run.read_cells()) == [record]


def test_a_run_opens_with_the_same_campaign_and_environment(run: RunDirectory) -> None:
    again = RunDirectory.open(run.path)
    assert again.campaign == campaign()
    assert again.environment == {"host": "h"}
    assert (run.path / "campaign.yaml").read_text() == "name: x\n"


def test_cells_are_read_in_the_order_of_their_keys_whatever_the_order_of_writing(run: RunDirectory) -> None:
    keys = [CellKey(b, arm, "coding", level) for b in (10, 2) for arm in ("b", "a") for level in (100, 5)]
    for key in keys:
        run.write_cell(_record(1, key))
    assert [record.key for record in run.read_cells()] == sorted(keys)


def test_a_measured_cell_is_never_replaced_but_an_unmeasured_one_gives_way(run: RunDirectory) -> None:
    run.write_cell(_record(0))
    assert run.measured_ids() == set()
    run.write_cell(_record(2))
    assert run.measured_ids() == {KEY.id}
    with pytest.raises(RecordError, match="never measured twice"):
        run.write_cell(_record(3))
    assert run.read_cell(KEY.id) == _record(2)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_full_disk_leaves_nothing_of_the_cell_and_all_of_the_others(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    run.write_cell(_record(2, CellKey(0, "off", "coding", 1)))
    write, calls = records._write_synced, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == fails_at:
            path.write_bytes(data[:3])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(records, "_write_synced", full)
    with pytest.raises(DiskFullError, match=r"no space is left.*--resume"):
        run.write_cell(_record())
    monkeypatch.undo()
    assert [entry.name for entry in run.cells_path.iterdir()] == ["b00-off-coding-c001"]
    run.write_cell(_record())
    assert len(list(run.read_cells())) == 2


def test_space_is_set_aside_before_measuring_and_given_back_by_writing(run: RunDirectory) -> None:
    run.reserve(100_000)
    assert (run.path / ".reserve").stat().st_size == 100_000
    run.write_cell(_record())
    assert not (run.path / ".reserve").exists()


def test_too_little_space_is_told_before_anything_is_measured(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match="free some"):
        run.reserve(1000)
    assert not (run.path / ".reserve").exists()


def test_a_journal_line_that_was_cut_is_passed_over_and_the_next_is_whole(run: RunDirectory) -> None:
    run.journal("run_started", cells=3)
    with run.journal_path.open("ab") as journal:
        journal.write(b'{"time": 1, "event": "cell_fini')
    assert [e["event"] for e in run.read_journal()] == ["run_started"]
    run.journal("run_finished", text="ü\n")
    assert [e["event"] for e in run.read_journal()] == ["run_started", "run_finished"]
    assert run.finished


def test_a_run_that_was_started_again_is_not_finished(run: RunDirectory) -> None:
    for event in ("run_started", "run_finished", "run_started"):
        run.journal(event)
    assert not run.finished


def test_half_written_cells_of_a_killed_run_are_not_cells_and_are_removed(run: RunDirectory) -> None:
    leftover = run.cells_path / ".tmp-b00-off-coding-c004"
    leftover.mkdir()
    (leftover / "cell.json").write_text("{")
    assert list(run.read_cells()) == []
    run.remove_leftovers()
    assert list(run.cells_path.iterdir()) == []


@pytest.mark.parametrize("name", ["requests.parquet", "chunks.parquet", "cell.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_a_damaged_cell_is_an_error_that_names_the_file(run: RunDirectory, name: str, damage: str) -> None:
    run.write_cell(_record())
    path = run.cells_path / KEY.id / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(RecordError, match=name):
        list(run.read_cells())


def test_files_of_different_cells_do_not_pass_for_one(run: RunDirectory) -> None:
    run.write_cell(_record(2))
    run.write_cell(_record(3, CellKey(1, "off", "coding", 4)))
    a, b = (run.cells_path / f"b0{i}-off-coding-c004" / "chunks.parquet" for i in (0, 1))
    b.write_bytes(a.read_bytes())
    with pytest.raises(RecordError, match="not of one cell"):
        run.read_cell("b01-off-coding-c004")


def test_a_directory_with_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RecordError, match="is not empty and holds no run"):
        RunDirectory.create(tmp_path, campaign(), "", {})


def test_an_existing_run_is_not_overwritten(run: RunDirectory) -> None:
    with pytest.raises(RecordError, match="already holds a run"):
        RunDirectory.create(run.path, campaign(), "", {})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"arms": 3}', b"\xff"])
def test_a_campaign_that_cannot_be_read_is_an_error(run: RunDirectory, content: bytes) -> None:
    (run.path / "campaign.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"campaign\.json"):
        RunDirectory.open(run.path)


def test_a_place_that_cannot_hold_a_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="Not a directory"):
        RunDirectory.create(tmp_path / "file" / "run", campaign(), "", {})
    with pytest.raises(RecordError, match="is not a directory"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(RecordError, match="holds no run"):
        RunDirectory.open(tmp_path)


_HOLD = """
import sys
from breakeven.lab.records import RunDirectory
with RunDirectory.open(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_has_a_run_and_a_dead_one_has_it_no_longer(run: RunDirectory) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=f"is being run by process {other.pid} on"), run.lock():
            pass
    finally:
        other.kill()
        other.communicate()
    with run.lock():
        pass
