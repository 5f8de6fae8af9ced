"""`breakeven doctor`: a healthy server passes every check; each planted fault is found by the check that names it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab.doctor import CHECKS, Diagnosis, Options, Status, UnreachableError, checks, diagnose
from breakeven.lab.doctor.clock import Clocks
from breakeven.lab.mock import MockScript, MockServer

SPECULATING = {"draft_tokens": 3, "tokens_per_chunk": (1, 3, 2)}


@contextmanager
def lifelike(**script: Any) -> Iterator[MockServer]:
    given = {"lifelike": True, "first_chunk_s": 0.002, "gap_s": 0.001, "chunks": 60, "prefill_s_per_token": 1e-4}
    server = MockServer(MockScript(**{**given, **script}))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)


def examine(*which: Any, options: dict[str, Any] | None = None, **script: Any) -> Diagnosis:
    with lifelike(**script) as server:
        return diagnose(Options(server.url, timeout_s=5.0, **(options or {})), checks=which or CHECKS)


@pytest.mark.parametrize("script", [{}, SPECULATING], ids=["off", "speculating"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_nothing_is_wrong_with_a_healthy_server(script: dict[str, Any], chat: bool) -> None:
    found = examine(options={"chat": chat}, **script)
    assert [f for f in found.findings if f.status is Status.WRONG] == []
    assert len(found.findings) == len(CHECKS) + 1
    unknown = {f.check for f in found.findings if f.status is Status.UNKNOWN}
    assert unknown == (set() if chat else {"template"})
    notes = {f.check for f in found.findings if f.status is Status.NOTE}
    assert notes == ({"chunks"} if script else set())


def faults(*names: str, **script: Any) -> dict[str, Any]:
    return {"faults": names, **script}


@pytest.mark.parametrize(
    ("check", "script", "status", "words"),
    [
        (checks.health, {"never_ready": True}, "wrong", "/health says 503"),
        (checks.server_date, faults("clock_skewed"), "note", " s behind"),
        (checks.streaming, faults("buffered"), "wrong", "the stream is buffered"),
        (checks.streaming, {"http_status": 500}, "wrong", "the mock was told to fail"),
        (checks.usage, {"no_usage": True}, "wrong", "carries no usage although stream_options"),
        (checks.usage, {"usage_offset": -12}, "wrong", "it counts wrongly"),
        (checks.chunks, {"tokens_per_chunk": 3}, "note", "chunks are not tokens: up to 3 in one"),
        (checks.max_tokens, faults("max_tokens_ignored"), "wrong", "max_tokens 5 gave 8 tokens"),
        (checks.stop_strings, faults("stop_ignored"), "wrong", "is in the answer"),
        (checks.greedy, faults("greedy_unsteady"), "wrong", "temperature 0 gave different texts"),
        (checks.seed, faults("seed_ignored"), "wrong", "`seed` is ignored"),
        (checks.sampling, faults("greedy_forced"), "wrong", "4 seeds at temperature 1 gave one text"),
        (checks.defaults, faults("defaults_changed"), "wrong", "sampling defaults of its own"),
        (checks.defaults, faults("seed_ignored"), "unknown", "two samples cannot be compared"),
        (checks.template, faults("template_ignored"), "note", "template arguments are ignored, or"),
        (checks.bos, faults("bos_doubled"), "wrong", "begins with token 1 twice"),
        (checks.prefix_cache, faults("cache_kept"), "wrong", "but the prompt is still cached"),
        (checks.prefix_cache, faults("cache_without_reset"), "note", "so a campaign salts its prompts"),
        (checks.prefix_cache, faults("cache_unreported"), "note", "whose hit rate is not reported"),
        (checks.prefix_cache, faults("cache_unreported", "cache_kept"), "wrong", "but the prompt is still cached"),
        (checks.speculation, faults("metrics_missing"), "note", "no /metrics"),
        (checks.speculation, faults("counters_missing", **SPECULATING), "note", "has no counters of speculation"),
        (checks.speculation, faults("counters_still", draft_tokens=3), "wrong", "speculation is silently off"),
        (checks.speculation, faults("counters_past_end", draft_tokens=3), "wrong", "tokens behind the end"),
        (checks.context, faults("context_unchecked"), "wrong", "it was cut in silence to 2047 tokens"),
        (checks.context, faults("context_uncoded"), "note", "neither its code nor its words tell that it was too long"),
        (checks.still_alive, {"stall_after": 1}, "wrong", "it no longer answers"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_planted_fault_is_found_by_its_check_and_has_a_remedy(
    check: Any, script: dict[str, Any], status: str, words: str
) -> None:
    stalls = {"timeout_s": 0.5} if "stall_after" in script else {}
    with lifelike(**script) as server:
        found = diagnose(Options(server.url, **{"timeout_s": 5.0, **stalls}), checks=[check]).findings[0]
    assert found.status.value == status
    assert words in found.seen
    assert found.remedy or status == "unknown"


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        (faults("counters_missing", **SPECULATING), True, "you say that it speculates"),
        (SPECULATING, False, "though it should be off"),
        (faults("metrics_missing"), True, "no /metrics"),
    ],
)
def test_what_the_user_says_of_speculation_is_held_against_the_counters(
    script: dict[str, Any], expected: bool, words: str
) -> None:
    found = examine(checks.speculation, options={"expect_speculation": expected}, **script).findings[0]
    assert found.status is Status.WRONG
    assert words in found.seen


def test_counters_of_one_rank_of_two_are_too_few_for_what_was_received() -> None:
    # The check's request is the mock's second, which this rank does not count.
    script = faults("counters_of_one_rank", draft_tokens=3, tokens_per_chunk=3)
    found = examine(checks.still_alive, checks.speculation, **script).findings[1]
    assert found.status is Status.WRONG


def test_a_template_argument_of_the_users_own_must_count() -> None:
    arguments = {"template_arguments": {"enable_thinking": True}}
    assert examine(checks.template, options=arguments).findings[0].status is Status.FINE
    ignored = examine(checks.template, options=arguments, **faults("template_ignored")).findings[0]
    assert ignored.status is Status.WRONG
    assert "enable_thinking=True leaves the prompt as it was" in ignored.seen


def test_a_clock_that_was_set_is_seen_and_one_that_is_slewed_is_not() -> None:
    clocks = Clocks(wall_s=1000.0, steady_s=50.0)
    assert clocks.finding(1020.005, 70.0).status is Status.FINE
    for jump in (-3600.0, -0.5, 0.5):
        found = clocks.finding(1020.0 + jump, 70.0)
        assert found.status is Status.WRONG
        assert f"{jump * 1000:+.0f} ms" in found.seen


# The command line


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None)
    return result


def test_a_healthy_server_gives_0_and_its_findings_as_json(tmp_path: Path) -> None:
    with lifelike(model="tiny") as server:
        result = invoke(server.url + "/v1", "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.output
    assert "tiny at http://127.0.0.1" in result.output
    assert "nothing wrong" in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["healthy"] is True
    assert {f["status"] for f in found["findings"]} == {"fine"}


def test_a_fault_gives_1_and_says_what_to_do_and_json_may_go_to_standard_output() -> None:
    with lifelike(no_usage=True) as server:
        result = invoke(server.url, "--json", "-")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert "usage" in [f["check"] for f in found["findings"] if f["status"] == "wrong"]
    assert "→ update the server" in result.stderr


def test_a_server_that_is_not_there_or_is_none_gives_2() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for arguments, words in (
        ([f"127.0.0.1:{port}"], "is the server running"),
        (["http://"], "does not answer"),
        (["http://[bad"], "does not answer"),
        ([f"127.0.0.1:{port}", "--header", "nonsense"], "must be written NAME:VALUE"),
        ([f"127.0.0.1:{port}", "--header", "X: ü"], "header"),
        ([f"127.0.0.1:{port}", "--api-key-env", "NOT_SET_ANYWHERE"], "is not set"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert words in result.output
    with pytest.raises(UnreachableError, match="does not answer"):
        diagnose(Options(f"http://127.0.0.1:{port}"))
