"""Arms: started, found ready, reset, counted, and for certain ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import QUICK, mock_arm

from breakeven.lab.arms import Probe, ResetError, StartError, make_arm
from breakeven.lab.arms.embedded import serve_command
from breakeven.lab.arms.http import HttpOptions, HttpServer, base_url, control_client
from breakeven.lab.arms.process import ServerProcess, free_port, kill_leftover, port_is_free
from breakeven.lab.arms.prometheus import (
    Series,
    engine_time_series,
    impossible,
    rise,
    samples,
    speculation_series,
    with_rounds,
)
from breakeven.lab.campaign import AttachArm, CommandArm, EmbeddedArm, Speculation
from breakeven.lab.mock import MockProcess, MockScript

PROBE = Probe("/v1/chat/completions", lambda model: b'{"model": "%b", "messages": [], "stream": true}' % model.encode())


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 15
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Counters

SCRAPE = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\", c"} 10
vllm:spec_decode_num_drafts_total{engine="1",model_name="x"} 5.0 1700000000000
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:spec_decode_num_draft_tokens_total{engine="0"} 45
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 12
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 8
vllm:num_requests_running{engine="0"} 3
not a sample
"""


def test_counters_are_read_by_name_whatever_the_prefix_and_summed_over_ranks() -> None:
    expected = {
        "num_drafts": 15,
        "num_draft_tokens": 45,
        "num_accepted_tokens": 20,
        "accepted_pos_0": 12,
        "accepted_pos_1": 8,
    }
    for prefix in ("vllm:", "breakeven:", "llamacpp:", "sglang_", ""):
        series = speculation_series(SCRAPE.replace("vllm:", prefix))
        assert rise({}, series).values == expected
        assert not rise({}, series).problems


SGLANG = """\
sglang:spec_verify_calls_total{model_name="m"} 10
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 40
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 2
sglang:num_requests_total{is_streaming="true",model_name="m"} 4
sglang:spec_accept_length{model_name="m"} 3.3
"""


def test_sglangs_counters_are_verifications_tokens_and_requests() -> None:
    # 42 tokens: 4 first ones, one for each of 10 rounds, and 28 drafts.
    found = rise({}, speculation_series(SGLANG))
    assert found.values == {"num_drafts": 10, "num_accepted_tokens": 28}
    assert not found.problems
    later = speculation_series(SGLANG.replace("} 10", "} 15").replace("} 40", "} 60").replace("} 4\n", "} 6\n"))
    assert rise(speculation_series(SGLANG), later).values == {"num_drafts": 5, "num_accepted_tokens": 13}
    assert speculation_series("sglang:generation_tokens_total 40\nsglang:num_requests_total 4\n") == {}


