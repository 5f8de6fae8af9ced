"""Every fault of docs/gates.md, planted in a mock server or in data, and caught by the gate or lint named there.

Numbers in the tests' names are those of the page.
"""

from __future__ import annotations

import math
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from run_helpers import QUICK, campaign, execute, mock_arm

from breakeven.lab import front_end, lints
from breakeven.lab.analysis import analyse, summarise
from breakeven.lab.campaign import Campaign
from breakeven.lab.events import CellProgress, Event
from breakeven.lab.metrics import cell_metrics
from breakeven.lab.mock import MockProcess, MockScript, MockServer
from breakeven.lab.mock.faults import FAULTS
from breakeven.lab.quantity import Quantity
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.report.words import warning
from breakeven.lab.summary import Summary
from breakeven.lab.texts import common_word_share
from breakeven.lab.workload.suite import domains, load_suite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gates.md"
LIFE = {"lifelike": True, "chunks": 24}
DRAFTS = {"draft_tokens": 3, "tokens_per_chunk": [1, 3, 2]}
SPECULATIVE = ["--speculative-config", '{"method": "ngram"}']


@contextmanager
def served(script: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A mock server in a thread (a process takes longer to start), as an arm."""
    server = MockServer(MockScript.from_mapping({**QUICK, **script}))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield {"type": "attach", "url": server.url, "reset_url": server.url + "/reset_prefix_cache"}
    finally:
        server.stop()
        thread.join(5)


def pair(tmp_path: Path, script: dict[str, Any], base: dict[str, Any] | None = None, **fields: Any) -> Summary:
    """One block of 2 streams: a sound arm, and one with a script; analysed from disk."""
    with served(base or {}) as off, served(script) as bad:
        return measured(tmp_path, {"off": off, "bad": bad}, **fields)


def launched(tmp_path: Path, script: dict[str, Any], base: dict[str, Any] | None = None, **fields: Any) -> Summary:
    """The same with servers that the lab starts."""
    return measured(tmp_path, {"off": mock_arm(base), "bad": mock_arm(script)}, **fields)


def measured(tmp_path: Path, arms: dict[str, Any], **fields: Any) -> Summary:
    sizes = {"requests_per_stream": 2, "min_requests": 4}
    given = campaign(arms, **{"blocks": 1, "levels": [2], "requests": sizes, **fields})
    run, _ = execute(tmp_path / "run", given)
    return analyse(run)


def reasons(summary: Summary) -> str:
    assert {cell.arm for cell in summary.invalid} <= {"bad"}
    return " | ".join(reason for cell in summary.invalid for reason in cell.reasons)


def linted(summary: Summary) -> str:
    return " | ".join(lint.message for lint in summary.lints)


def of_data(records: list[CellRecord], given: Campaign, environment: dict[str, Any] | None = None) -> Summary:
    return summarise(given, environment or synthetic.ENVIRONMENT, records)


@pytest.fixture(scope="module")
def given() -> Campaign:
    return synthetic.campaign(blocks=3, levels=(1, 5), workload={"domains": ("coding",), "max_tokens": 48})


@pytest.fixture
def good(given: Campaign) -> list[CellRecord]:
    return synthetic.cells(given, synthetic.by_level())


def test_sound_data_give_no_lint_and_no_invalid_cell(given: Campaign, good: list[CellRecord]) -> None:
    summary = of_data(good, given)
    (few_blocks,) = linted(summary).splitlines()  # which is said of every run of few blocks, and of nothing else here
    assert few_blocks.startswith("3 blocks: ")
    assert summary.invalid == []
    assert warning(summary) == ""


def test_two_sound_servers_give_no_lint(tmp_path: Path) -> None:
    script = {**LIFE, **DRAFTS}
    summary = launched(tmp_path, script, script)
    assert linted(summary) == ""
    assert summary.invalid == []


def test_an_invalid_cell_is_said_at_the_top(given: Campaign, good: list[CellRecord]) -> None:
    summary = of_data([synthetic.spoil(good[0], "a reason"), *good[1:]], given)
    assert "is invalid and takes no part in any comparison" in warning(summary)


# 1


def test_01_a_client_that_sends_late_invalidates_the_cell_and_latency_counts_from_the_intended_send(
    tmp_path: Path,
) -> None:
    """The client is held up for 60 ms now and then: answers that end meanwhile are followed late."""

    def hold(event: Event) -> None:
        if isinstance(event, CellProgress):
            time.sleep(0.06)

    slow = {"gap_s": 0.005}  # so that the client calls back within a cell, which it does ten times a second at most
    arms = {"off": mock_arm(slow), "on": mock_arm(slow)}
    rules = {"max_send_lag_ms": 20.0, "max_client_cpu_share": 1.0}
    run, outcome = execute(
        tmp_path / "run", campaign(arms, blocks=1, levels=[2], gates=rules, requests={"min_requests": 24}), hold
    )
    assert all("the client sent late: p99 of its lag is" in "; ".join(r) for r in outcome.invalid.values())
    assert len(outcome.invalid) == 2
    late = max((r for c in run.read_cells() for r in c.requests), key=lambda r: r.send_ns - r.intended_send_ns)
    assert late.chunks[0].arrival_ns - late.intended_send_ns > 20_000_000


# 2


def test_02_a_cache_left_warm_invalidates_the_cell(tmp_path: Path) -> None:
    """The two domains of one file hold the same prompts, so the second finds the first one's, reset or not."""
    prompts = tmp_path / "prompts.jsonl"
    text = " ".join(f"word{n}" for n in range(200))
    lines = [f'{{"id": "{d}{n}", "domain": "{d}", "prompt": "{n} {text}"}}' for d in "ab" for n in range(4)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    workload = {"domains": ["a", "b"], "prompts_file": str(prompts), "max_tokens": 8}
    summary = pair(tmp_path, {**LIFE, "faults": ["cache_kept"]}, LIFE, workload=workload, warmup={"requests": 0})
    assert "of the prompt tokens were in the server's prefix cache" in reasons(summary)
    assert len(summary.invalid) == 1


def test_02_a_reset_that_fails_leaves_the_cell_unmeasured(tmp_path: Path) -> None:
    assert "resetting the prefix cache failed" in reasons(pair(tmp_path, {"faults": ["cache_without_reset"]}))


def test_02_a_server_that_does_not_report_hits_is_named(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**LIFE, "faults": ["cache_unreported"]}, LIFE)
    assert "bad does not report hits of its prefix cache" in linted(summary)


# 3


def test_03_prompts_of_random_tokens_make_acceptance_not_valid(given: Campaign, good: list[CellRecord]) -> None:
    chance = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [" ".join("".join(chance.choices(letters, k=5)) for _ in range(100)) for _ in range(8)]
    share = common_word_share(words)
    environment = {**synthetic.ENVIRONMENT, "suites": {"coding": {"common_word_share": share}}}
    summary = of_data(good, given, environment)
    assert "the prompts of coding do not read like text" in linted(summary)
    assert not any(row.valid for row in summary.acceptance)
    assert all(row.valid for row in of_data(good, given).acceptance)


@pytest.mark.parametrize("domain", domains())
def test_03_our_own_prompts_read_like_text(domain: str) -> None:
    share = common_word_share([m["content"] for p in load_suite(domain).prompts for m in p.messages])
    assert share is None or share > 0.15


def test_03_ignoring_eos_by_request_makes_acceptance_not_valid(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**LIFE, **DRAFTS}, LIFE, sampling={"ignore_eos": True})
    assert summary.acceptance
    assert not any(row.valid for row in summary.acceptance)


