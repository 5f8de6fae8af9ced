"""From verdicts to a schedule: what may run where, the batch sizes in between, and the formats of the engines."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import campaign, cells, write
from typer.testing import CliRunner

from breakeven.lab.analysis import summarise
from breakeven.lab.campaign import EmbeddedArm, Speculation
from breakeven.lab.policy import ENGINES, LevelChoice, Policy, PolicyError, as_arm, decide, export
from breakeven.lab.policy.ranges import depth_at, probes, schedule, single_switch, thresholds
from breakeven.lab.policy.shapes import Shape, shape
from breakeven.lab.report import policy as report_policy
from breakeven.lab.report.markdown import markdown
from breakeven.lab.summary import Summary

# Ranges


@st.composite
def measured(draw: st.DrawFn) -> tuple[list[int], list[int], frozenset[tuple[int, int]]]:
    """Levels, a depth at each, and which (depth, level) pairs were shown to be safe: the chosen ones always."""
    levels = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=6)))
    depths = [draw(st.integers(0, 3)) for _ in levels]
    others = draw(st.sets(st.tuples(st.integers(1, 3), st.sampled_from(levels))))
    return levels, depths, frozenset(others | {(d, n) for d, n in zip(depths, levels, strict=True) if d})


@settings(deadline=None, max_examples=60)
@given(measured())
def test_a_schedule_runs_only_what_both_neighbours_speak_for(
    drawn: tuple[list[int], list[int], frozenset[tuple[int, int]]],
) -> None:
    levels, depths, safe = drawn
    ranges = schedule(levels, depths, lambda depth, level: (depth, level) in safe)
    # From 1, without gaps or overlaps, neighbours differ, and off above what was measured.
    assert ranges[0][0] == 1
    assert all(b[0] == a[1] + 1 and a[2] != b[2] for a, b in itertools.pairwise(ranges))
    assert ranges[-1][2] == 0
    assert ranges[-1][1] >= max(256, levels[-1] + 1)
    for size in range(1, 2 * levels[-1] + 2):
        depth = depth_at(ranges, size)
        below = max((n for n in levels if n <= size), default=None)
        above = min((n for n in levels if n >= size), default=None)
        if above is None:
            assert depth == 0
        elif below is None:
            assert depth == depths[0]
        elif below == above:
            assert depth == depths[levels.index(size)]
        else:
            assert depth == 0 or {(depth, below), (depth, above)} <= safe
            assert depth in (0, depths[levels.index(below)], depths[levels.index(above)])


@settings(deadline=None, max_examples=60)
@given(measured())
def test_a_switch_with_evidence_on_both_sides_lies_in_the_geometric_middle(
    drawn: tuple[list[int], list[int], frozenset[tuple[int, int]]],
) -> None:
    levels, depths, safe = drawn
    ranges = schedule(levels, depths, lambda depth, level: (depth, level) in safe)
    for (low, here), (high, there) in itertools.pairwise(zip(levels, depths, strict=True)):
        both = (here == 0 or (here, high) in safe) and (there == 0 or (there, low) in safe)
        if here != there and both and high > low + 1:
            last = next(size for size in range(low, high + 1) if depth_at(ranges, size + 1) == there)
            assert last <= math.sqrt(low * high) < last + 1


def test_without_evidence_at_the_next_level_speculation_ends_at_the_last_level_that_paid() -> None:
    def never(depth: int, level: int) -> bool:
        return (depth, level) in {(3, 4)}

    assert schedule([4, 10], [3, 0], never) == ((1, 4, 3), (5, 256, 0))
    assert schedule([4, 10], [3, 0], lambda depth, level: True) == ((1, 6, 3), (7, 256, 0))
    # A deeper draft unknown at 10 and a shallower one unknown at 4: neither runs between.
    assert schedule([4, 10, 300], [3, 1, 0], lambda d, n: (d, n) in {(3, 4), (1, 10)}) == (
        (1, 4, 3), (5, 9, 0), (10, 10, 1), (11, 600, 0),
    )  # fmt: skip


def test_a_measured_schedule_speaks_for_its_own_switch_where_no_depth_is_safe_on_both_sides() -> None:
    asked = []

    def switch(low: int, high: int) -> int | None:
        asked.append((low, high))
        return 6 if (low, high) == (4, 10) else None

    chosen = {(3, 4), (1, 10)}
    assert schedule([4, 10], [3, 1], lambda d, n: (d, n) in chosen, switch) == ((1, 6, 3), (7, 10, 1), (11, 256, 0))
    # A depth that is safe on both sides needs none, and one that a schedule does not know gets none.
    assert schedule([4, 10], [3, 1], lambda d, n: (d, n) != (3, 10), switch) == ((1, 4, 3), (5, 10, 1), (11, 256, 0))
    assert schedule([4, 9], [3, 1], lambda d, n: (d, n) in {(3, 4), (1, 9)}, switch)[1] == (5, 8, 0)
    assert asked == [(4, 10), (4, 9)]


@given(st.integers(1, 8), st.integers(1, 12), st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_a_single_switch_is_found_and_several_are_none(low: int, width: int, depths: list[int]) -> None:
    ranges = [(size, size, depth) for size, depth in enumerate(depths, 1)]
    found = single_switch(ranges, low, low + width)
    seen = [depth_at(ranges, size) for size in range(low, low + width + 1)]
    places = [i for i in range(width) if seen[i] != seen[i + 1]]
    assert found == (low + places[0] if len(places) == 1 else None)


def test_thresholds_are_probed_on_both_sides() -> None:
    ranges = ((1, 6, 3), (7, 20, 1), (21, 256, 0))
    assert thresholds(ranges) == (6, 20)
    assert probes(ranges, (1, 4, 10, 30)) == (1, 4, 6, 7, 10, 20, 21, 30)


# Shapes


def embedded(**speculation: Any) -> dict[str, Any]:
    given = Speculation(algorithm="eagle3", **speculation)
    return EmbeddedArm(type="embedded", speculation=given).model_dump(mode="json")


def engine(kind: str, **speculation: Any) -> dict[str, Any]:
    return {"type": kind, "model": "m", "speculation": {"method": "eagle3", "draft_model_path": "/d", **speculation}}


@pytest.mark.parametrize(
    ("settings", "depth"),
    [
        (embedded(), 3),
        (embedded(num_steps=5), 5),
        (embedded(num_steps=5, num_draft_tokens=4), 3),
        (embedded(num_steps=2, eagle_topk=4, num_draft_tokens=9), 2),
        (EmbeddedArm(type="embedded").model_dump(mode="json"), 0),
        (engine("vllm", num_steps=2), 2),
        (engine("vllm", num_draft_tokens=5), 4),
        ({"type": "vllm", "speculation": "off"}, 0),
    ],
)
def test_the_depth_of_an_arm_is_read_from_its_settings(settings: dict[str, Any], depth: int) -> None:
    found = shape(settings)
    assert found.known
    assert found.depth == depth
    assert found.depth_at(1) == depth


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"type": "attach", "url": "http://h"}, "already"),
        (engine("vllm"), "set num_steps"),
        (engine("sglang", adaptive=True), "adapts"),
        (engine("vllm", num_steps=3, synthetic_acceptance_length=2.5), "synthetic"),
        (engine("vllm", num_steps=3, extra={"num_speculative_tokens": 5}), "its extra sets"),
        ({**engine("sglang", num_steps=3), "flags": ["--speculative_num_steps=5"]}, "its flags set"),
        ({"type": "llamacpp", "speculation": "off", "flags": ["-md", "d.gguf"]}, "its flags set its speculation (-md)"),
        ({"type": "vllm", "speculation": "off", "flags": ["-sc", "{}"]}, "its flags set"),
        ({"type": "trtllm", "speculation": "off", "options": {"speculative_config": {}}}, "its options set"),
    ],
)
def test_a_depth_that_nobody_states_is_unknown_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    assert reason in shape(settings).reason


def test_options_that_leave_the_depth_to_the_settings_hide_it_from_nobody() -> None:
    flags = ["--speculative-attention-mode", "decode", "--mem-fraction-static", "0.8"]
    assert shape({**engine("sglang", num_steps=3), "flags": flags}).depth == 3


def test_an_arm_with_a_schedule_is_as_deep_as_it_says_at_each_level() -> None:
    found = shape(embedded(schedule=((1, 4, 3), (8, 16, 1), (17, 64, 0))))
    assert [found.depth_at(n) for n in (1, 4, 6, 8, 20, 100)] == [3, 3, 3, 1, 0, 0]
    assert found.family == shape(embedded(num_steps=7)).family
    assert found.family != shape(embedded(num_steps=3, eagle_topk=4)).family


# Decisions

ARMS = {
    "off": {"type": "embedded"},
    "deep": {"type": "embedded", "speculation": {"algorithm": "eagle3", "num_steps": 4}},
    "shallow": {"type": "embedded", "speculation": {"algorithm": "eagle3", "num_steps": 1}},
    "ngram": {"type": "embedded", "speculation": {"algorithm": "ngram", "num_steps": 3}},
    "planned": {
        "type": "embedded",
        "speculation": {"algorithm": "eagle3", "num_steps": 4, "schedule": [[1, 5, 4], [6, 16, 1]]},
    },
}
LEVELS = (1, 3, 8, 16)
TRUTH = {
    "deep": {1: 2.0, 3: 1.5, 8: 0.9, 16: 0.6},
    "shallow": {1: 1.5, 3: 1.3, 8: 1.2, 16: 0.9},
    "ngram": {1: 1.3, 3: 1.2, 8: 1.0, 16: 0.8},
}
BASE = dict.fromkeys(LEVELS, 100.0)


def measured_summary(
    truth: dict[str, dict[int, float]] = TRUTH, domain: dict[str, float] | None = None, **fields: Any
) -> Summary:
    """A campaign of these ratios; `domain`: further factors by domain, for every arm but the baseline."""
    made = campaign(
        **{
            "arms": {"off": ARMS["off"], **{name: ARMS[name] for name in truth}}, "levels": LEVELS, "blocks": 4,
            "workload": {"domains": tuple(domain or ("coding",)), "max_tokens": 48}, **fields,
        }
    )  # fmt: skip

    def ratio(arm: str, condition: str, level: int) -> float:
        return 1.0 if arm == "off" else truth[arm][level] * (domain or {}).get(condition, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("synthetic.BASE", BASE)
        return summarise(made, {"commands": {}}, cells(made, ratio, noise=0.003))


@pytest.fixture(scope="module")
def summary() -> Summary:
    return measured_summary()


def test_the_best_depth_that_pays_at_each_level_and_off_elsewhere(summary: Summary) -> None:
    found = decide(summary)
    assert [(c.level, c.arm, c.depth) for c in found.choices] == [
        (1, "deep", 4), (3, "deep", 4), (8, "shallow", 1), (16, "off", 0),
    ]  # fmt: skip
    # Between 3 and 8 the shallow draft is safe on both sides, the deep one is not; above 8 nothing is.
    assert found.ranges == ((1, 3, 4), (4, 8, 1), (9, 256, 0))
    assert found.arm == "deep"
    assert found.notes == ()


@pytest.mark.parametrize(
    ("planned", "ranges"),
    [
        (
            {3: 1.5, 8: 1.2},
            ((1, 5, 4), (6, 8, 1), (9, 256, 0)),
        ),  # its switch, though 4 hurts at 8 and 1 is unknown at 3
        ({3: 0.9, 8: 1.2}, ((1, 3, 4), (4, 7, 0), (8, 8, 1), (9, 256, 0))),  # it is not safe on both sides
    ],
)
def test_between_its_levels_a_schedule_that_was_measured_keeps_its_own_switch(
    planned: dict[int, float], ranges: tuple[tuple[int, int, int], ...]
) -> None:
    found = decide(measured_summary({"deep": TRUTH["deep"], "planned": {1: 1.9, 16: 0.9, **planned}}))
    assert found.ranges == ranges


def test_the_policy_of_a_winning_family_never_mixes_in_another(summary: Summary) -> None:
    assert {c.arm for c in decide(summary).choices} <= {"deep", "shallow", "off"}


def test_an_arm_that_hurts_one_domain_is_not_used() -> None:
    found = decide(measured_summary({"deep": {1: 2.0, 3: 1.2, 8: 0.9, 16: 0.6}}, {"coding": 1.3, "encyclopedic": 0.75}))
    assert [c.depth for c in found.choices] == [4, 0, 0, 0]
    assert found.choices[1].reason == "deep pays on the whole, but hurts encyclopedic"


def test_latency_as_the_declared_metric_is_better_when_lower() -> None:
    found = decide(measured_summary({"deep": TRUTH["deep"]}, primary_metric="tpot"))
    assert found.metric == "tpot"
    assert [c.depth for c in found.choices] == [4, 4, 0, 0]
    assert all(c.ratio is None or c.ratio < 1 for c in found.choices)


def test_what_pays_at_the_highest_level_is_off_above_it_and_that_is_said() -> None:
    found = decide(measured_summary({"deep": dict.fromkeys(LEVELS, 1.5)}))
    assert found.ranges == ((1, 16, 4), (17, 256, 0))
    assert "still pays at the highest level" in found.notes[0]


def test_nothing_pays_nothing_to_deploy() -> None:
    found = decide(measured_summary({"deep": dict.fromkeys(LEVELS, 0.8)}))
    assert found.off
    assert found.ranges == ((1, 256, 0),)
    with pytest.raises(PolicyError, match="nothing to deploy"):
        export(found)
    assert report_policy.ranges_in_words(found) == "off at every load: nothing pays"


def test_one_block_decides_nothing() -> None:
    found = decide(measured_summary(blocks=1))
    assert found.off
    assert "undecided" in found.choices[0].reason


def test_a_baseline_that_differs_in_more_than_speculation_is_named() -> None:
    deep = {"type": "embedded", "threads": 2, "speculation": {"algorithm": "eagle3", "num_steps": 4}}
    found = decide(measured_summary({"deep": TRUTH["deep"]}, arms={"off": ARMS["off"], "deep": deep}))
    assert any("differs from off in threads" in note for note in found.notes)


def test_rates_of_arrival_are_no_batch_sizes(summary: Summary) -> None:
    for change in (
        {"arrivals": {"process": "poisson"}},
        {"conditions": {"arrivals": {"calm": {"process": "poisson"}, "bursts": {"process": "gamma"}}}},
    ):
        with pytest.raises(PolicyError, match="closed loop"):
            decide(resolved_as(summary, change))


def test_sessions_in_play_are_no_batch_sizes(summary: Summary) -> None:
    workload = {**summary.campaign.resolved["workload"], "sessions": {"think_s": 5.0}}
    with pytest.raises(PolicyError, match="sessions in play"):
        decide(resolved_as(summary, {"workload": workload}))


def resolved_as(summary: Summary, change: dict[str, Any]) -> Summary:
    campaign = summary.campaign
    return summary.model_copy(
        update={"campaign": campaign.model_copy(update={"resolved": {**campaign.resolved, **change}})}
    )


def test_a_baseline_that_drafts_is_not_off_and_one_that_may_is_named() -> None:
    arms = {"off": ARMS["shallow"], "deep": ARMS["deep"]}
    with pytest.raises(PolicyError, match="'off' drafts 1 deep itself"):
        decide(measured_summary({"deep": TRUTH["deep"]}, arms=arms))
    arms = {"off": {"type": "attach", "url": "http://h:1"}, "deep": ARMS["deep"]}
    found = decide(measured_summary({"deep": TRUTH["deep"]}, arms=arms))
    assert not found.off
    assert any("whether the baseline off drafts is not known" in note for note in found.notes)


def test_off_for_want_of_a_verdict_is_said_of_all_families() -> None:
    # By the first family alone nothing pays; of the other one nothing is decided.
    made = measured_summary({"deep": dict.fromkeys(LEVELS, 0.5), "ngram": dict.fromkeys(LEVELS, 0.9)})
    rows = [c.model_copy(update={"verdict": "undecided"}) if c.arm == "ngram" else c for c in made.comparisons]
    found = decide(made.model_copy(update={"comparisons": rows}))
    assert found.off
    assert found.choices[0].undecided == ("ngram",)
    assert any("1 stream (ngram)" in note and "want of a verdict" in note for note in found.notes)
    assert report_policy.ranges_in_words(found) == "off at every load: no gain is decided yet"
    synthetic = [c.model_copy(update={"synthetic": True}) for c in rows]
    found = decide(made.model_copy(update={"comparisons": synthetic}))
    assert report_policy.ranges_in_words(found) == "off at every load: nothing was compared"


def test_the_two_policies_of_a_report_agree_on_the_metric_and_the_veto() -> None:
    domains = {"coding": 1.3, "encyclopedic": 0.75}
    vetoed = measured_summary({"deep": {1: 1.2, 3: 1.2, 8: 0.9, 16: 0.6}}, domains)
    found, chosen = decide(vetoed), report_policy.choices(vetoed)
    assert found.off
    assert [(c.arm, c.decided) for c in chosen[:2]] == [("off", True)] * 2
    assert chosen[0].reason == found.choices[0].reason == "deep pays on the whole, but hurts encyclopedic"
    assert "it pays on the whole, but hurts a domain" in report_policy.ranges_in_words(found)
    faster = measured_summary({"deep": TRUTH["deep"], "shallow": TRUTH["shallow"]}, primary_metric="tpot")
    assert [c.arm for c in report_policy.choices(faster)] == [c.arm for c in decide(faster).choices]
    assert all(c.ratio is None or c.ratio < 1 for c in report_policy.choices(faster))


# Engines

RANGES = ((1, 4, 3), (5, 8, 1), (9, 256, 0))


def policy_of(ranges: tuple[tuple[int, int, int], ...] = RANGES, kind: str = "vllm", **speculation: Any) -> Policy:
    settings = engine(kind, **{"num_steps": 3, **speculation})
    choices = tuple(LevelChoice(first, "a", depth, 1.2, 1.1, 1.3, "pays") for first, _, depth in ranges)
    return Policy("off", "throughput", 0.03, "a", shape(settings), settings, choices, ranges)


def test_vllm_takes_the_ranges_inside_its_speculative_config() -> None:
    exported = export(policy_of())
    assert exported.flags[0] == "--speculative-config"
    assert json.loads(exported.flags[1]) == json.loads(exported.content) == {
        "method": "eagle3", "model": "/d", "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1], [9, 256, 0]],
    }  # fmt: skip


def test_sglang_pins_one_candidate_for_each_range() -> None:
    exported = export(policy_of(), "sglang")
    config = json.loads(exported.content)
    assert {int(key): entry["candidate_steps"] for key, entry in config.items()} == {1: [3], 5: [1], 9: [0]}
    flags = dict(itertools.pairwise(exported.flags))
    assert flags["--speculative-num-draft-tokens"] == "4"
    assert flags["--speculative-eagle-topk"] == "1"
    assert "--speculative-adaptive" in exported.flags
    assert "--speculative-adaptive-config /x/p.json" in exported.command("/x/p.json")
    assert exported.notes[0] == "measured on vllm, not on sglang: loads carry over badly, so measure it there"


def test_tensorrt_llm_takes_the_last_batch_size_of_each_range() -> None:
    config = yaml.safe_load(export(policy_of(), "trtllm").content)["speculative_config"]
    assert config == {
        "decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/d", "draft_len_schedule": {4: 3, 8: 1},
    }  # fmt: skip
    single = yaml.safe_load(export(policy_of(((1, 32, 3), (33, 256, 0))), "trtllm").content)["speculative_config"]
    assert single["max_concurrency"] == 32
    assert "draft_len_schedule" not in single
    with pytest.raises(PolicyError, match="longest drafts at the smallest batches"):
        export(policy_of(((1, 4, 1), (5, 8, 3), (9, 256, 0))), "trtllm")


def test_breakeven_serve_takes_what_is_exported_for_it() -> None:
    import typer

    from breakeven.cli.main import app

    exported = export(policy_of(), "embedded")
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    found = serve.make_context("serve", list(exported.flags)).params
    assert json.loads(found["speculative_num_steps_per_batch_size"]) == [list(row) for row in RANGES]
    tree = export(policy_of(kind="embedded", eagle_topk=4, num_draft_tokens=16), "embedded")
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in tree.command("")


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_an_engine_that_schedules_chains_only_refuses_trees(name: str) -> None:
    with pytest.raises(PolicyError, match="eagle_topk 4"):
        export(policy_of(eagle_topk=4, num_draft_tokens=16), name)


def test_what_an_engine_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(PolicyError, match="EAGLE, EAGLE3 and MTP only"):
        export(policy_of(method="ngram", draft_model_path=None), "sglang")
    with pytest.raises(PolicyError, match="needs the drafter's path"):
        export(policy_of(draft_model_path=None), "vllm")
    with pytest.raises(PolicyError, match="takes no schedule"):
        export(policy_of(kind="llamacpp"))


@settings(deadline=None, max_examples=30)
@given(measured())
def test_every_engine_reads_the_same_depths_out_of_its_format(
    drawn: tuple[list[int], list[int], frozenset[tuple[int, int]]],
) -> None:
    """Each format is read by the rule of its engine, written down here once more."""
    levels, depths, safe = drawn
    ranges = schedule(levels, depths, lambda depth, level: (depth, level) in safe)
    if not any(depth for _, _, depth in ranges):
        return
    found = policy_of(ranges)
    vllm = json.loads(export(found, "vllm").content)
    sglang = {int(k): v["candidate_steps"][0] for k, v in json.loads(export(found, "sglang").content).items()}
    trtllm: dict[str, Any] | None = None
    if ranges[0][2] == max(depth for _, _, depth in ranges):
        trtllm = yaml.safe_load(export(found, "trtllm").content)["speculative_config"]
    for size in range(1, 130):
        expected = depth_at(ranges, size)
        rows = [row for row in vllm["num_speculative_tokens_per_batch_size"] if row[0] <= size]
        assert min(rows[-1][2], vllm["num_speculative_tokens"]) == expected
        assert sglang[max(key for key in sglang if key <= size)] == expected
        if trtllm is not None:
            keys = trtllm.get("draft_len_schedule") or {trtllm["max_concurrency"]: trtllm["max_draft_len"]}
            last = min((key for key in keys if key >= size), default=None)
            assert (0 if last is None else keys[last]) == expected


def test_an_export_says_what_an_arm_with_the_same_schedule_would_be_started_with() -> None:
    """Two roads to the same flags: the exporter, and the translation of a campaign's arm."""
    from breakeven.lab.engines import EngineSpeculation, sglang, trtllm, vllm

    fields = {"method": "eagle3", "draft_model_path": "/d", "num_steps": 3, "schedule": RANGES}
    speculation = EngineSpeculation.model_validate_json(json.dumps(fields))
    assert json.loads(export(policy_of(), "vllm").content) == vllm.speculative_config(speculation)
    ours = json.loads(export(policy_of(), "sglang").content)
    theirs = sglang.adaptive_config(speculation)
    assert theirs is not None
    assert ours == theirs
    assert list(export(policy_of(), "sglang").flags)[:-2] == sglang.speculation_flags(speculation)
    assert yaml.safe_load(export(policy_of(), "trtllm").content)["speculative_config"] == trtllm.speculative_config(
        speculation
    )


