"""`breakeven selftest`: simulated campaigns through the report's own statistics; a table and JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

DEFAULT_CAMPAIGNS = 1500


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("selftest")(selftest)


def selftest(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the rates to this file.", dir_okay=False)
    ] = None,
    campaigns: Annotated[
        int, typer.Option("--campaigns", min=1, max=100_000, help="Simulated campaigns per scenario and truth.")
    ] = DEFAULT_CAMPAIGNS,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the simulation: the same gives the same rates.")] = 0,
) -> None:
    """Check the statistics on simulated campaigns: false positives, coverage, power, wrong verdicts.

    Launch effects, drift, correlated requests, heavy tails, outliers: docs/statistics.md explains the table. Ends with
    exit code 1 if a rate is out of bounds.
    """
    from breakeven.lab.selftest import KNOWN_LIMITS, SCENARIOS, Result, run_scenario, table_rows, to_json

    console = Console()
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        every = (*SCENARIOS, *KNOWN_LIMITS)
        task = progress.add_task("", total=len(every))
        for scenario in every:

            def tell(part: str, name: str = scenario.name) -> None:
                progress.update(task, description=f"{name}: {part}")

            results.append(run_scenario(scenario, campaigns, seed, tell))
            progress.advance(task)
    kept, limits = results[: len(SCENARIOS)], results[len(SCENARIOS) :]
    for title, part in (
        (f"{campaigns} campaigns per truth; all figures in percent, nominal: false positives 5, coverage 95", kept),
        ("Known limits: no interval from so few blocks can hold here (docs/statistics.md)", limits),
    ):
        rows = table_rows(part)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
        table.title, table.title_justify = title, "left"
        for index, heading in enumerate(rows[0]):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    for result in kept:
        for problem in result.problems:
            typer.echo(f"out of bounds: {result.name}: {problem}", err=True)
    if json_file is not None:
        document = to_json(kept, limits, campaigns=campaigns, seed=seed)
        try:
            json_file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as problem:
            typer.echo(f"breakeven: {json_file} cannot be written: {problem.strerror or problem}", err=True)
            raise typer.Exit(2) from None
    if not all(result.within_bounds for result in kept):
        raise typer.Exit(1)
