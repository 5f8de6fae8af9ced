"""Factors besides the domain: their names, prompts, gates, effects and what a report says of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import campaign, execute, mock_arm

from breakeven.lab.analysis import AnalysisError, analyse, summarise
from breakeven.lab.campaign import SENTINEL, Campaign
from breakeven.lab.campaign_file import CampaignError, load_campaign, parse_campaign
from breakeven.lab.pilot import duration_s
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import CellRecord
from breakeven.lab.report import words
from breakeven.lab.report.html import page
from breakeven.lab.report.markdown import markdown
from breakeven.lab.stats.factorial import crossed_contrasts
from breakeven.lab.stats.ratio import ratio_from_logs
from breakeven.lab.summary import FactorEffect, Summary
from breakeven.lab.workload.prompt import PromptError

FACTORS: dict[str, Any] = {
    "temperature": [0.0, 0.8],
    "sampling": {"greedy": {}, "vendor": {"temperature": 0.6, "top_p": 0.95}, "hot": {"temperature": 1.5}},
    "input_words": {"short": [1, 30], "long": [31, 400]},
    "arrivals": {"poisson": {"process": "poisson"}, "bursts": {"process": "gamma", "cv": 3.0}},
    "cache": ["cold", "warm"],
}
# Of two campaigns without factors, by the version that had none.
UNCHANGED = {
    "closed": "125bdaff0fe19545cd8c6b513eeeca5945fccf1d0a78da5bbda93351ad56909f",
    "open": "939840c6235f32f65b56ba5b9d85267711181a98ad14f4394499b3d51675cdb9",
}


# Names and settings


@given(st.sets(st.sampled_from([name for name in FACTORS if name != "sampling"]), min_size=1), st.booleans())
def test_a_conditions_name_says_which_value_of_each_factor_it_has(chosen: set[str], named: bool) -> None:
    if named and "temperature" in chosen:
        chosen = (chosen - {"temperature"}) | {"sampling"}
    factors = {name: FACTORS[name] for name in sorted(chosen)}
    found = campaign(conditions=factors)
    assert set(found.factors) == chosen
    names = found.condition_names(("coding", "a.b-c_d"))
    assert len(names) == len(set(names)) == 2 * math.prod(len(values) for values in factors.values())
    seen = set()
    for name in names:
        setting = found.setting(name)
        seen.add(json.dumps([setting.domain, repr(setting)]))
        domain, *values = name.split("+")
        assert setting.domain == domain
        for factor, value in zip(found.factors, values, strict=True):
            given_value = factors[factor]
            if factor == "temperature":
                assert value == f"t{setting.sampling.temperature:g}"
            elif factor == "cache":
                assert setting.cache == value
            elif factor == "input_words":
                assert setting.words == tuple(given_value[value])
            else:
                section = getattr(setting, factor)
                assert section.model_dump().items() >= given_value[value].items()
    assert len(seen) == len(names)
    assert found.setting(SENTINEL) == replace(found.setting(names[0]), domain=SENTINEL)


def test_a_campaign_without_factors_is_what_it_was() -> None:
    plain = campaign(levels=[1, 2], workload={"domains": ["coding", "chat"], "max_tokens": 32}, sentinel=True)
    assert plain.condition_names(("coding", "chat")) == ["coding", "chat"]
    assert plain.factors == {}
    assert not plain.resolved().keys() & {"conditions", "cache"}
    assert Campaign.model_validate_json(json.dumps(plain.resolved())) == plain
    assert build_schedule(plain, load_suites(plain)).sha256 == UNCHANGED["closed"]
    opened = campaign(levels=[1, 2], arrivals={"process": "poisson", "unit_rate": 2.0})
    assert build_schedule(opened, load_suites(opened)).sha256 == UNCHANGED["open"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conditions: {}", "give at least one factor"),
        ("conditions: {temperature: [0.5]}", "temperature has 1 value(s), and a factor needs two"),
        ("conditions: {temprature: [0, 1]}", "conditions.temprature: unknown field; did you mean 'temperature'?"),
        (
            "conditions: {sampling: {a: {temprature: 1}, b: {}}}",
            "conditions.sampling.a.temprature: unknown field; did you mean 'temperature'?",
        ),
        ("conditions: {cache: [cold, hot]}", "must be 'cold' or 'warm'"),
        ("conditions: {cache: [cold, cold]}", "two values have the same name"),
        ("conditions: {temperature: [0, 1], sampling: {a: {}, b: {}}}", "are the same factor"),
        ("conditions: {arrivals: {a: {}, b: {process: poisson}}}", "cannot be crossed with open loop"),
        (
            "conditions: {arrivals: {a: {process: poisson, unit_rate: 2}, b: {process: poisson}}}",
            "must have the same unit_rate",
        ),
        ("conditions: {input_words: {a: [3, 1], b: [3, 4]}}", "a band is the fewest and the most words"),
        ("conditions: {input_words: {a+b: [1, 2], b: [3, 4]}}", "'a+b' must be 1 to 20 letters"),
        ("cache: warm\nconditions: {cache: [cold, warm]}", "cache stands beside conditions.cache"),
        (
            "arrivals: {process: poisson}\nconditions: {arrivals: {a: {process: gamma}, b: {process: constant}}}",
            "beside",
        ),
        ("conditions: {sampling: {a: {min_tokens: 500}, b: {}}}", "sampling.min_tokens (500) is above"),
    ],
)
def test_what_cannot_be_a_factor_is_refused_with_its_place(text: str, said: str) -> None:
    arms = "arms: {off: {type: embedded}, on: {type: embedded, threads: 1}}\nbaseline: off\n"
    with pytest.raises(CampaignError) as refused:
        parse_campaign(arms + text)
    assert said in str(refused.value)


def test_traces_of_conditions_count_from_the_campaigns_folder(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("0\n1\n3\n")
    text = (
        "arms: {off: {type: embedded}, on: {type: embedded, threads: 1}}\nbaseline: off\nblocks: 1\nlevels: [1]\n"
        "conditions: {arrivals: {recorded: {process: trace, trace: trace.txt}, poisson: {process: poisson}}}\n"
    )
    (tmp_path / "campaign.yaml").write_text(text)
    found = load_campaign(tmp_path / "campaign.yaml").campaign
    assert found.setting("coding+recorded").arrivals.trace == str(tmp_path / "trace.txt")
    assert all(cell.offsets is not None for cell in build_schedule(found, load_suites(found)).cells())


# The plan


def test_a_factor_changes_neither_prompts_nor_arrivals_between_arms_nor_prompts_between_its_values() -> None:
    factors = {"temperature": [0.0, 0.8], "cache": ["cold", "warm"]}
    found = campaign(conditions=factors, blocks=3, workload={"domains": ["coding", "chat"], "max_tokens": 8})
    schedule = build_schedule(found, load_suites(found))
    assert len(schedule.conditions) == 8
    by_key = {cell.key: cell for cell in schedule.cells()}
    assert len(by_key) == 3 * 2 * 8 * 2
    for key, cell in by_key.items():
        assert by_key[replace(key, arm="off")].prompt_ids == cell.prompt_ids
        assert by_key[replace(key, arm="off")].seeds == cell.seeds
        domain = key.condition.split("+")[0]
        other = by_key[replace(key, condition=f"{domain}+t0+cold")]
        assert other.prompt_ids == cell.prompt_ids
        assert (other.seeds == cell.seeds) == (other.key == cell.key)
        assert schedule.prompt(key.condition, cell.prompt_ids[0]).domain == domain
    assert any("declared warm cache" in note for note in schedule.notes)
    assert duration_s(found, schedule) > 0


def test_bands_hold_prompts_of_their_length_and_an_empty_one_is_refused() -> None:
    found = campaign(conditions={"input_words": {"short": [1, 30], "long": [31, 400]}})
    schedule = build_schedule(found, load_suites(found))
    for cell in schedule.cells():
        least, most = found.setting(cell.key.condition).words or (0, 0)
        for name in cell.prompt_ids:
            prompt = schedule.prompt(cell.key.condition, name)
            assert least <= sum(len(m["content"].split()) for m in prompt.messages) <= most
    empty = campaign(conditions={"input_words": {"short": [1, 30], "endless": [900_000, 900_001]}})
    with pytest.raises(PromptError, match="coding has no prompt of 900000 to 900001 words: they have"):
        build_schedule(empty, load_suites(empty))


def test_bursts_and_poisson_differ_and_are_the_same_for_all_arms() -> None:
    found = campaign(conditions={"arrivals": FACTORS["arrivals"]}, levels=[2])
    assert found.open_loop
    by_key = {cell.key: cell for cell in build_schedule(found, load_suites(found)).cells()}
    for key, cell in by_key.items():
        assert cell.offsets == by_key[replace(key, arm="off")].offsets
        assert cell.offsets != by_key[replace(key, condition="coding+bursts" if "poisson" in key.condition else
                                              "coding+poisson")].offsets  # fmt: skip


# The statistics


@given(st.integers(2, 3), st.integers(2, 3), st.integers(2, 5), st.data())
def test_a_crossed_contrast_is_a_difference_of_differences(
    rows: int, columns: int, blocks: int, data: st.DataObject
) -> None:
    values = st.floats(-2, 2).map(lambda x: round(x, 3))
    tables = [[[data.draw(values) for _ in range(columns)] for _ in range(rows)] for _ in range(blocks)]
    found = crossed_contrasts(tables)
    assert len(found) == (1 if rows == 2 else rows) * (1 if columns == 2 else columns)

    def without(items: list[float], place: int) -> float:
        rest = [item for i, item in enumerate(items) if i != place]
        return sum(rest) / len(rest)

    for i, j, contrast in found:
        wanted = []
        for table in tables:
            across = [table[i][c] - without([table[r][c] for r in range(rows)], i) for c in range(columns)]
            wanted.append(across[j] - without(across, j))
        expected = ratio_from_logs(wanted)
        assert contrast.estimate.ratio == pytest.approx(expected.ratio)
        assert contrast.estimate.ci_low == pytest.approx(expected.ci_low, abs=1e-9)


def test_crossed_contrasts_leave_incomplete_blocks_out_and_refuse_unequal_ones() -> None:
    whole = [[0.0, 0.1], [0.2, 0.6]]
    (found,) = crossed_contrasts([whole, whole, [[math.nan, 0.0], [0.0, 0.0]]])
    assert found[2].estimate.blocks == 2
    assert found[2].estimate.ratio == pytest.approx(math.exp(0.3))
    assert crossed_contrasts([]) == []
    assert crossed_contrasts([[[0.1, 0.2]]]) == []
    with pytest.raises(ValueError, match="same table"):
        crossed_contrasts([whole, [[0.0]]])


def _records(found: Campaign) -> list[CellRecord]:
    """Temperature takes a fifth off the arm's ratio, coding with a warm cache adds a tenth; the domain does nothing."""

    def ratio(arm: str, condition: str, level: int) -> float:
        if arm == "off":
            return 0.9 if "warm" in condition else 1.0
        value = 1.5 * (0.8 if "t0.8" in condition else 1.0) * (0.9 if "warm" in condition else 1.0)
        return value * (1.1 if condition.startswith("coding") and "warm" in condition else 1.0)

    return synthetic.cells(found, ratio, noise=0.001)


