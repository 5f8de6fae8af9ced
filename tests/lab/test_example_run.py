"""The example's report is what its data give, to the byte."""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path

import pytest

from breakeven.lab.analysis import analyse
from breakeven.lab.records import RunDirectory
from breakeven.lab.report import write_reports

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "archive", "prefix"),
    [
        ("smollm2-2-cores", "run.tar.gz", ""),
        ("smollm2-2-cores", "aa-run.tar.gz", "aa-"),
        ("synthetic-acceptance", "run.tar.gz", ""),
        ("synthetic-acceptance", "two-gpus-run.tar.gz", "two-gpus-"),
        ("real-engines-2-cores", "vllm-run.tar.gz", "vllm-"),
        ("real-engines-2-cores", "llamacpp-run.tar.gz", "llamacpp-"),
    ],
)
def test_the_examples_report_comes_from_its_data(tmp_path: Path, example: str, archive: str, prefix: str) -> None:
    folder = EXAMPLES / example
    with tarfile.open(folder / archive) as packed:
        packed.extractall(tmp_path, filter="data")
    run = RunDirectory.open(tmp_path)
    write_reports(run, analyse(run))
    assert (tmp_path / "report.md").read_bytes() == (folder / f"{prefix}report.md").read_bytes()
    page = folder / f"{prefix}report.html"
    if page.is_file():
        assert (tmp_path / "report.html").read_bytes() == page.read_bytes()


def test_the_table_of_the_api_processes_comes_from_its_data() -> None:
    folder = EXAMPLES / "synthetic-acceptance"
    spec = importlib.util.spec_from_file_location("front_end_example", folder / "front_end.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (folder / "README.md").read_text(encoding="utf-8").replace("**", "")
    rows = list(module.rows())
    assert len(rows) == 2 + 8
    assert "\n".join(rows) in page