def test_03_a_server_that_ignores_eos_by_itself_is_named(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**LIFE, "faults": ["eos_ignored"]}, LIFE)
    assert "100% of bad's answers end at max_tokens, 0% of off's: bad ignores the end of text" in linted(summary)


# 4, 5


def test_04_acceptance_counted_behind_the_end_is_noted(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**DRAFTS, "faults": ["counters_past_end"]})
    assert "acceptance is over-counted" in linted(summary)


def test_05_the_counters_of_one_rank_of_two_are_noted(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**DRAFTS, "faults": ["counters_of_one_rank"]})
    assert "acceptance is under-counted, as by the counters of one rank" in linted(summary)


def test_05_acceptance_is_of_the_cell_and_not_of_the_servers_life(tmp_path: Path) -> None:
    with MockProcess(
        MockScript(first_chunk_s=0.002, gap_s=0.001, chunks=6, draft_tokens=3, tokens_per_chunk=2)
    ) as mock:
        mock.post("/mock/counters", {"num_drafts": 10_000, "num_draft_tokens": 30_000, "num_accepted_tokens": 29_000})
        arms = {n: {"type": "attach", "url": mock.url} for n in ("off", "on")}
        run, _ = execute(tmp_path / "run", campaign(arms, blocks=1, levels=[1]))
    lengths = {row.length.value for row in analyse(run).acceptance}
    assert lengths == {2.0}  # each step accepts one of three; the server's life so far would say 3.9


