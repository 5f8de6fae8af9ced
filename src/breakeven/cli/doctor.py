"""`breakeven doctor`: options in, findings and an exit code out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from breakeven.lab.doctor import Finding

WRONG = 1
UNREACHABLE = 2
_SIGNS = {"fine": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red"), "unknown": ("?", "dim")}
_NAME_WIDTH = 12


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    url: Annotated[str, typer.Argument(help="The server, with or without /v1.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Default: the first that /v1/models names.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable that holds the API key.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The key itself; others may see it in the process list.", show_default=False)
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME:VALUE, sent with every request.")] = None,
    completions: Annotated[bool, typer.Option("--completions", help="Ask /v1/completions instead of chat.")] = False,
    template_arg: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for chat_template_kwargs: does it count?")
    ] = None,
    speculation: Annotated[
        bool | None, typer.Option("--speculation/--no-speculation", help="Is the server meant to speculate?")
    ] = None,
    reset_url: Annotated[str | None, typer.Option(help="POST empties the prefix cache.", show_default=False)] = None,
    metrics_url: Annotated[str | None, typer.Option(help="Prometheus text.", show_default=False)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the TLS certificate.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one request.")] = 20.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the findings there; - for standard output.", dir_okay=False)
    ] = None,
) -> None:
    """Look over a live server before measuring it: what would spoil a comparison, and the remedy. Under a minute.

    Exit code 0: nothing wrong. 1: something is. 2: the server cannot be reached, or an option is wrong.
    """
    from breakeven.lab.doctor import Options, UnreachableError, diagnose

    headers = dict(_pair(text, ":", "--header") for text in header or ())
    key = api_key
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if not key:
            _fail(f"the environment variable {api_key_env}, which should hold the API key, is not set")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    options = Options(
        url=url if "://" in url else f"http://{url}",
        model=model,
        headers=headers,
        verify_tls=not insecure,
        chat=not completions,
        timeout_s=timeout,
        reset_url=reset_url,
        metrics_url=metrics_url,
        expect_speculation=speculation,
        template_arguments=dict(_argument(text) for text in template_arg or ()),
    )
    quiet = json_file is not None and str(json_file) == "-"
    console = Console(stderr=quiet, highlight=False)
    try:
        found = diagnose(options, lambda finding: _show(console, finding))
    except UnreachableError as problem:
        _fail(str(problem))
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    wrong = len(found.wrong)
    console.print(
        f"\n{found.model} at {found.url}: "
        + (f"{wrong} of {len(found.findings)} checks found something wrong" if wrong else "nothing wrong")
        + f" ({found.seconds:.0f} s)",
        soft_wrap=True,
        markup=False,
    )
    if json_file is not None:
        _write(json_file, json.dumps(found.to_json(), indent=2, ensure_ascii=False) + "\n")
    raise typer.Exit(WRONG if wrong else 0)


def _show(console: Console, finding: Finding) -> None:
    sign, style = _SIGNS[finding.status.value]
    console.print(Text.assemble((f"{sign} {finding.check:<{_NAME_WIDTH}} ", style), finding.seen), soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"  {'':<{_NAME_WIDTH}} → {finding.remedy}"), soft_wrap=True)


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        _fail(f"{path} cannot be written: {problem.strerror or problem}")


def _pair(text: str, mark: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition(mark)
    if not found or not name.strip():
        _fail(f"{option} {text!r} must be written NAME{mark}VALUE")
    return name.strip(), value.strip()


def _argument(text: str) -> tuple[str, Any]:
    """A value that is JSON (true, 3, "text") is taken as such, anything else as text."""
    name, value = _pair(text, "=", "--template-arg")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _fail(message: str, code: int = UNREACHABLE) -> NoReturn:
    typer.echo(f"breakeven: {message}", err=True)
    raise typer.Exit(code)
