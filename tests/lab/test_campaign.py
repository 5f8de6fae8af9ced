"""The campaign file: what it may say, and how it says what is wrong."""

from __future__ import annotations

import contextlib
import re
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakeven.lab.campaign import Campaign, EmbeddedArm, Requests, Speculation
from breakeven.lab.campaign_file import CampaignError, load_campaign, parse_campaign
from breakeven.lab.engines import EngineSpeculation, LlamaCppArm, SglangArm, TrtLlmArm, VllmArm
from breakeven.lab.plan import assumed_cell_s, assumed_launch_s, build_schedule, load_suites

PAGE = Path(__file__).resolve().parents[2] / "docs" / "campaign.md"
GOOD = """\
arms:
  off: {type: embedded}
  ngram: {type: embedded, speculation: {algorithm: ngram}}
baseline: off
"""


def _example() -> str:
    found = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return next(text for text in found if "baseline:" in text)


def test_the_worked_example_of_the_page_is_a_campaign() -> None:
    campaign = parse_campaign(_example())
    assert {arm.type for arm in campaign.arms.values()} == {"embedded", "vllm", "attach", "command"}


def test_the_page_names_every_field() -> None:
    page = PAGE.read_text(encoding="utf-8")
    models = [Campaign, Speculation]
    from breakeven.lab import campaign as module

    models += [module.EmbeddedArm, module.AttachArm, module.CommandArm, module.Workload, module.Requests]
    models += [module.Sampling, module.Warmup, module.Gates, module.Assumptions, module.Sentinel, module.Stop]
    models += [
        module.Arrivals,
        module.Client,
        module.PromptFile,
        module.Conditions,
        module.Sessions,
        module.Tune,
    ]
    missing = sorted({name for model in models for name in model.model_fields if f"`{name}`" not in page})
    assert missing == []


def test_the_page_of_engines_names_every_field_and_its_example_is_a_campaign() -> None:
    page = (PAGE.parent / "engines.md").read_text(encoding="utf-8")
    models = [VllmArm, SglangArm, LlamaCppArm, TrtLlmArm, EngineSpeculation]
    fields = {name for model in models for name in model.model_fields} - {"type"}
    assert sorted(name for name in fields if f"`{name}`" not in page) == []
    example = next(text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "baseline:" in text)
    assert {arm.type for arm in parse_campaign(example).arms.values()} == {"vllm"}


def test_off_is_a_word_and_not_a_boolean() -> None:
    campaign = parse_campaign(GOOD)
    off = campaign.arms["off"]
    assert campaign.baseline == "off"
    assert isinstance(off, EmbeddedArm)
    assert off.speculation == "off"
    explicit = parse_campaign(GOOD.replace("{type: embedded}", "{type: embedded, speculation: off}"))
    assert explicit == campaign


def test_a_resolved_campaign_reads_back_equal_and_holds_every_default() -> None:
    campaign = parse_campaign(_example())
    text = campaign.model_dump_json()
    assert Campaign.model_validate_json(text) == campaign
    assert '"max_send_lag_ms"' in text


def test_what_came_after_the_first_runs_and_is_not_asked_for_leaves_a_campaigns_hash_as_it_was() -> None:
    plain, remote = parse_campaign(GOOD), parse_campaign(GOOD + "client: {backend: ray, max_clock_error_ms: 2}\n")
    assert plain.resolved()["client"] == {"workers": 1, "calibration": "quick"}
    for campaign in (plain, remote):
        assert Campaign.model_validate(campaign.resolved(), strict=False) == campaign


def test_aliases_and_merge_keys_save_repetition() -> None:
    text = GOOD.replace("off: {type: embedded}", "off: &base {type: embedded, threads: 2}").replace(
        "ngram: {type: embedded,", "ngram: {<<: *base,"
    )
    ngram = parse_campaign(text).arms["ngram"]
    assert isinstance(ngram, EmbeddedArm)
    assert ngram.threads == 2
    assert isinstance(ngram.speculation, Speculation)


