"""Other tools' files become the summary that a run of our own gives; one run never gets an interval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab.importers import ImportFileError, import_files
from breakeven.lab.importers.convert import _streams
from breakeven.lab.importers.load import parse
from breakeven.lab.importers.model import ImportedRequest
from breakeven.lab.importers.naming import distinct, slug
from breakeven.lab.summary import Comparison, Summary, read_summary

ROOT = Path(__file__).resolve().parents[2]
KIMI = ROOT / "examples" / "kimi-k2.5-public" / "figures.csv"


def write(path: Path, value: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def rows(summary: Summary, condition: str = "all", metric: str = "throughput") -> list[Comparison]:
    return [c for c in summary.comparisons if (c.metric, c.condition) == (metric, condition)]


def messages(summary: Summary) -> str:
    return "\n".join(lint.message for lint in summary.lints)


def vllm(
    level: int, gap_s: float, *, detailed: bool = True, requests_per_stream: int = 4, **fields: Any
) -> dict[str, Any]:
    """A result as `vllm bench serve` saves it: `level` streams, 21 chunks of 2 tokens, exactly `gap_s` apart."""
    tokens, ttft, each = 42, 0.1, 0.1 + 20 * gap_s
    count = level * requests_per_stream
    duration = each * requests_per_stream
    value: dict[str, Any] = {
        "date": "20260101-120000", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "m",
        "tokenizer_id": "m", "num_prompts": count, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": level,
        "duration": duration, "completed": count, "failed": 0, "total_input_tokens": 10 * count,
        "total_output_tokens": tokens * count, "request_throughput": count / duration, "request_goodput": None,
        "output_throughput": tokens * count / duration, "total_token_throughput": 52 * count / duration,
        "mean_ttft_ms": 100.0, "median_ttft_ms": 100.0, "p99_ttft_ms": 100.0,
        "mean_tpot_ms": 20 * gap_s * 1000 / 41, "median_tpot_ms": 20 * gap_s * 1000 / 41, "p99_tpot_ms": 1.0,
        "mean_itl_ms": gap_s * 1000, "median_itl_ms": gap_s * 1000, "p99_itl_ms": gap_s * 1000,
        "max_output_tokens_per_s": 1e6, "max_concurrent_requests": level,
    }  # fmt: skip
    if detailed:
        value |= {
            "input_lens": [10] * count,
            "output_lens": [tokens] * count,
            "ttfts": [ttft] * count,
            "itls": [[gap_s] * 20] * count,
            "start_times": [5000.0 + each * (i // level) for i in range(count)],
            "generated_texts": [f"answer {i}" for i in range(count)],
            "errors": [""] * count,
        }
    return {**value, **fields}


def vllm_files(folder: Path, *, blocks: int = 1, detailed: bool = True) -> list[str]:
    files = []
    for block in range(blocks):
        for arm, speed in (("off", 1.0), ("eagle3", 0.5)):
            for level in (1, 4):
                gap = 0.02 * speed * (1 + 0.01 * ((block * 7 + level) % 3))
                path = folder / f"{arm}-c{level}-r{block}.json"
                files.append(write(path, vllm(level, gap, detailed=detailed)))
    return files


# A single run has no interval


def test_the_public_kimi_figures_give_ratios_per_level_and_no_interval(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["import", str(KIMI), "--baseline", "off", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "single run: no interval" in " ".join(done.output.split())
    summary = read_summary(out / "summary.json")
    for c in summary.comparisons:
        assert (c.ci_low, c.ci_high, c.p_value, c.verdict) == (None, None, None, "undecided")
    expected = {("encyclopedic", 1): 77.5 / 92.7, ("encyclopedic", 30): 340 / 773, ("coding", 1): 80.9 / 92.7}
    for (condition, level), ratio in expected.items():
        (row,) = [c for c in rows(summary, condition) if c.level == level]
        assert row.ratio == pytest.approx(ratio)
    assert summary.lints[0].message.startswith("single run: no interval")
    assert "single run: no interval" in (out / "report.html").read_text(encoding="utf-8")
    assert not summary.missing


@pytest.mark.parametrize("detailed", [True, False])
def test_one_run_of_requests_is_one_block_however_many_requests_it_has(tmp_path: Path, detailed: bool) -> None:
    summary = import_files(vllm_files(tmp_path, detailed=detailed), "off")
    assert all(c.ci_low is None and c.ci_high is None and c.verdict == "undecided" for c in summary.comparisons)


def test_repetitions_are_blocks_and_give_intervals(tmp_path: Path) -> None:
    text = "arm,level,block,throughput_tok_s\n" + "".join(
        f"off,{level},{b},{100 + b}\nspec,{level},{b},{(100 + b) * ratio * (1 + 0.004 * b)}\n"
        for level, ratio in ((1, 1.5), (8, 0.7))
        for b in (1, 2, 3)
    )
    summary = import_files([write(tmp_path / "f.csv", text)], "off")
    assert [(c.level, c.blocks, c.verdict) for c in rows(summary)] == [(1, 3, "pays"), (8, 3, "hurts")]
    assert "taken as blocks" in messages(summary)
    assert "single run" not in messages(summary)
    assert summary.break_even["spec"].level is not None


# vLLM


def test_a_detailed_vllm_file_is_analysed_again(tmp_path: Path) -> None:
    summary = import_files(vllm_files(tmp_path), "off")
    assert [arm.name for arm in summary.campaign.arms] == ["off", "eagle3"]
    (cell,) = [c for c in summary.cells if (c.arm, c.level) == ("off", 4)]
    gap = 0.02 * 1.01
    # tokens after the first of 42, over 20 gaps; the file's own TPOT takes the same
    assert cell.metrics["tpot_mean"].value == pytest.approx(20 * gap * 1000 / 41)
    assert cell.metrics["inter_chunk_p50"].value == pytest.approx(gap * 1000)
    assert cell.metrics["ttft_mean"].value == pytest.approx(100)
    assert cell.metrics["throughput"].provenance == "derived"
    assert cell.metrics["throughput_whole"].value == pytest.approx(4 * 42 / (0.1 + 20 * gap), rel=1e-6)
    assert cell.metrics["send_lag_p99"].value is None
    assert {d.metric for d in summary.distributions} == {"ttft", "latency"}
    assert [a.identical for a in summary.agreement if a.level is None and a.condition == "all"] == [20]
    assert "inter-chunk latency" in messages(summary)  # "ITL" is about twice TPOT


def test_a_plain_vllm_file_is_taken_as_stated(tmp_path: Path) -> None:
    summary = import_files(vllm_files(tmp_path, detailed=False), "off")
    (cell,) = [c for c in summary.cells if (c.arm, c.level) == ("off", 1)]
    assert cell.metrics["throughput"].provenance == "estimated"
    assert cell.metrics["ttft_p99"].value == 100
    assert "nothing could be recomputed" in messages(summary)
    assert not summary.agreement
    assert not summary.distributions
    assert {c.metric for c in summary.comparisons} == {"throughput", "ttft", "tpot"}


def test_details_without_send_times_keep_the_stated_throughput(tmp_path: Path) -> None:
    files = []
    for arm, gap in (("off", 0.02), ("spec", 0.01)):
        value = vllm(4, gap)
        del value["start_times"]
        files.append(write(tmp_path / f"{arm}.json", value))
    summary = import_files(files, "off")
    (cell,) = [c for c in summary.cells if c.arm == "off"]
    assert cell.metrics["throughput"].value == pytest.approx(vllm(4, 0.02)["output_throughput"])
    assert cell.metrics["tpot_p50"].value == pytest.approx(20 * 20 / 41)
    assert "no send times" in messages(summary)


def test_vllm_speculation_counters_become_acceptance(tmp_path: Path) -> None:
    speculation = {
        "spec_decode_num_drafts": 100, "spec_decode_draft_tokens": 300, "spec_decode_accepted_tokens": 150,
        "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 2.5,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2],
    }  # fmt: skip
    files = [
        write(tmp_path / "off-c4.json", vllm(4, 0.02, detailed=False)),
        write(tmp_path / "spec-c4.json", vllm(4, 0.01, detailed=False, **speculation)),
    ]
    (found,) = [a for a in import_files(files, "off").acceptance if a.condition == "all"]
    assert (found.arm, found.length.value, found.draft_share.value) == ("spec", 2.5, 0.5)
    assert [p.value for p in found.per_position] == pytest.approx([0.8, 0.5, 0.2])
    assert found.valid


def test_impossible_figures_are_linted(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "off.json", vllm(4, 0.02, detailed=False, max_output_tokens_per_s=10.0)),
        write(tmp_path / "spec.json", vllm(4, 0.01, detailed=False, duration=50.0, spec_decode_acceptance_rate=130.0)),
    ]
    said = messages(import_files(files, "off"))
    assert "peak throughput (10 tok/s) below the mean" in said
    assert "acceptance rate of 130% cannot be" in said
    assert "not the output tokens divided by the duration" in said


def test_failed_requests_make_a_run_invalid_unless_allowed(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "off.json", vllm(4, 0.02, detailed=False)),
        write(tmp_path / "spec.json", vllm(4, 0.01, detailed=False, failed=2)),
    ]
    strict = import_files(files, "off")
    assert [cell.reasons for cell in strict.invalid] == [["2 of 18 requests failed"]]
    assert not import_files(files, "off", max_failed_share=0.2).invalid


# SGLang, AIPerf, GuideLLM, SpecForge


def test_an_sglang_file_holds_a_result_per_line_and_its_acceptance_is_not_trusted(tmp_path: Path) -> None:
    files = []
    for arm, factor in (("off", 1.0), ("eagle", 1.4)):
        lines = [
            {
                "tag": arm, "backend": "sglang", "dataset_name": "sharegpt", "request_rate": float("inf"),
                "max_concurrency": level, "duration": 10.0, "completed": 20 * level, "total_output_tokens": 2000,
                "total_output_tokens_retokenized": 1500, "output_throughput": 200.0 * factor,
                "mean_e2e_latency_ms": 900 / factor, "mean_ttft_ms": 50.0, "mean_tpot_ms": 9.0, "mean_itl_ms": 9.0,
                "accept_length": 2.2 if arm == "eagle" else None,
            }
            for level in (1, 16)
        ]  # fmt: skip
        files.append(write(tmp_path / f"{arm}.jsonl", "\n".join(json.dumps(line) for line in lines)))
    summary = import_files(files, "off")
    assert [(c.level, c.ratio) for c in rows(summary)] == [(1, pytest.approx(1.4)), (16, pytest.approx(1.4))]
    assert summary.campaign.conditions == ["sharegpt"]
    found = [a for a in summary.acceptance if a.condition == "all"]
    assert [(a.level, a.length.value, a.valid) for a in found] == [(1, 2.2, False), (16, 2.2, False)]
    said = messages(summary)
    assert "since it started" in said
    assert "ignores EOS" in said
    assert "tokenizer 1500" in said


def _aiperf_records(streams: int, itl_ms: float) -> str:
    lines = []
    for i in range(3 * streams):
        latency = 20 + 30 * itl_ms
        start = round(1_759_813_207e9 + (i // streams) * latency * 1e6)
        lines.append(
            {
                "metadata": {"session_num": i, "request_start_ns": start, "benchmark_phase": "profiling"},
                "metrics": {
                    "time_to_first_token": {"value": 20.0, "unit": "ms"},
                    "request_latency": {"value": latency / 1000, "unit": "s"},
                    "inter_token_latency": {"value": itl_ms, "unit": "ms"},
                    "output_sequence_length": {"value": 31, "unit": "tokens"},
                },
                "error": None,
            }
        )
    warm = {"metadata": {"request_start_ns": 1, "benchmark_phase": "warmup"}, "metrics": {}, "error": None}
    return "\n".join(json.dumps(line) for line in [warm, *lines])


def test_aiperf_records_are_analysed_again_and_the_level_found_beside_them(tmp_path: Path) -> None:
    files = []
    for arm, itl in (("off", 10.0), ("spec", 8.0)):
        files.append(write(tmp_path / arm / "profile_export.jsonl", _aiperf_records(4, itl)))
        beside = {"request_latency": {"unit": "ms", "avg": 320.0}, "input_config": {"loadgen": {"concurrency": 4}}}
        files.append(write(tmp_path / arm / "profile_export_aiperf.json", beside))
    summary = import_files(files, "off")
    assert (summary.campaign.levels, summary.campaign.blocks) == ([4], 1)
    (cell,) = [c for c in summary.cells if c.arm == "off"]
    assert cell.requests == 12  # the warm-up is left out
    assert cell.metrics["tpot_p50"].value == pytest.approx(10)
    assert cell.metrics["throughput_whole"].value == pytest.approx(4 * 31 / 0.320, rel=1e-4)
    assert cell.metrics["inter_chunk_p50"].value is None  # no gaps in the file: none invented


def test_aiperf_records_alone_take_the_most_requests_at_once_as_level(tmp_path: Path) -> None:
    files = [write(tmp_path / a / "profile_export.jsonl", _aiperf_records(3, 9.0)) for a in ("off", "spec")]
    summary = import_files(files, "off")
    assert summary.campaign.levels == [3]
    assert "the most requests at once" in messages(summary)


def test_an_aiperf_summary_is_read_in_its_units(tmp_path: Path) -> None:
    def value(rate: float) -> dict[str, Any]:
        return {
            "aiperf_version": "0.8.0", "input_config": {"loadgen": {"concurrency": 8}},
            "output_token_throughput": {"unit": "tokens/sec", "avg": rate},
            "request_count": {"unit": "requests", "avg": 80},
            "request_latency": {"unit": "ms", "avg": 900.0, "p50": 880.0, "p99": 1500.0},
            "time_to_first_token": {"unit": "s", "avg": 0.05},
            "inter_token_latency": {"unit": "ms", "avg": 7.0}, "benchmark_duration": {"unit": "sec", "avg": 12.0},
            "start_time": "2026-01-01T10:00:00",
        }  # fmt: skip

    files = [f"off={write(tmp_path / '1.json', value(500.0))}", f"spec={write(tmp_path / '2.json', value(600.0))}"]
    summary = import_files(files, "off")
    (cell,) = [c for c in summary.cells if c.arm == "spec"]
    assert cell.metrics["ttft_mean"].value == pytest.approx(50)
    assert cell.metrics["latency_p99"].value == 1500
    assert [c.ratio for c in rows(summary)] == [pytest.approx(1.2)]


def test_guidellm_latency_is_in_seconds_and_its_requests_are_analysed_again(tmp_path: Path) -> None:
    def request(start: float, itl: float) -> dict[str, Any]:
        latency = 0.05 + 19 * itl
        return {
            "request_start_time": start, "request_end_time": start + latency, "request_latency": latency,
            "time_to_first_token_ms": 50.0, "inter_token_latency_ms": itl * 1000, "output_tokens": 20,
            "prompt_tokens": 9, "output": "text",
        }  # fmt: skip

    def bench(streams: int, itl: float) -> dict[str, Any]:
        each = 0.05 + 19 * itl
        good = [request(100 + each * (i // streams), itl) for i in range(4 * streams)]
        return {
            "config": {"strategy": {"type_": "concurrent", "streams": streams}},
            "metrics": {
                "request_totals": {"successful": len(good), "errored": 0},
                "output_tokens_per_second": {"successful": {"mean": 20 * streams / each}},
                "request_latency": {"successful": {"mean": each, "median": each, "percentiles": {"p99": each}}},
            },
            "requests": {"successful": good, "errored": [], "incomplete": []},
        }

    files = [
        write(tmp_path / f"{arm}.json", {"metadata": {}, "benchmarks": [bench(1, itl), bench(5, itl)]})
        for arm, itl in (("off", 0.02), ("spec", 0.015))
    ]
    summary = import_files(files, "off")
    (cell,) = [c for c in summary.cells if (c.arm, c.level) == ("off", 5)]
    assert cell.metrics["latency_mean"].value == pytest.approx(430, abs=0.01)
    assert cell.metrics["tpot_mean"].value == pytest.approx(20, abs=0.01)
    assert cell.metrics["throughput"].value == pytest.approx(100 / 0.43, rel=0.02)


def _sweep(models: Sequence[str] = ("m",)) -> dict[str, Any]:
    def result(steps: int, rate: float, length: float) -> dict[str, Any]:
        return {
            "batch_size": 8, "steps": steps, "topk": 1, "num_draft_tokens": steps + 1,
            "metrics": [
                {"Name": "Wihtout EAGLE3", "output_throughput": 1000.0, "accept_length": 1.0},
                {"Name": "org/drafter", "output_throughput": rate, "accept_length": length},
            ],
        }  # fmt: skip

    benchmarks = {
        name: {"benchmark_name": name, "results": [result(3, 1400.0, 2.6), result(5, 1300.0, 2.9)]}
        for name in ("gsm8k", "mtbench")
    }
    return dict.fromkeys(models, benchmarks)


def test_a_specforge_sweep_has_one_run_without_a_drafter_however_often_it_is_repeated(tmp_path: Path) -> None:
    file = write(tmp_path / "sweep.json", _sweep())
    summary = import_files([file], "Wihtout EAGLE3")
    assert [arm.name for arm in summary.campaign.arms] == [
        "Wihtout-EAGLE3", "eagle3-steps3-topk1-tokens4", "eagle3-steps5-topk1-tokens6",
    ]  # fmt: skip
    assert [round(c.ratio or 0, 3) for c in rows(summary, "gsm8k")] == [1.4, 1.3]
    assert all(c.ci_low is None and c.verdict == "undecided" for c in summary.comparisons)
    assert {a.length.value for a in summary.acceptance} == {2.6, 2.9}
    assert import_files([file], "off").campaign.baseline == "off"


def test_a_sweep_of_several_models_names_them_or_takes_one(tmp_path: Path) -> None:
    file = write(tmp_path / "sweep.json", _sweep(("Model-A", "Model-B")))
    assert import_files([file], "off").campaign.conditions == [
        "Model-A.gsm8k", "Model-A.mtbench", "Model-B.gsm8k", "Model-B.mtbench",
    ]  # fmt: skip
    assert import_files([file], "off", model="Model-B").campaign.conditions == ["gsm8k", "mtbench"]
    with pytest.raises(ImportFileError, match="no model 'Z': it has Model-A, Model-B"):
        import_files([file], "off", model="Z")


# Names, and what is refused


def test_an_arm_is_named_by_the_command_line_the_file_or_its_name(tmp_path: Path) -> None:
    named = write(tmp_path / "x.json", vllm(2, 0.02, detailed=False))
    labelled = write(tmp_path / "y.json", vllm(2, 0.02, detailed=False, label="with drafts"))
    plain = write(tmp_path / "ngram_concurrency2_run1.json", vllm(2, 0.02, detailed=False))
    summary = import_files([f"base={named}", labelled, plain], "base")
    assert [arm.name for arm in summary.campaign.arms] == ["base", "with-drafts", "ngram"]
    assert summary.campaign.arms[1].settings["known_as"] == "with drafts"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "", "is empty"),
        ("a.json", '{"duration": 1, "completed": 2, "output_thr', "is it cut off"),
        ("a.jsonl", '{"output_throughput": 1, "duration": 1, "completed": 1}\n{"output', "line 2 is not valid JSON"),
        ("a.json", '{"hello": 1}', "its format is not known"),
        ("a.csv", "arm,level\noff,1\n", "its format is not known"),
        ("a.csv", "arm,level,throughput_tok_s\noff,x,3\n", "line 2: level must be a whole number"),
        ("a.csv", "arm,level,throughput_tok_s\noff,1,-3\n", "line 2: throughput_tok_s must be above 0"),
        ("a.csv", "arm,level,throughput_tok_s\noff,1,3,4\n", "more fields than the header"),
        ("a.csv", "arm,level,throughput_tok_s,colour\noff,1,3,red\n", "unknown column 'colour'"),
        ("a.csv", "arm,level,throughput_tok_s\n", "no row"),
        ("a.csv", "arm,level,throughput_tok_s\noff,1,3\n", "only off is there"),
        ("a.csv", "arm,level,throughput_tok_s\na,1,3\nb,1,3\n", "no run of the baseline 'off': the files have a, b"),
        ("a.csv", "arm,level,block,throughput_tok_s\noff,1,1,3\noff,1,1,3\nb,1,1,3\n", "is there twice"),
        ("a.csv", b"\xff\xfe\x00", "not UTF-8"),
        ("a.json", json.dumps({**vllm(1, 0.1), "ttfts": [1.0]}), "the file is damaged"),
        ("a.json", json.dumps(vllm(1, 0.1, max_concurrency=None, request_rate=0.2)), "no level"),
        ("a.json", json.dumps(vllm(1, 0.1, detailed=False, duration="long")), "duration must be a number"),
    ],
)
def test_a_bad_file_ends_in_one_sentence_that_names_it(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = CliRunner().invoke(app, ["import", str(path), "--baseline", "off", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "summary.json").exists()


def test_import_does_not_write_over_a_run_or_a_strangers_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = CliRunner().invoke(app, ["import", str(KIMI), "--baseline", "off", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "choose another directory" in done.output


def test_the_same_files_give_the_same_summary(tmp_path: Path) -> None:
    files = vllm_files(tmp_path, blocks=2)
    assert import_files(files, "off").to_json() == import_files(files, "off").to_json()


# Pure parts


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_streams_never_overlap_and_are_as_few_as_requests_at_once(spans: list[tuple[int, int]]) -> None:
    requests = [ImportedRequest(float(s), 1.0, n * 1000.0, None, None, 1, None) for s, n in spans]
    streams = _streams(requests)
    for i, (a, m) in enumerate(spans):
        for j, (b, n) in enumerate(spans):
            if i < j and streams[i] == streams[j]:
                assert a + m <= b or b + n <= a
    at_once = max(sum(s <= t < s + n for s, n in spans) for t, _ in spans)
    assert len(set(streams)) == at_once


@given(st.lists(st.text(max_size=60), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_every_name_becomes_a_distinct_name_that_campaigns_allow(names: list[str]) -> None:
    found = distinct(names)
    assert len({name.lower() for name in found.values()}) == len(set(names))
    for name in (*found.values(), *map(slug, names)):
        assert 1 <= len(name) <= 40
        assert name[0].isalnum()
        assert all(c.isascii() and (c.isalnum() or c in "._-") for c in name)


@given(st.one_of(st.integers(0, 10_000), st.binary(max_size=60)))
@settings(max_examples=120, deadline=None)
def test_a_file_cut_anywhere_is_an_error_or_a_shorter_file_but_never_a_crash(cut: int | bytes) -> None:
    whole = "\n".join(json.dumps(vllm(level, 0.01, detailed=False)) for level in (1, 2)).encode()
    with suppress(ImportFileError):
        parse(whole[: cut % len(whole)] if isinstance(cut, int) else cut, "x")
