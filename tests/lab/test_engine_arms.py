"""Engines' arms: every speculation becomes an engine's own flags, or is refused with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakeven.lab.arms import Probe, StartError, make_arm
from breakeven.lab.campaign import Campaign, CommandArm
from breakeven.lab.campaign_file import CampaignError, parse_campaign
from breakeven.lab.engines import METHODS, EngineArm, EngineSpeculation, Launch
from breakeven.lab.engines.base import option_values
from breakeven.lab.engines.speculation import edges, most_nodes
from breakeven.lab.engines.traps import NOT_INHERITED, is_synthetic

ENGINES = ("vllm", "sglang", "llamacpp", "trtllm")
SCHEDULE = [[1, 4, 3], [5, 8, 1], [9, 16, 0]]


def arm(type: str, speculation: Any = "off", **fields: Any) -> Any:
    value = {"type": type, "model": "m", "speculation": speculation, **fields}
    text = json.dumps({"arms": {"a": value, "b": {"type": "embedded"}}, "baseline": "b"})
    return Campaign.model_validate_json(text).arms["a"]


def launch(type: str, speculation: Any = "off", **fields: Any) -> Launch:
    return arm(type, speculation, **fields).launch()


def eagle(**fields: Any) -> dict[str, Any]:
    return {"method": "eagle3", "draft_model_path": "d", **fields}


def vllm_config(speculation: dict[str, Any]) -> dict[str, Any]:
    (text,) = option_values(launch("vllm", speculation).command, "--speculative-config")
    return dict(json.loads(text))


def trtllm_config(speculation: dict[str, Any], **fields: Any) -> dict[str, Any]:
    (options,) = launch("trtllm", speculation, **fields).files.values()
    return dict(options["speculative_config"])


def _everything(found: Launch) -> str:
    return json.dumps([*found.command, found.files, found.env])


# The command line


def test_vllm_is_told_everything_in_its_own_words() -> None:
    found = launch(
        "vllm",
        served_model_name="name",
        dtype="float32",
        max_model_len=2048,
        tensor_parallel=2,
        pipeline_parallel=3,
        data_parallel=4,
        expert_parallel=8,
        gpus=[0, 3],
        executable="/venv/bin/vllm",
        flags=["--enforce-eager"],
        env={"X": "1"},
    )
    assert found.command == (
        *("/venv/bin/vllm", "serve", "m", "--host", "{host}", "--port", "{port}"),
        *("--enable-prompt-tokens-details", "--served-model-name", "name"),
        *("--dtype", "float32", "--max-model-len", "2048", "--tensor-parallel-size", "2"),
        *("--pipeline-parallel-size", "3", "--data-parallel-size", "4", "--enable-expert-parallel", "--enforce-eager"),
    )
    assert found.env == {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "0,3", "X": "1"}
    assert found.reset_path == "/reset_prefix_cache"


def test_vllms_cache_cannot_be_reset_outside_its_development_mode() -> None:
    given = arm("vllm", env={"VLLM_SERVER_DEV_MODE": "0"})
    assert not given.can_reset
    assert given.launch().reset_path is None
    assert not make_arm("a", given).can_reset


def test_sglang_is_told_everything_in_its_own_words() -> None:
    found = launch("sglang", eagle(num_steps=2, eagle_topk=4, num_draft_tokens=16), tensor_parallel=8, dtype="bfloat16")
    assert found.command == (
        *("python", "-m", "sglang.launch_server", "--model-path", "m", "--host", "{host}", "--port", "{port}"),
        *(
            "--enable-metrics",
            "--enable-cache-report",
            "--dtype",
            "bfloat16",
            "--tp-size",
            "8",
            "--speculative-algorithm",
            "EAGLE3",
        ),
        *("--speculative-draft-model-path", "d", "--speculative-num-steps", "2", "--speculative-eagle-topk", "4"),
        *("--speculative-num-draft-tokens", "16"),
    )
    assert found.reset_path == "/flush_cache?timeout=5"


def test_llamacpp_is_told_everything_in_its_own_words() -> None:
    found = launch("llamacpp", eagle(num_steps=3), slots=4, threads=2, max_model_len=1000)
    assert found.command == (
        *("llama-server", "-m", "m", "--host", "{host}", "--port", "{port}", "--metrics", "--no-webui"),
        *("--parallel", "4", "--ctx-size", "4000", "--threads", "2", "--threads-batch", "2"),
        *("--spec-type", "draft-eagle3", "--spec-draft-n-max", "3", "--spec-draft-model", "d"),
    )
    assert found.reset_path is None
    assert found.why_no_reset
    with pytest.raises(ValidationError, match="set slots beside max_model_len"):
        arm("llamacpp", max_model_len=1000)


def test_tensorrt_llm_is_told_in_a_file() -> None:
    found = launch("trtllm", eagle(num_steps=3), options={"cuda_graph_config": {"max_batch_size": 64}}, dtype="float16")
    assert found.command[-2:] == ("--extra_llm_api_options", "{files}/trtllm-options.yaml")
    assert found.files["trtllm-options.yaml"] == {
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        "dtype": "float16",
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "d"},
        "cuda_graph_config": {"max_batch_size": 64},
    }
    assert found.metrics_path == "/prometheus/metrics"
    mtp = trtllm_config({"method": "mtp", "num_steps": 3})
    assert mtp == {"decoding_type": "MTP", "max_draft_len": 3, "num_nextn_predict_layers": 3}


def test_a_server_does_not_inherit_synthetic_acceptance_or_a_folder_of_metrics_from_the_users_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NOT_INHERITED:
        monkeypatch.setenv(name, "2.5")
    show = f"import os; print(sorted(set(os.environ) & set({NOT_INHERITED!r})))"
    given = {
        "a": arm("llamacpp", executable=[sys.executable, "-c", show], env={"LLAMA_ARG_SPEC_SYNTH_LEN": "2"}),
        "b": CommandArm(type="command", command=(sys.executable, "-c", show, "{port}")),
    }
    for name, config in given.items():
        server = make_arm(name, config)
        server.start(tmp_path / name)
        with pytest.raises(StartError):
            server.wait_ready(Probe("/v1/completions", lambda model: b"{}"))
        server.stop()
    assert (tmp_path / "a").read_text().strip() == "['LLAMA_ARG_SPEC_SYNTH_LEN']"  # the arm's own
    assert (tmp_path / "b").read_text().strip() == "[]"


# Speculation


def test_ngram_in_each_engines_words() -> None:
    ngram = {"method": "ngram", "num_steps": 4, "ngram_max": 3}
    assert vllm_config({**ngram, "ngram_min": 2}) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
    assert launch("llamacpp", ngram).command[-6:] == (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4"),
    )
    assert trtllm_config(ngram) == {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 3}
    assert launch("sglang", {"method": "ngram", "num_steps": 4}).command[-8:] == (
        *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
        *("--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5"),
    )


def test_a_schedule_in_each_engines_words() -> None:
    speculation = eagle(schedule=SCHEDULE)
    assert vllm_config(speculation)["num_speculative_tokens_per_batch_size"] == SCHEDULE
    assert vllm_config(speculation)["num_speculative_tokens"] == 3
    sglang = launch("sglang", speculation)
    assert "--speculative-adaptive" in sglang.command
    assert sglang.files["sglang-adaptive.json"] == {
        "1": {"candidate_steps": [3]},
        "5": {"candidate_steps": [1]},
        "9": {"candidate_steps": [0]},
    }
    assert trtllm_config(speculation)["draft_len_schedule"] == {4: 3, 8: 1}
    assert trtllm_config(speculation, schedule_keys="first")["draft_len_schedule"] == {1: 3, 5: 1, 9: 0}
    assert trtllm_config(eagle(schedule=[[1, 4, 3], [5, 8, 0]]))["max_concurrency"] == 4
    with pytest.raises(ValidationError, match="does not depend on the load"):
        launch("llamacpp", speculation)


def test_synthetic_acceptance_in_each_engines_words() -> None:
    speculation = eagle(num_steps=3, synthetic_acceptance_length=2.5)
    assert vllm_config(speculation)["rejection_sample_method"] == "synthetic"
    assert vllm_config(speculation)["synthetic_acceptance_length"] == 2.5
    assert launch("sglang", speculation).env["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert launch("llamacpp", speculation).command[-2:] == ("--spec-synth-len", "2.5")
    with pytest.raises(ValidationError, match="no synthetic_acceptance_length"):
        launch("trtllm", speculation)
    for engine in ("vllm", "sglang", "llamacpp"):
        pretending, earning = launch(engine, speculation), launch(engine, eagle(num_steps=3))
        assert is_synthetic(pretending.command, pretending.env)
        assert not is_synthetic(earning.command, earning.env)


def test_acceptance_thresholds_are_sglangs_alone() -> None:
    speculation = eagle(num_steps=3, acceptance_threshold=0.9, acceptance_threshold_acc=0.8)
    assert launch("sglang", speculation).command[-4:] == (
        *("--speculative-accept-threshold-single", "0.9", "--speculative-accept-threshold-acc", "0.8"),
    )
    for engine in ("vllm", "llamacpp", "trtllm"):
        with pytest.raises(ValidationError, match="no acceptance_threshold"):
            launch(engine, speculation)


def test_a_tree_is_a_tree_where_there_are_trees() -> None:
    tree = eagle(num_steps=3, eagle_topk=4, num_draft_tokens=9)
    assert trtllm_config(tree) == {
        "decoding_type": "Eagle3",
        "max_draft_len": 3,
        "speculative_model": "d",
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 4,
        "max_total_draft_tokens": 8,
    }
    with pytest.raises(ValidationError, match="2 to 8"):
        launch("trtllm", eagle(num_steps=2, eagle_topk=4, num_draft_tokens=16))
    for engine in ("vllm", "llamacpp"):
        with pytest.raises(ValidationError, match="chains only"):
            launch(engine, tree)
    with pytest.raises(ValidationError, match="static without a word"):
        launch("sglang", {**tree, "adaptive": True})


def test_sglang_adapts_by_its_own_settings_or_by_given_ones() -> None:
    assert launch("sglang", eagle(num_steps=3, adaptive=True)).command[-1] == "--speculative-adaptive"
    given = {"1": {"candidate_steps": [1, 3]}}
    assert launch("sglang", eagle(num_steps=3, adaptive=given)).files["sglang-adaptive.json"] == given
    assert "EAGLE" in launch("sglang", {"method": "mtp", "schedule": SCHEDULE}).command


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"method": "eagle3", "num_steps": 3}, "eagle3 needs draft_model_path"),
        ({"method": "ngram", "draft_model_path": "d"}, "leave draft_model_path out"),
        (eagle(ngram_max=3), "mean nothing to eagle3"),
        ({"method": "ngram", "ngram_min": 4, "ngram_max": 3}, "is above"),
        (eagle(num_steps=3, num_draft_tokens=9), "a chain of 3 steps has 4 tokens to verify"),
        (eagle(num_steps=1, eagle_topk=4, num_draft_tokens=6), "has at most 5 tokens"),
        (eagle(schedule=[[2, 4, 3]]), "must start at batch size 1"),
        (eagle(schedule=[[1, 4, 3], [4, 8, 1]]), "overlap or are out of order"),
        (eagle(schedule=[[1, 0, 3]]), "ends before it starts"),
        (eagle(schedule=[[1, 8, 0]]), "never drafts"),
        (eagle(schedule=[]), "holds no row"),
        (eagle(schedule=[[1, 8, 4]], num_steps=3), "drafts 4 tokens, but num_steps is 3"),
        (eagle(schedule=SCHEDULE, adaptive=True), "not both"),
        (eagle(num_steps=2, synthetic_acceptance_length=3.5), "yields at most 3"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(speculation: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EngineSpeculation.model_validate_json(json.dumps(speculation))


def test_an_error_in_a_campaign_file_names_the_line() -> None:
    text = "arms:\n  a: {type: vllm, model: m}\n  b:\n    type: vllm\n    speculation: {metod: ngram}\nbaseline: a"
    with pytest.raises(CampaignError) as caught:
        parse_campaign(text, "c.yaml")
    assert "c.yaml, line 5: arms.b.speculation.metod: unknown field; did you mean 'method'?" in str(caught.value)


# Every (engine, method)

_SHAPES = st.fixed_dictionaries(
    {},
    optional={
        "num_steps": st.integers(1, 6),
        "eagle_topk": st.integers(1, 4),
        "num_draft_tokens": st.integers(2, 20),
        "ngram_min": st.integers(1, 4),
        "ngram_max": st.integers(1, 4),
        "schedule": st.just(SCHEDULE) | st.just([[1, 8, 2]]) | st.just([[1, 2, 1], [6, 9, 3]]),
        "adaptive": st.booleans(),
        "synthetic_acceptance_length": st.floats(1, 4),
        "acceptance_threshold": st.floats(0.5, 1),
        "extra": st.just({"key": 1}),
    },
)


@given(st.sampled_from(ENGINES), st.sampled_from(METHODS), _SHAPES)
def test_every_speculation_is_translated_or_refused(engine: str, method: str, shape: dict[str, Any]) -> None:
    drafter = {} if method == "ngram" else {"draft_model_path": "the-drafter"}
    refused: list[Any] = []
    try:
        config = arm(engine, {"method": method, **drafter, **shape})
    except ValidationError as problem:
        refused = list(problem.errors())
    if refused:
        reasons = [error["msg"] for error in refused if error["type"] != "literal_error"]  # the other member is 'off'
        assert reasons
        assert all(reason.startswith("Value error, ") and len(reason) > 30 for reason in reasons)
        return
    found = config.launch()
    told = _everything(found)
    assert told != _everything(launch(engine))
    # Nothing that was asked for is left out.
    assert "the-drafter" in told or method == "ngram"
    speculation = config.speculation
    if speculation.synthetic_acceptance_length is not None:
        assert str(speculation.synthetic_acceptance_length) in told
    if speculation.depth is not None:
        assert str(speculation.depth) in told or str(speculation.depth + 1) in told
    if speculation.schedule is not None:
        assert all(str(first) in told for first, _, _ in speculation.ranges) or engine == "trtllm"


@given(st.sampled_from(ENGINES), st.sampled_from(METHODS))
def test_every_method_with_a_plain_chain_is_translated_everywhere(engine: str, method: str) -> None:
    drafter = {} if method == "ngram" else {"draft_model_path": "d"}
    assert isinstance(arm(engine, {"method": method, "num_steps": 3, **drafter}), EngineArm)


# Schedules

_ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=6)


def _schedule(parts: list[tuple[int, int, int]]) -> list[list[int]]:
    """Rows of (length, gap before, tokens) as [first, last, tokens]; the first starts at 1."""
    rows, at = [], 1
    for index, (length, gap, tokens) in enumerate(parts):
        at += gap if index else 0
        rows.append([at, at + length - 1, tokens])
        at += length
    return rows


def _tokens_at(rows: list[list[int]], batch: int) -> int:
    """vLLM's reading, one batch size at a time: a gap, and all that is beyond the last row, keep the row before."""
    return next(tokens for first, _, tokens in reversed(rows) if first <= batch)


