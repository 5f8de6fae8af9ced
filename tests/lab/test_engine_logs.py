"""Logs of real engines: what they say of themselves, and what went wrong in their own words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.arms.logs import errors_of, pairs, read_log
from breakeven.lab.arms.process import log_text
from breakeven.lab.servers import leftovers, servers

LOGS = Path(__file__).parent / "engine_logs"


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def test_vllm_tells_its_version_arguments_and_warnings() -> None:
    facts = read_log(log("vllm-eagle3-cpu"))
    assert facts.version == "0.32.0"
    # What the user set…
    assert facts.arguments["max_model_len"] == "1024"
    assert facts.arguments["max_num_seqs"] == "8"
    assert "'num_speculative_tokens_per_batch_size': [[1, 4, 3], [5, 8, 1]]" in facts.arguments["speculative_config"]
    # …and what the engine made of the rest.
    assert facts.arguments["enable_prefix_caching"] == "True"
    assert facts.arguments["seed"] == "0"
    assert facts.arguments["kv_cache_tokens"] == "21120"
    assert any(warning.startswith("max_num_scheduled_tokens is set to 2048") for warning in facts.warnings)
    assert len(set(facts.warnings)) == len(facts.warnings)
    assert not any("pid=" in warning for warning in facts.warnings)
    assert facts.errors == ()


def test_vllms_captured_graphs_are_read_from_its_configuration() -> None:
    text = log("vllm-eagle3-cpu").replace("'cudagraph_capture_sizes': []", "'cudagraph_capture_sizes': [4, 8, 16]")
    assert read_log(text).graph_sizes == (4, 8, 16)


def test_the_cause_of_vllms_crash_is_found_above_a_page_of_consequences() -> None:
    text = log("vllm-synthetic-crash-cpu")
    assert errors_of(text)[0] == "AssertionError: Synthetic acceptance not supported with CPU sampling"
    assert not any("EngineDeadError" in error for error in errors_of(text))


def test_the_death_of_an_engines_process_is_the_cause_and_not_what_is_cancelled_by_it() -> None:
    vllm = (
        "(EngineCore pid=7) ERROR 11-30 15:34:37 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly"
        " (exit code: None), shutting down executor.\n"
        '(EngineCore pid=7) ERROR 11-30 15:34:37 [core.py:1512]     raise RuntimeError("cancelled")\n'
        "(EngineCore pid=7) ERROR 11-30 15:34:37 [core.py:1512] RuntimeError: cancelled\n"
        "(APIServer pid=6) ERROR 11-30 15:34:37 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError:"
        " EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
    )
    assert errors_of(vllm) == ("Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",)
    dead = "[2026-01-28 04:18:10] Rank 0 scheduler is dead. Please check if there are relevant logs.\n"
    assert errors_of(dead) == ("Rank 0 scheduler is dead. Please check if there are relevant logs.",)
    cause = "[2026-01-28 04:18:09 TP0] torch.OutOfMemoryError: CUDA out of memory.\n"
    assert errors_of(cause + dead) == ("torch.OutOfMemoryError: CUDA out of memory.",)


def test_an_engines_refusal_is_told_in_its_own_words() -> None:
    assert errors_of(log("vllm-bad-flag")) == ("vllm: error: unrecognized arguments: --no-such-flag",)
    (too_long,) = errors_of(log("vllm-too-long"))
    assert "1 validation error for ModelConfig Value error, User-specified max_model_len (999999)" in too_long
    assert (
        "failed to open GGUF file '/models/none.gguf' (No such file or directory)"
        in errors_of(log("llamacpp-no-model"))[0] + errors_of(log("llamacpp-no-model"))[1]
    )


def test_llamacpp_tells_slots_and_warnings_and_calls_some_errors_harmless() -> None:
    facts = read_log(log("llamacpp-eagle3-cpu"))
    assert facts.arguments == {"n_threads": "1", "n_slots": "4", "n_ctx_slot": "1024", "kv_unified": "false"}
    assert any(warning.startswith("srv  llama_server: security") for warning in facts.warnings)
    assert facts.errors == ()


def test_sglangs_and_tensorrt_llms_lines_are_understood() -> None:
    # In the form that both engines print; only the lines that are read.
    sglang = (
        "[2026-02-26 05:19:58] WARNING server_args.py:1252: Setting page size to 1 for DeepSeek DSA on ROCm.\n"
        "[2026-02-26 05:19:58] server_args=ServerArgs(model_path='org/model', tp_size=8, dtype='auto', "
        "cuda_graph_bs=[1, 2], speculative_algorithm=None)\n"
        "[2026-02-26 05:35:09 TP0] Capture cuda graph bs [1, 2, 4, 8, 12, 16]\n"
        "[2026-02-26 05:35:42 TP3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    facts = read_log(sglang)
    assert facts.graph_sizes == (1, 2, 4, 8, 12, 16)
    assert facts.arguments["tp_size"] == "8"
    assert facts.arguments["cuda_graph_bs"] == "[1, 2]"
    assert facts.warnings == ("Setting page size to 1 for DeepSeek DSA on ROCm.",)
    assert facts.errors == ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    trtllm = (
        "[TensorRT-LLM] TensorRT LLM version: 1.2.1\n"
        "[11/22/2025-11:19:23] [TRT-LLM] [I] Using LLM with PyTorch backend\n"
        "[11/22/2025-11:19:23] [TRT-LLM] [W] Using default gpus_per_node: 1\n"
    )
    assert read_log(trtllm).version == "1.2.1"
    assert read_log(trtllm).warnings == ("Using default gpus_per_node: 1",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1, b='x, y', c=[1, (2, 3)]", {"a": "1", "b": "x, y", "c": "[1, (2, 3)]"}),
        ("{'a': {'b': 1}, 'c': <X.Y: 0>}", {"a": "{'b': 1}", "c": "<X.Y: 0>"}),
        ("(a=F(b=1, c=2), d='it\\'s')", {"a": "F(b=1, c=2)", "d": "it\\'s"}),
        ("", {}),
    ],
)
def test_arguments_are_taken_apart_at_their_own_commas(text: str, expected: dict[str, str]) -> None:
    assert dict(pairs(text)) == expected


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.lists(st.integers()) | st.booleans()))
def test_any_listing_of_python_values_is_read_back(values: dict[str, object]) -> None:
    listing = ", ".join(f"{name}={value!r}" for name, value in values.items())
    assert dict(pairs(listing)) == {name: repr(value) for name, value in values.items()}
    assert dict(pairs(repr(values))) == {name: repr(value) for name, value in values.items()}


@given(st.text(max_size=300))
def test_any_log_can_be_read(text: str) -> None:
    facts = read_log(text)
    assert all(isinstance(value, str) for value in (*facts.warnings, *facts.errors, *facts.arguments.values()))


def test_of_a_very_long_log_beginning_and_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n" + "x\n" * 2_000_000 + "last\n", encoding="utf-8")
    text = log_text(path)
    assert text.startswith("first")
    assert text.endswith("last\n")
    assert len(text) < 2_100_000
    assert log_text(path, path.stat().st_size - 5) == "last\n"
    assert log_text(tmp_path / "none") == ""


# Of several launches


def ready(arm: str, version: str | None = "1", **server: object) -> dict[str, object]:
    return {"event": "arm_ready", "arm": arm, "version": version, "server": server}


def test_launches_of_an_arm_are_one_entry_and_say_what_differed() -> None:
    journal = [
        ready("a", arguments={"port": "1", "seed": "0"}, warnings=["w"]),
        ready("a", arguments={"port": "2", "seed": "1"}, graph_sizes=[1, 2]),
        ready("a", arguments={"port": "3", "seed": "1"}),
        ready("b", version=None),
        {"event": "arm_ready", "arm": "c", "version": "2"},  # a journal from before servers were asked
        {"event": "arm_started", "arm": "d"},
    ]
    assert servers(journal) == {
        "a": {
            "version": "1",
            "arguments": {"seed": "0"},
            "warnings": ["w"],
            "differing": ["graph_sizes", "seed"],
        },
    }


def test_what_a_server_left_behind_is_told() -> None:
    problems = ["port 8000 is still in use", "9 MiB less memory is free than"]
    stopped = {"event": "arm_stopped", "arm": "a", "block": 1, "problems": problems}
    (told,) = leftovers([stopped, {"event": "arm_stopped", "arm": "b", "problems": []}, {"event": "cell_finished"}])
    assert told.startswith("a in block 1 did not leave the machine as it was: port 8000 is still in use.")