def test_tensorrt_llm_counts_drafted_tokens_and_no_rounds() -> None:
    text = (
        'trtllm_spec_decode_num_draft_tokens_total{m="a"} 30\ntrtllm_spec_decode_num_accepted_tokens_total{m="a"} 12\n'
    )
    series = speculation_series(text)
    assert rise({}, series).values == {"num_draft_tokens": 30, "num_accepted_tokens": 12}
    assert rise({}, with_rounds(series, 3)).values == {
        "num_drafts": 10,
        "num_draft_tokens": 30,
        "num_accepted_tokens": 12,
    }
    assert with_rounds(speculation_series(SCRAPE), 3) == speculation_series(SCRAPE)
    gauges = "".join(
        f"# TYPE trtllm_spec_decode_{name} gauge\ntrtllm_spec_decode_{name} 4\n"
        for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    assert speculation_series(gauges) == {}
    assert speculation_series(gauges + text) == series


def test_labels_are_unescaped_and_commas_inside_them_do_not_end_them() -> None:
    assert next(samples(SCRAPE)).labels == {"engine": "0", "model_name": 'a "b", c'}


def test_a_rise_is_the_difference_of_two_scrapes() -> None:
    before = speculation_series(SCRAPE)
    after = speculation_series(SCRAPE.replace("} 45", "} 75").replace("} 10", "} 20").replace("} 20\n", "} 40\n", 1))
    values = rise(before, after).values
    assert values["num_draft_tokens"] == 30
    assert values["accepted_pos_0"] == 0


ENGINE_TIME = """\
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3"} 3
vllm:request_queue_time_seconds_sum{engine="0"} 0.5
vllm:request_queue_time_seconds_count{engine="0"} 3
vllm:request_queue_time_seconds_sum{engine="1"} 0.25
vllm:request_queue_time_seconds_count{engine="1"} 4
vllm:request_inference_time_seconds_sum{engine="0"} 1.5
vllm:request_inference_time_seconds_count{engine="0"} 3
vllm:request_inference_time_seconds_sum{engine="1"} 2.5
vllm:request_inference_time_seconds_count{engine="1"} 4
vllm:request_prefill_time_seconds_sum{engine="0"} 9.0
"""


def test_an_engines_own_time_is_summed_over_engines_and_is_no_counter_of_speculation() -> None:
    series = engine_time_series(ENGINE_TIME)
    found = rise({}, series)
    assert found.engine == {"requests": 7.0, "seconds": 4.75}
    assert (found.values, found.problems, found.restarted) == ({}, (), False)
    assert speculation_series(ENGINE_TIME) == {}
    text = ENGINE_TIME.replace("} 1.5", "} 2.0").replace('_count{engine="1"} 4', '_count{engine="1"} 6')
    drafts = speculation_series(SCRAPE)
    both = rise({**series, **drafts}, {**engine_time_series(text), **drafts})
    assert both.engine == {"requests": 2.0, "seconds": 0.5}
    assert both.values["num_drafts"] == 0


@pytest.mark.parametrize(
    "lost", ["queue_time_seconds_sum", "inference_time_seconds_count", "inference_time_seconds_sum"]
)
def test_an_engines_own_time_that_is_half_told_is_not_used(lost: str) -> None:
    series = engine_time_series(ENGINE_TIME)
    half = {key: value for key, value in series.items() if not key[0].endswith(lost)}
    assert rise({}, half).engine == {}
    assert not rise({}, half).restarted
    unlike = {key: value + ("queue" in key[0] and "count" in key[0]) for key, value in series.items()}
    assert rise({}, unlike).engine == {}


def test_an_engines_own_time_that_ran_backwards_shows_a_restart_where_nothing_drafts() -> None:
    series = engine_time_series(ENGINE_TIME)
    found = rise({key: value + 100 for key, value in series.items()}, series)
    assert found.restarted
    assert found.engine == {}
    assert all("the server was restarted or reset" in problem for problem in found.problems)


def test_counters_that_were_read_once_are_not_lost_when_the_next_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer("a", HttpOptions("http://127.0.0.1:9"))
    key: Series = ("vllm:request_queue_time_seconds_count", ())
    for readings, found in (
        ([{key: 1.0}, {key: 2.0}, None], {key: 2.0}),
        ([{key: 1.0}, {key: 1.0}], {key: 1.0}),
        ([None], None),
        ([{}], {}),
    ):
        left = iter(readings)
        monkeypatch.setattr(server, "_scrape", lambda left=left: next(left))
        assert server.counters() == found
        assert list(left) == []
    server.close()


def test_one_rank_that_starts_again_is_seen_though_the_sum_rises() -> None:
    before = speculation_series(SCRAPE)
    after = speculation_series(SCRAPE.replace("} 10", "} 1000").replace("} 5.0", "} 1"))
    found = rise(before, after)
    assert found.restarted
    assert found.values == {}
    assert "ran backwards" in found.problems[0]
    assert rise(before, {}).restarted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_accepted_tokens": 5, "num_draft_tokens": 4}, "5 accepted tokens of 4 drafted"),
        ({"num_drafts": 5, "num_draft_tokens": 4}, "5 drafts with 4 drafted tokens"),
        ({"num_drafts": 5, "accepted_pos_0": 6}, "6 drafts accepted at position 0, out of 5"),
        ({"num_drafts": 5, "accepted_pos_0": 2, "accepted_pos_1": 3}, "3 drafts accepted at position 1, out of 2"),
    ],
)
def test_counters_that_cannot_be_are_named(values: dict[str, float], words: str) -> None:
    assert any(words in problem for problem in impossible(values))