@given(_ROWS)
def test_every_engine_reads_a_schedule_alike(parts: list[tuple[int, int, int]]) -> None:
    rows = _schedule(parts)
    if not any(tokens for _, _, tokens in rows):
        return
    speculation = EngineSpeculation.model_validate_json(json.dumps(eagle(schedule=rows)))
    batches = range(1, rows[-1][1] + 4)
    wanted = [_tokens_at(rows, batch) for batch in batches]
    by_range = [
        next(tokens for first, last, tokens in speculation.ranges if first <= batch and (last is None or batch <= last))
        for batch in batches
    ]
    assert by_range == wanted
    assert list(edges(speculation)) == [b for b in batches if b > 1 and wanted[b - 2] != wanted[b - 1] for b in [b - 1]]
    adaptive = launch("sglang", eagle(schedule=rows)).files["sglang-adaptive.json"]
    slots = {int(key): entry["candidate_steps"][0] for key, entry in adaptive.items()}
    assert [slots[max(key for key in slots if key <= batch)] for batch in batches] == wanted
    if rows[0][2] != max(tokens for _, _, tokens in rows):
        with pytest.raises(ValidationError, match="longest drafts at the smallest batches"):
            trtllm_config(eagle(schedule=rows))
        return
    config = trtllm_config(eagle(schedule=rows))
    table = config.get("draft_len_schedule") or {config["max_concurrency"]: config["max_draft_len"]}
    ours = [next((table[key] for key in sorted(table) if batch <= key), 0) for batch in batches]
    assert ours == wanted


@given(st.integers(1, 5), st.integers(1, 4))
def test_the_largest_tree_is_counted_as_it_grows(topk: int, steps: int) -> None:
    nodes, frontier = 1, 1
    for _ in range(steps):
        nodes += frontier * topk
        frontier = topk
    assert most_nodes(topk, steps) == nodes