@pytest.fixture(scope="module")
def crossed() -> Summary:
    found = synthetic.campaign(
        levels=(1, 2), blocks=4, conditions={"temperature": (0.0, 0.8), "cache": ("cold", "warm")}
    )
    return summarise(found, synthetic.ENVIRONMENT, _records(found))


def _effect(rows: list[FactorEffect], factor: str, condition: str) -> FactorEffect:
    (found,) = [
        r for r in rows if (r.factor, r.condition, r.metric, r.level) == (factor, condition, "throughput", None)
    ]
    return found


def test_each_factor_has_the_effect_that_was_planted_and_no_other(crossed: Summary) -> None:
    assert crossed.campaign.factors == {
        "domain": ["coding", "encyclopedic"], "temperature": ["t0", "t0.8"], "cache": ["cold", "warm"],
    }  # fmt: skip
    assert len(crossed.campaign.conditions) == 8
    temperature = _effect(crossed.interactions, "arm × temperature", "t0")
    assert temperature.ratio == pytest.approx(1 / 0.8, rel=0.01)
    assert (temperature.against, temperature.verdict) == ("t0.8", "differs")
    domain = _effect(crossed.interactions, "arm × domain", "coding")
    assert domain.ratio == pytest.approx(math.sqrt(1.1), rel=0.01)  # in half of its conditions
    cache = _effect(crossed.interactions, "arm × cache", "cold")
    assert cache.ratio == pytest.approx(1 / math.sqrt(1.1), rel=0.01)
    both = _effect(crossed.interactions, "arm × domain × cache", "coding and cold")
    assert both.ratio == pytest.approx(1 / 1.1, rel=0.01)
    none = _effect(crossed.interactions, "arm × domain × temperature", "coding and t0")
    assert none.verdict == "equivalent"
    assert _effect(crossed.main_effects, "cache", "cold").ratio == pytest.approx(1 / 0.9, rel=0.01)
    assert _effect(crossed.main_effects, "domain", "coding").verdict == "equivalent"
    assert _effect(crossed.main_effects, "temperature", "t0").verdict == "equivalent"
    assert {r.factor for r in crossed.interactions} >= {"arm × condition"}


