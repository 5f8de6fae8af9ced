"""Reports say what the summary says, in full, and obey nothing that a server or a prompt wrote."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import synthetic
from matplotlib.figure import Figure
from rich.console import Console

from breakeven.lab.analysis import summarise
from breakeven.lab.records import RecordError
from breakeven.lab.report import plots, print_summary, words, write_reports
from breakeven.lab.report.html import page
from breakeven.lab.report.markdown import markdown
from breakeven.lab.summary import BreakEvenSummary, Summary

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "<script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)> \x1b[31m| $x_1$"
# What lies beside the page: the raw data. Names without a scheme, a host or a step upwards.
BESIDE = r"summary\.json|report\.md|campaign\.(json|yaml)|environment\.json|journal\.jsonl|(cells|logs)/([\w.-]+/)?"
SECTIONS = (
    "answer", "load", "times", "distributions", "acceptance", "agreement", "stability", "comparisons", "invalid",
    "method", "definitions",
)  # fmt: skip


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, ids, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def ids(self) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get("id"))]


def summary(spoil: bool = False, **fields: object) -> Summary:
    given = synthetic.campaign(**fields)
    records = synthetic.cells(given, synthetic.by_level())
    if spoil:
        records[0] = synthetic.spoil(records[0], f"1 of 2 requests failed: {HOSTILE}")
    return summarise(given, synthetic.ENVIRONMENT, records)


@pytest.fixture(scope="module")
def good() -> Summary:
    return summary()


@pytest.fixture(scope="module")
def good_page(good: Summary) -> str:
    return page(good)


def printed(given: Summary, *, width: int = 80, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_summary(given, Console(file=stream, width=width), Path("runs/first/report.html"))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


# The page


def test_the_page_has_every_section_once_and_a_chart_in_each_that_needs_one(good_page: str) -> None:
    seen = Page(good_page)
    assert [i for i in seen.ids if i in SECTIONS] == list(SECTIONS)
    labels = [attributes.get("aria-label") for tag, attributes in seen.tags if tag == "svg"]
    assert labels == [
        "Throughput over load", "ngram against off", "Throughput against speed per user",
        "Time to first token (TTFT)", "Time per output token (TPOT)", "TTFT: median and tail", "TPOT: median and tail",
        "Inter-chunk latency: median and tail", "End-to-end latency: median and tail",
        *(f"TTFT, {n}" for n in ("1 stream", "2 streams", "5 streams", "10 streams")),
        *(f"Latency, {n}" for n in ("1 stream", "2 streams", "5 streams", "10 streams")),
        "Acceptance length over load", "Acceptance by position",
    ]  # fmt: skip


def test_the_page_loads_nothing_and_runs_nothing(good_page: str) -> None:
    seen = Page(good_page)
    assert not {tag for tag, _ in seen.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in seen.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert (value or "").startswith("#") or re.fullmatch(BESIDE, value or ""), (tag, name, value)
    assert not re.search(r"https?://|@import|url\((?!#)", good_page)
    assert "default-src 'none'" in good_page


def test_ids_are_unique_and_every_reference_has_its_target(good_page: str) -> None:
    seen = Page(good_page)
    assert len(seen.ids) == len(set(seen.ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', good_page))
    assert references
    assert references <= set(seen.ids)


def test_every_colour_of_a_chart_is_a_variable_of_the_page(good_page: str) -> None:
    charts = "".join(re.findall(r"<svg.*?</svg>", good_page, re.DOTALL))
    used = set(re.findall(r"var\((--[\w-]+)\)", charts))
    assert {"--ink", "--line", "--band", "--arm-0", "--arm-1"} <= used
    assert not re.search(r"(fill|stroke): ?#", charts)
    for variable in used:
        assert f"{variable}:" in good_page


def test_the_page_says_the_verdict_in_words_and_the_figures_of_every_comparison(good: Summary, good_page: str) -> None:
    text = " ".join(Page(good_page).text.split())
    assert "ngram pays at 1, 2 and 5 streams and hurts at 10 streams." in text
    assert "Break-even is at " in text
    for c in good.comparisons:
        assert f"{c.ratio:.3f}" in text
        assert f"{c.ci_low:.3f} to {c.ci_high:.3f}" in text
    assert "breakeven serve --model smollm2-135m --speculative-algorithm NGRAM" in text
    assert "Example CPU" in text


def test_an_invalid_cell_is_announced_at_the_top_with_its_reason_below() -> None:
    text = page(summary(spoil=True))
    assert text.index('class="warning"') < text.index('id="answer"')
    assert "1 of 80 cells is invalid" in text
    assert "1 of 2 requests failed" in text[text.index('id="invalid"') :]


def test_a_whole_run_has_no_warning(good_page: str) -> None:
    assert 'class="warning"' not in good_page


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    given = summary(spoil=True)
    # Names are checked when a campaign is read; a page must hold even where they were not.
    data = given.model_dump_json().replace("ngram", "ng<script>ram $x^2$").replace("encyclopedic", "<b>bold</b>")
    hostile = Summary.model_validate_json(data)
    text = page(hostile)
    seen = Page(text)
    assert not {tag for tag, _ in seen.tags} & {"script", "img"}
    assert sum(tag == "b" for tag, _ in seen.tags) == len(given.campaign.levels)  # the page's own
    assert "alert('x')" in seen.text
    assert "&lt;script&gt;" in text
    in_terminal = printed(given)
    assert "\x1b" not in in_terminal
    assert "<script>" in in_terminal
    for line in markdown(hostile).splitlines():
        assert "<" not in line
        assert "http://" not in line or "&" in line


def test_the_same_summary_gives_the_same_page(good: Summary, good_page: str) -> None:
    assert page(good) == good_page


def test_one_block_one_domain_and_nothing_valid_each_give_a_page_and_a_table() -> None:
    one = summary(blocks=1, workload={"domains": ["coding"], "max_tokens": synthetic.TOKENS})
    assert "no interval" in page(one)
    assert "[no interval]" in printed(one)
    given = synthetic.campaign(blocks=1)
    records = [replace(r, requests=(), invalid=("not measured",)) for r in synthetic.cells(given, synthetic.by_level())]
    nothing = summarise(given, {}, records)
    assert "Break-even is unknown" in page(nothing)
    assert "Break-even is unknown" in printed(nothing)
    assert "undecided" in markdown(nothing)


def test_a_run_that_ended_early_says_how_many_of_its_blocks_are_compared(good: Summary, good_page: str) -> None:
    given = synthetic.campaign(blocks=5)
    records = [
        cell
        for cell in synthetic.cells(given, synthetic.by_level())
        if cell.key.block < 2 or (cell.key.block, cell.key.arm) == (2, "off")
    ]
    early = summarise(given, synthetic.ENVIRONMENT, records)
    assert "2 of 5 blocks of server launches" in markdown(early)
    assert "2 of 5 blocks of server launches" in page(early)
    assert "2 of 5 blocks, " in printed(early)
    assert f"\n{good.campaign.blocks} blocks of server launches" in markdown(good)
    assert f" {good.campaign.blocks} blocks of server launches" in good_page


def test_records_that_were_left_out_as_placeholders_are_said_in_every_form() -> None:
    one = {"hub": "someone/sums", "path": "data/questions.parquet", "sha256": "0" * 64, "placeholders": 494}
    files = [one, {"path": "own.jsonl", "sha256": "1" * 64, "placeholders": 0}]
    asked = synthetic.campaign(blocks=1, levels=(1,))
    records = synthetic.cells(asked, synthetic.by_level())
    summary = summarise(asked, {**synthetic.ENVIRONMENT, "files": files}, records)
    said = "someone/sums, data/questions.parquet: 494 records hold a placeholder instead of their text"
    assert [lint.message[: len(said)] for lint in summary.lints if "placeholder" in lint.message] == [said]
    for text in (page(summary), markdown(summary), printed(summary)):
        assert "questions.parquet: 494 records hold a placeholder" in " ".join(text.split())


# The terminal


def test_the_table_fits_80_columns_and_says_verdicts_in_words(good: Summary) -> None:
    text = printed(good)
    assert max(len(line) for line in text.splitlines()) <= 80
    for row, verdict in zip(words.rows(good, "ngram"), ["pays", "pays", "pays", "hurts"], strict=True):
        (line,) = [x for x in text.splitlines() if x.strip().startswith(f"{row.level} ")]
        c = row.comparison
        assert f"{c.ratio:.2f} [{c.ci_low:.2f}, {c.ci_high:.2f}]" in line
        assert verdict in line
        assert "2.00" in line
    assert "runs/first/report.html" in text


def test_the_table_falls_back_to_ascii_where_the_terminal_has_nothing_else(good: Summary) -> None:
    text = printed(good, encoding="ascii")
    assert "+ pays" in text
    assert "?" not in text


def test_invalid_cells_and_their_reasons_are_printed() -> None:
    text = printed(summary(spoil=True))
    assert "1 of 80 cells is invalid" in " ".join(text.split())
    assert "b00-off-coding-c001" in text


def test_the_example_of_the_page_on_reading_reports_is_what_is_printed() -> None:
    given = synthetic.campaign(name="example", blocks=3)
    records = synthetic.cells(given, synthetic.by_level(synthetic.EXAMPLE_RATIOS), noise=0.04, seed=1)
    text = printed(summarise(given, synthetic.ENVIRONMENT, records)).strip()
    documented = (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8")
    assert "\n".join(line.rstrip() for line in text.splitlines()) in documented


# Sentences


def _break_even(**fields: object) -> BreakEvenSummary:
    value = {
        "level": 6.9, "ci_low": 6.0, "ci_high": 8.0, "low_open": False, "high_open": False, "condition": "all",
        "note": "", "monotone": True, "levels": [1, 10], "fitted": [1.5, 0.8], "pays": [], "blocks": 5,
    }  # fmt: skip
    return BreakEvenSummary.model_validate({**value, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Break-even is at 6.9 streams (95% interval: 6 to 8)."),
        (
            {"ci_high": None, "high_open": True},
            "Break-even is at 6.9 streams (95% interval: at least 6, open above 10).",
        ),
        ({"ci_low": None, "low_open": True}, "Break-even is at 6.9 streams (95% interval: open below 1, at most 8)."),
        (
            {"level": None, "ci_low": 10.0, "ci_high": None, "high_open": True, "fitted": [1.5, 1.2]},
            "Break-even lies above 10 streams, the highest level measured.",
        ),
        (
            {"level": None, "ci_low": None, "ci_high": 1.0, "low_open": True, "fitted": [0.9, 0.8]},
            "Break-even lies below 1 stream, the lowest level measured.",
        ),
        (
            {"ci_low": None, "ci_high": None, "blocks": 1},
            "Break-even is near 6.9 streams in the one block; one block gives no interval.",
        ),
        (
            {"monotone": False, "level": None, "note": "the ratio does not fall steadily with load"},
            "There is no single break-even: the ratio does not fall steadily with load.",
        ),
    ],
)
def test_break_even_is_said_in_plain_words(fields: dict[str, object], said: str) -> None:
    assert words.break_even_sentence(_break_even(**fields), 0.95) == said


def test_an_interval_open_at_both_ends_claims_nothing() -> None:
    found = _break_even(ci_low=None, ci_high=None, low_open=True, high_open=True)
    assert "do not bound the break-even" in words.break_even_sentence(found, 0.95)


# Files


def test_reports_are_written_whole_beside_the_cells(tmp_path: Path, good: Summary, good_page: str) -> None:
    run = synthetic.write(tmp_path / "run", synthetic.campaign(), [])
    path = write_reports(run, good)
    assert path == run.path / "report.html"
    assert path.read_text(encoding="utf-8") == good_page
    assert (run.path / "summary.json").read_text(encoding="utf-8") == good.to_json()
    assert (run.path / "report.md").read_text(encoding="utf-8") == markdown(good)
    assert not [p for p in run.path.iterdir() if p.name.startswith(".tmp")]


def test_a_report_that_cannot_be_written_names_its_file(tmp_path: Path, good: Summary) -> None:
    run = synthetic.write(tmp_path / "run", synthetic.campaign(), [])
    (run.path / "summary.json").mkdir()
    with pytest.raises(RecordError, match=r"summary\.json cannot be written"):
        write_reports(run, good)
    assert not [p for p in run.path.iterdir() if p.name.startswith(".tmp")]


def test_an_interval_that_leaves_the_picture_ends_in_an_arrow_and_the_caption_says_so() -> None:
    given = synthetic.campaign(blocks=2)
    records = synthetic.cells(given, synthetic.by_level(synthetic.EXAMPLE_RATIOS), noise=0.5, seed=1)
    wide = plots.throughput(summarise(given, synthetic.ENVIRONMENT, records))
    assert "An arrow" in wide.caption
    narrow = plots.throughput(summarise(given, synthetic.ENVIRONMENT, synthetic.cells(
        given, synthetic.by_level(synthetic.EXAMPLE_RATIOS), noise=0.001, seed=1)))  # fmt: skip
    assert "An arrow" not in narrow.caption


@pytest.mark.parametrize(
    ("low", "high"), [(40.0, 2500.0), (1.0, 20.0), (0.5, 90_000.0), (90.0, 1600.0), (0.02, 0.9), (7.0, 7.1e6)]
)
def test_a_small_log_axis_has_few_ticks_which_do_not_touch(low: float, high: float) -> None:
    axes = Figure().add_subplot()
    plots.logarithmic(axes, "x", low, high, most=4)
    assert 1 <= len(axes.get_xticks()) <= 8
    if high / low < 1000:
        assert len(axes.get_xticks()) <= 4
