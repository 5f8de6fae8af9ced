"""`breakeven plan`, `run`, `report` and `quickstart`: options in, tables and exit codes out."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from breakeven.lab.campaign import Campaign
    from breakeven.lab.data_files import DataFile
    from breakeven.lab.engines import EngineArm
    from breakeven.lab.plan import Schedule
    from breakeven.lab.records import RunDirectory
    from breakeven.lab.runner import Outcome
    from breakeven.lab.summary import Summary

_SHOWN_INVALID = 5


class Exit(IntEnum):
    """Exit codes, as docs/campaign.md lists them."""

    OK = 0
    INVALID_CELLS = 1  # the run came to its end, but some cells are invalid
    BAD_INPUT = 2
    SERVER = 3  # a server could not be started, or died and the campaign says to stop
    INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (quickstart, plan, run, report):
        app.command(command.__name__)(command)


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Where the run goes.", file_okay=False)] = Path("quickstart-run"),
    blocks: Annotated[int | None, typer.Option(min=1, max=1000, help="More blocks: surer, and longer.")] = None,
) -> None:
    """Measure the embedded engine without speculation, with n-gram and with EAGLE-3: minutes on 2 cores.

    An unfinished quickstart in the directory is continued; beside a finished one a new directory is made.
    """
    with _plain_errors():
        from importlib.resources import files

        from breakeven.lab.campaign_file import parse_campaign
        from breakeven.lab.records import RunDirectory

        text = files("breakeven.lab").joinpath("quickstart.yaml").read_text(encoding="utf-8")
        campaign = parse_campaign(text, "quickstart.yaml")
        if blocks is not None:
            campaign = campaign.model_copy(update={"blocks": blocks})
        target = out
        number = 1
        while RunDirectory.is_run(target):
            existing = RunDirectory.open(target)
            if existing.campaign == campaign and not existing.finished:
                typer.echo(f"{target} holds an unfinished quickstart: continuing it")
                break
            number += 1
            target = out.with_name(f"{out.name}-{number}")
        if target != out:
            typer.echo(f"{out} holds a run already; this one goes to {target}")
        _execute(campaign, text, target, resume=RunDirectory.is_run(target))


def plan(
    file: Annotated[Path, typer.Argument(help="Campaign file (YAML); see docs/campaign.md.", show_default=False)],
    pilot: Annotated[
        Path | None,
        typer.Option(
            "--pilot", help="A run whose scatter and durations are used.", file_okay=False, show_default=False
        ),
    ] = None,
    scatter: Annotated[
        float | None,
        typer.Option(
            "--scatter",
            min=0.0001,
            max=0.9999,
            show_default=False,
            help="Standard deviation of a block's log ratio, without a pilot; 0.03: launches differ by 3%.",
        ),
    ] = None,
    effect: Annotated[
        float | None,
        typer.Option("--effect", min=0.0001, max=100.0, show_default=False, help="Change to be shown; 0.05: 5%."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, max=100_000, show_default=False, help="For the cost in GPU hours.")
    ] = None,
) -> None:
    """Show what a campaign would run, how long it takes, what it costs and what it can show. Starts nothing."""
    with _plain_errors():
        campaign, _, schedule = _load(file)
        _print_plan(campaign, schedule, _pilot(pilot), scatter, effect, gpus)


def run(
    file: Annotated[
        Path | None,
        typer.Argument(help="Campaign file (YAML). May be left out with --resume.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the run.", file_okay=False, show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the directory.")] = False,
) -> None:
    """Run a campaign, then report. Interrupt it at any point: --resume goes on where it stopped."""
    with _plain_errors():
        from breakeven.lab.records import RunDirectory

        if out is None:
            _fail("--out is missing: give the directory that the run goes to")
        if file is not None:
            campaign, text, schedule = _load(file, out)
            if RunDirectory.is_run(out) and not resume:
                _fail(f"{out} already holds a run: continue it with --resume, or choose another directory")
            _execute(campaign, text, out, resume=resume, schedule=schedule)
        elif resume:
            existing = RunDirectory.open(out)
            _execute(existing.campaign, "", out, resume=True)
        else:
            _fail("give a campaign file, or --resume to continue the run in --out")


class Format(StrEnum):
    """What `breakeven report` prints."""

    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    JSON = "json"


def report(
    directory: Annotated[Path, typer.Argument(help="Directory of a run or an import.", show_default=False)],
    format: Annotated[
        Format, typer.Option("--format", help="markdown: for a pull request. json: the whole summary.")
    ] = Format.TERMINAL,
) -> None:
    """Analyse a run again from what is on disk, write its reports, and print its verdicts."""
    with _plain_errors():
        from breakeven.lab.records import RunDirectory

        if not RunDirectory.is_run(directory) and (directory / "summary.json").is_file():
            _report_again(directory, format)
            return
        existing = RunDirectory.open(directory)
        if not existing.cell_ids():
            _fail(f"{directory} holds no cell yet: continue it with breakeven run --resume --out {directory}")
        _report(existing, format)


# Steps


def _pilot(directory: Path | None) -> Summary | None:
    from breakeven.lab.analysis import analyse
    from breakeven.lab.records import RunDirectory

    return None if directory is None else analyse(RunDirectory.open(directory))


def _report_again(directory: Path, format: Format) -> None:
    """Of an import there is no raw data to analyse: the reports are made from its summary."""
    from breakeven.lab.report import write_reports
    from breakeven.lab.summary import read_summary

    summary = read_summary(directory / "summary.json")
    _show(summary, write_reports(directory, summary), format)


def _show(summary: Summary, page: Path, format: Format) -> None:
    if format is Format.MARKDOWN:
        from breakeven.lab.report.markdown import markdown

        typer.echo(markdown(summary), nl=False)
    elif format is Format.JSON:
        typer.echo(summary.to_json(), nl=False)
    else:
        from breakeven.lab.report import print_summary

        print_summary(summary)
        typer.echo(f"report: {page}")


def _load(file: Path, run: Path | None = None) -> tuple[Campaign, str, Schedule]:
    from breakeven.lab.campaign_file import load_campaign

    loaded = load_campaign(file)
    return loaded.campaign, loaded.text, _schedule(loaded.campaign, run)


def _schedule(campaign: Campaign, run: Path | None = None) -> Schedule:
    """The campaign's schedule; with the data sets of the run in the directory `run`, if there is one."""
    from breakeven.lab.plan import build_schedule, load_suites
    from breakeven.lab.runner import check_requests

    check_requests(campaign)
    files = _data_files(campaign, run)
    return build_schedule(campaign, load_suites(campaign, files), files)