def test_the_quickstart_is_a_campaign_that_fits_into_five_minutes_as_assumed() -> None:
    campaign = parse_campaign(files("breakeven.lab").joinpath("quickstart.yaml").read_text(encoding="utf-8"))
    assert (campaign.levels, set(campaign.arms)) == ((1, 2, 5, 10), {"eagle3", "ngram", "off"})
    schedule = build_schedule(campaign, load_suites(campaign))
    assert len(schedule.conditions) >= 2
    cells = sum(assumed_cell_s(campaign, cell.key.level) for cell in schedule.cells())
    assert cells + len(schedule.launches) * assumed_launch_s(campaign) < 270


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GOOD + "levls: [1]\n", 5, "levls: unknown field; did you mean 'levels'"),
        (GOOD.replace("off: {type: embedded}", "off: {type: embedded, modl: x}"), 2, "did you mean 'model'"),
        (GOOD + "gates:\n  max_lag: 3\n", 6, "gates.max_lag: unknown field"),
        (GOOD + "tune: {etaa: 3}\n", 5, "tune.etaa: unknown field; did you mean 'eta'"),
        (GOOD + "sentinel: {levle: 3}\n", 5, "sentinel.levle: unknown field; did you mean 'level'"),
        (GOOD + "stop: {x: 3}\n", 5, "stop.x: unknown field; known here: rule, min_blocks"),
        (
            GOOD + "workload:\n  files: [{path: x, formt: csv}]\n",
            6,
            "files[0].formt: unknown field; did you mean 'format'",
        ),
        (GOOD + "levels: [1, 2]\nlevels: [3]\n", 6, "the key occurs twice; it is already set on line 5"),
        (GOOD + "levels: [1, '2']\n", 5, 'levels[1]: should be a valid integer, found "2"'),
        (GOOD + "levels: [1, 0]\n", 5, "levels[1]: should be greater than or equal to 1"),
        (GOOD + "levels: [1, 1]\n", 5, "levels: 1 occurs twice"),
        (GOOD + "levels: []\n", 5, "levels: "),
        (GOOD + "blocks: true\n", 5, "blocks: should be a valid integer, found true"),
        (GOOD + "margin: .nan\n", 5, "margin: .nan is not a number"),
        (GOOD + "confidence: 95\n", 5, "confidence: should be less than 1"),
        (GOOD + "workload: 3\n", 5, "workload: must be a mapping, found 3"),
        (GOOD + "sampling: {seed: x}\n", 5, "sampling.seed: must be a whole number, per_request or null"),
        (GOOD + "sampling: {min_tokens: 999}\n", None, "sampling.min_tokens (999) is above"),
        (GOOD + "requests: {min_requests: 9, max_requests: 3}\n", 5, "max_requests (3) is below"),
        (GOOD + "workload: {domains: [all]}\n", 5, "'all' is the name of all domains pooled"),
        (GOOD.replace("baseline: off", "baseline: no"), 4, "baseline: 'no' is not one of the arms: off, ngram"),
        (GOOD.replace("baseline: off\n", ""), None, "baseline: is missing"),
        (GOOD.replace("type: embedded,", "type: tgi,"), 3, "unknown type 'tgi': choose one of embedded, vllm"),
        (GOOD.replace("{type: embedded}", "{}"), 2, "'type' is missing"),
        (GOOD.replace("{algorithm: ngram}", "{algorithm: ngrm}"), 3, "must be 'ngram' or 'eagle3', found \"ngrm\""),
        (
            GOOD.replace(
                "embedded, speculation: {algorithm: ngram}", "embedded, model: /m, speculation: {algorithm: eagle3}"
            ),
            3,
            "eagle3 needs speculation.draft_model_path",
        ),
        (GOOD.replace("{algorithm: ngram}", "ngram"), 3, "must be 'off' or a mapping with an algorithm"),
        (GOOD.replace("{type: embedded}", "{type: embedded, flags: [--port=3]}"), 2, "--port is set by the lab itself"),
        (GOOD.replace("{type: embedded}", "{type: attach, url: localhost}"), 2, "is not a URL of a server"),
        (GOOD.replace("{type: embedded}", "{type: attach, url: 'http://a:b@c'}"), 2, "must not carry a password"),
        (
            GOOD.replace("{type: embedded}", "{type: attach, url: http://h, headers: {Authorization: x}}"),
            2,
            "use api_key_env",
        ),
        (GOOD.replace("{type: embedded}", "{type: command, command: [x]}"), 2, "must hold {port}"),
        (GOOD.replace("  off:", "  'o f':"), 1, "the arm's name 'o f' must be"),
        ("arms: {off: {type: embedded}}\nbaseline: off\n", 1, "at least two arms are needed"),
        ("arms: [\n", 2, "not YAML"),
        ("arms: !!python/object:os.system {}\nbaseline: off\n", None, ""),
        ("a: &a [*a]\n", 1, "nested too deeply"),
        ("- 1\n", 1, "must be a mapping"),
        ("", None, "is empty"),
    ],
)
def test_an_error_names_file_line_field_and_cause(text: str, line: int | None, words: str) -> None:
    with pytest.raises(CampaignError) as caught:
        parse_campaign(text, "c.yaml")
    message = str(caught.value)
    where = "c.yaml" if line is None else f"c.yaml, line {line}: "
    assert where in message
    assert words in message


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(CampaignError) as caught:
        parse_campaign(GOOD + "levels: 3\nblocks: 0\nmargin: 7\n")
    assert [problem.field for problem in caught.value.problems] == ["levels", "blocks", "margin"]


