"""A whole run on a tiny target; and the gate between the trainer and the engine's drafter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from train_tools import TINY, conversations, tiny_model
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.engine.config import ConfigError, EngineConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter import Drafter
from breakeven.engine.models.drafter_load import load_drafter
from breakeven.engine.models.load import load_model
from breakeven.train.config import OptimConfig, ShapeConfig, TrainConfig, load_config
from breakeven.train.evaluate import PromptResult, group_result, run_prompts, summarise, table_lines
from breakeven.train.export import export_drafter
from breakeven.train.files import read_rows, shards
from breakeven.train.heldout import HeldOutPrompt
from breakeven.train.model import DrafterModule
from breakeven.train.pipeline import STAGES, RunOptions, run
from breakeven.train.replay import replay_accuracy
from breakeven.train.trainer import FrozenTarget, Trainer
from breakeven.train.vocab import choose_vocab

SETTINGS = """
device: cpu
dtype: float32
prompts:
  {total: 24, self_prompts: 6, articles: 2, article_tokens: 24, packages: [rich], max_source_files: 5}
answers: {max_tokens: 12, max_prompt_tokens: 400, slots: 8, steps_per_sync: 4}
vocab: {size: 64}
drafter: {intermediate_size: 32, num_heads: 4, num_kv_heads: 2, head_dim: 16, tap_boundaries: [1, 2, 4]}
train: {unrolled_steps: 3, max_length: 512, batch_tokens: 2048, micro_batch_tokens: 2048, epochs: 2,
        held_out_conversations: 4, compile: false}
export: {vocab_sizes: [64, 32]}
evaluate: {max_tokens: 8, max_running: 4, kv_cache_tokens: 4096, max_prompts: 3}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("run")
    target = str(tiny_llama_dir(num_hidden_layers=4))
    (folder / "tiny.yaml").write_text(SETTINGS)
    held_out = folder / "held.jsonl"
    held_out.write_text("".join(json.dumps({"id": n, "messages": [{"role": "user", "content": f"ask {n}"}]}) + "\n"
                                for n in range(4)))  # fmt: skip
    arguments = ["train", "run", str(folder / "tiny.yaml"), "--out", str(folder / "out"), "--target", target,
                 "--held-out", str(held_out)]  # fmt: skip
    first = CliRunner().invoke(app, [*arguments, "--max-seconds", "0"])
    assert first.exit_code == 75, first.output
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder, target, arguments


def test_a_run_leaves_data_checkpoints_and_a_card(finished) -> None:  # type: ignore[no-untyped-def]
    folder, target, _ = finished
    out = folder / "out"
    manifest = json.loads((out / "manifest.json").read_text())["stages"]
    assert set(manifest) == set(STAGES)
    rows = [row for path in shards(out, "answers") for row in read_rows(path)]
    assert rows
    assert {"id", "domain", "conversations", "prompt_ids", "answer_ids"} <= set(rows[0])
    assert all(row["conversations"][-1]["role"] == "assistant" for row in rows)
    assert {row["temperature"] for row in rows} >= {0.0}
    loaded = load_model(target)
    for name, size in (("drafter", 64), ("drafter-32", 32)):
        drafter = load_drafter(out / name, loaded.config)
        assert drafter.config.draft_vocab_size == size
        assert drafter.config.tap_boundaries == (1, 2, 4)
        card = json.loads((out / name / "card.json").read_text())
        assert list(card["evaluation"][name]) == ["chain 3", "chain 7", "tree 2/4/16"]
        assert "Mean acceptance length" in (out / name / "README.md").read_text()


def test_trainer_and_engine_agree_on_the_run(finished) -> None:  # type: ignore[no-untyped-def]
    folder, _, _ = finished
    card = json.loads((folder / "out" / "drafter" / "card.json").read_text())
    trained = card["training"][-1]["accuracy"]
    assert card["replay"] == pytest.approx(trained, abs=0.01)