def test_an_engines_own_options_stay_with_it() -> None:
    own = export(policy_of(extra={"draft_tensor_parallel_size": 1}), "vllm")
    assert json.loads(own.content)["draft_tensor_parallel_size"] == 1
    moved = export(policy_of(extra={"draft_tensor_parallel_size": 1}), "trtllm")
    assert "draft_tensor_parallel_size" not in moved.content
    assert "left out, because it is vllm's own: draft_tensor_parallel_size" in moved.notes
    kept = export(policy_of(kind="sglang", acceptance_threshold=0.9))
    assert "--speculative-accept-threshold-single 0.9" in kept.command("f")
    with pytest.raises(PolicyError, match="no acceptance_threshold"):
        export(policy_of(kind="sglang", acceptance_threshold=0.9), "vllm")
    old = policy_of(kind="trtllm")
    old = replace(old, settings={**old.settings, "schedule_keys": "first"})
    assert yaml.safe_load(export(old).content)["speculative_config"]["draft_len_schedule"] == {1: 3, 5: 1, 9: 0}


def test_a_policy_can_be_measured_as_an_arm() -> None:
    from breakeven.lab.campaign import EmbeddedArm as Embedded
    from breakeven.lab.engines import VllmArm

    line = as_arm(policy_of())
    fields = yaml.safe_load(line)
    arm = VllmArm.model_validate_json(json.dumps({"type": "vllm", "model": "m", **fields}))
    assert shape(arm.model_dump(mode="json")).ranges == RANGES
    settings = embedded(num_steps=3, num_draft_tokens=4)
    found = Policy("off", "throughput", 0.03, "a", shape(settings), settings, (), RANGES)
    own = Embedded.model_validate_json(json.dumps({"type": "embedded", **yaml.safe_load(as_arm(found))}))
    assert shape(own.model_dump(mode="json")).ranges == RANGES


