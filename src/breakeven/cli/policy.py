"""`breakeven policy`: the schedule that a run supports, in the terms of an engine."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from breakeven.cli.lab import _fail, _plain_errors
from breakeven.cli.results import _summary

if TYPE_CHECKING:
    from breakeven.lab.policy import Exported, Policy


class TargetEngine(StrEnum):
    """Engines that take a schedule."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    EMBEDDED = "embedded"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("policy")(policy)


def policy(
    directory: Annotated[Path, typer.Argument(help="Directory of a run or an import.", show_default=False)],
    engine: Annotated[
        TargetEngine | None,
        typer.Option("--engine", help="In whose terms.", show_default="the engine that was measured"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write the engine's configuration to this file.", dir_okay=False, show_default=False
        ),
    ] = None,
) -> None:
    """Turn a run's verdicts into a schedule: how deep to draft at which load, as flags and files of an engine.

    Only what pays is used, and never where a domain is hurt; see docs/policy.md.
    """
    with _plain_errors():
        from breakeven.lab.policy import as_arm, decide, export

        found = decide(_summary(directory))
        _print(found)
        if found.off:
            if out is not None:
                _fail(f"speculation is off at every load, so there is nothing to write: {out} is left as it was")
            return
        exported = export(found, None if engine is None else engine.value)
        _print_export(exported, out)
        typer.echo(f"\nto measure it, as an arm: {as_arm(found)}")


def _print(found: Policy) -> None:
    from breakeven.lab.report.policy import ranges_in_words
    from breakeven.lab.report.words import percent

    for choice in found.choices:
        ratio = "" if choice.ratio is None else f", {found.metric} {percent(choice.ratio)}"
        if choice.ci_low is not None and choice.ci_high is not None:
            ratio += f" [{percent(choice.ci_low)}, {percent(choice.ci_high)}]"
        depth = f"{choice.depth} deep ({choice.arm})" if choice.depth else "off"
        typer.echo(
            f"{choice.level:>6} {'stream: ' if choice.level == 1 else 'streams:'} {depth}{ratio} ({choice.reason})"
        )
    typer.echo(f"policy: {ranges_in_words(found)}")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _print_export(exported: Exported, out: Path | None) -> None:
    for note in exported.notes:
        typer.echo(f"note: {exported.engine}: {note}")
    typer.echo("")
    if out is None:
        typer.echo(exported.command(f"{exported.engine}-policy{_SUFFIXES.get(exported.engine, '.json')}"))
        if exported.names_file:
            typer.echo(exported.content, nl=False)
        return
    content = exported.content or exported.command(str(out)) + "\n"
    try:
        out.write_text(content, encoding="utf-8")
    except OSError as problem:
        _fail(f"{out} cannot be written: {problem.strerror or problem}")
    typer.echo(exported.command_reading(str(out)))
    typer.echo(f"written: {shlex.quote(str(out))}")


_SUFFIXES = {"trtllm": ".yaml"}
