"""`breakeven serve`: its flags, and what it says before anything is loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from breakeven.cli import serve as serve_command
from breakeven.engine.config import ConfigError, EngineConfig
from breakeven.engine.server import ServerOptions, bind

FLAGS = """
    --model some/dir --dtype float32 --port 0 --api-key k --served-model-name a --served-model-name b
    --context-length 100 --kv-cache-tokens 640 --page-size 8 --max-running-requests 3 --threads 2
    --chunked-prefill-size 32 --max-queued-requests 5 --queue-policy wait --disable-radix-cache --seed 7
    --speculative-algorithm NGRAM --speculative-num-steps 4 --speculative-ngram-max 6
"""
NGRAM = ("--speculative-algorithm", "ngram")
BY_LOAD = ("--speculative-num-steps-per-batch-size",)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    serve_command.register(app)
    return CliRunner().invoke(app, ["serve", *arguments])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EngineConfig, int | None, ServerOptions]]:
    """What would have been served: (model, config, threads, options)."""
    from breakeven.engine import server

    calls: list[tuple[str, EngineConfig, int | None, ServerOptions]] = []
    loads: list[tuple[str, EngineConfig, int | None]] = []

    def fake_serve(load: object, options: ServerOptions, listener: object) -> int:
        assert callable(load)
        load()
        calls.append((*loads[-1], options))
        return 0

    monkeypatch.setattr(server, "serve", fake_serve)
    monkeypatch.setattr(serve_command, "_load", lambda *call: loads.append(call[:3]))
    return calls


def test_the_flags_reach_the_engine_and_the_server(
    served: list[tuple[str, EngineConfig, int | None, ServerOptions]],
) -> None:
    result = run(*FLAGS.split())
    assert result.exit_code == 0, result.output
    ((model, config, threads, options),) = served
    assert (model, threads) == ("some/dir", 2)
    assert (config.dtype, config.max_context, config.kv_cache_tokens, config.page_size) == ("float32", 100, 640, 8)
    assert (config.max_running_requests, config.prefill_chunk, config.prefix_cache, config.seed) == (3, 32, False, 7)
    assert config.speculation is not None
    assert (config.speculation.algorithm, config.speculation.num_steps) == ("ngram", 4)
    assert (config.speculation.num_draft_tokens, config.speculation.ngram_max) == (5, 6)
    assert options.model_names == ("a", "b")
    assert (options.api_key, options.max_queued_requests, options.queue_policy) == ("k", 5, "wait")


def test_a_schedule_reaches_the_engine_and_sets_the_depth(
    served: list[tuple[str, EngineConfig, int | None, ServerOptions]],
) -> None:
    result = run("--port", "0", *NGRAM, *BY_LOAD, "[[1,4,5],[5,8,1],[9,256,0]]")
    assert result.exit_code == 0, result.output
    ((_, config, _, _),) = served
    assert config.speculation is not None
    assert (config.speculation.num_steps, config.speculation.num_draft_tokens) == (5, 6)
    assert config.schedule is not None
    assert [config.schedule.num_steps(n) for n in (1, 4, 5, 8, 9, 1000)] == [5, 5, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2-135m", "smollm2-135m"), ("/models/Qwen3-0.6B/", "Qwen3-0.6B"), ("x/tiny.gguf", "tiny")],
)
def test_the_model_is_served_under_its_own_name_and_without_speculation(
    served: list[tuple[str, EngineConfig, int | None, ServerOptions]], model: str, name: str
) -> None:
    assert run("--model", model, "--port", "0").exit_code == 0
    ((_, config, _, options),) = served
    assert options.model_names == (name,)
    assert config.speculation is None
    assert config.prefix_cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "9"), "lower it or raise num_steps"),
        (("--speculative-draft-model-path", "x"), "needs --speculative-algorithm"),
        (("--speculative-draft-layer-ids", "output"), "needs --speculative-algorithm eagle3"),
        ((*BY_LOAD, "[[1,4,3]]"), "needs --speculative-algorithm"),
        ((*NGRAM, *BY_LOAD, "[[2,4,3]]"), "start the first"),
        ((*NGRAM, "--speculative-num-steps", "2", *BY_LOAD, "[[1,4,3]]"), "raise num_steps"),
        (("--page-size", "0"), "page_size must be at least 1"),
        (("--api-key", ""), "API key is empty"),
        (("--host", "host.invalid"), "cannot listen on host.invalid"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_two(arguments: tuple[str, ...], message: str) -> None:
    result = run("--port", "0", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_port_in_use_is_told_with_exit_code_two_before_the_model_loads(
    served: list[tuple[str, EngineConfig, int | None, ServerOptions]],
) -> None:
    with bind("127.0.0.1", 0) as taken:
        result = run("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "choose another --host or --port" in result.output
    assert served == []


def test_what_the_engine_cannot_do_is_told_with_exit_code_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("eagle3 is not available")

    monkeypatch.setattr(serve_command, "_load", refuse)
    result = run("--port", "0", "--speculative-algorithm", "eagle3", "--speculative-draft-model-path", "x")
    assert result.exit_code == 2
    assert "eagle3 is not available" in result.output


@pytest.mark.parametrize(
    ("damage", "message"),
    [("truncated GGUF", "truncated"), ("no tokenizer", "tokenizer.json is missing")],
)
def test_a_damaged_model_is_one_line_and_exit_code_two(
    tiny_llama_dir: Callable[..., Path], tmp_path: Path, damage: str, message: str
) -> None:
    if damage == "no tokenizer":
        model = tmp_path / "model"
        shutil.copytree(tiny_llama_dir(), model, ignore=shutil.ignore_patterns("tokenizer.json"))
    else:
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x02" + b"\x00" * 9)
    command = [sys.executable, "-m", "breakeven.cli.main", "serve", "--model", str(model), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert str(model) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "layer_ids", "tested"),
    [
        ("--speculative-algorithm eagle3", None, True),
        ("--speculative-algorithm eagle3 --speculative-draft-layer-ids output", "output", True),
        ("--speculative-algorithm eagle3 --skip-drafter-self-test", None, False),
        ("--speculative-algorithm ngram", None, False),
    ],
)
def test_a_drafter_is_tested_after_loading_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, arguments: str, layer_ids: str | None, tested: bool
) -> None:
    from breakeven.engine import drafter_check, server
    from breakeven.engine.engine import Engine

    configs: list[EngineConfig] = []
    checked: list[object] = []
    monkeypatch.setattr(Engine, "from_pretrained", lambda model, config: configs.append(config) or "the engine")
    monkeypatch.setattr(drafter_check, "log_drafter_check", checked.append)
    monkeypatch.setattr(server, "serve", lambda load, options, listener: 0 if load() == "the engine" else 1)
    assert run("--port", "0", *arguments.split()).exit_code == 0
    assert configs[0].speculation is not None
    assert configs[0].speculation.draft_layer_ids == layer_ids
    assert checked == (["the engine"] if tested else [])


def test_listening_beyond_loopback_without_a_key_warns(
    served: list[tuple[str, EngineConfig, int | None, ServerOptions]],
) -> None:
    assert "without --api-key" in run("--host", "0.0.0.0", "--port", "0").output
    assert "without --api-key" not in run("--host", "127.0.0.1", "--port", "0").output


def test_the_help_needs_neither_torch_nor_the_web_server() -> None:
    script = (
        "import sys, typer\n"
        "from breakeven.cli import serve\n"
        "app = typer.Typer(); app.callback()(lambda: None); serve.register(app)\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'numpy', 'uvicorn', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for flag in ("--speculative-num-draft-tokens", "--kv-cache-tokens", "--queue-policy"):
        assert flag[:20] in done.stdout  # a narrow terminal cuts long names