def test_05_counters_that_ran_backwards_invalidate_the_cell(tmp_path: Path) -> None:
    with MockProcess(MockScript(first_chunk_s=0.01, gap_s=0.001, chunks=4, draft_tokens=3)) as mock:
        mock.post("/mock/counters", {"num_drafts": 1000})

        def restart(event: Event) -> None:
            if isinstance(event, CellProgress):
                mock.post("/mock/counters", {"num_drafts": 1})

        arms = {name: {"type": "attach", "url": mock.url} for name in ("off", "on")}
        _, outcome = execute(tmp_path / "run", campaign(arms, blocks=1, levels=[1]), restart)
    assert "ran backwards" in str(outcome.invalid)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"faults": ["counters_still"], "draft_tokens": 3}, "speculation was silently off"),
        ({**DRAFTS, "faults": ["counters_missing"]}, "its server has no counters of it"),
    ],
)
def test_05_speculation_that_is_off_or_cannot_be_seen_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any], words: str
) -> None:
    # The mock takes no such flags; that the arm is meant to speculate is read from its command.
    monkeypatch.setattr(lints, "speculates", lambda arm: "draft_tokens" in str(arm.command))
    assert words in linted(launched(tmp_path, script))


def test_05_speculation_is_read_from_a_command() -> None:
    arms = {
        "off": {"type": "command", "command": ["vllm", "serve", "{port}"]},
        "vllm": {"type": "command", "command": ["vllm", "serve", "{port}", *SPECULATIVE]},
        "sglang": {"type": "command", "command": ["sglang", "{port}", "--speculative-algorithm=EAGLE3"]},
        "llama": {"type": "command", "command": ["llama-server", "{port}", "-md", "x.gguf"]},
    }
    found = {name: lints.speculates(arm) for name, arm in campaign(arms).arms.items()}
    assert found == {"off": None, "vllm": True, "sglang": True, "llama": True}


# 6, 7


def test_06_a_level_that_scatters_more_is_named_with_what_it_can_show() -> None:
    given = synthetic.campaign(levels=(1, 5), blocks=5)
    noise = {1: 0.20, 5: 0.005}
    records = [
        record
        for level, scatter in noise.items()
        for record in synthetic.cells(given, synthetic.by_level(), noise=scatter)
        if record.key.level == level
    ]
    words = linted(of_data(records, given))
    assert re.search(r"ngram at 1 stream: launches scatter by \d+\.\d%, \d+ times as much as at the calmest", words)
    assert "at 5 stream" not in words


def test_07_throughput_that_gets_better_while_ttft_gets_worse_has_two_verdicts() -> None:
    given = synthetic.campaign(levels=(2,), blocks=4, workload={"domains": ("coding",), "max_tokens": 48})
    records = [
        synthetic.cell(
            CellKey(block, arm, "coding", 2), 200 if arm == "ngram" else 100, ttft_s=0.08 if arm == "ngram" else 0.02
        )
        for block in range(4)
        for arm in given.arms
    ]
    summary = of_data(records, given)
    verdicts = {c.metric: c.verdict for c in summary.comparisons if c.condition == "all"}
    assert (verdicts["throughput"], verdicts["ttft"]) == ("pays", "hurts")