def _data_files(campaign: Campaign, run: Path | None) -> tuple[DataFile, ...]:
    """The campaign's data sets, at the commits that a run was begun with; says what is fetched."""
    from breakeven.lab.data_files import pins, read_data_files
    from breakeven.lab.records import RunDirectory

    files = campaign.workload.files
    pinned = {}
    if run is not None and RunDirectory.is_run(run) and any(file.hub is not None for file in files):
        pinned = pins(RunDirectory.open(run).environment)
    return read_data_files(files, pinned, lambda words: typer.echo(words, err=True))


def _execute(campaign: Campaign, text: str, out: Path, *, resume: bool, schedule: Schedule | None = None) -> None:
    from breakeven.lab.progress import Progress
    from breakeven.lab.records import RunDirectory
    from breakeven.lab.runner import CampaignRunner, check_resumable, prepare

    schedule = schedule or _schedule(campaign, out)
    if resume and RunDirectory.is_run(out):
        directory = RunDirectory.open(out)
        check_resumable(directory, campaign, schedule)
    else:
        directory = RunDirectory.create(out, campaign, text, prepare(campaign, schedule, sys.argv))
    with _signals_interrupt():
        try:
            with Progress(directory, schedule) as progress:
                outcome = CampaignRunner(directory, campaign, schedule, on_event=progress).execute()
        except KeyboardInterrupt:
            typer.echo(
                f"\ninterrupted; the servers are stopped and {len(directory.measured_ids())} cells are kept. Continue "
                f"with:\n  breakeven run --resume --out {shlex.quote(str(out))}",
                err=True,
            )
            raise typer.Exit(Exit.INTERRUPTED) from None
    if outcome.measured:
        _report(directory)
    raise typer.Exit(_close(outcome, out))


