"""Tuning: the halving plan, what stays, and a search and confirmation of known truth that share nothing."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from breakeven.lab.analysis import analyse
from breakeven.lab.campaign import Campaign, EmbeddedArm, Speculation
from breakeven.lab.campaign_file import parse_campaign
from breakeven.lab.plan import Schedule
from breakeven.lab.policy import decide
from breakeven.lab.policy.ranges import depth_at
from breakeven.lab.policy.shapes import Shape, shape
from breakeven.lab.records import RunDirectory
from breakeven.lab.report.markdown import markdown
from breakeven.lab.runner import CampaignRunner, Outcome
from breakeven.lab.tune.choose import propose, survivors, worth
from breakeven.lab.tune.halving import launches, rounds
from breakeven.lab.tune.session import StageFailedError, Tuning
from breakeven.lab.tune.space import TuneError, search_space, tuned_arm

# The plan


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(2, 6), st.integers(1, 5), st.integers(1, 6))
def test_rounds_halve_down_to_the_finalists_and_each_spends_about_the_same(
    candidates: int, eta: int, first_blocks: int, finalists: int
) -> None:
    plan = rounds(candidates, eta=eta, first_blocks=first_blocks, finalists=finalists)
    assert [step.number for step in plan] == list(range(1, len(plan) + 1))
    assert plan[0].candidates == candidates
    assert plan[0].blocks == first_blocks
    assert plan[-1].keep == min(candidates, finalists)
    budget = candidates * first_blocks
    for before, after in itertools.pairwise(plan):
        assert after.candidates == before.keep < before.candidates
        assert after.blocks >= before.blocks
    for step in plan:
        assert step.keep >= min(step.candidates, math.ceil(step.candidates / eta))
        assert budget <= step.candidates * step.blocks < budget + step.candidates
    assert len(plan) <= 1 + math.ceil(math.log(candidates, eta)) if candidates > 1 else len(plan) == 1
    assert launches(plan) == sum((step.candidates + 1) * step.blocks for step in plan)


def test_halving_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 1 candidate"):
        rounds(0)


# What stays

LEVELS = (1, 4, 16)


@st.composite
def gains(draw: st.DrawFn) -> dict[str, dict[int, float]]:
    names = [f"c{index}" for index in range(draw(st.integers(1, 7)))]
    return {name: {n: draw(st.floats(-1, 1)) for n in LEVELS if draw(st.integers(0, 9))} for name in names}


@settings(deadline=None)
@given(gains(), st.integers(1, 5))
def test_what_stays_is_worth_nearly_as_much_as_any_set_of_its_size(
    drawn: dict[str, dict[int, float]], keep: int
) -> None:
    """One family: greedy choice of a submodular value reaches 1 − 1/e of the best set (Nemhauser et al. 1978)."""
    family = dict.fromkeys(drawn, "f")
    kept = survivors(drawn, family, LEVELS, keep)
    known = [name for name in drawn if drawn[name]]
    assert len(kept) == min(keep, len(known)) == len(set(kept))
    assert set(kept) <= set(known)
    if kept:
        assert worth(kept[:1], drawn, family, LEVELS) == max(worth([n], drawn, family, LEVELS) for n in known)
    best = max((worth(s, drawn, family, LEVELS) for s in itertools.combinations(known, len(kept))), default=0.0)
    assert worth(kept, drawn, family, LEVELS) >= (1 - 1 / math.e) * best - 1e-12


def test_a_shape_that_is_best_at_one_load_stays_though_others_are_better_on_the_whole() -> None:
    drawn = {
        "deep": {1: 0.9, 4: 0.5, 16: -0.6},
        "deeper": {1: 0.89, 4: 0.48, 16: -0.9},
        "shallow": {1: 0.3, 4: 0.3, 16: 0.2},
    }
    assert survivors(drawn, dict.fromkeys(drawn, "f"), LEVELS, 2) == ("deep", "shallow")
    # Of another family it adds nothing to the same schedule.
    assert survivors(drawn, {"deep": "f", "deeper": "f", "shallow": "g"}, LEVELS, 2) == ("deep", "deeper")


@settings(deadline=None)
@given(gains())
def test_a_proposal_drafts_where_its_family_gains_and_nowhere_else(drawn: dict[str, dict[int, float]]) -> None:
    shapes = {
        name: Shape("embedded", "eagle3", index + 1, family="f" if index % 2 else "g")
        for index, name in enumerate(drawn)
    }
    found = propose(drawn, shapes, LEVELS)
    if not found.winner:
        assert all(gain <= 0 for by_level in drawn.values() for gain in by_level.values())
        assert all(depth == 0 for _, _, depth in found.ranges)
        return
    family = shapes[found.deepest].family
    members = [name for name in drawn if shapes[name].family == family]
    for level, depth in zip(LEVELS, found.depths, strict=True):
        assert depth_at(found.ranges, level) == depth
        best = max((drawn[name][level] for name in members if level in drawn[name]), default=0.0)
        assert (depth > 0) == (best > 0)
        if depth:
            assert any(shapes[n].depth == depth and drawn[n].get(level) == best for n in members)
    assert max(found.depths) == shapes[found.deepest].depth


# The space


def tuned(**fields: Any) -> Campaign:
    arms = {
        "off": {"type": "embedded"},
        "eagle3": {"type": "embedded", "speculation": {"algorithm": "eagle3"}},
    }
    return synthetic.campaign(
        **{"arms": arms, "levels": (1, 4, 10), "blocks": 4, "workload": {"domains": ("coding",), "max_tokens": 48}}
        | fields
    )


def test_every_combination_that_the_engine_runs_is_a_candidate() -> None:
    campaign = tuned(tune={"num_steps": (1, 2, 4), "eagle_topk": (1, 4), "num_draft_tokens": (8, 16)})
    found = search_space(campaign, "eagle3")
    names = [candidate.name for candidate in found.candidates]
    assert names == ["s1", "s1-k4-d8", "s2", "s2-k4-d8", "s4", "s4-k4-d8", "s4-k4-d16"]
    assert [c.shape.depth for c in found.candidates if c.shape.topk == 1] == [1, 2, 4]
    # The trees of the campaign that began this project: 16 tokens verified to gain 3 at most.
    assert any(
        reason.startswith("s2-k4-d16: verifies 16 tokens a round and can gain at most 3") for reason in found.left_out
    )


def test_without_a_section_there_are_defaults_for_both_kinds() -> None:
    assert [c.name for c in search_space(tuned(), "eagle3").candidates] == ["s1", "s2", "s3", "s5"]
    ngram = {"off": {"type": "embedded"}, "ngram": {"type": "embedded", "speculation": {"algorithm": "ngram"}}}
    found = search_space(tuned(arms=ngram), "ngram").candidates
    assert [c.name for c in found][:3] == ["s2-max3", "s2-max5", "s4-max3"]
    assert len(found) == 6
    own = {"type": "embedded", "speculation": {"algorithm": "ngram", "ngram_max": 7}}
    found = search_space(tuned(arms={**ngram, "ngram": own}), "ngram").candidates
    assert [c.name for c in found][:3] == ["s2-max3", "s2-max5", "s2-max7"]
    trie = {"off": {"type": "sglang", "model": "/m"}, "ngram": {"type": "sglang", "model": "/m", "speculation": {
        "method": "ngram", "num_steps": 3}}}  # fmt: skip
    assert [c.name for c in search_space(tuned(arms=trie), "ngram").candidates] == ["s2", "s4", "s8"]


def test_an_engine_of_its_own_is_tuned_by_the_same_names() -> None:
    arms = {
        "off": {"type": "vllm", "model": "/m"},
        "eagle3": {"type": "vllm", "model": "/m", "speculation": {
            "method": "eagle3", "draft_model_path": "/d", "num_steps": 3}},
    }  # fmt: skip
    found = search_space(tuned(arms=arms, tune={"num_steps": (1, 3), "eagle_topk": (1, 4)}), "eagle3")
    assert [c.name for c in found.candidates] == ["s1", "s3"]
    assert all("drafts chains only" in reason for reason in found.left_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {"off": {"type": "embedded"}, "b": {"type": "attach", "url": "http://h"}}}, "none speculates"),
        ({"tune": {"arm": "nobody"}}, "is not one of the arms"),
        ({"tune": {"arm": "off"}}, "cannot be tuned"),
    ],
)
def test_a_campaign_that_cannot_be_tuned_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        tuned_arm(tuned(**change))


EMBEDDED = {"type": "embedded"}
EAGLE = {"type": "embedded", "speculation": {"algorithm": "eagle3"}}
VLLM: dict[str, Any] = {"type": "vllm", "model": "/m", "speculation": {"method": "mtp", "num_steps": 3}}
RATES = {"arrivals": {"calm": {"process": "poisson"}, "bursts": {"process": "gamma"}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrivals": {"process": "poisson"}}, "rates of arrival"),
        ({"conditions": RATES}, "rates of arrival"),
        ({"workload": {"domains": ("agentic",), "max_tokens": 48, "sessions": {}}}, "sessions in play"),
        ({"arms": {"off": {**EAGLE, "threads": 1}, "eagle3": EAGLE}}, "drafts 3 deep itself"),
        ({"arms": {"S1": EMBEDDED, "eagle3": EAGLE}, "baseline": "S1"}, "rename it"),
        ({"arms": {"policy": EMBEDDED, "eagle3": EAGLE}, "baseline": "policy"}, "rename it"),
        (
            {"arms": {"off": EMBEDDED, "eagle3": {**VLLM, "speculation": {
                **VLLM["speculation"], "extra": {"synthetic_acceptance_length": 2.0}}}}},
            "synthetic acceptance",
        ),
        ({"arms": {"off": EMBEDDED, "eagle3": {**EAGLE, "flags": ("--speculative-num-steps", "2")}}}, "its flags set"),
    ],
)  # fmt: skip
def test_a_search_that_no_schedule_can_come_of_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        search_space(tuned(**change), "eagle3")


def test_a_baseline_of_which_nobody_knows_whether_it_drafts_is_named() -> None:
    arms = {"off": {"type": "attach", "url": "http://h"}, "eagle3": EAGLE}
    assert "whether the baseline off drafts is not known" in search_space(tuned(arms=arms), "eagle3").notes[0]


@pytest.mark.parametrize("count", [1, 2])
def test_prompts_that_do_not_make_two_halves_are_refused_before_anything_is_measured(
    tmp_path: Path, count: int
) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = [
        {"id": f"p{n}", "domain": "own", "messages": [{"role": "user", "content": "word " * (5 if n else 500)}]}
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    bands = {"input_words": {"few": (1, 20), "many": (21, 1000)}} if count > 1 else None
    made = tuned(workload={"prompts_file": str(file), "max_tokens": 48}, conditions=bands)
    lab = Lab()
    tuning, _ = session(tmp_path / "t", lab, made)
    with pytest.raises(TuneError, match="has 1 prompt" if count == 1 else "half of the prompts"):
        tuning.run()
    assert lab.stages == []


# The session, over cells of known truth

TRUTH = {  # ratio of throughput by depth and level
    1: {1: 1.5, 4: 1.3, 10: 1.12},
    2: {1: 1.7, 4: 1.4, 10: 0.95},
    3: {1: 1.9, 4: 1.35, 10: 0.8},
    5: {1: 1.8, 4: 1.0, 10: 0.6},
}


def true_ratio(settings: dict[str, Any], level: int) -> float:
    depth = shape(settings).depth_at(level)
    known = max(n for n in (1, 4, 10) if n <= level)
    return TRUTH[depth][known] if depth else 1.0


class Lab:
    """Stands in for the runner: writes cells of known truth, and remembers what each stage asked for."""

    def __init__(self, *, noise: float = 0.004, dead: str = "", interrupt: str = "") -> None:
        self.noise, self.dead, self.interrupt = noise, dead, interrupt
        self.stages: list[str] = []
        self.prompts: dict[str, set[str]] = {}
        self.arms: dict[str, list[str]] = {}

    def __call__(self, run: RunDirectory, schedule: Schedule, runner: CampaignRunner) -> Outcome:
        name = run.path.name
        self.stages.append(name)
        self.prompts[name] = {prompt for cell in schedule.cells() for prompt in cell.prompt_ids}
        self.arms[name] = list(run.campaign.arms)
        run.journal("run_started", cells=0, done=0, version="test")
        source = random.Random(name)
        for cell in schedule.cells():
            key = cell.key
            settings = run.campaign.arms[key.arm].model_dump(mode="json")
            rate = 100.0 * true_ratio(settings, key.level) * math.exp(source.gauss(0, self.noise))
            record = synthetic.cell(key, rate, requests=key.level)
            run.write_cell(synthetic.spoil(record, "dead") if key.arm == self.dead else record)
            if name == self.interrupt:
                self.interrupt = ""
                raise KeyboardInterrupt
        run.journal("run_finished")
        return Outcome(0, 0, {})


def session(path: Path, lab: Lab, campaign: Campaign | None = None) -> tuple[Tuning, list[str]]:
    said: list[str] = []
    made = campaign or tuned()
    return Tuning(made, search_space(made, "eagle3"), path, said.append, lab), said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lab, RunDirectory, list[str]]:
    lab = Lab()
    tuning, said = session(tmp_path_factory.mktemp("tune") / "t", lab)
    run = tuning.run()
    assert run is not None
    return lab, run, said


def test_the_search_finds_the_schedule_of_the_truth_and_confirms_it(
    finished: tuple[Lab, RunDirectory, list[str]],
) -> None:
    lab, run, said = finished
    assert lab.stages == ["round-1", "confirm"]
    assert lab.arms["round-1"] == ["off", "s1", "s2", "s3", "s5"]
    arms = run.campaign.arms
    assert set(arms) == {"off", "s1", "policy"} or set(arms) == {"off", "s3", "policy"}
    policy = arms["policy"]
    assert isinstance(policy, EmbeddedArm)
    assert isinstance(policy.speculation, Speculation)
    ranges = policy.speculation.schedule
    assert ranges is not None
    assert [depth_at(ranges, n) for n in (1, 10)] == [3, 1]
    # Both sides of each threshold below the highest level.
    edges = {n for _, last, _ in ranges[:-1] for n in (last, last + 1) if n <= 10}
    assert edges <= set(run.campaign.levels)
    assert {1, 4, 10} <= set(run.campaign.levels)
    assert run.campaign.blocks == 4
    assert any(line.startswith("to be confirmed") for line in said)


def test_search_and_confirmation_share_no_prompt_and_no_seed(finished: tuple[Lab, RunDirectory, list[str]]) -> None:
    lab, run, _ = finished
    search = set().union(*(ids for stage, ids in lab.prompts.items() if stage != "confirm"))
    assert search
    assert lab.prompts["confirm"]
    assert not search & lab.prompts["confirm"]
    seeds = {json.loads((run.path.parent / stage / "campaign.json").read_text())["seed"] for stage in lab.stages}
    assert len(seeds) == len(lab.stages)


def test_the_report_says_at_its_top_that_only_the_confirmation_counts(
    finished: tuple[Lab, RunDirectory, list[str]],
) -> None:
    _, run, _ = finished
    summary = analyse(run)
    words = "Everything below is from the confirmation alone"
    text = markdown(summary)
    assert text.index(words) < text.index("As a schedule")
    assert len(summary.cells) == 4 * 3 * len(run.campaign.levels)
    found = decide(summary)
    assert [depth_at(found.ranges, n) for n in (1, 10)] == [3, 1]


def test_a_finished_tuning_measures_nothing_twice(finished: tuple[Lab, RunDirectory, list[str]]) -> None:
    lab, run, _ = finished
    again = Lab()
    tuning, _ = session(run.path.parent, again)
    assert tuning.run() is not None
    assert again.stages == []
    assert lab.stages


def test_a_tuning_that_was_interrupted_goes_on_to_the_same_end(
    tmp_path: Path, finished: tuple[Lab, RunDirectory, list[str]]
) -> None:
    lab = Lab(interrupt="confirm")
    tuning, _ = session(tmp_path / "t", lab)
    with pytest.raises(KeyboardInterrupt):
        tuning.run()

    class Rest(Lab):
        def __call__(self, run: RunDirectory, schedule: Schedule, runner: CampaignRunner) -> Outcome:
            for name in run.cell_ids():  # the real runner leaves them alone
                for part in (run.cells_path / name).iterdir():
                    part.unlink()
                (run.cells_path / name).rmdir()
            return super().__call__(run, schedule, runner)

    rest = Rest()
    tuning, _ = session(tmp_path / "t", rest)
    run = tuning.run()
    assert run is not None
    assert rest.stages == ["confirm"]
    assert run.campaign == finished[1].campaign


def test_a_candidate_without_a_valid_cell_is_left_out(tmp_path: Path) -> None:
    tuning, said = session(tmp_path / "t", Lab(dead="s3"))
    run = tuning.run()
    assert run is not None
    assert "s3" not in run.campaign.arms
    assert any(line == "no valid cell, so left out: s3" for line in said)


def test_a_baseline_without_a_valid_cell_stops_the_tuning(tmp_path: Path) -> None:
    tuning, _ = session(tmp_path / "t", Lab(dead="off"))
    with pytest.raises(StageFailedError, match="no cell that is valid beside"):
        tuning.run()


def test_a_baseline_with_cells_that_were_not_measured_stops_the_tuning(tmp_path: Path) -> None:
    class Gaps(Lab):
        def __call__(self, run: RunDirectory, schedule: Schedule, runner: CampaignRunner) -> Outcome:
            outcome = super().__call__(run, schedule, runner)
            lost = run.cells_path / next(c.key.id for c in schedule.cells() if c.key.arm == "off")
            for part in lost.iterdir():
                part.unlink()
            lost.rmdir()
            return outcome

    tuning, _ = session(tmp_path / "t", Gaps())
    with pytest.raises(StageFailedError, match="cells of the baseline 'off' could not be measured"):
        tuning.run()


def test_nothing_gains_nothing_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TRUTH", {depth: dict.fromkeys((1, 4, 10), 0.8) for depth in TRUTH})
    lab = Lab()
    tuning, said = session(tmp_path / "t", lab)
    assert tuning.run() is None
    assert "confirm" not in lab.stages
    assert "leave speculation off" in said[-1]


def test_a_winner_at_every_load_is_confirmed_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TRUTH", {d: dict.fromkeys((1, 4, 10), 1 + d / 10) for d in TRUTH})
    tuning, _ = session(tmp_path / "t", Lab())
    run = tuning.run()
    assert run is not None
    assert list(run.campaign.arms) == ["off", "s5"]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40))
def test_an_engine_without_schedules_has_its_winner_confirmed_alone(seed: int) -> None:
    arms = {
        "off": {"type": "llamacpp", "model": "m.gguf"},
        "eagle3": {"type": "llamacpp", "model": "m.gguf", "speculation": {
            "method": "eagle3", "draft_model_path": "d.gguf", "num_steps": 3}},
    }  # fmt: skip
    made = tuned(arms=arms, seed=seed)
    space = search_space(made, "eagle3")
    tuning = Tuning(made, space, Path("nowhere"), lambda words: None, Lab())
    shapes = {c.name: c.shape for c in space.candidates}
    proposal = propose({name: TRUTH_LOGS[s.depth] for name, s in shapes.items()}, shapes, [1, 4, 10])
    found = tuning.confirmation(proposal)
    assert list(found.arms) == [proposal.winner]
    assert "takes no schedule" in found.notes[0]


TRUTH_LOGS = {d: {n: math.log(r) for n, r in by_level.items()} for d, by_level in TRUTH.items()}


# The command

FILE = """\
arms:
  off: {type: embedded}
  eagle3: {type: embedded, speculation: {algorithm: eagle3}}