def test_running_again_does_nothing_and_a_changed_setting_redoes_what_depends_on_it(finished) -> None:  # type: ignore[no-untyped-def]
    folder, _, arguments = finished
    before = {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*") if p.is_file()}
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*") if p.is_file()} == before
    (folder / "tiny.yaml").write_text(SETTINGS.replace("[64, 32]", "[48]"))
    changed = CliRunner().invoke(app, [*arguments, "--stage", "export"])
    (folder / "tiny.yaml").write_text(SETTINGS)
    assert changed.exit_code == 0, changed.output
    after = {p: p.stat().st_mtime_ns for p in (folder / "out").rglob("*") if p.is_file()}
    moved = {p.relative_to(folder / "out").parts[0] for p in after if before.get(p) != after[p]}
    assert moved == {"drafter", "manifest.json"}


def test_the_time_of_unfinished_calls_goes_into_the_stage_and_nowhere_else(tmp_path: Path, tiny_llama_dir) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "tiny.yaml").write_text(SETTINGS)
    config = load_config(tmp_path / "tiny.yaml").model_copy(update={"target": str(tiny_llama_dir(num_hidden_layers=4))})
    out = tmp_path / "out"

    def records() -> dict[str, Any]:
        return json.loads((out / "manifest.json").read_text())["stages"]  # type: ignore[no-any-return]

    assert run(config, RunOptions(out=out, stages=("prompts",)))
    assert not run(config, RunOptions(out=out, stages=("answers",), max_seconds=100, evaluate_reserve=200))
    assert set(records()) == {"prompts", "answers so far"}
    assert run(config, RunOptions(out=out, stages=("answers",)))
    assert set(records()) == {"prompts", "answers"}


def test_the_engines_replay_is_right_as_often_as_the_trainer(tmp_path: Path) -> None:
    """The gate, on a drafter whose head is far from random: both sides count the same places."""
    optim = OptimConfig(
        unrolled_steps=4, max_length=64, batch_tokens=256, micro_batch_tokens=256, epochs=15, lr=5e-3, compile=False
    )
    shape = ShapeConfig(tap_boundaries=(1, 3, 5)).drafter(TINY, 50)
    model = tiny_model()
    ids = torch.arange(3, 53)
    module = DrafterModule(shape)
    module.start_from_target(model.head.weight, model.final_norm, ids)
    data = conversations(12, seed=1)
    trainer = Trainer(module, FrozenTarget(model, shape, ids, optim), data, data, optim, 0, tmp_path, lambda line: None)
    trainer.prepare()
    trainer.train(None, None)
    weights = module.export_weights(torch.float32) | {"d2t": ids - torch.arange(50)}
    engine_side = Drafter(shape, TINY, weights, model.embedding, torch.device("cpu"), model.head.weight)
    replay = replay_accuracy(engine_side, model, data, 4, 64)
    assert replay == pytest.approx(trainer.evaluate().accuracy, abs=0.002)
    assert replay[0] > 0.2


def test_a_pruned_export_keeps_the_rows_of_the_tokens_it_keeps(tmp_path: Path) -> None:
    shape = ShapeConfig(tap_boundaries=(1, 3, 5)).drafter(TINY, 20)
    module = DrafterModule(shape)
    module.tap_scale.uniform_(0.5, 2)
    counts = torch.randint(0, 100, (TINY.vocab_size,), generator=torch.Generator().manual_seed(0)).numpy()
    target_ids = choose_vocab(counts, 20)
    path = export_drafter(module, TINY, target_ids, counts, 7, tmp_path / "d", "official")
    weights = load_drafter(path, TINY).weights(torch.float32)
    kept = torch.arange(7) + weights["d2t"]
    assert kept.tolist() == choose_vocab(counts, 7).tolist()
    for row, token in enumerate(kept.tolist()):
        full = module.lm_head.weight[target_ids.tolist().index(token)].to(torch.bfloat16).float()
        assert torch.equal(weights["lm_head.weight"][row], full)
    folded = (module.fc.weight * module.tap_scale).to(torch.bfloat16).float()
    assert torch.equal(weights["fc.weight"], folded)


def test_an_evaluation_counts_what_the_engine_counts(tiny_llama_dir) -> None:  # type: ignore[no-untyped-def]
    loaded = load_model(str(tiny_llama_dir()))
    speculation = SpeculationConfig("ngram", num_steps=3, eagle_topk=1, num_draft_tokens=4, ngram_min=1)
    config = EngineConfig(dtype="float32", kv_cache_tokens=4096, speculation=speculation)
    engine = Engine(loaded.config, loaded.tokenizer, loaded.weights(torch.float32), config)
    prompts = [HeldOutPrompt(str(n), "own", "a", (("user", f"the the {n}"),)) for n in range(5)]
    results = run_prompts(engine, prompts, 24)
    assert [item.id for item in results] == ["0", "1", "2", "3", "4"]
    totals = engine.stats().speculation
    assert sum(item.drafts for item in results) == totals.drafts
    assert sum(item.accepted for item in results) == totals.accepted_tokens
    figures = group_result(results, 3, 200)
    assert figures.acceptance_length == pytest.approx(1 + totals.accepted_tokens / totals.drafts, abs=1e-4)
    assert figures.low is not None
    assert figures.high is not None
    assert figures.low <= figures.acceptance_length <= figures.high


