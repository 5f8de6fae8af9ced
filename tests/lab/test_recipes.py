"""The recipes under examples/: they load, they can be planned, and real engines' own parsers take their command lines.

Which engines there are is told by the environment, as scripts/engines.sh sets it: BREAKEVEN_VLLM (the `vllm` program),
BREAKEVEN_SGLANG_PYTHON (a Python that imports sglang), BREAKEVEN_LLAMA_SERVER (`llama-server`). What is not named is
skipped. TensorRT-LLM's parser needs CUDA to be imported: its recipe is only looked at by breakeven itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from breakeven.lab.campaign import Campaign
from breakeven.lab.campaign_file import load_campaign
from breakeven.lab.engines import EngineArm, EngineSpeculation, SglangArm, VllmArm
from breakeven.lab.known_traps import synthetic_arms, trap_sentences
from breakeven.lab.plan import build_schedule, load_suites

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = sorted(EXAMPLES.glob("*/*.yaml"))
PARSERS = Path(__file__).resolve().parent / "engine_parsers"
VLLM = os.environ.get("BREAKEVEN_VLLM", "")
SGLANG = os.environ.get("BREAKEVEN_SGLANG_PYTHON", "")
LLAMA = os.environ.get("BREAKEVEN_LLAMA_SERVER", "")


def _id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@cache
def recipe(path: Path) -> Campaign:
    return load_campaign(path).campaign


def commands(*types: str) -> dict[str, tuple[str, ...]]:
    """The command lines of all arms of these types, by recipe and arm; what a launch fills in is filled in."""
    found = {}
    for path in RECIPES:
        for name, arm in recipe(path).arms.items():
            if isinstance(arm, EngineArm) and arm.type in types:
                filled = {"{host}": "127.0.0.1", "{port}": "8000", "{files}": "/tmp/files"}
                command = arm.launch().command
                for key, value in filled.items():
                    command = tuple(part.replace(key, value) for part in command)
                found[f"{_id(path)} {name}"] = command
    return found


# Without any engine


def test_there_is_a_recipe_of_each_kind() -> None:
    folders = {path.parent.name for path in RECIPES}
    assert folders >= {
        "kimi-k2.5-8gpu",
        "llama-3.1-8b-1gpu",
        "qwen3-mtp",
        "dynamic-schedule",
        "synthetic-acceptance",
        "real-engines-2-cores",
    }
    assert {arm.type for path in RECIPES for arm in recipe(path).arms.values()} >= {
        "vllm",
        "sglang",
        "llamacpp",
        "trtllm",
    }
    assert all((path.parent / "README.md").is_file() for path in RECIPES)


@pytest.mark.parametrize("path", RECIPES, ids=_id)
def test_a_recipe_can_be_planned_and_has_blocks_for_a_verdict(path: Path) -> None:
    given = recipe(path)
    one_block = given.model_copy(update={"blocks": 1})
    assert build_schedule(one_block, load_suites(one_block)).launches
    synthetic = bool(synthetic_arms(given))
    first, *others = given.arms.values()
    itself = all(arm == first for arm in others)
    # Holm's correction over the levels needs nine blocks for a sign-flip p of 0.05; a condition gets no verdict, and a
    # server against itself should get none.
    assert given.blocks >= (5 if synthetic or itself else 9)
    assert given.natural or synthetic


GRAPHS = ("--max-cudagraph-capture-size=", "--compilation-config=")


@pytest.mark.parametrize("path", RECIPES, ids=_id)
def test_arms_of_a_recipe_differ_in_their_speculation_and_graphs_only(path: Path) -> None:
    def rest(arm: Any) -> dict[str, Any]:
        fields = arm.model_dump(mode="json", exclude={"speculation"})
        fields["flags"] = [flag for flag in fields["flags"] if not flag.startswith(GRAPHS)]
        return dict(fields)

    arms = list(recipe(path).arms.values())
    assert all(rest(arm) == rest(arms[0]) for arm in arms)


@pytest.mark.parametrize("path", RECIPES, ids=_id)
def test_no_recipe_walks_into_a_trap_unless_that_is_its_point(path: Path) -> None:
    expected: tuple[str, ...] = ()
    if _id(path) == "kimi-k2.5-8gpu/sglang":  # the shape that is named, and the baseline's graphs up to 128
        expected = ("verifies 16 tokens a round and can gain at most 3", "250 streams run without one")
    elif _id(path) == "kimi-k2.5-8gpu/vllm":  # the same graphs
        expected = ("those levels run without a graph",)
    elif path.parent.name == "synthetic-acceptance":
        expected = ("accepts drafts by lot",)
    found = list(trap_sentences(recipe(path)))
    assert [s for s in found if not any(words in s for words in expected)] == []
    assert all(any(words in s for s in found) for words in expected)


def test_the_campaign_that_started_this_project_is_kept_and_the_chain_to_try_is_beside_it() -> None:
    given = recipe(EXAMPLES / "kimi-k2.5-8gpu" / "sglang.yaml")
    tree, chain = given.arms["eagle3-tree"], given.arms["eagle3-chain"]
    assert isinstance(tree, SglangArm)
    assert isinstance(chain, SglangArm)
    assert isinstance(tree.speculation, EngineSpeculation)
    assert isinstance(chain.speculation, EngineSpeculation)
    shape = tree.speculation
    assert (shape.eagle_topk, shape.num_steps, shape.num_draft_tokens) == (4, 2, 16)
    assert (chain.speculation.num_steps, chain.speculation.eagle_topk) == (3, 1)
    assert given.levels == (1, 2, 5, 10, 30, 70, 100, 250)
    assert given.workload.max_tokens == 512
    assert given.workload.domains == ("coding", "agentic", "encyclopedic")
    assert any("eagle3-tree verifies 16 tokens" in s and "a chain of 3" in s for s in trap_sentences(given))


def test_graphs_of_vllm_arms_hold_as_many_requests_in_every_arm() -> None:
    """vLLM counts graphs in tokens: an arm that drafts K brings K + 1 of them for each request."""
    for path in RECIPES:
        if path.parent.name == "dynamic-schedule":  # all have those of the longest draft
            continue
        requests: set[Any] = set()
        for arm in recipe(path).arms.values():
            if isinstance(arm, VllmArm) and "--enforce-eager" not in arm.flags:
                listed = path.parent.name == "synthetic-acceptance"
                (given,) = [f.partition("=")[2] for f in arm.flags if f.startswith(GRAPHS[listed])]
                depth = arm.speculation.depth if isinstance(arm.speculation, EngineSpeculation) else 0
                tokens = (depth or 0) + 1
                if listed:  # sizes, without drafts also those of prefills
                    sizes = json.loads(given)["cudagraph_capture_sizes"]
                    assert max(sizes) == 1024
                    requests.add(tuple(size / tokens for size in sizes if size / tokens <= 256))
                else:
                    requests.add(int(given) / tokens)
        assert len(requests) <= 1, path


def _shapes() -> Any:
    spec = importlib.util.spec_from_file_location("make_shapes", EXAMPLES / "synthetic-acceptance" / "make_shapes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shapes_of_the_synthetic_recipe_fit_together_and_every_token_can_be_written(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'breakeven[engine]'")
    module = _shapes()
    module.write(tmp_path)
    target = json.loads((tmp_path / "llama-8b" / "config.json").read_text())
    drafter = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert target["hidden_size"] == drafter["target_hidden_size"] == drafter["hidden_size"]
    assert target["vocab_size"] == drafter["vocab_size"] > drafter["draft_vocab_size"]
    assert max(drafter["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) < target["num_hidden_layers"]
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "llama-8b" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == target["vocab_size"]
    for text in ("def f(x):\n\treturn x", "Grüße, 世界 🙂"):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("<end>") == target["eos_token_id"]
    assert tokenizer.decode([300, 5_000, 128_000]) == "w300w5000w128000"


# With the real engines' parsers


def _parse(python: str, script: str, lines: dict[str, tuple[str, ...]], **environment: str) -> dict[str, str | None]:
    done = subprocess.run(
        [python, str(PARSERS / script)],
        input=json.dumps(list(lines.values())),
        capture_output=True,
        text=True,
        timeout=600,
        env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(lines, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))


def _accepted(answers: dict[str, str | None]) -> None:
    """Every recipe is, and what was made wrong on purpose is not: a parser that takes anything proves nothing."""
    assert {name: said for name, said in answers.items() if said and not name.startswith("wrong")} == {}
    assert [name for name, said in answers.items() if name.startswith("wrong") and not said] == []


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM, reason="BREAKEVEN_VLLM names no vLLM: make test-engines")
def test_vllms_own_parser_takes_every_recipe() -> None:
    python = str(Path(VLLM).with_name("python"))
    lines = {name: command[command.index("serve") + 1 :] for name, command in commands("vllm").items()}
    assert len(lines) >= 10
    lines |= {
        "wrong key": ("model", '--speculative-config={"method": "eagle3", "num_speculative_tokes": 3}'),
        "wrong value": ("model", "--max-num-seqs", "many"),
        "wrong flag": ("model", "--no-such-flag"),
    }
    _accepted(_parse(python, "parse_vllm.py", lines, HF_HUB_OFFLINE="1"))


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SGLANG, reason="BREAKEVEN_SGLANG_PYTHON names no Python with SGLang: make test-engines")
def test_sglangs_own_parser_takes_every_recipe() -> None:
    lines = {name: command[command.index("--model-path") :] for name, command in commands("sglang").items()}
    assert len(lines) >= 10
    lines |= {
        "wrong flag": ("--model-path", "model", "--speculative-num-step-count", "3"),
        "wrong value": ("--model-path", "model", "--speculative-eagle-topk", "many"),
        "wrong choice": ("--model-path", "model", "--attention-backend", "flashinfers"),
    }
    _accepted(_parse(SGLANG, "parse_sglang.py", lines))


def _help_options() -> Iterator[str]:
    done = subprocess.run([LLAMA, "--help"], capture_output=True, text=True, timeout=60)
    yield from re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout)


@pytest.mark.engines
@pytest.mark.skipif(not LLAMA, reason="BREAKEVEN_LLAMA_SERVER names no llama-server: make test-engines")
def test_llama_servers_help_names_every_option_of_the_recipes() -> None:
    """It has no way to parse and not start, so names are compared, and values only of the kind of speculation."""
    known = set(_help_options())
    help_text = subprocess.run([LLAMA, "--help"], capture_output=True, text=True, timeout=60).stdout
    lines = commands("llamacpp")
    assert lines
    for command in lines.values():
        options = [part for part in command[1:] if re.fullmatch(r"--?[a-z][\w-]*", part)]
        assert [option for option in options if option not in known] == []
        if "--spec-type" in command:
            assert command[command.index("--spec-type") + 1] in help_text


if __name__ == "__main__":
    print(json.dumps({name: list(command) for name, command in commands(*sys.argv[1:]).items()}, indent=2))