def _close(outcome: Outcome, out: Path) -> Exit:
    """Says what went wrong, if anything, and chooses the exit code."""
    for name, reasons in list(outcome.invalid.items())[:_SHOWN_INVALID]:
        typer.echo(f"invalid: {name}: {'; '.join(reasons)}", err=True)
    if len(outcome.invalid) > _SHOWN_INVALID:
        typer.echo(f"invalid: and {len(outcome.invalid) - _SHOWN_INVALID} more cells; the report lists them", err=True)
    if outcome.start_failures or outcome.stopped:
        typer.echo(
            f"a server failed, and {outcome.cells - outcome.measured} of {outcome.cells} cells were not measured. Once "
            f"it is mended, continue with:\n  breakeven run --resume --out {shlex.quote(str(out))}",
            err=True,
        )
        return Exit.SERVER
    return Exit.INVALID_CELLS if outcome.invalid else Exit.OK


def _report(directory: RunDirectory, format: Format = Format.TERMINAL) -> None:
    from breakeven.lab.analysis import analyse
    from breakeven.lab.report import write_reports

    summary = analyse(directory)
    _show(summary, write_reports(directory, summary), format)


def _print_launch(config: EngineArm) -> None:
    """What an engine gets beside its command line."""
    from breakeven.lab.arms.launched import file_text

    launch = config.launch()
    if config.ssh is not None:
        typer.echo(f"    on {config.ssh}, reached at {config.address}:{config.port}")
    if launch.env:
        typer.echo(f"    with {shlex.join(f'{name}={value}' for name, value in launch.env.items())}")
    for file, content in launch.files.items():
        typer.echo(f"    {{files}}/{file}:")
        typer.echo("".join(f"      {line}\n" for line in file_text(file, content).splitlines()), nl=False)


