"""Campaigns of sessions: turns, think times, contexts, gates, and what is written and said of them."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import campaign, execute, mock_arm

from breakeven.lab.analysis import analyse, summarise
from breakeven.lab.campaign import SENTINEL, Campaign, Sessions
from breakeven.lab.campaign_file import CampaignError, parse_campaign
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.play import session_of, turn_of, turn_seed, turns_in
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.reduced import reduce_cell
from breakeven.lab.report import words
from breakeven.lab.report.html import page
from breakeven.lab.report.markdown import markdown
from breakeven.lab.sent import sent_summaries, unlike_prompts
from breakeven.lab.workload.prompt import Prompt, PromptError
from breakeven.lab.workload.suite import load_suite

LIFE = {"lifelike": True, "chunks": 6}


def _campaign(sessions: dict[str, object] | bool, **fields: object) -> Campaign:
    return campaign(
        arms={"off": mock_arm(LIFE), "on": mock_arm({**LIFE, "draft_tokens": 3})},
        workload={"domains": ["agentic"], "max_tokens": 16, "request_timeout_s": 20.0, "sessions": sessions},
        **{"levels": [2], "blocks": 1, "warmup": {"requests": 1}, **fields},
    )


def test_a_prompts_user_messages_are_the_turns_and_its_answers_the_recorded_ones() -> None:
    for prompt in load_suite("agentic").prompts:
        users = [m["content"] for m in prompt.messages if m["role"] == "user"]
        answers = [m["content"] for m in prompt.messages if m["role"] == "assistant"]
        session = session_of(prompt, "s", Sessions(think_s=0.5), 1)
        assert [turn.text for turn in session.turns] == users
        assert [turn.answer for turn in session.turns] == [*answers, None]
        assert [turn.think_s for turn in session.turns] == [0.0, *([0.5] * (len(users) - 1))]
        assert (session.system is not None) == (prompt.messages[0]["role"] == "system")
        assert turns_in(prompt, Sessions()) == len(users)
        own = session_of(prompt, "s", Sessions(answers="own", max_turns=2), 1)
        assert [turn.answer for turn in own.turns] == [None] * min(2, len(users))


@given(st.integers(0, 2**64))
def test_think_times_are_drawn_by_the_seed_alone_and_are_exponential(draw: int) -> None:
    turn = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    prompt = Prompt("p", "d", (*turn * 400, {"role": "user", "content": "x"}))
    spread = Sessions(think_s=2.0, think_spread="exponential")
    times = [turn.think_s for turn in session_of(prompt, "s", spread, draw).turns[1:]]
    assert times == [turn.think_s for turn in session_of(prompt, "another", spread, draw).turns[1:]]
    assert min(times) >= 0
    assert statistics.mean(times) == pytest.approx(2.0, rel=0.25)  # a standard error of 5%
    assert statistics.stdev(times) == pytest.approx(2.0, rel=0.5)


def test_each_turn_has_a_seed_of_its_own_unless_the_campaign_fixes_one() -> None:
    assert turn_seed(7, 1, per_request=True) == 7
    assert len({turn_seed(7, turn, per_request=True) for turn in range(1, 9)}) == 8
    assert {turn_seed(7, turn, per_request=False) for turn in range(1, 9)} == {7}
    assert turn_seed(None, 3, per_request=False) is None
    assert [turn_of(name) for name in ("cell-00001/3", "cell-00001", "a/b")] == [3, 1, 1]


def test_sessions_are_refused_where_they_cannot_be_played() -> None:
    arms = "arms: {off: {type: embedded}, on: {type: embedded, threads: 1}}\nbaseline: off\n"
    for text, said in (
        ("workload: {sessions: true}\narrivals: {process: poisson}", "leave arrivals out"),
        ("workload: {sessions: true}\nclient: {workers: 2}", "set client.workers to 1"),
        ("workload: {sessions: true, template: completions}", "need the chat template"),
        ("workload: {sessions: {think_s: -1}}", "workload.sessions.think_s"),
        ("workload: {sessions: {thinks: 1}}", "did you mean 'think_s'"),
    ):
        with pytest.raises(CampaignError, match=said):
            parse_campaign(arms + text)
    single = campaign(workload={"domains": ["coding"], "sessions": True})
    with pytest.raises(PromptError, match="coding has no prompt of several turns"):
        build_schedule(single, load_suites(single))
    assert "sessions" not in campaign().resolved()["workload"]


def test_a_campaign_of_sessions_plays_them_alike_in_all_arms(tmp_path: Path) -> None:
    found = _campaign({"think_s": 0.03})
    run, outcome = execute(tmp_path / "run", found)
    assert (outcome.cells, outcome.measured, outcome.invalid) == (2, 2, {})
    schedule = build_schedule(found, load_suites(found))
    cells = {record.key.arm: record for record in run.read_cells()}
    planned = next(schedule.cells())
    turns = sum(turns_in(schedule.prompt("agentic", name), Sessions()) for name in planned.prompt_ids)
    for record in cells.values():
        assert len(record.requests) == turns > len(planned.prompt_ids)
        names = [r.request_id for r in record.requests]
        assert names == [
            f"{record.key.id}-{index:05d}/{turn}"
            for index, name in enumerate(planned.prompt_ids)
            for turn in range(1, turns_in(schedule.prompt("agentic", name), Sessions()) + 1)
        ]
        assert [r.prompt_id for r in record.requests if turn_of(r.request_id) == 1] == list(planned.prompt_ids)
        for before, after in itertools.pairwise(record.requests):
            if turn_of(after.request_id) > 1:
                assert after.intended_send_ns - before.end_ns == 30_000_000
                assert (after.prompt_tokens or 0) > (before.prompt_tokens or 0)
        # Later turns find their own history; that is no fault of a cold cache.
        assert record.extra["cached_share"] > 0.3
    assert cells["off"].extra["bodies_sha256"] == cells["on"].extra["bodies_sha256"]
    assert cells["off"].extra["rendered"] == cells["on"].extra["rendered"]
    assert cells["off"].extra["rendered"]["prompts"] == turns

    summary = analyse(run)
    rows = {(row.arm, row.turn): row for row in summary.turns}
    assert {arm for arm, _ in rows} == {"off", "on"}
    assert sum(row.requests for (arm, _), row in rows.items() if arm == "on") == turns
    assert rows["on", 1].cached_share == 0
    assert (rows["on", 2].cached_share or 0) > 0.3
    assert (rows["on", 2].prompt_tokens or 0) > (rows["on", 1].prompt_tokens or 0)
    assert rows["on", 2].ttft_ms is not None
    html = page(summary)
    assert "Sessions, turn by turn" in html
    for where in (html, markdown(summary), words.regime(summary)[0]):
        assert "a level is a number of dialogues in play" in where
    _, again = execute(tmp_path / "run", found)
    assert (again.measured, again.invalid) == (2, {})


def test_a_turn_that_fails_ends_its_session_and_its_other_turns_count_as_not_sent(tmp_path: Path) -> None:
    faulty = {**LIFE, "http_status": 500, "fault_from": 4, "fault_every": 1000}
    found = campaign(
        arms={"off": mock_arm(LIFE), "on": mock_arm(faulty)},
        workload={"domains": ["agentic"], "max_tokens": 16, "sessions": {"think_s": 0}},
        levels=[1], blocks=1, warmup={"requests": 0}, requests={"min_requests": 6},
    )  # fmt: skip
    run, outcome = execute(tmp_path / "run", found)
    (reason,) = outcome.invalid["b00-on-agentic-c001"]
    assert "requests failed" in reason
    assert analyse(run).cells[1].failed == 1


def test_a_warm_cache_of_sessions_holds_the_whole_dialogue(tmp_path: Path) -> None:
    found = _campaign({"think_s": 0, "answers": "own"}, cache="warm")
    run, outcome = execute(tmp_path / "run", found)
    assert outcome.invalid == {}
    for record in run.read_cells():
        first = [r for r in record.requests if turn_of(r.request_id) == 1]
        assert all((r.cached_tokens or 0) > 0 for r in first)
        # Contexts are the model's own: of these, only first turns are rendered alike by design.
        assert record.extra["rendered"]["prompts"] == len({r.prompt_id for r in record.requests})
    assert "what the model itself said" in words.regime(analyse(run))[0]


def test_the_sentinels_sessions_think_alike_in_every_block(tmp_path: Path) -> None:
    found = _campaign({"think_s": 0.01, "think_spread": "exponential"}, blocks=2, sentinel={"requests": 2})
    run, outcome = execute(tmp_path / "run", found)
    assert outcome.invalid == {}
    pauses: dict[str, set[tuple[int, ...]]] = {"sentinel": set(), "agentic": set()}
    for record in run.read_cells():
        pairs = itertools.pairwise(record.requests)
        gaps = (b.intended_send_ns - a.end_ns for a, b in pairs if turn_of(b.request_id) > 1)
        pauses[record.key.condition].add(tuple(gaps))
    assert len(pauses["sentinel"]) == 1  # of two blocks and two arms
    assert len(pauses["agentic"]) == 2


def _played(campaign: Campaign, texts: Callable[[str, int], str]) -> list[CellRecord]:
    """Cells of one session of six turns at each level; `texts`: what an arm answers in a turn."""
    records = []
    for record in synthetic.cells(campaign, synthetic.by_level(), noise=0):
        turns = record.requests[:6]
        named = tuple(
            replace(r, request_id=f"{record.key.id}-00000/{turn}", text=texts(record.key.arm, turn))
            for turn, r in enumerate(turns, 1)
        )
        records.append(replace(record, requests=named))
    return records


@pytest.mark.parametrize(("answers", "pairs", "identical"), [("recorded", 12, 2), ("own", 2, 2)])
def test_only_first_turns_are_the_same_request_where_contexts_are_the_models_own(
    answers: str, pairs: int, identical: int
) -> None:
    found = synthetic.campaign(
        workload={"domains": ("agentic",), "max_tokens": 48, "sessions": {"answers": answers}}, levels=(5,), blocks=2
    )
    records = _played(found, lambda arm, turn: f"The answer of turn {turn}" + (arm if turn > 1 else ""))
    (row,) = [a for a in summarise(found, {}, records).agreement if a.condition == "all" and a.level is None]
    assert (row.pairs, row.identical) == (pairs, identical)


@pytest.mark.parametrize(("sessions", "window"), [(True, "whole"), (False, "steady")])
def test_the_window_goes_by_the_sessions_planned_and_not_by_the_turns_played(sessions: bool, window: str) -> None:
    found = synthetic.campaign(
        workload={"domains": ("agentic",), "max_tokens": 48, "sessions": sessions},
        requests={"requests_per_stream": 1, "min_requests": 1}, levels=(2,), blocks=1, sentinel={"requests": 2},
    )  # fmt: skip
    for condition in ("agentic", SENTINEL):
        record = synthetic.cell(CellKey(0, "off", condition, 2), 30.0, requests=6)
        assert reduce_cell(record, found).metrics.throughput_window == window


def test_rendered_prompts_are_held_against_each_other_where_as_many_were_sent() -> None:
    def record(arm: str, sha256: str, prompts: int, *invalid: str) -> CellRecord:
        extra = {"sampling": {}, "rendered": {"sha256": sha256, "prompts": prompts}}
        return replace(synthetic.cell(CellKey(0, arm, "agentic", 1), 30.0), extra=extra, invalid=invalid)

    whole = record("off", "a", 7)
    for other, alike in (
        (record("on", "b", 7), False),
        (record("on", "a", 7), True),
        (record("on", "b", 6), None),  # a session of it ended early
        (record("on", "b", 7, "the server ended during the cell"), None),
    ):
        assert sent_summaries([whole, other])[0].rendered_alike is alike
        assert len(list(unlike_prompts([whole, other], "off"))) == (alike is False)


def test_a_campaign_of_sessions_is_another_schedule() -> None:
    plain = campaign(workload={"domains": ["agentic"], "max_tokens": 16})
    played = campaign(workload={"domains": ["agentic"], "max_tokens": 16, "sessions": True})
    schedule = build_schedule(played, load_suites(played))
    assert schedule.sha256 != build_schedule(plain, load_suites(plain)).sha256
    assert any("92 prompts of several turns" in note for note in schedule.notes)
    assert Campaign.model_validate_json(json.dumps(played.resolved())) == played
