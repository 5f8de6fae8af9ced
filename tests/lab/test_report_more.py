"""The policy, the charts of cells, the formats on demand, and two results beside each other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab.analysis import summarise
from breakeven.lab.report import cell_plots, policy, words
from breakeven.lab.report.compare import compare_summaries, comparison_markdown, print_comparison, welch
from breakeven.lab.report.html import page
from breakeven.lab.report.markdown import markdown
from breakeven.lab.summary import Summary

RATIOS = {"ngram": {1: 1.2, 5: 0.9}, "eagle3": {1: 1.6, 5: 0.7}}
SMALL = {"levels": (1, 5), "workload": {"domains": ("coding",), "max_tokens": synthetic.TOKENS}, "blocks": 3}
ARMS = {
    "off": {"type": "embedded"},
    "ngram": {"type": "embedded", "speculation": {"algorithm": "ngram"}},
    "eagle3": {"type": "embedded", "speculation": {"algorithm": "eagle3", "draft_model_path": "/d"}},
}


def three_arms(**fields: object) -> Summary:
    asked = synthetic.campaign(arms=ARMS, **{**SMALL, **fields})
    truth = lambda arm, condition, level: 1.0 if arm == "off" else RATIOS[arm][level]  # noqa: E731
    records = synthetic.cells(asked, truth, noise=0.002)
    # Each cell begins a minute after the one before; arms swap places in odd blocks.
    records.sort(key=lambda r: (r.key.block, (-1) ** r.key.block * list(ARMS).index(r.key.arm)))
    moved = [replace(r, started_ns=r.started_ns + i * 60_000_000_000) for i, r in enumerate(records)]
    return summarise(asked, synthetic.ENVIRONMENT, moved)


@pytest.fixture(scope="module")
def three() -> Summary:
    return three_arms()


@pytest.fixture(scope="module")
def three_page(three: Summary) -> str:
    return page(three)


# Policy


def test_the_policy_is_the_best_arm_that_pays_and_else_the_baseline(three: Summary, three_page: str) -> None:
    found = policy.choices(three)
    assert [(c.level, c.arm, c.decided) for c in found] == [
        (1, "eagle3", True), (5, "off", True),
    ]  # fmt: skip
    said = policy.sentence(three, found)
    assert said == "Run eagle3 at 1 stream and off at 5 streams."
    for text in (three_page, markdown(three)):
        assert text.index(said) < text.index("ngram pays at")


def test_no_verdict_no_policy() -> None:
    one = three_arms(blocks=1)
    found = policy.choices(one)
    assert not any(c.decided for c in found)
    assert policy.sentence(one, found).startswith("No policy: no level is decided yet.")


def test_parts_that_a_summary_may_have_are_shown_if_it_has_them(three: Summary) -> None:
    class Fuller(Summary):
        interactions: list[dict[str, Any]]
        tails: list[dict[str, Any]]
        aa: dict[str, Any]
        sentinel: list[dict[str, Any]]

    end = {"ratio": 1.012, "ci_low": 0.992, "ci_high": 1.031, "p_adjusted": 0.2, "verdict": "equivalent"}
    fuller = Fuller(
        **three.model_dump(exclude={"interactions", "tails", "aa", "sentinel"}),
        interactions=[
            {"factor": "arm × condition", "arm": "<i>ngram", "condition": "coding", "against": "the others",
             "metric": "throughput", "level": None, **end},
        ],
        tails=[
            {"metric": "ttft", "arm": "ngram", "level": 1, "quantile": 0.99, "ratio": None, "ci_low": None,
             "ci_high": None, "verdict": "undecided", "requests": 6, "note": "p99 needs 662 requests"},
        ],
        aa={"arm": "again", "statement": "No false alarm.", "levels": [{**end, "level": 1, "noise_floor": 0.02}]},
        sentinel=[{"arm": "off", "level": 5, "points": [1, 2], "cv": 0.01, "drift_per_hour": 0.001, "drift_low": None,
                   "drift_high": None}],
    )  # fmt: skip
    text = page(fuller)
    for said in (
        "+1.2%",
        "−0.8% to +3.1%",
        "p99 needs 662 requests",
        "No false alarm.",
        "varies by 1%",
        "&lt;i&gt;ngram",
    ):
        assert said in text, said


# Charts of cells


def test_order_and_drift_are_drawn_where_times_are_known_and_arms_swap_places(three: Summary, three_page: str) -> None:
    assert "Drift: throughput over time" in three_page
    assert "Order: throughput by place in the block" in three_page
    assert cell_plots.order(three_arms(blocks=1)) is None
    undated = three.model_copy(update={"cells": [c.model_copy(update={"started": "unknown"}) for c in three.cells]})
    assert cell_plots.drift(undated) is None
    assert cell_plots.order(undated) is None


def test_tails_are_geometric_means_over_valid_cells_with_enough_requests(three: Summary) -> None:
    many = three.model_copy(update={"cells": [c.model_copy(update={"requests": 700}) for c in three.cells]})
    found = cell_plots.tail_figures(many, "latency")["off", 5]
    values = [
        c.metrics["latency_p99"].value or 0.0 for c in three.cells if (c.arm, c.level, c.valid) == ("off", 5, True)
    ]
    assert cell_plots.withheld(many, "latency") == ""
    assert found["p99"] == pytest.approx(math.exp(sum(map(math.log, values)) / len(values)))
    assert cell_plots.tail_figures(three.model_copy(update={"cells": []}), "latency") == {}


def test_a_p99_of_a_dozen_requests_is_neither_drawn_nor_listed(three: Summary, three_page: str) -> None:
    assert all(set(found) == {"p50"} for found in cell_plots.tail_figures(three, "latency").values())
    assert cell_plots.withheld(three, "latency") == ("No p99: it takes 662 requests in every cell (LoadGen's floor).")
    chart = cell_plots.tails(three, "latency")
    assert chart is not None
    assert "it takes 662 requests" in chart.caption
    assert "off p99" not in chart.svg
    assert "off p50" in chart.svg
    some = [c.model_copy(update={"requests": 662 if c.level > 1 else 661}) for c in three.cells]
    mixed = three.model_copy(update={"cells": some})
    assert "No p99 at 1 stream:" in cell_plots.withheld(mixed, "latency")
    assert "p99" in cell_plots.tail_figures(mixed, "latency")["off", 5]
    assert "64 for the p90, 662 for the p99" in three_page


def test_an_arm_set_up_as_the_baseline_is_shown_as_a_a(three: Summary) -> None:
    twin = synthetic.campaign(arms={"off": {"type": "embedded", "port": 8001}, "again": {"type": "embedded"}}, **SMALL)
    summary = summarise(twin, {}, synthetic.cells(twin, lambda *_: 1.0))
    assert words.twins(summary) == ["again"]
    assert "A/A: again is set up as off is" in page(summary)
    assert words.twins(three) == []


# Formats on demand


def test_report_prints_markdown_or_json_alone(tmp_path: Path) -> None:
    asked = synthetic.campaign(**SMALL)
    run = synthetic.write(tmp_path / "run", asked, synthetic.cells(asked, synthetic.by_level()))
    done = CliRunner().invoke(app, ["report", str(run.path), "--format", "markdown"])
    assert done.output == (run.path / "report.md").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(run.path), "--format", "json"])
    assert json.loads(done.output)["schema_version"] == 1


def test_the_report_of_an_import_is_made_again_from_its_summary(tmp_path: Path) -> None:
    file = tmp_path / "f.csv"
    file.write_text("arm,level,throughput_tok_s\noff,1,100\nspec,1,150\n")
    out = tmp_path / "out"
    assert CliRunner().invoke(app, ["import", str(file), "--baseline", "off", "--out", str(out)]).exit_code == 0
    before = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    done = CliRunner().invoke(app, ["report", str(out)])
    assert done.exit_code == 0
    assert (out / "report.html").read_bytes() == before


# Two results


def test_compare_says_what_changed_and_where_the_ratios_differ(tmp_path: Path) -> None:
    paths = []
    for name, ratios, model in (("one", synthetic.RATIOS, "A"), ("two", {**synthetic.RATIOS, 5: 0.9}, "B")):
        asked = synthetic.campaign(**{**SMALL, "blocks": 4})
        environment = {**synthetic.ENVIRONMENT, "cpu": {"model": model}}
        records = synthetic.cells(asked, synthetic.by_level(ratios), noise=0.003, seed=len(paths))
        paths.append(str(synthetic.write(tmp_path / name, asked, records, environment).path))
    done = CliRunner().invoke(app, ["compare", *paths, "--markdown"])
    assert done.exit_code == 0, done.output
    assert "| cpu.model | A | B |" in done.output
    answers = {line.split("|")[3].strip(): line for line in done.output.splitlines() if "| all |" in line}
    assert "| differs |" in answers["5"]
    assert "| within the margin |" in answers["1"]
    assert CliRunner().invoke(app, ["compare", *paths]).exit_code == 0


def test_runs_without_a_common_arm_cannot_be_compared(three: Summary) -> None:
    other = synthetic.campaign(arms={"off": {"type": "embedded"}, "x": {"type": "embedded"}}, **SMALL)
    with pytest.raises(ValueError, match="no arm, domain and level in common"):
        compare_summaries(three, summarise(other, {}, synthetic.cells(other, synthetic.by_level())), "a", "b")
    same = compare_summaries(three, three, "a", "a")
    assert same.changes == ()
    assert {p.change for p in same.pairs} == {1.0}
    assert comparison_markdown(same)
    print_comparison(same)


def test_compare_of_a_directory_that_is_no_result_is_a_plain_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path)])
    assert done.exit_code == 2
    assert "holds neither a run nor an import" in done.output


_LOGS = st.lists(st.floats(-1, 1), min_size=2, max_size=12)


@given(_LOGS, _LOGS)
@settings(max_examples=80, deadline=None)
def test_welchs_interval_holds_that_of_scipy(a: list[float], b: list[float]) -> None:
    change, low, high = welch(a, b, 0.95)
    assert low is not None
    assert high is not None
    assert low <= change <= high
    if min(max(a) - min(a), max(b) - min(b)) < 1e-3:
        return
    theirs = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert math.log(low) <= theirs.low + 1e-9
    assert math.log(high) >= theirs.high - 1e-9


@pytest.mark.parametrize(("a", "b"), [([0.1], [0.2, 0.3]), ([0.1, 0.2], [0.3])])
def test_a_single_block_gives_no_interval(a: list[float], b: list[float]) -> None:
    assert welch(a, b, 0.95)[1:] == (None, None)
