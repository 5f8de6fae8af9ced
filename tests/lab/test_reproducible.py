"""The same run directory gives the same summary and report, to the byte, wherever and by whomever it is analysed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from breakeven.lab.records import RunDirectory

FILES = ("summary.json", "report.html", "report.md")
_REPORT = "import sys; from breakeven.cli.main import app; sys.argv[1:] = ['report', sys.argv[1]]; app()"
# A user's own taste in charts must not show in a report.
_MATPLOTLIBRC = "font.size: 17\naxes.grid: True\nlines.linewidth: 4\nsvg.fonttype: path\nfont.family: serif\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    given = synthetic.campaign(levels=(1, 5), blocks=4)
    records = synthetic.cells(given, synthetic.by_level(), noise=0.03)
    return synthetic.write(tmp_path_factory.mktemp("here") / "run", given, records)


def reported(path: Path, cwd: Path, **changes: str) -> dict[str, bytes]:
    """The files that `breakeven report` writes, by an interpreter of its own."""
    arguments = [sys.executable, "-c", _REPORT, str(path)]
    done = subprocess.run(arguments, cwd=cwd, env={**os.environ, **changes}, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    return {name: (path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def here(run: RunDirectory) -> dict[str, bytes]:
    """The files as this machine makes them."""
    return reported(run.path, run.path.parent, PYTHONHASHSEED="1", TZ="UTC", LC_ALL="C.UTF-8")


def test_a_copied_run_gives_the_same_bytes_in_another_place_time_zone_locale_and_process(
    run: RunDirectory, here: dict[str, bytes], tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere" / "their run"
    shutil.copytree(run.path, copy)
    for name in (*FILES, "journal.jsonl"):
        (copy / name).unlink(missing_ok=True)  # not what the report is made from
    for path in sorted(copy.rglob("*"), reverse=True):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    taste = tmp_path / "taste"
    taste.mkdir()
    (taste / "matplotlibrc").write_text(_MATPLOTLIBRC)
    there = reported(
        copy,
        tmp_path,
        PYTHONHASHSEED="4242",
        TZ="Asia/Kathmandu",
        LC_ALL="de_DE.UTF-8",
        LANG="de_DE.UTF-8",
        MATPLOTLIBRC=str(taste),
        SOURCE_DATE_EPOCH="1",
        OMP_NUM_THREADS="2",
        COLUMNS="33",
        NO_COLOR="1",
    )
    assert there["summary.json"] == here["summary.json"]
    assert there["report.md"] == here["report.md"]
    assert there["report.html"] == here["report.html"]


def test_a_processor_with_other_vector_units_gives_the_same_bytes(
    run: RunDirectory, here: dict[str, bytes], tmp_path: Path
) -> None:
    """numpy and the C library choose their kernels by the processor; a lesser one is put before them here."""
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    there = reported(
        copy,
        tmp_path,
        NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR X86_V3 AVX512F AVX512_SKX AVX2 FMA3",
        GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-FMA4_Usable",
        OPENBLAS_CORETYPE="Prescott",
    )
    for name in FILES:
        assert there[name] == here[name], name
