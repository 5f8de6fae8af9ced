"""`breakeven import` and `breakeven compare`: other tools' results, and two results beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from breakeven.cli.lab import _fail, _plain_errors

if TYPE_CHECKING:
    from breakeven.lab.summary import Summary


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("import")(import_)
    app.command("compare")(compare)


def import_(
    files: Annotated[
        list[str],
        typer.Argument(help="Result files, each FILE or ARM=FILE; see docs/importing.md.", show_default=False),
    ],
    baseline: Annotated[str, typer.Option("--baseline", help="The arm without speculation.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Directory for the report.", file_okay=False, show_default=False)],
    name: Annotated[str | None, typer.Option(help="Title of the report.  [default: the directory's name]")] = None,
    margin: Annotated[float, typer.Option(min=0.0001, max=0.99, help="What is too small to matter.")] = 0.03,
    confidence: Annotated[float, typer.Option(min=0.51, max=0.999, help="Of every interval.")] = 0.95,
    max_failed_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Above it a run with failed requests is invalid.")
    ] = 0.0,
    model: Annotated[
        str | None, typer.Option(help="Of a SpecForge sweep: only this model.", show_default=False)
    ] = None,
) -> None:
    """Read results of vLLM, SGLang, AIPerf, GuideLLM, SpecForge or a CSV, and report on them as on a run.

    A single run gets no interval and no verdict.
    """
    with _plain_errors():
        from breakeven.lab.importers import import_files
        from breakeven.lab.records import RunDirectory
        from breakeven.lab.report import print_summary, write_reports

        if RunDirectory.is_run(out):
            _fail(f"{out} holds a run of breakeven: choose another directory for what is imported")
        if out.is_dir() and any(out.iterdir()) and not (out / "summary.json").is_file():
            _fail(f"{out} is not empty and holds no report: choose another directory")
        summary = import_files(
            files,
            baseline,
            name=name or out.resolve().name or "imported",
            margin=margin,
            confidence=confidence,
            max_failed_share=max_failed_share,
            model=model,
        )
        out.mkdir(parents=True, exist_ok=True)
        page = write_reports(out, summary)
        print_summary(summary)
        typer.echo(f"report: {page}")


def compare(
    first: Annotated[Path, typer.Argument(help="Directory of a run or an import.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another.", show_default=False)],
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown, for a pull request.")] = False,
) -> None:
    """Say what changed between two runs, and per level whether their ratios differ."""
    with _plain_errors():
        from breakeven.lab.report.compare import compare_summaries, comparison_markdown, print_comparison

        found = compare_summaries(_summary(first), _summary(second), str(first), str(second))
        if markdown:
            typer.echo(comparison_markdown(found), nl=False)
        else:
            print_comparison(found)


def _summary(directory: Path) -> Summary:
    """Of a run from its cells, of an import as written."""
    from breakeven.lab.analysis import analyse
    from breakeven.lab.records import RunDirectory
    from breakeven.lab.summary import read_summary

    if RunDirectory.is_run(directory):
        return analyse(RunDirectory.open(directory))
    if not (directory / "summary.json").is_file():
        _fail(f"{directory} holds neither a run nor an import: give the --out directory of one")
    return read_summary(directory / "summary.json")