@given(st.text(max_size=200))
def test_any_text_can_be_scraped(text: str) -> None:
    assert all(isinstance(value, float) for value in speculation_series(text).values())


# Commands and URLs


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
)
def test_a_url_may_be_written_with_or_without_its_route(url: str) -> None:
    assert base_url(url) == "http://h:1"
    assert base_url(url.replace("h:1", "h:1/tenant")) == "http://h:1/tenant"


def test_the_embedded_command_is_one_that_breakeven_serve_parses() -> None:
    from breakeven.cli.main import app

    config = EmbeddedArm(
        type="embedded",
        threads=2,
        dtype="float32",
        speculation=Speculation(
            algorithm="ngram", num_steps=2, eagle_topk=2, num_draft_tokens=5, ngram_min=1, ngram_max=3,
            draft_model_path="/x", schedule=((1, 4, 2), (5, 8, 0)),
        ),
        flags=("--page-size", "32"),
    )  # fmt: skip
    command = serve_command(config)
    assert command[:4] == (sys.executable, "-m", "breakeven.cli.main", "serve")
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    arguments = [part.replace("{port}", "1234") for part in command[4:]]
    found = serve.make_context("serve", arguments).params
    assert found["port"] == 1234
    assert found["threads"] == 2
    assert found["speculative_num_draft_tokens"] == 5
    assert found["speculative_ngram_max"] == 3
    assert found["speculative_draft_model_path"] == "/x"
    assert found["speculative_num_steps_per_batch_size"] == "[[1,4,2],[5,8,0]]"
    assert found["page_size"] == 32


# Life and death


def _arm(script: dict[str, Any] | None = None, **fields: Any) -> Any:
    value = mock_arm(script, **fields)
    return make_arm("arm", CommandArm(**{**value, "command": tuple(value["command"])}))


def test_an_arm_starts_answers_resets_counts_and_is_gone_afterwards(tmp_path: Path) -> None:
    arm = _arm({"draft_tokens": 2, "tokens_per_chunk": 2})
    identity = arm.start(tmp_path / "log")
    try:
        ready = arm.wait_ready(PROBE)
        assert (ready.model, ready.version) == ("mock", "mock")
        before = arm.counters()
        arm.wait_ready(PROBE)
        arm.reset()
        assert rise(before, arm.counters()).values["num_drafts"] == QUICK["chunks"] - 1
        port = int(arm.endpoint("/x").url.split(":")[2].split("/")[0])
    finally:
        report = arm.stop()
    assert not report.killed
    assert _gone(identity.pid)
    assert port_is_free(port)
    assert arm.stop().exit_status is None  # again, and harmless


def test_a_server_that_never_gets_ready_is_told_with_the_reason(tmp_path: Path) -> None:
    arm = _arm({"never_ready": True}, startup_timeout_s=1.0)
    identity = arm.start(tmp_path / "log")
    try:
        with pytest.raises(
            StartError, match=r"not ready within 1 s \(startup_timeout_s\): .*/health answers with status"
        ):
            arm.wait_ready(PROBE)
    finally:
        arm.stop()
    assert _gone(identity.pid)


def test_a_wrong_flag_is_told_at_once_with_the_servers_own_words(tmp_path: Path) -> None:
    value = mock_arm()
    arm = make_arm("arm", CommandArm(**{**value, "command": (*value["command"], "--no-such-flag")}))
    arm.start(tmp_path / "log")
    try:
        with pytest.raises(StartError, match=r"exit status 2; its log ends:\n(.|\n)*unrecognized arguments"):
            arm.wait_ready(PROBE)
    finally:
        arm.stop()