def test_greedy_conditions_alone_are_expected_to_agree(crossed: Summary) -> None:
    expected = {row.condition: row.expected for row in crossed.agreement if row.level is None}
    assert expected["coding+t0+cold"] is True
    assert expected["coding+t0.8+cold"] is False
    assert expected["all"] is False


def test_the_report_names_the_crossing_the_warm_cache_and_each_factor(crossed: Summary) -> None:
    html, text = page(crossed), markdown(crossed)
    for where in (html, text):
        assert "domain (coding, encyclopedic) × temperature (t0, t0.8) × cache (cold, warm), each with each" in where
        assert "Declared warm prefix cache." in where
    assert "Do the conditions matter?" in html
    assert "<td>arm × temperature</td>" in html
    assert "<td>arm × condition</td>" not in html
    assert any(
        s.startswith("Temperature: the ratio in t0 against t0.8") for s in words.condition_sentences(crossed, "ngram")
    )


def test_a_cell_of_a_condition_that_the_campaign_has_not_is_refused() -> None:
    found = synthetic.campaign(levels=(1,), blocks=1, conditions={"cache": ("cold", "warm")})
    records = _records(found)
    strange = replace(records[0], key=replace(records[0].key, condition="coding+hot"))
    with pytest.raises(AnalysisError, match=r"no part of the campaign .*conditions coding\+cold, coding\+warm"):
        summarise(found, {}, [strange])


