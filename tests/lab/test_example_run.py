"""The example's report is what its data give, to the byte."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from breakeven.lab.analysis import analyse
from breakeven.lab.records import RunDirectory
from breakeven.lab.report import write_reports

EXAMPLE = Path(__file__).parents[2] / "examples/smollm2-2-cores"


@pytest.mark.parametrize(("archive", "prefix"), [("run.tar.gz", ""), ("aa-run.tar.gz", "aa-")])
def test_the_examples_report_comes_from_its_data(tmp_path: Path, archive: str, prefix: str) -> None:
    with tarfile.open(EXAMPLE / archive) as packed:
        packed.extractall(tmp_path, filter="data")
    run = RunDirectory.open(tmp_path)
    write_reports(run, analyse(run))
    assert (tmp_path / "report.md").read_bytes() == (EXAMPLE / f"{prefix}report.md").read_bytes()
    page = EXAMPLE / f"{prefix}report.html"
    if page.is_file():
        assert (tmp_path / "report.html").read_bytes() == page.read_bytes()