def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    arm = make_arm("arm", CommandArm(type="command", command=("no-such-server", "{port}")))
    arm.start(tmp_path / "log")
    try:
        with pytest.raises(
            StartError, match="exit status 127; its log ends:\nno-such-server: there is no such command"
        ):
            arm.wait_ready(PROBE)
    finally:
        arm.stop()


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        arm = _arm(port=other.getsockname()[1])
        with pytest.raises(StartError, match=r"port \d+ is in use by another program"):
            arm.start(tmp_path / "log")
        assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("urls", "verified"),
    [
        (("http://host", None, None), False),
        (("https://host", None, None), True),
        (("HTTPS://host", None, None), True),
        (("http://host", None, "https://metrics"), True),
    ],
)
def test_certificates_are_checked_wherever_one_of_the_urls_is_secure(
    urls: tuple[str | None, ...], verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("breakeven.lab.arms.http.httpx.Client", lambda **options: asked.append(options["verify"]))
    control_client({}, True, urls)
    control_client({}, False, urls)
    assert asked == [verified, False]


def test_a_missing_key_is_told_by_the_variables_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    arm = make_arm("arm", AttachArm(type="attach", url="http://h", api_key_env="THE_KEY"))
    with pytest.raises(StartError, match="THE_KEY, which should hold the API key, is not set"):
        arm.start(tmp_path / "log")


@pytest.fixture
def mock() -> Iterator[MockProcess]:
    with MockProcess(MockScript(first_chunk_s=0.002, gap_s=0.001, chunks=3)) as server:
        yield server


def test_an_attached_server_is_left_running(mock: MockProcess, tmp_path: Path) -> None:
    arm = make_arm("arm", AttachArm(type="attach", url=mock.url + "/v1"))
    arm.start(tmp_path / "log")
    assert arm.wait_ready(PROBE).model == "mock"
    assert not arm.can_reset
    arm.stop()
    assert mock.process.poll() is None


def test_a_refused_request_is_told_at_once_and_a_failed_reset_is_an_error(mock: MockProcess, tmp_path: Path) -> None:
    mock.play(MockScript(http_status=400))
    arm = make_arm("arm", AttachArm(type="attach", url=mock.url, reset_url=mock.url + "/nothing"))
    arm.start(tmp_path / "log")
    with pytest.raises(StartError, match="the server refuses a small request like the measured ones: HTTP 400"):
        arm.wait_ready(PROBE)
    with pytest.raises(ResetError, match="answers with status 404"):
        arm.reset()
    arm.stop()


_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print(child.pid, flush=True)
time.sleep(99)
"""


def test_a_server_that_ignores_sigterm_goes_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = ServerProcess([sys.executable, "-c", _STUBBORN], log, {}, free_port())
    assert _wait_for(lambda: log.read_text().strip().isdigit())
    child = int(log.read_text())
    report = server.stop(0.2)
    assert report.killed
    assert _gone(server.pid)
    assert _gone(child)
    assert [p for p in report.problems if "memory" not in p] == []


def test_a_ctrl_c_while_stopping_still_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(99)"], tmp_path / "log", {}, None)

    def interrupted(timeout: float | None = None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server._popen, "terminate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop(5)
    assert _gone(server.pid)


_PARENT = """
import sys, time
from pathlib import Path
from breakeven.lab.arms.process import ServerProcess
server = ServerProcess([sys.executable, "-c", "import time; time.sleep(99)"], Path(sys.argv[1]), {}, None)
print(server.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(99)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux's kernel to end the server with its parent")
def test_a_lab_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    lab = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "log"), "wait"], stdout=subprocess.PIPE, text=True
    )
    assert lab.stdout is not None
    pid = int(lab.stdout.readline())
    # The guard asks the kernel just after its start; a lab that is gone before then is noticed by its number.
    os.kill(lab.pid, signal.SIGKILL)
    lab.communicate()
    assert _wait_for(lambda: _gone(pid))


def test_a_lab_that_ends_without_stopping_its_server_takes_it_along(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARENT, str(tmp_path / "log"), "leave"], capture_output=True, text=True, timeout=60
    )
    assert _wait_for(lambda: _gone(int(done.stdout)))


def test_a_leftover_is_killed_only_if_it_is_the_same_process(tmp_path: Path) -> None:
    from dataclasses import replace

    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(99)"], tmp_path / "log", {}, None)
    try:
        assert not kill_leftover(replace(server.identity, created=server.identity.created - 100))
        assert server.alive()
        assert kill_leftover(server.identity)
        assert _wait_for(lambda: not server.alive())
    finally:
        server.stop(1)
