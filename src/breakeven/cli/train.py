"""`breakeven train`: from prompts to a drafter, and its evaluation."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from breakeven.train.config import TrainConfig

UNFINISHED = 75  # EX_TEMPFAIL: run the same command again


class StageName(StrEnum):
    """A stage of a run."""

    prompts = "prompts"
    self_prompts = "self-prompts"
    answers = "answers"
    vocab = "vocab"
    train = "train"
    export = "export"
    evaluate = "evaluate"


class DraftAlgorithm(StrEnum):
    """What drafts in an evaluation."""

    eagle3 = "eagle3"
    ngram = "ngram"


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(no_args_is_help=True, help="Train an EAGLE-3 drafter, and evaluate it.")
    group.command("run")(run)
    group.command("eval")(evaluate)
    app.add_typer(group, name="train")


def _fail(message: str) -> NoReturn:
    typer.echo(f"breakeven train: {message}", err=True)
    raise typer.Exit(2)


def _not_installed(error: ModuleNotFoundError) -> NoReturn:
    _fail(f"training is not installed ({error.name} is missing): pip install 'breakeven[train]'")


def _config(path: Path | None) -> TrainConfig:
    from breakeven.train.config import TrainConfig, load_config

    if path is None:
        return TrainConfig()
    if not path.exists():
        ready = Path(__file__).resolve().parent.parent / "train" / "configs" / f"{path.name}.yaml"
        path = ready if ready.is_file() else path
    return load_config(path)


def run(
    config: Annotated[Path, typer.Argument(help="Training file, or the name of a ready one: smollm2-135m, tiny.")],
    out: Annotated[Path, typer.Option(help="Directory of the run; an interrupted run goes on there.")],
    stage: Annotated[
        list[StageName] | None, typer.Option(help="Only these stages; repeat.", show_default="all")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(min=0, help="This call ends after so long (exit 75).")] = None,
    answer_seconds: Annotated[float | None, typer.Option(min=0, help="Time box of the answers stage.")] = None,
    train_seconds: Annotated[
        float | None, typer.Option(min=1, help="Time box of the train stage over all calls; the schedule fits it.")
    ] = None,
    evaluate_reserve: Annotated[
        float, typer.Option(min=0, help="Seconds of --max-seconds kept for export and evaluation.")
    ] = 0.0,
    bfcl: Annotated[Path | None, typer.Option(help="Unpacked bfcl-eval package, for agentic prompts.")] = None,
    held_out: Annotated[
        list[Path] | None, typer.Option(help="HumanEval, Spec-Bench or messages: evaluated on, never trained on.")
    ] = None,
    data: Annotated[list[Path] | None, typer.Option(help="Conversations (JSONL) to train on as well.")] = None,
    target: Annotated[str | None, typer.Option(help="As of `serve --model`; replaces the file's.")] = None,
    train_on: Annotated[list[str] | None, typer.Option("--domain", help="Train on these domains only.")] = None,
) -> None:
    """Run all stages: prompts, answers, vocabulary, training, export, evaluation. Finished ones are not run again."""
    try:
        from breakeven.engine.config import ConfigError
        from breakeven.train.config import DOMAINS
        from breakeven.train.pipeline import STAGES, RunOptions
        from breakeven.train.pipeline import run as run_stages
    except ModuleNotFoundError as error:
        _not_installed(error)
    for path in (*(held_out or ()), *(data or ()), *((bfcl,) if bfcl is not None else ())):
        if not path.exists():
            _fail(f"{path} does not exist")
    try:
        settings = _config(config)
        if target is not None:
            settings = settings.model_copy(update={"target": target})
        if train_on:
            unknown = [name for name in train_on if name not in DOMAINS]
            if unknown:
                _fail(f"--domain {unknown[0]}: choose from {', '.join(DOMAINS)}")
            settings = settings.model_copy(update={"domains": tuple(train_on)})
        chosen = {item.value for item in stage} if stage else set(STAGES)
        options = RunOptions(
            out=out,
            stages=tuple(name for name in STAGES if name in chosen),
            max_seconds=max_seconds,
            answer_seconds=answer_seconds,
            train_seconds=train_seconds,
            evaluate_reserve=evaluate_reserve,
            bfcl=bfcl,
            held_out=tuple(held_out or ()),
            data=tuple(data or ()),
        )
        finished = run_stages(settings, options)
    except ConfigError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or out}: {error.strerror or error}")
    if not finished:
        raise typer.Exit(UNFINISHED)


def evaluate(
    held_out: Annotated[list[Path], typer.Argument(help="HumanEval.jsonl.gz, Spec-Bench question.jsonl, or messages.")],
    out: Annotated[Path, typer.Option(help="Where evaluation.json and evaluation.md go.")],
    drafter: Annotated[
        Path | None, typer.Option(help="Directory of the drafter.", show_default="the one in the box")
    ] = None,
    target: Annotated[str, typer.Option(help="As of `serve --model`.")] = "smollm2-135m",
    algorithm: Annotated[DraftAlgorithm, typer.Option(help="What drafts.")] = DraftAlgorithm.eagle3,
    config: Annotated[Path | None, typer.Option(help="Training file whose `evaluate` section holds.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="A sample of the prompts.")] = None,
) -> None:
    """Mean acceptance length of a drafter on held-out prompts, through the engine, with intervals."""
    try:
        from breakeven.engine.config import ConfigError
        from breakeven.engine.models.drafter_load import default_drafter
        from breakeven.train.evaluate import table_lines
        from breakeven.train.pipeline import evaluate_files
    except ModuleNotFoundError as error:
        _not_installed(error)
    try:
        settings = _config(config)
        if max_prompts is not None:
            limited = settings.evaluate.model_copy(update={"max_prompts": max_prompts})
            settings = settings.model_copy(update={"evaluate": limited})
        directory = drafter
        if algorithm is DraftAlgorithm.eagle3 and directory is None:
            directory = default_drafter(target)
            if directory is None:
                _fail(f"there is no drafter in the box for {target!r}; name one with --drafter")
        tables = evaluate_files(settings, target, directory, held_out, out, algorithm.value)
    except ConfigError as error:
        _fail(str(error))
    for line in table_lines(tables):
        typer.echo(line)
