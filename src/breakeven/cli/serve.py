"""`breakeven serve`: the embedded engine behind an OpenAI-compatible server."""

from __future__ import annotations

import ipaddress
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from breakeven.engine.config import EngineConfig, SpeculationConfig, SpeculationSchedule
    from breakeven.engine.engine import Engine

_SERVER, _ENGINE, _SPECULATION = "Server", "Engine", "Speculation"
_NUM_STEPS = 3
API_KEY_VARIABLE = "BREAKEVEN_API_KEY"


class Dtype(StrEnum):
    """Arithmetic of weights and KV."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class QueuePolicy(StrEnum):
    """What happens to a request beyond the queue's limit."""

    reject = "reject"
    wait = "wait"


class Algorithm(StrEnum):
    """Where drafts come from."""

    ngram = "ngram"
    eagle3 = "eagle3"

    @classmethod
    def _missing_(cls, value: object) -> Algorithm | None:
        return next((item for item in cls if isinstance(value, str) and item.value == value.lower()), None)


class LayerIds(StrEnum):
    """What the layer ids in a drafter's config.json mean."""

    boundary = "boundary"
    output = "output"


class LogLevel(StrEnum):
    """How much is logged, to standard error."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("serve")(serve)


def _fail(message: str) -> NoReturn:
    typer.echo(f"breakeven serve: {message}", err=True)
    raise typer.Exit(2)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _speculation(
    algorithm: Algorithm | None,
    draft_model_path: str | None,
    draft_layer_ids: LayerIds | None,
    num_steps: int | None,
    eagle_topk: int,
    num_draft_tokens: int | None,
    ngram_min: int,
    ngram_max: int,
    schedule: SpeculationSchedule | None,
) -> SpeculationConfig | None:
    from breakeven.engine.config import ConfigError, SpeculationConfig

    if algorithm is None:
        if schedule is not None:
            raise ConfigError("--speculative-num-steps-per-batch-size needs --speculative-algorithm")
        if draft_model_path is not None:
            raise ConfigError("--speculative-draft-model-path needs --speculative-algorithm")
        if draft_layer_ids is not None:
            raise ConfigError("--speculative-draft-layer-ids needs --speculative-algorithm eagle3")
        return None
    if num_steps is None:
        num_steps = max(1, schedule.depths[-1]) if schedule is not None else _NUM_STEPS
    if num_draft_tokens is None:  # all that a chain drafts; for a tree, one level's branching per step
        num_draft_tokens = min(64, 1 + num_steps * eagle_topk)
    return SpeculationConfig(
        algorithm=algorithm.value,
        num_steps=num_steps,
        eagle_topk=eagle_topk,
        num_draft_tokens=num_draft_tokens,
        draft_model_path=draft_model_path,
        draft_layer_ids=None if draft_layer_ids is None else draft_layer_ids.value,
        ngram_min=ngram_min,
        ngram_max=ngram_max,
    )


def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "--model-path",
            help="'smollm2-135m', a Hugging Face directory (Llama, Qwen2 or Qwen3), or a .gguf file.",
            rich_help_panel=_ENGINE,
        ),
    ] = "smollm2-135m",
    dtype: Annotated[Dtype, typer.Option(help="Weights and KV.", rich_help_panel=_ENGINE)] = Dtype.bfloat16,
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.", rich_help_panel=_ENGINE)] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads.", show_default="PyTorch's choice", rich_help_panel=_ENGINE),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            "--context-length",
            min=1,
            help="Longest prompt plus answer, in tokens.",
            show_default="the model's limit",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_cache_tokens: Annotated[
        int, typer.Option(help="Capacity of the KV pool, in tokens.", rich_help_panel=_ENGINE)
    ] = 65_536,
    page_size: Annotated[int, typer.Option(help="Tokens in a KV page.", rich_help_panel=_ENGINE)] = 16,
    max_running_requests: Annotated[
        int, typer.Option(help="Sequences in one batch at most.", rich_help_panel=_ENGINE)
    ] = 256,
    chunked_prefill_size: Annotated[
        int, typer.Option(help="Prompt tokens in one step at most.", rich_help_panel=_ENGINE)
    ] = 512,
    disable_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--disable-prefix-cache",
            "--disable-radix-cache",
            help="Do not reuse the KV of prefixes that requests share.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="For requests that name no seed.", rich_help_panel=_ENGINE)] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.", rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="Clients must send it as a bearer token.", rich_help_panel=_SERVER),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name in the API; repeat for several.", show_default="the --model's name", rich_help_panel=_SERVER
        ),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(min=0, help="Requests held beyond the running ones.", rich_help_panel=_SERVER)
    ] = 1024,
    queue_policy: Annotated[
        QueuePolicy, typer.Option(help="A full queue answers 429, or lets requests wait.", rich_help_panel=_SERVER)
    ] = QueuePolicy.reject,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Concurrent HTTP requests; beyond, 503.", rich_help_panel=_SERVER)
    ] = 4096,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest request body; beyond, 413.", rich_help_panel=_SERVER)
    ] = 16 * 2**20,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds that running requests get after SIGTERM.", rich_help_panel=_SERVER),
    ] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(rich_help_panel=_SERVER, help="To standard error.")] = LogLevel.info,
    speculative_algorithm: Annotated[
        Algorithm | None,
        typer.Option(
            case_sensitive=False,
            help="'ngram': look the last tokens up in the context. 'eagle3': a trained drafter.",
            show_default="off",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    speculative_draft_model_path: Annotated[
        str | None,
        typer.Option(help="Directory of the drafter (eagle3), or its name in the box.", rich_help_panel=_SPECULATION),
    ] = None,
    speculative_draft_layer_ids: Annotated[
        LayerIds | None,
        typer.Option(
            help="What the drafter's layer ids mean: the state after so many layers, or a layer's output (eagle3).",
            show_default="by the rule in docs/drafters.md",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    skip_drafter_self_test: Annotated[
        bool,
        typer.Option(
            "--skip-drafter-self-test",
            help="Do not draft for a few prompts after loading to see whether the drafter fits (eagle3).",
            rich_help_panel=_SPECULATION,
        ),
    ] = False,
    speculative_num_steps: Annotated[
        int | None,
        typer.Option(
            help="Depth: tokens drafted along one path.",
            show_default="3, or the schedule's largest",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    speculative_num_steps_per_batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Depth by the number of decoding sequences: ranges [first, last, steps], 0 is off;"
            " '[[1,4,3],[5,8,1],[9,256,0]]'.",
            show_default="the same at any load",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    speculative_eagle_topk: Annotated[
        int, typer.Option(help="Branches per step; 1 is a chain.", rich_help_panel=_SPECULATION)
    ] = 1,
    speculative_num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens verified per round, the root included.",
            show_default="1 + steps × topk",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    speculative_ngram_min: Annotated[
        int, typer.Option(help="Shortest suffix looked up.", rich_help_panel=_SPECULATION)
    ] = 2,
    speculative_ngram_max: Annotated[
        int, typer.Option(help="Longest suffix looked up.", rich_help_panel=_SPECULATION)
    ] = 4,
) -> None:
    """Serve a model over OpenAI's API, with or without speculative decoding.

    Without flags: SmolLM2-135M-Instruct on http://127.0.0.1:8000.
    """
    from breakeven.engine.config import ConfigError, EngineConfig, SpeculationSchedule

    try:
        schedule = None
        if speculative_num_steps_per_batch_size is not None:
            schedule = SpeculationSchedule.parse(speculative_num_steps_per_batch_size)
        config = EngineConfig(
            dtype=dtype.value,
            device=device,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            max_running_requests=max_running_requests,
            max_context=max_model_len,
            prefill_chunk=chunked_prefill_size,
            prefix_cache=not disable_prefix_cache,
            speculation=_speculation(
                speculative_algorithm,
                speculative_draft_model_path,
                speculative_draft_layer_ids,
                speculative_num_steps,
                speculative_eagle_topk,
                speculative_num_draft_tokens,
                speculative_ngram_min,
                speculative_ngram_max,
                schedule,
            ),
            schedule=schedule,
            seed=seed,
        )
    except ConfigError as error:
        _fail(str(error))
    if api_key == "":
        _fail(f"the API key is empty; give one, or leave --api-key and {API_KEY_VARIABLE} out")
    if any(not name for name in served_model_name or ()):
        _fail("--served-model-name must not be empty")
    try:
        from breakeven.engine import server
    except ModuleNotFoundError as error:
        _fail(f"the engine is not installed ({error.name} is missing): pip install 'breakeven[engine]'")
    try:
        listener = server.bind(host, port)
    except ConfigError as error:
        _fail(str(error))
    if api_key is None and not _is_loopback(host):
        typer.echo(f"warning: listening on {host} without --api-key: anyone who reaches it can use it", err=True)
    options = server.ServerOptions(
        model_names=tuple(served_model_name or [_default_name(model)]),
        api_key=api_key,
        max_queued_requests=max_queued_requests,
        queue_policy=queue_policy.value,
        max_connections=max_connections,
        max_body_bytes=max_body_bytes,
        drain_timeout_s=drain_timeout,
        log_level=log_level.value,
    )
    _limit_spinning()
    code = server.serve(lambda: _load(model, config, threads, not skip_drafter_self_test), options, listener)
    sys.stdout.flush()
    raise typer.Exit(code)


def _default_name(model: str) -> str:
    """`/models/Qwen3-0.6B/` → `Qwen3-0.6B`; `x/y.gguf` → `y`; a known name as it is."""
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if os.sep in model or path.is_dir() else model


def _limit_spinning() -> None:
    """Let OpenMP's idle threads sleep after a fraction of a millisecond, unless the user has said otherwise.

    By default they spin without end between PyTorch's operations. Where anything else wants the same cores, the load
    generator of a benchmark included, the spinning thread keeps the working one from running and decoding slows
    many-fold. Read once, when PyTorch loads its OpenMP library, so it must be set before.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _load(model: str, config: EngineConfig, threads: int | None, self_test: bool) -> Engine:
    try:
        import torch
    except ModuleNotFoundError:
        from breakeven.engine.config import ConfigError

        raise ConfigError("the engine is not installed (torch is missing): pip install 'breakeven[engine]'") from None
    from breakeven.engine.engine import Engine

    if threads is not None:
        torch.set_num_threads(threads)
    engine = Engine.from_pretrained(model, config)
    if self_test and config.speculation is not None and config.speculation.algorithm == "eagle3":
        from breakeven.engine.drafter_check import log_drafter_check

        log_drafter_check(engine)
    return engine
