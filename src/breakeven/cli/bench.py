"""`breakeven bench-client`: options in, a table and a JSON file out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from breakeven.lab.calibration import Calibration, Step


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("bench-client")(bench_client)


def bench_client(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there as well.", dir_okay=False)
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Client processes.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter steps, one try each: 10 seconds.")] = False,
) -> None:
    """Calibrate the load generator against a mock server of known truth: how many events, and how late."""
    from breakeven.lab.calibration import LADDER, CalibrationError, calibrate
    from breakeven.lab.client import WorkerError

    typer.echo(
        "Streams started at once; first chunk after 50 ms, then one every 20 ms. Errors: reported minus true, in ms\n"
        f"{'streams':>8}{'TTFT mean':>11}{'p99':>8}{'send lag':>10}{'TPOT':>8}{'gap p99':>9}{'failed':>8}"
    )
    state = {"ladder": False}

    def on_step(step: Step) -> None:
        if not state["ladder"]:
            state["ladder"] = True
            typer.echo(
                f"\nPaced rates, chunk events/s, over {step.streams} streams; CPU time per event while receiving, and "
                f"of the parsing afterwards\n"
                f"{'asked':>9}{'sent':>10}{'TTFT ms':>9}{'gap %':>8}{'CPU µs':>8}{'parse µs':>10}"
            )
        verdict = "sustained" if step.sustained and step.paced else "mock limit" if step.sustained else "client limit"
        typer.echo(
            f"{step.requested_per_s:9,.0f}{step.achieved_per_s:10,.0f}{step.ttft.mean:9.2f}"
            f"{100 * step.gap_relative:8.2f}{step.client_us_per_event:8.1f}{step.parse_us_per_event:10.1f}  {verdict}"
        )

    try:
        found = calibrate(
            workers,
            rates=LADDER[::3] if quick else LADDER,
            step_s=1.0 if quick else 2.0,
            repeats=1 if quick else 3,
            on_burst=_show_burst,
            on_step=on_step,
        )
        _conclude(found)
        if json_file is not None:
            json_file.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
            typer.echo(f"written to {json_file}; a campaign uses it with client: {{calibration: {json_file.name}}}")
    except (CalibrationError, WorkerError, OSError, RuntimeError) as problem:
        typer.echo(f"breakeven: {problem}", err=True)
        raise typer.Exit(2) from None


def _show_burst(step: Step) -> None:
    typer.echo(
        f"{step.streams:8d}{step.ttft.mean:11.3f}{step.ttft.p99_abs:8.3f}{step.send_lag.mean:10.3f}"
        f"{step.tpot.mean:8.3f}{step.gap.p99_abs:9.3f}{step.failed:8d}"
    )


def _conclude(found: Calibration) -> None:
    processes = "1 client process" if found.workers == 1 else f"{found.workers} client processes"
    core = ", each on a core of its own" if found.pinned else ", not pinned: too few cores"
    bound = "at least " if found.ladder_ended else ""
    typer.echo(f"\nSustained: {bound}{found.events_per_s:,.0f} chunk events/s with {processes}{core}")
    if not found.pinned:
        typer.echo("The mock server shares the client's cores, so the figure is that of both together.")