def _print_plan(
    campaign: Campaign,
    schedule: Schedule,
    pilot: Summary | None,
    scatter: float | None,
    effect: float | None,
    gpus: int | None,
) -> None:
    from breakeven.lab.arms import make_arm
    from breakeven.lab.engines import EngineArm
    from breakeven.lab.pilot import duration_s, gpu_hours
    from breakeven.lab.plan import detectable
    from breakeven.lab.progress import duration

    console = Console()
    cells = list(schedule.cells())
    requests = sum(len(cell.prompt_ids) for cell in cells)
    kind = "conditions" if campaign.factors else "domains"
    typer.echo(
        f"{campaign.name}: {len(campaign.arms)} arms (baseline {campaign.baseline}), {campaign.blocks} blocks, "
        f"{len(schedule.conditions)} {kind}, {len(campaign.levels)} levels: {len(schedule.launches)} launches, "
        f"{len(cells)} cells, {requests} requests of at most {campaign.workload.max_tokens} tokens\n"
    )
    typer.echo("Servers")
    for name, config in campaign.arms.items():
        command = make_arm(name, config).command()
        typer.echo(f"  {name}: {shlex.join(command) if command else getattr(config, 'url', '')}")
        if isinstance(config, EngineArm):
            _print_launch(config)
    table = Table(title="Schedule", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in (
        "block",
        "arms, in order of launch",
        kind,
        "levels, in order" if campaign.open_loop else "streams, in order",
    ):
        table.add_column(heading, overflow="fold")
    for block in range(campaign.blocks):
        launches = [launch for launch in schedule.launches if launch.block == block]
        first = launches[0].cells
        table.add_row(
            str(block + 1),
            ", ".join(launch.arm for launch in launches),
            ", ".join(dict.fromkeys(cell.key.condition for cell in first)),
            ", ".join(dict.fromkeys(str(c.key.level) for c in first if c.key.condition in schedule.conditions)),
        )
    typer.echo("")
    console.print(table)
    sizes = ", ".join(f"{campaign.requests_at(level)} at {level}" for level in sorted(campaign.levels))
    if campaign.open_loop:
        arrivals = [campaign.setting(condition).arrivals for condition in schedule.conditions]
        processes = " and ".join(dict.fromkeys(given.process for given in arrivals))
        typer.echo(
            f"\nOpen loop, {processes} arrivals: a level is a rate of {arrivals[0].unit_rate:g} "
            f"requests/s times its number. Requests in a cell, by level: {sizes}"
        )
    else:
        typer.echo(f"\nRequests in a cell, by streams: {sizes}")
    for note in schedule.notes:
        console.print(Text(f"Note: {note}"), soft_wrap=True)
    assumed = campaign.assumptions
    known = scatter if scatter is not None else assumed.launch_scatter
    if pilot is not None or known is not None:
        stated = campaign.model_copy(update={"assumptions": assumed.model_copy(update={"launch_scatter": known})})
        _print_outlook(console, stated, effect if effect is not None else campaign.margin, pilot)
    else:
        can_show = ", ".join(f"{least:.0%} if launches scatter by {by:.0%}" for by, least in detectable(campaign))
        typer.echo(
            f"Smallest change of throughput that {campaign.blocks} blocks show with 80% probability: {can_show}"
            if can_show
            else "One block gives no interval, and every verdict will be undecided: use at least two, better five"
        )
    total = duration_s(campaign, schedule, pilot)
    basis = (
        "by the pilot's cells; what it has not measured by the assumptions in the campaign file"
        if pilot is not None
        else f"if a server starts in {assumed.startup_s:g} s, gives {assumed.tokens_per_second:g} tok/s at one stream "
        "and every answer is of full length (assumptions: in the campaign file)"
    )
    most = "at most about" if campaign.stop.rule != "fixed" else "about"
    typer.echo(f"Expected duration: {most} {duration(total)}, {basis}")
    cards = gpus if gpus is not None else assumed.gpus
    if cards:
        typer.echo(
            f"Cost: {gpu_hours(total, cards):.2g} GPU hours ({cards} GPU{'s' if cards > 1 else ''} held throughout)"
        )


def _print_outlook(console: Console, campaign: Campaign, effect: float, pilot: Summary | None) -> None:
    """The table of what the planned blocks show at each level."""
    from breakeven.lab.pilot import outlook

    rows = outlook(campaign, effect, pilot)
    if not rows:
        typer.echo("The pilot has no two valid blocks at any level, so it says nothing of the scatter")
        return
    blocks = campaign.blocks
    table = Table(title=f"What {blocks} blocks show", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in (
        "arm",
        "streams",
        "scatter",
        f"interval after {blocks}",
        "detects (80%)",
        f"blocks for {effect:.3g}",
    ):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        width = "–"
        if row.half_width is not None and row.half_width_upper is not None:
            upper = f" (to {row.half_width_upper:.1%})" if row.pilot_blocks else ""
            width = f"±{row.half_width:.1%}{upper}"
        table.add_row(
            row.arm,
            str(row.level),
            f"{row.scatter:.1%}",
            width,
            "–" if row.detectable is None else f"{row.detectable:.1%}",
            "> 10,000" if row.blocks_needed is None else f"{row.blocks_needed:,}",
        )
    console.print(table)
    if pilot is not None:
        few = max(row.pilot_blocks for row in rows)
        typer.echo(f"Scatter from a pilot of {few} blocks; in brackets: if it is at the upper end of its 80% interval")


# Errors and signals


def _fail(message: str, code: Exit = Exit.BAD_INPUT) -> NoReturn:
    typer.echo(f"breakeven: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What can go wrong with input, disk and servers ends in a message and an exit code, not in a traceback."""
    from breakeven.lab.arms import ArmError

    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", Exit.INTERRUPTED)
    except ArmError as problem:
        _fail(str(problem), Exit.SERVER)
    except (ValueError, OSError) as problem:  # CampaignError, RecordError and PromptError are ValueErrors
        _fail(str(problem))


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: servers stopped, nothing lost."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
        sys.stdout.flush()