baseline: off
levels: [1, 4]
tune: {num_steps: [1, 3], eagle_topk: [1]}
"""


def test_the_campaign_of_the_page_can_be_tuned() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
    campaign = parse_campaign(text.split("```yaml\n")[1].split("```")[0])
    found = search_space(campaign, tuned_arm(campaign))
    assert [candidate.name for candidate in found.candidates][:3] == ["s1", "s1-k4-d8", "s2"]


def test_a_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    from breakeven.cli.main import app

    assert parse_campaign(FILE).tune is not None
    (tmp_path / "c.yaml").write_text(FILE)
    result = CliRunner().invoke(app, ["tune", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "t"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "tuning eagle3: 2 shapes against off" in result.output
    assert "round 1: 2 shapes in 2 blocks, 2 stay" in result.output
    (tmp_path / "c.yaml").write_text(FILE + "conditions: {temperature: [0.0, 0.7]}\n")
    twice = CliRunner().invoke(app, ["tune", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "t"), "--dry-run"])
    assert twice.exit_code == 0, twice.output
    assert _expected(twice.output) != _expected(result.output)
    assert not (tmp_path / "t").exists()


def _expected(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("expected duration"))


def test_the_line_that_continues_a_tuning_names_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from breakeven.cli.main import app

    def failing(self: Tuning) -> None:
        raise StageFailedError("round-1: a server died")

    monkeypatch.setattr(Tuning, "run", failing)
    (tmp_path / "c.yaml").write_text(FILE)
    result = CliRunner().invoke(
        app, ["tune", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "t"), "--arm", "eagle3"]
    )
    assert result.exit_code == 3
    assert result.output.rstrip().endswith("--arm eagle3")


def test_the_command_refuses_a_directory_that_holds_something_else(tmp_path: Path) -> None:
    from breakeven.cli.main import app

    (tmp_path / "c.yaml").write_text(FILE)
    result = CliRunner().invoke(app, ["tune", str(tmp_path / "c.yaml"), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty and holds no tuning" in result.output