VLLM_PYTHON = os.environ.get("BREAKEVEN_VLLM_PYTHON", "")


@pytest.mark.engines
@pytest.mark.skipif(not VLLM_PYTHON, reason="BREAKEVEN_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_expands_an_exported_schedule_to_the_same_depths() -> None:
    """vLLM's own table of depth by batch size, for exported and for odd schedules."""
    tables = [RANGES, ((1, 6, 4), (7, 7, 2), (8, 600, 0)), ((1, 1, 0), (2, 30, 5), (31, 256, 0))]
    configs = [json.loads(export(policy_of(ranges), "vllm").content) for ranges in tables]
    code = (
        "import json, sys\n"
        "from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as build\n"
        "key = 'num_speculative_tokens'\n"
        "print(json.dumps([build(c[key + '_per_batch_size'], 700, c[key]) for c in json.loads(sys.argv[1])]))"
    )
    done = subprocess.run(
        [VLLM_PYTHON, "-c", code, json.dumps(configs)], capture_output=True, text=True, timeout=250, check=True
    )
    for ranges, table in zip(tables, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert table[1:] == [depth_at(ranges, size) for size in range(1, 701)]


# What is shown


def test_the_report_shows_the_schedule_with_its_flags(summary: Summary) -> None:
    said = report_policy.ranges_in_words(decide(summary))
    assert said == "4 deep at 1 to 3, 1 deep at 4 to 8, off from 9 sequences on"
    text = markdown(summary)
    assert said in text
    assert "--speculative-num-steps-per-batch-size" in text


def test_the_report_says_why_there_is_no_schedule() -> None:
    arms = {"off": {"type": "attach", "url": "http://h:1"}, "deep": {"type": "attach", "url": "http://h:2"}}
    found = report_policy.deployable(measured_summary({"deep": TRUTH["deep"]}, arms=arms))
    assert found.why_not.startswith("no arm says how deep it drafts")
    assert (found.words, found.flags) == ("", "")


def test_the_command_prints_the_flags_and_writes_the_file(tmp_path: Path) -> None:
    from breakeven.cli.main import app

    made = campaign(
        arms={"off": ARMS["off"], "deep": {**ARMS["deep"], "model": "/m"} | {"speculation": {
            "algorithm": "eagle3", "num_steps": 4, "draft_model_path": "/d"}}},
        workload={"domains": ("coding",), "max_tokens": 48}, blocks=4,
    )  # fmt: skip
    write(tmp_path / "run", made, cells(made, lambda arm, _, level: 1.0 if arm == "off" else 2.0 / level**0.5))
    runner = CliRunner()
    plain = runner.invoke(app, ["policy", str(tmp_path / "run")])
    assert plain.exit_code == 0, plain.output
    assert "[[1,2,4],[3,256,0]]" in plain.output
    assert "off (hurts" not in plain.output
    target = tmp_path / "sglang.json"
    written = runner.invoke(app, ["policy", str(tmp_path / "run"), "--engine", "sglang", "--out", str(target)])
    assert written.exit_code == 0, written.output
    assert json.loads(target.read_text())["1"]["candidate_steps"] == [4]
    assert f"--speculative-adaptive-config {target}" in written.output
    config = tmp_path / "it's.json"
    read = runner.invoke(app, ["policy", str(tmp_path / "run"), "--engine", "vllm", "--out", str(config)])
    assert read.exit_code == 0, read.output
    assert json.loads(config.read_text())["num_speculative_tokens"] == 4
    line = next(line for line in read.output.splitlines() if line.startswith("--speculative-config"))
    shown = subprocess.run(["bash", "-c", f"printf %s {line.partition(' ')[2]}"], capture_output=True, check=True)
    assert json.loads(shown.stdout) == json.loads(config.read_text())
    nowhere = runner.invoke(app, ["policy", str(tmp_path / "nothing")])
    assert nowhere.exit_code == 2
    assert "Traceback" not in nowhere.output


def test_a_policy_that_is_off_writes_no_file_and_fails_where_one_was_wanted(tmp_path: Path) -> None:
    from breakeven.cli.main import app

    made = campaign(blocks=3, arms={"off": ARMS["off"], "deep": ARMS["deep"]},
                    workload={"domains": ("coding",), "max_tokens": 48})  # fmt: skip
    write(tmp_path / "run", made, cells(made, lambda arm, _, level: 1.0 if arm == "off" else 0.5))
    assert CliRunner().invoke(app, ["policy", str(tmp_path / "run")]).exit_code == 0
    target = tmp_path / "flags"
    wanted = CliRunner().invoke(app, ["policy", str(tmp_path / "run"), "--out", str(target)])
    assert wanted.exit_code == 2
    assert "nothing to write" in wanted.output
    assert not target.exists()


def test_the_markdown_holds_the_file_that_its_flags_name() -> None:
    arms = {"off": {"type": "sglang", "model": "m"}, "deep": {"type": "sglang", "model": "m", "speculation": {
        "method": "eagle3", "draft_model_path": "/d", "num_steps": 4}}}  # fmt: skip
    text = markdown(measured_summary({"deep": TRUTH["deep"]}, arms=arms))
    assert "--speculative-adaptive-config policy-file" in text
    assert '"candidate_steps"' in text
    assert "SGLang rounds the batch size up" in text


def test_the_engines_are_those_that_the_command_names() -> None:
    from breakeven.cli.policy import TargetEngine

    assert {engine.value for engine in TargetEngine} == set(ENGINES)
    assert Shape("embedded").known