# 8, 9


def test_08_greedy_text_that_speculation_changes_is_counted(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**LIFE, **DRAFTS, "faults": ["text_changed"]}, {**LIFE, **DRAFTS})
    assert "bad: 4 of 4 greedy answers differ from the baseline's" in linted(summary)
    (row,) = (a for a in summary.agreement if a.level is None and a.condition == "all")
    assert (row.identical, row.token_mismatches) == (0, 0)


def test_08_answers_of_unlike_length_are_counted(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**LIFE, "chunks": 16}, LIFE)
    assert "4 of them in length" in linted(summary)
    assert "they do not do the same work" in linted(summary)


def test_09_a_template_argument_that_one_arm_ignores_shows_in_the_prompts_tokens(tmp_path: Path) -> None:
    workload = {
        "domains": ["coding"],
        "max_tokens": 8,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    summary = pair(tmp_path, {**LIFE, "faults": ["template_ignored"]}, LIFE, workload=workload)
    assert "bad and off do not see the same prompts: 4 requests differ in prompt tokens" in linted(summary)


def test_09_a_doubled_bos_in_one_arm_shows_too(tmp_path: Path) -> None:
    summary = pair(tmp_path, {**LIFE, "faults": ["bos_doubled"]}, LIFE)
    assert "do not see the same prompts" in linted(summary)


def test_09_sampling_that_is_greedy_shows_where_prompts_repeat(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "p", "prompt": "Tell me a story."}\n{"id": "q", "prompt": "And another?"}\n')
    fields: dict[str, Any] = {
        "workload": {"prompts_file": str(prompts), "max_tokens": 24},
        "sampling": {"temperature": 1.0},
        "warmup": {"requests": 0},
    }
    sizes = {"requests_per_stream": 4, "min_requests": 8}
    words = linted(pair(tmp_path, {**LIFE, "faults": ["greedy_forced"]}, LIFE, requests=sizes, **fields))
    assert "bad gives one text per prompt whatever the seed, at temperature 1" in words
    assert "off gives one text" not in words


# 10, 11


def test_10_metrics_are_read_between_cells_only_and_flags_that_differ_are_named(tmp_path: Path) -> None:
    with MockProcess(
        MockScript(first_chunk_s=0.002, gap_s=0.001, chunks=6, draft_tokens=2, tokens_per_chunk=2)
    ) as mock:
        arms = {name: {"type": "attach", "url": mock.url} for name in ("off", "on")}
        execute(tmp_path / "run", campaign(arms, blocks=1))
        truth = mock.truth()
    assert truth["metrics_reads"] >= 8
    assert truth["metrics_reads_while_busy"] == 0
    commands = {
        "off": {"type": "command", "command": ["sglang", "{port}"]},
        "on": {"type": "command", "command": ["sglang", "{port}", "--enable-metrics"]},
    }
    (words,) = lints.unlike_metrics(campaign(commands))
    assert "off: none; on: --enable-metrics" in words


def test_11_a_client_that_is_the_bottleneck_invalidates_the_cell(tmp_path: Path) -> None:
    summary = pair(tmp_path, {}, gates={"max_client_cpu_share": 1e-6})
    assert len(summary.invalid) == 2
    assert all("it may have been the bottleneck" in str(cell.reasons) for cell in summary.invalid)


# 12, 13


def test_12_an_answer_beyond_max_tokens_invalidates_the_cell(tmp_path: Path) -> None:
    summary = pair(
        tmp_path, {**LIFE, "faults": ["max_tokens_ignored"]}, workload={"domains": ["coding"], "max_tokens": 8}
    )
    assert "answers are longer than max_tokens" in reasons(summary)


def test_12_fewer_tokens_than_chunks_invalidate_the_cell(tmp_path: Path) -> None:
    assert "more chunks than tokens" in reasons(pair(tmp_path, {"usage_offset": -4}))


def test_12_figures_that_contradict_each_other_are_named(good: list[CellRecord]) -> None:
    record = good[0]
    sound = cell_metrics(record.requests, {}, record.started_ns, record.ended_ns, 1)
    assert list(lints.cannot_be(sound)) == []

    def figure(old: Quantity, value: float) -> Quantity:
        return replace(old, value=value)

    peak = replace(sound, throughput_whole_tok_s=figure(sound.throughput_whole_tok_s, 1e-3))
    assert "far below the tokens received" in "".join(lints.cannot_be(peak))
    fall = replace(sound, latency=replace(sound.latency, p99=figure(sound.latency.p99, 0.0)))
    assert "the quantiles of latency fall" in "".join(lints.cannot_be(fall))
    late = replace(sound, ttft=replace(sound.ttft, mean=figure(sound.ttft.mean, 1e9)))
    assert "the mean TTFT is above the mean latency" in "".join(lints.cannot_be(late))
    cached = replace(sound, cached_share=figure(sound.cached_share, 1.5))
    assert "more prompt tokens are said to be cached than there are" in "".join(lints.cannot_be(cached))


def test_13_throughput_that_includes_ramp_up_and_drain_is_named(tmp_path: Path) -> None:
    sizes = {"requests_per_stream": 1, "min_requests": 1}
    words = linted(pair(tmp_path, LIFE, LIFE, levels=[3], requests=sizes))
    assert "at 3 streams a cell has fewer than 2 requests a stream" in words


def test_13_first_cells_that_are_slow_show_a_warm_up_that_is_too_short(given: Campaign) -> None:
    records = []
    for index, record in enumerate(synthetic.cells(given, synthetic.by_level(), noise=0.0)):
        first = (record.key.block + (record.key.level == 5)) % 2 == 0
        rate = 60.0 if first else 100.0
        made = synthetic.cell(record.key, rate * (1 + 0.001 * math.sin(index)))
        records.append(replace(made, extra={"cell_position": 0 if first else 1}))
    words = linted(of_data(records, given))
    assert "off: the first cell after a launch is 40% slower" in words


# 14, 15


@pytest.mark.parametrize(
    ("levels", "found"), [([1, 3, 7], True), ([4, 5, 8, 9], False), ([2, 8, 16], True), ([1, 2], True)]
)
def test_14_a_policys_thresholds_must_be_measured_on_both_sides(levels: list[int], found: bool) -> None:
    schedule = '{"method": "eagle3", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 8, 1], [9, 16, 0]]}'
    arms = {
        "off": {"type": "command", "command": ["vllm", "serve", "{port}"]},
        "policy": {"type": "command", "command": ["vllm", "serve", "{port}", "--speculative-config", schedule]},
    }
    given = campaign(arms, levels=levels)
    command = given.arms["policy"].command  # type: ignore[union-attr]
    assert lints.batch_thresholds(command) == [4, 8]
    assert bool(list(lints.thresholds(given))) is found


@pytest.mark.parametrize("text", ["[[1, 4]]", "[1, 2]", '[["a", 2, 3]]', "[]"])
def test_14_a_schedule_that_cannot_be_read_has_no_threshold(text: str) -> None:
    assert lints.batch_thresholds([f'{{"num_speculative_tokens_per_batch_size": {text}}}']) == []


def test_15_what_is_missing_to_repeat_a_run_is_listed(tmp_path: Path, given: Campaign, good: list[CellRecord]) -> None:
    words = linted(of_data(good, given, {"commands": {"off": ["x"]}}))
    assert "the version of breakeven, the hardware, the hashes of the prompts, the command of ngram" in words
    assert "nobody can repeat this" not in linted(launched(tmp_path, {}))
    assert "nobody can repeat bad exactly: the run does not know how it was started" in linted(
        pair(tmp_path / "attached", {})
    )


def test_15_a_clock_that_was_throttled_is_named(given: Campaign, good: list[CellRecord]) -> None:
    def at(mhz: float) -> dict[str, Any]:
        return {"before": {"cpu_mhz": 3000.0}, "after": {"cpu_mhz": mhz}}

    records = [replace(r, extra=at(1200.0 if i == 4 else 2900.0)) for i, r in enumerate(good)]
    summary = of_data(records, given)
    (lint,) = (found for found in summary.lints if "MHz" in found.message)
    assert lint.cells == [good[4].key.id]


# 16


def test_16_an_api_server_that_cannot_keep_up_with_its_engine_is_named(tmp_path: Path) -> None:
    script = {"first_chunk_s": 0.02, "gap_s": 0.02, "chunks": 8}
    summary = pair(tmp_path, {**script, "engine_gap_s": 0.0}, script)
    (lint,) = (found for found in summary.lints if "answers took longer" in found.message)
    (times,) = re.findall(r"\(bad (\d+\.\d\d) times at 2 streams\)", lint.message)
    assert float(times) >= 7.9  # 8 gaps, of which the engine knows of one
    assert lint.cells == ["b00-bad-coding-c002"]
    assert "from that alone" not in lint.message  # whose engine tells nothing
    (cell,) = (cell for cell in summary.cells if cell.arm == "bad")
    assert cell.metrics["engine_lag"].value == pytest.approx(float(times), abs=0.006)
    assert cell.metrics["engine_time_mean"].value == pytest.approx(20.0)


def told(record: CellRecord, lag: float) -> CellRecord:
    """The cell of a server whose engine took `lag` times less than its answers."""
    spent = sum(r.end_ns - r.send_ns for r in record.requests) / 1e9
    own = {"requests": float(len(record.requests)), "seconds": spent / lag}
    return replace(record, extra=front_end.engine_times(record.requests, own))


def held_back(records: list[CellRecord], given: Campaign) -> list[str]:
    return [lint.message for lint in of_data(records, given).lints if "answers took longer" in lint.message]


def test_16_an_engine_whose_answers_come_at_once_is_not_named(given: Campaign, good: list[CellRecord]) -> None:
    assert held_back([told(r, 1.09) for r in good], given) == []
    assert held_back(good, given) == []


def test_16_what_unlike_lags_do_to_a_ratio_is_said_in_either_direction(given: Campaign, good: list[CellRecord]) -> None:
    def lag(record: CellRecord) -> float:
        return {("off", 5): 1.65, ("ngram", 5): 1.16}.get((record.key.arm, record.key.level), 1.02)

    (words,) = held_back([told(r, lag(r)) for r in good], given)
    assert "(off 1.65 times at 5 streams; ngram 1.16 times at 5 streams)" in words
    assert words.endswith(" Of ngram's throughput over off's, up to 1.42 at 5 streams comes from that alone.")
    (words,) = held_back([told(r, 1.65 / lag(r) * 1.16) for r in good], given)
    assert "up to 0.70 at 5 streams comes from that alone" in words
    (alike,) = held_back([told(r, 1.5 if r.key.arm == "off" else 1.47) for r in good], given)
    assert "comes from that alone" not in alike


def test_16_one_domain_that_is_held_back_is_not_hidden_by_the_others() -> None:
    domains = ("coding", "chat", "agentic")
    given = synthetic.campaign(blocks=3, levels=(2,), workload={"domains": domains, "max_tokens": 48})
    records = [
        told(synthetic.cell(CellKey(block, arm, domain, 2), 100.0), 1.6 if (arm, domain) == ("off", "chat") else 1.0)
        for block in range(3)
        for arm in given.arms
        for domain in domains
    ]
    summary = of_data(records, given)
    (lint,) = (lint for lint in summary.lints if "answers took longer" in lint.message)
    assert "(off 1.60 times at 2 streams (chat))" in lint.message
    assert "up to 1.60 at 2 streams (chat) comes from that alone" in lint.message
    assert lint.cells == [f"b0{block}-off-chat-c002" for block in range(3)]


def test_16_rates_are_called_by_their_own_unit(good: list[CellRecord]) -> None:
    arrivals = {"process": "poisson", "unit_rate": 0.5}
    given = synthetic.campaign(
        blocks=3, levels=(1, 5), workload={"domains": ("coding",), "max_tokens": 48}, arrivals=arrivals
    )
    records = [told(r, 1.3 if r.key.level == 5 else 1.0) for r in good]
    (lint,) = front_end.front_end_lints(given, records)
    assert "off 1.30 times at 2.5 requests/s" in lint.message
    crossed = synthetic.campaign(
        blocks=3,
        levels=(1, 5),
        workload={"domains": ("coding",), "max_tokens": 48},
        conditions={"arrivals": {"smooth": {"process": "constant", "unit_rate": 0.5}, "poisson": arrivals}},
    )
    named = [replace(r, key=replace(r.key, condition="coding+poisson")) for r in records]
    (lint,) = front_end.front_end_lints(crossed, named)
    assert (
        "off 1.30 times at 2.5 requests/s" in lint.message
    )  # the conditions', not the campaign's own, which is a closed loop
    unlike = [told(r, 1.3 if (r.key.arm, r.key.level) == ("off", 5) else 1.0) for r in good]
    (lint,) = front_end.front_end_lints(given, unlike)
    assert "from that alone" not in lint.message  # a schedule sets the throughput, not the time of a request


def test_16_a_shift_within_the_margin_or_of_small_lags_is_not_said(given: Campaign, good: list[CellRecord]) -> None:
    def words(lags: dict[tuple[str, int], float], margin: float = 0.03) -> str:
        wide = given.model_copy(update={"margin": margin})
        records = [told(r, lags.get((r.key.arm, r.key.level), 1.0)) for r in good]
        return "".join(lint.message for lint in front_end.front_end_lints(wide, records))

    assert "up to 1.20 at 5 streams" in words({("off", 5): 1.2})
    assert "from that alone" not in words({("off", 5): 1.2}, margin=0.25)
    assert "at 1 stream" not in words({("off", 5): 1.2, ("off", 1): 1.09})


def test_16_times_of_other_requests_than_the_cells_are_not_used(good: list[CellRecord]) -> None:
    requests = good[0].requests
    count = float(len(requests))
    assert front_end.engine_times(requests, {"seconds": 1.0, "requests": count})
    assert front_end.engine_times(requests, {"seconds": 1.0, "requests": count + 1}) == {}  # somebody else's too
    assert front_end.engine_times(requests, {}) == {}
    assert front_end.engine_times((), {"seconds": 0.0, "requests": 0.0}) == {}
    broken = (replace(requests[0], error="it broke off"), *requests[1:])
    assert front_end.engine_times(broken, {"seconds": 1.0, "requests": count}) == {}
    whole = {"requests": 2, "engine_s": 1.0, "client_s": 1.5}
    assert front_end.lag(replace(good[0], extra={"engine_times": whole})) == 1.5
    for extra in ({}, {"engine_times": None}, *({"engine_times": {**whole, name: 0}} for name in whole)):
        assert front_end.lag(replace(good[0], extra=extra)) is None


# The page


def test_the_page_names_tests_that_exist_and_every_fault_of_the_mock() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert sorted(set(map(int, rows))) == list(range(1, 17))
    folder = Path(__file__).parent
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("test_*.py")}
    for name in re.findall(r"`(test_\w+)`", page):
        assert any(f"def {name}(" in source or stem == name for stem, source in sources.items()), name
    own = set(re.findall(r"def (test_\d\d_\w+)\(", sources["test_seeded_faults"]))
    assert own <= set(re.findall(r"`(test_\w+)`", page)), own - set(re.findall(r"`(test_\w+)`", page))
    used = " ".join(sources.values())
    for fault in FAULTS:
        assert f'"{fault}"' in used, fault
