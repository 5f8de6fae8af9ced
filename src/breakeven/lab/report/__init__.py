"""The summary as a terminal table, one self-contained HTML file, and Markdown."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from breakeven.lab.records import DiskFullError, RecordError, RunDirectory
from breakeven.lab.report.terminal import print_summary
from breakeven.lab.summary import Summary

__all__ = ["print_summary", "write_reports"]

SUMMARY, PAGE, MARKDOWN = "summary.json", "report.html", "report.md"


def write_reports(run: RunDirectory | Path, summary: Summary) -> Path:
    """Write summary.json, report.html and report.md into a run's (or any) directory; return the page's path.

    Each file is replaced whole or not at all, and the same summary gives the same bytes. Raises DiskFullError or
    RecordError, with the file's name, if one cannot be written.
    """
    from breakeven.lab.report.html import page  # matplotlib takes its time: only when it is needed
    from breakeven.lab.report.markdown import markdown

    folder = run if isinstance(run, Path) else run.path
    _replace(folder / SUMMARY, summary.to_json())
    _replace(folder / PAGE, page(summary))
    _replace(folder / MARKDOWN, markdown(summary))
    return folder / PAGE


def _replace(path: Path, text: str) -> None:
    """Write to a file beside it, flush, rename."""
    temporary: str | None = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as problem:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no space is left to write {path}: free some, then run `breakeven report {path.parent}` (nothing"
                " that was measured is lost)"
            ) from problem
        raise RecordError(f"{path} cannot be written: {problem.strerror or problem}") from problem
