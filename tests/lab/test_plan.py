"""The schedule: the same for all arms of a block, fresh between blocks, and a function of the campaign alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import campaign, mock_arm

from breakeven.lab.campaign import Campaign
from breakeven.lab.plan import Forecast, Schedule, assumed_cell_s, build_schedule, cell_salt, detectable, load_suites
from breakeven.lab.records import CellKey
from breakeven.lab.workload.prompt import Prompt, PromptError, make_suite


def _schedule(given: Campaign) -> Schedule:
    return build_schedule(given, load_suites(given))


def _big() -> Campaign:
    return campaign(
        blocks=4, levels=[1, 2, 5], workload={"domains": ["coding", "chat"], "max_tokens": 8}, warmup={"requests": 5}
    )


def test_every_cell_of_the_design_occurs_once() -> None:
    given = _big()
    keys = [cell.key for cell in _schedule(given).cells()]
    wanted = {
        CellKey(b, arm, domain, level)
        for b in range(4)
        for arm in given.arms
        for domain in ("coding", "chat")
        for level in (1, 2, 5)
    }
    assert len(keys) == len(wanted)
    assert set(keys) == wanted


def test_all_arms_of_a_block_get_the_same_prompts_seeds_and_order() -> None:
    schedule = _schedule(_big())
    for block in range(4):
        first, second = (launch for launch in schedule.launches if launch.block == block)
        assert [(c.key.condition, c.key.level, c.prompt_ids, c.seeds) for c in first.cells] == [
            (c.key.condition, c.key.level, c.prompt_ids, c.seeds) for c in second.cells
        ]


def test_blocks_get_fresh_prompts_and_seeds_while_the_supply_lasts() -> None:
    schedule = _schedule(_big())
    seen: set[object] = set()
    for cell in schedule.cells():
        if cell.key.arm == "off":
            assert seen.isdisjoint(cell.prompt_ids)
            assert seen.isdisjoint(cell.seeds)
            seen.update(cell.prompt_ids)
            seen.update(cell.seeds)
    assert schedule.notes == ()


def test_reuse_of_prompts_is_told() -> None:
    schedule = _schedule(campaign(blocks=10, requests={"min_requests": 30}))
    assert any("too small" in note for note in schedule.notes)


def test_warm_up_prompts_are_never_measured() -> None:
    schedule = _schedule(campaign(blocks=10, requests={"min_requests": 30}, warmup={"requests": 6}))
    measured = {prompt_id for cell in schedule.cells() for prompt_id in cell.prompt_ids}
    assert len({prompt.id for prompt in schedule.warmup}) == 6
    assert measured.isdisjoint(prompt.id for prompt in schedule.warmup)


def test_a_suite_too_small_to_give_warm_up_prompts_keeps_all_for_measuring() -> None:
    prompts = [Prompt(f"p{i}", "coding", ({"role": "user", "content": f"question {i}"},)) for i in range(3)]
    schedule = build_schedule(campaign(), {"coding": make_suite("coding", prompts)})
    measured = {prompt_id for cell in schedule.cells() for prompt_id in cell.prompt_ids}
    assert measured == {"p0", "p1", "p2"}
    assert [prompt.domain for prompt in schedule.warmup] == ["warmup"]


def test_the_schedule_and_its_hash_depend_on_the_campaign_alone() -> None:
    assert _schedule(_big()) == _schedule(_big())
    assert _schedule(campaign()).sha256 != _schedule(campaign(seed=1)).sha256


def test_a_fixed_seed_and_none_are_sent_as_asked() -> None:
    assert {s for c in _schedule(campaign(sampling={"seed": 5})).cells() for s in c.seeds} == {5}
    assert {s for c in _schedule(campaign(sampling={"seed": None})).cells() for s in c.seeds} == {None}


def test_names_that_would_give_two_cells_one_directory_are_refused() -> None:
    given = campaign({"a": mock_arm(), "a-b": mock_arm()}, baseline="a")
    prompts = [Prompt("p", "x", ({"role": "user", "content": "q"},))]
    with pytest.raises(PromptError, match="rename an arm or a domain"):
        build_schedule(given, {"b-c": make_suite("b-c", prompts), "c": make_suite("c", prompts)})


def test_a_prompts_file_gives_its_domains_as_conditions(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"id": f"{d}-{i}", "domain": d, "prompt": f"{d} {i}"} for d in ("tickets", "mails") for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert list(load_suites(campaign(workload={"prompts_file": str(path)}))) == ["mails", "tickets"]
    assert list(load_suites(campaign(workload={"prompts_file": str(path), "domains": ["tickets"]}))) == ["tickets"]
    with pytest.raises(PromptError, match=r"holds no prompt of the domain 'coding': it has mails, tickets"):
        load_suites(campaign(workload={"prompts_file": str(path), "domains": ["coding"]}))
    for domain, source in (("sentinel", {"prompts_file": str(path)}), ("all", {"files": [{"path": str(path)}]}),
                           ("sentinel", {"files": [{"path": str(path)}]})):  # fmt: skip
        path.write_text(json.dumps({"id": "a", "domain": domain, "prompt": "x"}))
        with pytest.raises(PromptError, match=rf"mine\.jsonl: '{domain}' is the name"):
            load_suites(campaign(workload=source))


def test_a_salt_is_the_same_for_all_arms_unless_they_share_a_server() -> None:
    attach = {"type": "attach", "url": "http://h:1"}
    shared = campaign({"a": attach, "b": attach, "c": {"type": "attach", "url": "http://h:2"}}, baseline="a")
    apart = campaign({"a": attach, "b": {"type": "attach", "url": "http://h:2"}}, baseline="a")

    def salt(given: Campaign, arm: str, run: str = "run", level: int = 1) -> str:
        return cell_salt(given, CellKey(0, arm, "coding", level), run)

    assert salt(apart, "a") == salt(apart, "b")
    assert len({salt(shared, "a"), salt(shared, "b"), salt(shared, "c")}) == 3
    assert len({salt(apart, "a"), salt(apart, "a", "other run"), salt(apart, "a", level=2)}) == 3
    assert len(salt(apart, "a")) == 12
    assert salt(apart, "a").isdigit()


def test_the_forecast_begins_with_the_assumptions_and_then_follows_what_was_measured() -> None:
    given = campaign()
    forecast = Forecast(given)
    one, other = CellKey(0, "off", "coding", 1), CellKey(0, "off", "coding", 3)
    assert forecast.cell_s(one) == assumed_cell_s(given, 1)
    forecast.cell_took(one, 2 * assumed_cell_s(given, 1))
    assert forecast.cell_s(other) == pytest.approx(2 * assumed_cell_s(given, 3))
    forecast.launch_took(3.0)
    expected = 2 * assumed_cell_s(given, 1) + 2 * assumed_cell_s(given, 3) + 6.0
    assert forecast.remaining_s([one, other], 2) == pytest.approx(expected)


def test_the_smallest_effect_shown_shrinks_with_blocks_and_one_block_shows_none() -> None:
    assert detectable(campaign(blocks=1)) == []
    few, many = detectable(campaign(blocks=3)), detectable(campaign(blocks=12))
    assert [scatter for scatter, _ in few] == [scatter for scatter, _ in many]
    assert all(large > small > 0 for (_, large), (_, small) in zip(few, many, strict=True))
