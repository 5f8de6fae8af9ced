"""The `breakeven` command: each group of commands registers itself and imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from breakeven import __version__
from breakeven.cli import bench, doctor, lab, policy, results, selftest, serve, train, tune

app = typer.Typer(
    name="breakeven",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"breakeven {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """At which load does speculative decoding stop paying? An A/B lab, and the engine it ships with."""


lab.register(app)
selftest.register(app)
results.register(app)
policy.register(app)
tune.register(app)
bench.register(app)
serve.register(app)
train.register(app)
doctor.register(app)

if __name__ == "__main__":
    app()
