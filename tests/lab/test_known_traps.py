"""Traps are named before anything is started, and synthetic acceptance never becomes a result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import campaign, execute, mock_arm
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab.analysis import analyse, summarise
from breakeven.lab.campaign import Campaign
from breakeven.lab.engines.traps import dominated, is_synthetic, synthetic_length, traps
from breakeven.lab.known_traps import synthetic_arms, trap_sentences, unjudged_arms
from breakeven.lab.lints import speculates, unlike_metrics
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.policy import PolicyError, decide
from breakeven.lab.report import policy, words


def arms(**others: Any) -> Campaign:
    return campaign({"off": {"type": "embedded"}, **others}, baseline="off", levels=[1, 30, 100])


def found(**others: Any) -> str:
    return "\n".join(trap_sentences(arms(**others)))


def typed(type: str, *flags: str, **speculation: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"type": type, "model": "m", "flags": list(flags)}
    if speculation:
        value["speculation"] = {"method": "eagle3", "draft_model_path": "d", **speculation}
    return value


SHELL = "vllm serve m --port {port} --no_enable_prefix_caching"
KIMI = {"num_steps": 2, "eagle_topk": 4, "num_draft_tokens": 16}


def test_plain_arms_have_no_traps() -> None:
    slots = {**typed("llamacpp", "--no-spec-draft-backend-sampling", num_steps=3), "slots": 100}
    assert found(a=typed("vllm"), b=typed("vllm", num_steps=3), c=slots) == ""


def test_a_tree_that_its_depth_caps_is_named_with_the_chain_to_try() -> None:
    told = found(kimi=typed("sglang", "--max-running-requests", "256", **KIMI))
    assert told.startswith("kimi verifies 16 tokens a round and can gain at most 3")
    assert "a chain of 3 (num_steps 3, eagle_topk 1) verifies 4" in told
    ours = {"type": "embedded", "speculation": {"algorithm": "eagle3", **KIMI}}
    assert "ours verifies 16 tokens" in found(ours=ours)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 64))
def test_only_what_a_short_chain_beats_by_far_is_called_dominated(steps: int, topk: int, nodes: int) -> None:
    if list(dominated(steps, topk, nodes)):
        chain_yields, chain_verifies = steps + 2, steps + 2
        assert topk > 1
        assert chain_yields > steps + 1
        assert nodes >= 4 * chain_verifies


def test_usual_trees_are_not_called_dominated() -> None:
    for steps, topk, nodes in ((5, 4, 8), (5, 8, 32), (6, 10, 60), (4, 4, 16), (3, 1, 4)):
        assert not list(dominated(steps, topk, nodes))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "4"), "with --speculative-eagle-topk 4"),
        (("--speculative-algorithm=NGRAM",), "with NGRAM"),
        (("--speculative-algorithm", "EAGLE", "--enable-dp-attention"), "with --enable-dp-attention"),
    ],
)
def test_adaptive_speculation_that_would_run_static_is_named(flags: tuple[str, ...], words: str) -> None:
    told = found(a=typed("sglang", *flags, "--speculative-adaptive", "--max-running-requests", "128"))
    assert f"a asks for adaptive speculation {words}, where SGLang has none: it runs static" in told


def test_adaptive_speculation_that_works_is_not() -> None:
    assert "static" not in found(a=typed("sglang", num_steps=3, schedule=[[1, 4, 3], [5, 8, 1]]))


def test_thresholds_below_one_are_lossy() -> None:
    assert "(--speculative-accept-threshold-single 0.9 is below 1.0)" in found(
        a=typed("sglang", num_steps=3, acceptance_threshold=0.9)
    )
    assert "below 1.0" not in found(a=typed("sglang", num_steps=3, acceptance_threshold=1.0))


def test_sglang_lowers_how_many_requests_run_under_speculation() -> None:
    assert "lowers to 48: at 100 streams requests queue" in found(a=typed("sglang", num_steps=3))
    assert "48" not in found(a=typed("sglang", "--max-running-requests", "128", num_steps=3))
    assert "48" not in found(a=typed("sglang"))


def test_vllm_drops_a_schedule_under_data_parallelism() -> None:
    given = typed("vllm", num_steps=3, schedule=[[1, 4, 3], [5, 8, 1]])
    assert "vLLM then drops the schedule" in found(a={**given, "data_parallel": 2})
    assert "drops" not in found(a=given)


def test_graph_ladders_that_do_not_divide_are_named() -> None:
    told = found(a=typed("vllm", "--compilation-config", '{"cudagraph_capture_sizes": [1, 4, 8, 30]}', num_steps=3))
    assert "captures CUDA graphs of 1, 30 tokens, which are no multiple of 4" in told
    assert "up to 30 tokens, and 30, 100 streams bring 4 each" in told
    fitting = found(a=typed("vllm", "--cudagraph-capture-sizes", "4", "8", "400", num_steps=3))
    assert fitting == ""
    for flags in (
        ("--max-cudagraph-capture-size=256",),
        ("--max_cudagraph_capture_size", "256"),
        ("--compilation-config", '{"max_cudagraph_capture_size": 256}'),
    ):
        told = found(a=typed("vllm", *flags, num_steps=3))
        assert told == "a captures CUDA graphs of up to 256 tokens, and 100 streams bring 4 each: those levels run " + (
            "without a graph"
        )
    assert found(a=typed("vllm", "--max-cudagraph-capture-size=400", num_steps=3)) == ""
    assert "up to 16 requests: 30, 100 streams run without one" in found(a=typed("sglang", "--cuda-graph-max-bs", "16"))


def test_streams_beyond_llamacpps_slots_wait() -> None:
    assert "serves 4 requests at once: at 30, 100 streams" in found(a={**typed("llamacpp"), "slots": 4})
    for flags in ((), ("--parallel", "-1")):
        assert "serves 4 requests at once, llama-server's default" in found(a=typed("llamacpp", *flags))
    assert found(a=typed("llamacpp", "-np", "100")) == ""


def test_llamacpps_drafts_of_several_slots_are_sampled_badly_in_the_backend() -> None:
    drafting = {**typed("llamacpp", num_steps=3), "slots": 100}
    assert "then drafts badly for all but one of those that run together: acceptance falls at 30, 100" in found(
        a=drafting
    )
    switch = "spec-draft-backend-sampling"
    assert switch in found(a={**drafting, "flags": [f"--no-{switch}", f"--{switch}"]})  # the last one counts
    for quiet in (
        {"flags": [f"--{switch}", f"--no-{switch}"]},
        {"env": {"LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING": "0"}},
        {"env": {"LLAMA_ARG_NO_SPEC_DRAFT_BACKEND_SAMPLING": "1"}},
        {"speculation": {"method": "ngram", "num_steps": 3}},
    ):
        assert found(a={**drafting, **quiet}) == ""
    assert switch not in found(a={**drafting, "slots": 1})  # one at a time
    paced = {"off": {"type": "embedded"}, "a": drafting}
    rates = campaign(paced, baseline="off", levels=[1, 30], arrivals={"process": "poisson"})
    (told,) = trap_sentences(rates)  # a level is a rate: no number of streams is told
    assert "acceptance falls wherever requests overlap for no reason of the drafter's" in told
    one = campaign({**paced, "a": {**drafting, "slots": 1}}, baseline="off", arrivals={"process": "poisson"})
    assert list(trap_sentences(one)) == []


def test_a_command_line_written_by_hand_is_looked_at_too() -> None:
    config = json.dumps({"method": "eagle3", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2})
    command = ["vllm", "serve", "m", "--port", "{port}", f"--speculative-config={config}"]
    given = {"type": "command", "command": command}
    assert "of 2 tokens a round: this is a condition, not a result" in found(a=given)
    assert synthetic_arms(arms(a=given)) == {"a": 2.0}


def test_every_way_to_pretend_is_recognised() -> None:
    assert synthetic_length(("sglang",), {"SGLANG_SIMULATE_ACC_LEN": "2.5"}) == 2.5
    assert synthetic_length(("sglang",), {"SGLANG_SIMULATE_ACC_LEN": "-1"}) is None
    assert synthetic_length(("llama-server", "--spec-synth-len", "1.5"), {}) == 1.5
    assert synthetic_length(("llama-server", "--spec-synth-rates", "0.5,0.25"), {}) == 1.75
    config = json.dumps({"synthetic_acceptance_rates": [1.0, 0.5]})
    assert synthetic_length(("vllm", "--speculative-config", config), {}) == 2.5
    assert synthetic_length(("vllm", "serve"), {}) is None
    assert synthetic_length(("llama-server",), {"LLAMA_ARG_SPEC_SYNTH_LEN": "1.5"}) == 1.5
    assert synthetic_length(("llama-server",), {"LLAMA_ARG_SPEC_SYNTH_RATES": "0.5,0.25"}) == 1.75


@pytest.mark.parametrize(
    "config",
    [
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.8},
        {"synthetic_acceptance_rates": 0.8},
        {"synthetic_acceptance_rates": [10**400]},
    ],
)
def test_acceptance_by_lot_at_a_length_that_is_not_told_gets_no_verdict_either(config: dict[str, Any]) -> None:
    command = ("vllm", "--speculative-config", json.dumps(config))
    assert is_synthetic(command, {})
    assert synthetic_length(command, {}) is None
    given = arms(real=typed("vllm", num_steps=3), set=typed("vllm", num_steps=3, extra=config))
    assert synthetic_arms(given) == {"set": None}
    assert unjudged_arms(given) == {"set"}
    assert "set accepts drafts by lot, at a set length: this" in "".join(trap_sentences(given))
    made = synthetic.campaign(arms={"off": typed("vllm"), "set": given.arms["set"].model_dump()}, baseline="off")
    summary = summarise(made, {}, synthetic.cells(made, synthetic.by_level()))
    assert all(c.synthetic and c.verdict == "undecided" and "length unknown" in c.explanation
               for c in summary.comparisons)  # fmt: skip
    assert summary.needed_acceptance == []
    assert "gets no verdict" in words.answer(summary, "set")
    with pytest.raises(PolicyError, match="synthetic"):
        decide(summary)


_PARTS = [
    *("--speculative-config", "{}", "[]", '{"num_speculative_tokens_per_batch_size": [[1]]}', "--spec-synth-rates"),
    *("--cudagraph-capture-sizes", "nan", "-np", "llama-server", "--compilation-config", str(10**400)),
    *('{"synthetic_acceptance_rates": 1}', '{"max_cudagraph_capture_size": []}', '{"synthetic_acceptance_length": {}}'),
]


@given(st.lists(st.text(max_size=12) | st.sampled_from(_PARTS), max_size=8))
def test_any_command_line_can_be_looked_at(parts: list[str]) -> None:
    assert all(isinstance(sentence, str) for sentence in traps(parts, {}, (1, 2)))


def test_typed_arms_say_whether_they_speculate() -> None:
    given = arms(a=typed("vllm"), b=typed("vllm", num_steps=3), c=typed("sglang", "--speculative-algorithm", "NGRAM"))
    assert [speculates(given.arms[name]) for name in ("a", "b", "c")] == [False, True, True]
    options = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}
    more = arms(
        a={**typed("trtllm"), "options": options},
        b=typed("trtllm"),
        c=typed("llamacpp", "--spec-type", "none", "-c", "100"),
        d=typed("llamacpp", "--spec-draft-model", "d"),
        e=typed("vllm", "--speculative_config={}"),
    )
    assert [speculates(more.arms[name]) for name in "abcde"] == [True, False, False, True, True]


def test_typed_arms_of_one_engine_must_collect_metrics_alike() -> None:
    (told,) = unlike_metrics(arms(a=typed("vllm", "--disable-log-stats"), b=typed("vllm"), c=typed("sglang")))
    assert "a: --disable-log-stats; b: none" in told
    alike = arms(a=typed("vllm", "--disable_log_stats"), b=typed("vllm", "--disable-log-stats"))
    assert not list(unlike_metrics(alike))


def test_traps_reach_the_plan() -> None:
    given = arms(kimi=typed("sglang", **KIMI))
    assert any("can gain at most 3" in note for note in build_schedule(given, load_suites(given)).notes)


def test_the_plan_shows_what_an_engine_gets_beside_its_command_line_and_its_traps(tmp_path: Path) -> None:
    far = {**typed("sglang", num_steps=3, schedule=[[1, 4, 3], [5, 8, 1]]), "ssh": "me@gpu7", "port": 30000}
    file = tmp_path / "campaign.yaml"
    arms = {"off": typed("vllm"), "far": far, "kimi": typed("sglang", **KIMI)}
    text = {"arms": arms, "baseline": "off", "levels": [1, 64], "workload": {"domains": ["coding"]}}
    file.write_text(json.dumps(text), encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "off: vllm serve m" in output
    assert "with VLLM_SERVER_DEV_MODE=1" in output
    assert "on me@gpu7, reached at gpu7:30000" in output
    assert '{files}/sglang-adaptive.json: { "1": { "candidate_steps": [ 3 ] }' in output
    assert "Note: kimi verifies 16 tokens a round" in output


def test_synthetic_acceptance_gets_no_verdict_in_plan_journal_or_report(tmp_path: Path) -> None:
    pretender = mock_arm({"draft_tokens": 3, "tokens_per_chunk": [3]}, env={"SGLANG_SIMULATE_ACC_LEN": "2.5"})
    real = mock_arm({"draft_tokens": 3, "tokens_per_chunk": [3]})
    given = campaign({"off": mock_arm(), "real": real, "set": pretender}, levels=[2])
    run, outcome = execute(tmp_path / "run", given)
    assert not outcome.invalid
    (started,) = [e for e in run.read_journal() if e["event"] == "run_started"]
    assert any(trap.startswith("set accepts drafts by lot") for trap in started["traps"])
    summary = analyse(run)
    rows = [c for c in summary.comparisons if c.arm == "set"]
    assert rows
    for row in rows:
        assert row.synthetic
        assert row.verdict == "undecided"
        assert row.p_value is row.p_adjusted is row.p_max_t is None
        assert not row.primary
        assert row.explanation.startswith("No verdict: acceptance is synthetic in set (length 2.5).")
        assert row.ratio is not None
    assert summary.multiplicity is not None
    assert summary.multiplicity.tests == len(summary.campaign.levels)  # those of `real` alone
    assert not any(c.synthetic for c in summary.comparisons if c.arm == "real")
    assert {row.arm for row in summary.tails} == {"real"}
    assert not any(effect.arm == "set" for effect in (*summary.main_effects, *summary.interactions))
    assert [a.synthetic_acceptance for a in summary.campaign.arms] == [None, None, 2.5]
    assert all(not row.valid for row in summary.acceptance if row.arm == "set")
    assert any("by lot" in lint.message for lint in summary.lints)
    assert "gets no verdict" in words.answer(summary, "set")
    assert words.outlook(summary, "set") == ""
    assert all("set" not in choice.reason and choice.arm != "set" for choice in policy.choices(summary))
    assert "synthetic" in summary.break_even["set"].note


def test_a_server_without_a_prefix_cache_is_not_asked_for_its_hits() -> None:
    bare = {"type": "vllm", "model": "/m", "flags": ["--no-enable-prefix-caching"]}
    made = synthetic.campaign(arms={"off": bare, "cached": {**bare, "flags": []}}, workload={"domains": ("coding",)})
    cells = [
        replace(cell, requests=tuple(replace(request, cached_tokens=None) for request in cell.requests))
        for cell in synthetic.cells(made, synthetic.by_level())
    ]
    lints = [lint.message for lint in summarise(made, {}, cells).lints]
    told = [message for message in lints if "does not report hits of its prefix cache" in message]
    assert [message.partition(" ")[0] for message in told] == ["cached"]


@pytest.mark.parametrize(
    ("arm", "option"),
    [
        (typed("vllm", "--no-enable-prefix-caching"), "--no-enable-prefix-caching"),
        ({"type": "command", "command": ["sglang", "--port={port}", "--disable-radix-cache"]}, "--disable-radix-cache"),
        ({"type": "command", "command": ["sh", "-c", SHELL]}, "--no-enable-prefix-caching"),
    ],
)
def test_cells_that_are_declared_warm_are_named_where_the_cache_is_switched_off(
    arm: dict[str, Any], option: str
) -> None:
    made = synthetic.campaign(
        arms={"off": {"type": "vllm", "model": "/m"}, "bare": arm}, workload={"domains": ("coding",)},
        levels=(1, 2), blocks=1, conditions={"cache": ["cold", "warm"]},
    )  # fmt: skip
    cells = [
        replace(cell, requests=tuple(replace(request, cached_tokens=None) for request in cell.requests))
        for cell in synthetic.cells(made, lambda *of: 1.0)
    ]
    lints = [lint for lint in summarise(made, {}, cells).lints if "prefix cache" in lint.message]
    assert [lint.message.partition(" ")[0] for lint in lints] == ["off", "bare"]
    assert lints[1].message == (
        f"bare has its prefix cache switched off ({option}), though cells are declared warm: they were measured cold"
    )
    assert lints[1].cells == ["b00-bare-coding+warm-c001", "b00-bare-coding+warm-c002"]
