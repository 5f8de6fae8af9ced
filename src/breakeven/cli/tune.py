"""`breakeven tune`: a search over shapes of speculation, then a confirmation on data of its own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakeven.cli.lab import Exit, _close, _data_files, _fail, _plain_errors, _report, _signals_interrupt

if TYPE_CHECKING:
    from breakeven.lab.campaign import Campaign
    from breakeven.lab.records import RunDirectory
    from breakeven.lab.runner import CampaignRunner, Outcome
    from breakeven.lab.tune.session import Tuning


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("tune")(tune)


def tune(
    file: Annotated[Path, typer.Argument(help="Campaign file (YAML); see docs/tuning.md.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Directory of the tuning.", file_okay=False, show_default=False)],
    arm: Annotated[
        str | None, typer.Option("--arm", help="Which arm.", show_default="the only one that speculates")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be measured. Starts nothing.")] = False,
) -> None:
    """Search for the best shape of speculation, then measure it and its schedule anew.

    The search halves the candidates round by round. What is reported comes from the confirmation alone: new launches,
    fresh prompts and seeds. The same command continues a tuning that was interrupted.
    """
    with _plain_errors():
        from breakeven.lab.campaign_file import load_campaign
        from breakeven.lab.runner import check_requests
        from breakeven.lab.tune.session import StageFailedError, Tuning
        from breakeven.lab.tune.space import search_space, tuned_arm

        campaign = load_campaign(file).campaign
        check_requests(campaign)
        space = search_space(campaign, tuned_arm(campaign, arm))
        files = _data_files(campaign, out / "round-1")
        tuning = Tuning(campaign, space, out, typer.echo, _execute, sys.argv, files=files)
        tuning.check()
        _print_plan(campaign, tuning)
        if dry_run:
            return
        if out.is_dir() and any(out.iterdir()) and not (out / "round-1").is_dir():
            _fail(f"{out} is not empty and holds no tuning: choose another directory")
        again = f"breakeven tune {shlex.quote(str(file))} --out {shlex.quote(str(out))}"
        again += f" --arm {shlex.quote(arm)}" if arm is not None else ""
        with _signals_interrupt():
            try:
                run = tuning.run()
            except KeyboardInterrupt:
                typer.echo(f"\ninterrupted; what is measured is kept. Continue with:\n  {again}", err=True)
                raise typer.Exit(Exit.INTERRUPTED) from None
            except StageFailedError as problem:
                typer.echo(f"breakeven: {problem}\nOnce it is mended, continue with:\n  {again}", err=True)
                raise typer.Exit(Exit.SERVER) from None
        if run is not None:
            _finish(run)


def _print_plan(campaign: Campaign, tuning: Tuning) -> None:
    from breakeven.lab.plan import assumed_cell_s, assumed_launch_s, load_suites
    from breakeven.lab.progress import duration
    from breakeven.lab.tune.halving import launches

    plan = tuning.plan
    typer.echo(f"tuning {tuning.space.arm}: {len(tuning.space.candidates)} shapes against {campaign.baseline}")
    for note in tuning.space.notes:
        typer.echo(f"  note: {note}")
    for reason in tuning.space.left_out:
        typer.echo(f"  left out: {reason}")
    for step in plan:
        blocks = f"{step.blocks} block{'s' if step.blocks != 1 else ''}"
        typer.echo(f"  round {step.number}: {step.candidates} shapes in {blocks}, {step.keep} stay")
    conditions = campaign.condition_names(load_suites(campaign, tuning.files))
    per_launch = assumed_launch_s(campaign) + sum(
        assumed_cell_s(campaign, level, condition) for condition in conditions for level in campaign.levels
    )
    typer.echo(f"  confirmation: the winner and its schedule in {campaign.blocks} new blocks")
    total = (launches(plan) + 3 * campaign.blocks) * per_launch
    typer.echo(f"expected duration: about {duration(total)}, by the assumptions in the campaign file\n")


def _execute(run: RunDirectory, schedule: Any, runner: CampaignRunner) -> Outcome:
    from breakeven.lab.progress import Progress

    with Progress(run, schedule) as progress:
        runner.on_event = progress
        return runner.execute()


def _finish(run: RunDirectory) -> None:
    """The report of the confirmation, and its policy."""
    from breakeven.lab.analysis import analyse
    from breakeven.lab.runner import Outcome

    summary = analyse(run)
    _report(run)
    if summary.invalid:
        cells = len(summary.cells)
        outcome = Outcome(cells, cells, {cell.cell: tuple(cell.reasons) for cell in summary.invalid})
        raise typer.Exit(_close(outcome, run.path))
    typer.echo(f"as flags of an engine: breakeven policy {shlex.quote(str(run.path))}")