# Measured


LIFE = {"lifelike": True, "chunks": 6}


def test_a_campaign_of_factors_runs_and_resumes_and_its_warm_cells_are_warm(tmp_path: Path) -> None:
    found = campaign(
        arms={"off": mock_arm(LIFE), "on": mock_arm({**LIFE, "draft_tokens": 3})},
        conditions={"temperature": [0.0, 0.8], "cache": ["cold", "warm"]},
        levels=[2], blocks=1, warmup={"requests": 0}, sentinel={"requests": 2},
    )  # fmt: skip
    run, outcome = execute(tmp_path / "run", found)
    assert (outcome.cells, outcome.measured, outcome.invalid) == (10, 10, {})
    cells = {record.key.condition: record for record in run.read_cells() if record.key.arm == "on"}
    for condition, record in cells.items():
        warm = condition.endswith("warm")
        share = record.extra["cached_share"]
        assert share > 0.5 if warm else share < 0.5
        assert record.extra.get("cache_regime") == ("warm" if warm else None)
        assert {r.prompt_id for r in record.requests} == {r.prompt_id for r in cells["coding+t0+cold"].requests} or (
            condition == SENTINEL
        )
    # Warm or cold, one temperature and seed rule: other seeds, so the hash of the bodies tells conditions apart.
    assert len({record.extra["bodies_sha256"] for record in cells.values()}) == 5
    _, again = execute(tmp_path / "run", found)
    assert (again.measured, again.invalid) == (10, {})
    summary = analyse(run)
    assert "from it." in words.regime(summary)[1]
    sent = {row.condition: row for row in summary.sent}
    assert set(sent) == set(cells)
    assert sent["coding+t0.8+warm"].fields == {"temperature": 0.8, "max_tokens": 32}
    assert sent["coding+t0+cold"].seed.startswith("one per request")
    assert all((row.rendered, row.rendered_alike) == (["off", "on"], True) for row in sent.values())
    # One domain and block: the rendered prompts are the same, whatever the temperature and the cache.
    assert len({c.rendered_sha256 for c in summary.cells if c.condition != SENTINEL}) == 1
    html = page(summary)
    assert "the same in off, on" in html
    assert "temperature 0.8, max_tokens 32" in html