def test_a_file_of_aliases_that_unfold_without_end_is_refused_quickly() -> None:
    rows = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(CampaignError, match="too large once its aliases are followed"):
        parse_campaign("\n".join(rows))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"a" * 1_000_001, b"\x00"])
def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(CampaignError, match=re.escape(str(path))):
        load_campaign(path)


def test_a_missing_file_is_told_in_plain_words(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="cannot be read: No such file"):
        load_campaign(tmp_path / "none.yaml")


def test_a_prompts_file_is_found_beside_the_campaign(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD + "workload: {prompts_file: mine.jsonl}\n")
    campaign = load_campaign(tmp_path / "c.yaml").campaign
    assert campaign.workload.prompts_file == str(tmp_path / "mine.jsonl")
    assert campaign.workload.domains is None


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_NAMES = st.sampled_from([*Campaign.model_fields, "off", "type", "embedded", "attach", "seed", "x", "speculation"])
_VALUES = st.recursive(
    _SCALARS | st.sampled_from(["embedded", "attach", "command", "off"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # drawing such values takes long on a busy machine
@given(st.dictionaries(_NAMES, _VALUES, max_size=6))
def test_whatever_a_file_says_it_is_a_campaign_or_a_campaign_error(value: dict[str, object]) -> None:
    text = yaml.safe_dump(value, sort_keys=False)
    with contextlib.suppress(CampaignError):
        assert isinstance(parse_campaign(text), Campaign)


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#, \n\t?%@`<=.0", max_size=60))
def test_whatever_text_there_is_it_gives_a_campaign_error(text: str) -> None:
    with pytest.raises(CampaignError):
        parse_campaign(text)


@given(
    st.floats(min_value=0.01, max_value=50),
    st.integers(min_value=1, max_value=50),
    st.none() | st.integers(min_value=50, max_value=500),
    st.integers(min_value=1, max_value=1000),
)
def test_a_cell_has_a_request_for_every_stream_and_keeps_its_bounds(
    per_stream: float, least: int, most: int | None, level: int
) -> None:
    count = Requests(requests_per_stream=per_stream, min_requests=least, max_requests=most).at(level)
    assert count >= max(level, least)
    assert most is None or count <= max(most, level)


SCHEDULED = GOOD.replace("{algorithm: ngram}", "{algorithm: ngram, schedule: RANGES}")


def test_a_schedule_is_ordered_by_batch_size() -> None:
    arm = parse_campaign(SCHEDULED.replace("RANGES", "[[9, 64, 0], [1, 4, 3]]")).arms["ngram"]
    assert isinstance(arm, EmbeddedArm)
    assert isinstance(arm.speculation, Speculation)
    assert arm.speculation.schedule == ((1, 4, 3), (9, 64, 0))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("[]", "at least one range"),
        ("[[2, 4, 3]]", "must start at 1"),
        ("[[1, 4, 3], [4, 8, 1]]", "overlap"),
        ("[[1, 4, -1]]", "is not a range"),
        ("[[4, 1, 3]]", "is not a range"),
        ("[[1, 4, 3]], num_steps: 2", "asks for 3 steps"),
    ],
)
def test_a_bad_schedule_is_refused_with_its_line(ranges: str, message: str) -> None:
    with pytest.raises(CampaignError, match=message) as refused:
        parse_campaign(SCHEDULED.replace("RANGES", ranges))
    assert "line 3" in str(refused.value)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 9)), max_size=4))
def test_the_engine_takes_exactly_the_schedules_that_a_campaign_takes(ranges: list[tuple[int, int, int]]) -> None:
    from breakeven.engine.config import ConfigError, SpeculationSchedule

    try:
        ours = Speculation(algorithm="ngram", schedule=tuple(ranges)).schedule
    except ValueError:
        with pytest.raises(ConfigError):
            SpeculationSchedule(tuple(ranges))
    else:
        assert ours == SpeculationSchedule(tuple(ranges)).ranges