def test_summaries_set_loops_apart_and_average_spec_bench() -> None:
    def result(category: str, accepted: int, looping: bool = False, suite: str = "Spec-Bench") -> PromptResult:
        return PromptResult(f"{category}{accepted}", suite, category, 20, 10, accepted, (accepted,), looping)

    results = [
        result("writing", 5), result("stem", 15), result("coding", 30), result("qa", 20), result("qa", 30, True),
        result("HumanEval", 10, suite="HumanEval"),
    ]  # fmt: skip
    summary = summarise(results, 1, 200)
    groups = summary["groups"]
    assert groups["Spec-Bench/qa"]["all"]["acceptance_length"] == 3.5
    assert groups["Spec-Bench/qa"]["without_loops"]["acceptance_length"] == 3.0
    assert groups["Spec-Bench/qa"]["loops"]["prompts"] == 1
    assert groups["Spec-Bench task/mt_bench"]["all"]["acceptance_length"] == 2.0
    assert summary["means"]["Spec-Bench non-code categories, all"] == pytest.approx((1.5 + 2.5 + 3.5) / 3, abs=1e-3)
    assert summary["means"]["Spec-Bench six tasks, without_loops"] == 2.5
    assert any("HumanEval" in line for line in table_lines({"chain 3": summary}))
    nothing = dataclasses.replace(results[0], drafts=0, accepted=0)
    assert group_result([nothing], 1, 200).acceptance_length is None


def test_shapes_that_were_evaluated_on_other_prompts_show_their_own_counts() -> None:
    def shape(looping: Sequence[bool], suite: str = "HumanEval") -> dict[str, Any]:
        made = [PromptResult(str(n), suite, "code", 20, 10, 5, (5,), loops) for n, loops in enumerate(looping)]
        return summarise(made, 1, 20)

    few, many, other = shape([True, False, False]), shape([True] * 3 + [False] * 27), shape([False], "MBPP")
    (row,) = [line for line in table_lines({"a": few, "b": many}) if line.startswith("| HumanEval |")]
    assert row.startswith("| HumanEval | 3 / 30 | 33% / 10% |")
    (row,) = [line for line in table_lines({"a": few, "b": few, "c": other}) if line.startswith("| HumanEval |")]
    assert row.startswith("| HumanEval | 3 | 33% |")
    (row,) = [line for line in table_lines({"c": other, "a": few, "b": many}) if line.startswith("| HumanEval |")]
    assert row.startswith("| HumanEval | – / 3 / 30 | – / 33% / 10% |")


def test_ready_configs_are_valid_and_mistakes_are_named(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "src" / "breakeven" / "train" / "configs"
    for path in folder.glob("*.yaml"):
        load_config(path)
    bad = tmp_path / "bad.yaml"
    bad.write_text("train: {lr: fast}\nanswer: {}\n")
    with pytest.raises(ConfigError, match=r"train\.lr.*answer"):
        load_config(bad)
    bad.write_text("train: {micro_batch_tokens: 100000}\n")
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        load_config(bad)


def test_missing_inputs_are_errors_and_not_tracebacks(tmp_path: Path, tiny_llama_dir) -> None:  # type: ignore[no-untyped-def]
    target = str(tiny_llama_dir(num_hidden_layers=4))
    config = TrainConfig(target=target, device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="run the prompts stage"):
        run(config, RunOptions(out=tmp_path, stages=("answers",)))
    with pytest.raises(ConfigError, match="run the answers stage"):
        run(config, RunOptions(out=tmp_path, stages=("vocab",)))
    answer = CliRunner().invoke(app, ["train", "run", str(tmp_path / "none.yaml"), "--out", str(tmp_path)])
    assert answer.exit_code == 2
    assert "none.yaml cannot be read" in answer.output
    answer = CliRunner().invoke(app, ["train", "run", "tiny", "--out", str(tmp_path), "--held-out", "missing.jsonl"])
    assert answer.exit_code == 2
    assert "missing.jsonl does not exist" in answer.output