def test_a_template_that_makes_other_tokens_of_as_many_words_is_named(tmp_path: Path) -> None:
    found = campaign(
        arms={"off": mock_arm(LIFE), "on": mock_arm({**LIFE, "faults": ["bos_other"]})}, levels=[1], blocks=1
    )
    run, outcome = execute(tmp_path / "run", found)
    assert outcome.invalid == {}
    summary = analyse(run)
    assert [row.rendered_alike for row in summary.sent] == [False]
    assert any(
        "on and off do not render the same prompts: their token ids differ in 1 cells" in lint.message
        for lint in summary.lints
    )
    assert "DIFFERENT in off, on" in page(summary)


def test_a_server_without_tokenize_leaves_the_rendered_prompts_unknown(tmp_path: Path) -> None:
    run, _ = execute(tmp_path / "run", campaign(levels=[1], blocks=1))
    assert all("(/tokenize)" in record.extra["rendered"]["note"] for record in run.read_cells())
    (row,) = analyse(run).sent
    assert (row.rendered, row.rendered_alike) == ([], None)
    assert "not told by any server" in page(analyse(run))


def test_a_cache_declared_warm_that_stays_cold_invalidates_its_cells(tmp_path: Path) -> None:
    cold = {**LIFE, "lifelike": False, "prompt_tokens": 32, "cached_tokens": 0}
    found = campaign(arms={"off": mock_arm(LIFE), "on": mock_arm(cold)}, cache="warm", levels=[1], blocks=1)
    run, outcome = execute(tmp_path / "run", found)
    assert list(outcome.invalid) == ["b00-on-coding-c001"]
    assert (
        "the cache is declared warm, and only 0% of the prompt tokens were in it (asked for: 50%)"
        in (outcome.invalid["b00-on-coding-c001"][0])
    )
    summary = analyse(run)
    assert words.regime(summary)[0].startswith("Declared warm prefix cache. The prompts of each cell were sent once")


def test_a_warm_cell_whose_filling_failed_is_invalid_and_quotes_the_first_error(tmp_path: Path) -> None:
    # Request 0 is the probe; of the three that fill the cell's cache, one fails, and none of the three measured.
    faulty = {**LIFE, "http_status": 503, "fault_from": 2, "fault_every": 1000}
    found = campaign(
        arms={"off": mock_arm(LIFE), "on": mock_arm(faulty)}, cache="warm", levels=[1], blocks=1,
        warmup={"requests": 0},
    )  # fmt: skip
    run, outcome = execute(tmp_path / "run", found)
    assert list(outcome.invalid) == ["b00-on-coding-c001"]
    reason = "; ".join(outcome.invalid["b00-on-coding-c001"])
    assert "1 of 3 requests that fill the cache failed, so it was not warm as declared; the first error: " in reason
    assert [record.extra["cache_fill_failed"] for record in run.read_cells() if record.key.arm == "off"] == [0]


def test_a_server_that_ends_while_its_cache_is_filled_takes_no_launch_for_ever(tmp_path: Path) -> None:
    # Request 0 of each launch is the probe, and the next one begins to fill the first cell's cache.
    dying = {**LIFE, "die_after": 0, "death": "exit", "fault_from": 1}
    found = campaign(
        arms={"off": mock_arm(LIFE), "on": mock_arm(dying)}, cache="warm", levels=[1, 2], blocks=1,
        warmup={"requests": 0},
    )  # fmt: skip
    run, outcome = execute(tmp_path / "run", found)
    assert list(outcome.invalid) == ["b00-on-coding-c001", "b00-on-coding-c002"]
    assert all(reasons[0].startswith("the server ended during the cell") for reasons in outcome.invalid.values())
    assert all("requests that fill the cache failed" in "; ".join(reasons) for reasons in outcome.invalid.values())

    def launches() -> int:
        return sum(event["event"] == "arm_started" and event["arm"] == "on" for event in run.read_journal())

    assert launches() == 2
    left = sum(not record.measured for record in run.read_cells())
    execute(tmp_path / "run", found)
    assert launches() == 2 + left  # cells without requests are tried again by whoever resumes the run


def test_a_warm_cache_whose_hits_are_not_reported_is_named(tmp_path: Path) -> None:
    hidden = {**LIFE, "faults": ["cache_unreported"]}
    found = campaign(arms={"off": mock_arm(LIFE), "on": mock_arm(hidden)}, cache="warm", levels=[1], blocks=1)
    run, outcome = execute(tmp_path / "run", found)
    assert outcome.invalid == {}
    lints = [lint.message for lint in analyse(run).lints]
    assert any(
        "on does not report hits of its prefix cache: that it was warm, as declared, rests on" in m for m in lints
    )
