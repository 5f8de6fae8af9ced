"""Servers elsewhere: over ssh (a stand-in for it runs the script here), and by commands of the user's own."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_helpers import QUICK, campaign, execute

from breakeven.lab.analysis import analyse
from breakeven.lab.arms import Probe, ResetError, StartError, make_arm
from breakeven.lab.arms.process import answers_at, free_port, port_is_free
from breakeven.lab.arms.remote import first_line, group_is_gone, process_group, ssh_command, start_script
from breakeven.lab.campaign import AttachArm, Campaign
from breakeven.lab.mock import MockProcess, MockScript
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import RunDirectory
from breakeven.lab.runner import prepare

PROBE = Probe("/v1/chat/completions", lambda model: b'{"model": "%b", "messages": [], "stream": true}' % model.encode())

# Options and destination are passed over; what is left is run by a shell, as sshd does it.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift;; esac; shift; done
test "$1" = nobody@nowhere && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
shift
exec sh -c "$*"
"""

# Takes the place of an engine: llama-server's command line, the mock's behaviour.
ENGINE = f"""#!{sys.executable}
import json, os, sys
a = sys.argv
port = a[a.index("--port") + 1]
print("variable", os.environ.get("THE_VARIABLE"), flush=True)
mock = ["-m", "breakeven.lab.mock", "--port", port, "--script", {json.dumps(QUICK)!r}]
os.execv(sys.executable, [sys.executable, *mock])
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("ssh", SSH), ("engine", ENGINE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return str(folder / "engine")


def remote(engine: str, **fields: Any) -> dict[str, Any]:
    given = {"type": "llamacpp", "model": "m", "executable": engine, "ssh": "me@far", "host": "127.0.0.1"}
    return {**given, "port": free_port(), "env": {"THE_VARIABLE": "a b'c"}, "stop_timeout_s": 5, **fields}


def config(arm: dict[str, Any]) -> Any:
    return campaign({"off": arm, "on": arm}, baseline="off").arms["off"]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def members(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found


def test_a_server_over_ssh_is_started_measured_and_proved_gone(engine: str, tmp_path: Path) -> None:
    given = remote(engine)
    arm = make_arm("far", config(given))
    log = tmp_path / "log"
    arm.start(log)
    ready = arm.wait_ready(PROBE)
    assert ready.model
    assert arm.alive()
    group = process_group(log.read_text())
    assert group is not None
    assert members(group)
    report = arm.stop()
    assert report.problems == ()
    assert not report.killed
    assert report.gpu == "not checked: the GPUs are on another machine"
    assert members(group) == []
    assert port_is_free(given["port"])
    assert "variable a b'c" in log.read_text()


def test_variables_stand_in_no_command_line(engine: str, tmp_path: Path) -> None:
    arm = make_arm("far", config(given := remote(engine, env={"THE_VARIABLE": "a-secret"})))
    try:
        identity = arm.start(tmp_path / "log")
        assert identity is not None
        arm.wait_ready(PROBE)
        lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
        assert any(str(given["port"]) in line for line in lines)
        assert not any("a-secret" in line for line in lines)
        assert "variable a-secret" in (tmp_path / "log").read_text()
    finally:
        arm.stop()
    assert first_line({"A": None}) == b""


def test_what_answers_there_already_is_not_taken_for_the_server(engine: str, tmp_path: Path) -> None:
    with MockProcess(MockScript(**QUICK)) as mock:
        arm = make_arm("far", config(remote(engine, port=int(mock.url.rpartition(":")[2]))))
        with pytest.raises(StartError, match=r"something already answers at 127\.0\.0\.1:\d+, and would be measured"):
            arm.start(tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_forwarded_port_with_nothing_behind_it_is_no_server() -> None:
    with socket.socket() as forwarder:
        forwarder.bind(("127.0.0.1", 0))
        forwarder.listen()
        port = forwarder.getsockname()[1]
        hanging_up = threading.Thread(target=lambda: forwarder.accept()[0].close())
        hanging_up.start()
        assert not answers_at("127.0.0.1", port)
        hanging_up.join()
    assert not answers_at("127.0.0.1", port)


def test_a_shells_greeting_does_not_hide_that_the_group_is_gone(engine: str) -> None:
    ssh = Path(engine).with_name("ssh")
    ssh.write_text(SSH.replace("shift\nexec", "shift\necho Welcome to gone left\nexec"))
    assert group_is_gone("me@far", os.getpgid(0)) is False
    child = subprocess.Popen(["true"], start_new_session=True)
    child.wait()
    assert group_is_gone("me@far", child.pid) is True


def test_the_far_server_dies_with_the_lab(engine: str, tmp_path: Path) -> None:
    """The connection ends without a word: what is on the far side must not stay."""
    arm = make_arm("far", config(remote(engine)))
    log = tmp_path / "log"
    identity = arm.start(log)
    assert identity is not None
    arm.wait_ready(PROBE)
    group = process_group(log.read_text())
    assert group is not None
    script = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); p.wait()"
    arm.stop()
    # The same script, held by a process that is killed as a lab would be.
    command = [engine, "--port", str(free_port())]
    holder = subprocess.Popen(
        [sys.executable, "-c", script, *ssh_command("me@far", start_script(command, {}, {}, "/none", 2))],
        stdout=(out := (tmp_path / "out").open("w")),
    )
    assert wait_for(lambda: process_group((tmp_path / "out").read_text()) is not None)
    started = process_group((tmp_path / "out").read_text())
    assert started is not None
    assert wait_for(lambda: bool(members(started)))
    holder.kill()
    holder.wait()
    out.close()
    assert wait_for(lambda: members(started) == [])


def test_a_far_machine_that_is_not_there_is_told_in_sshs_words(engine: str, tmp_path: Path) -> None:
    arm = make_arm("far", config(remote(engine, ssh="nobody@nowhere")))
    arm.start(tmp_path / "log")
    with pytest.raises(StartError, match="Could not resolve hostname nowhere"):
        arm.wait_ready(PROBE)
    assert arm.stop().problems == ()


def test_a_far_server_that_ends_by_itself_is_told_with_its_status(engine: str, tmp_path: Path) -> None:
    arm = make_arm("far", config(remote("/no/such/engine")))
    arm.start(tmp_path / "log")
    with pytest.raises(StartError, match=r"(?s)exit status 127.*no/such/engine"):
        arm.wait_ready(PROBE)
    arm.stop()


def test_files_travel_with_the_script(engine: str, tmp_path: Path) -> None:
    text = "a: 'ü'\nb: $HOME `x`\n"
    script = start_script(["cat", f"{tmp_path}/there/f.yaml"], {}, {"f.yaml": text}, f"{tmp_path}/there", 1)
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.read()  # ends with the server, though the leash is still held
        assert process.wait() == 0
    assert text in told
    assert not (tmp_path / "there").exists()


def test_a_campaign_with_a_far_arm_runs(engine: str, tmp_path: Path) -> None:
    given = campaign({"here": remote(engine, ssh=None, host=None, port=None), "far": remote(engine)}, baseline="here")
    run, outcome = execute(tmp_path / "run", given.model_copy(update={"blocks": 1}))
    assert not outcome.invalid
    assert all(e["problems"] == [] for e in run.read_journal() if e["event"] == "arm_stopped")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": None}, "needs a port"),
        ({"ssh": "-oProxyCommand=x"}, "not a destination of ssh"),
        ({"ssh": "a b"}, "not a destination of ssh"),
        ({"ssh": None, "host": "far"}, "cannot be 'far'"),
    ],
)
def test_what_cannot_be_started_elsewhere_is_refused(engine: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(remote(engine, **fields))


def test_far_servers_are_reached_by_their_name_and_listen_everywhere(engine: str) -> None:
    far = config(remote(engine, host=None, ssh="me@gpu7"))
    assert (far.address, far.bind) == ("gpu7", "0.0.0.0")
    named = config(remote(engine, host="10.0.0.7", ssh="me@gpu7"))
    assert (named.address, named.bind) == ("10.0.0.7", "0.0.0.0")
    near = config(remote(engine, ssh=None, host=None))
    assert (near.address, near.bind) == ("127.0.0.1", "127.0.0.1")


# Commands of the user's own


def hooks(url: str, tmp_path: Path, **commands: str) -> dict[str, Any]:
    told = {f"{name}_command": ["sh", "-c", text] for name, text in commands.items()}
    return {"type": "attach", "url": url, "startup_timeout_s": 20, **told}


def test_commands_bring_a_server_up_and_down_and_empty_its_cache(tmp_path: Path) -> None:
    port = free_port()
    start = (
        f"{sys.executable} -m breakeven.lab.mock --port {port} --script '{json.dumps(QUICK)}' >/dev/null 2>&1 & "
        f"echo $! > {tmp_path}/pid; echo started"
    )
    arms = {
        name: hooks(
            f"http://127.0.0.1:{port}",
            tmp_path,
            start=start,
            stop=f"kill $(cat {tmp_path}/pid); echo stopped >> {tmp_path}/seen",
            reset=f"echo reset >> {tmp_path}/seen",
        )
        for name in ("a", "b")
    }
    given = campaign(arms, baseline="a", blocks=1, levels=[1])
    assert not given.salts_prompts
    run, outcome = execute(tmp_path / "run", given)
    assert not outcome.invalid
    assert (tmp_path / "seen").read_text().split() == ["reset", "stopped"] * 2
    assert port_is_free(port)
    assert not any("attached, so not launched anew" in lint.message for lint in analyse(run).lints)
    assert "started" in run.log_path(0, "a").read_text()


def attached(**fields: Any) -> AttachArm:
    value = {"arms": {"a": {"type": "attach", **fields}, "b": {"type": "embedded"}}, "baseline": "b"}
    arm = Campaign.model_validate_json(json.dumps(value)).arms["a"]
    assert isinstance(arm, AttachArm)
    return arm


def test_a_command_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    arm = make_arm("a", attached(url="http://127.0.0.1:1", start_command=["sh", "-c", "echo no such pod; exit 3"]))
    with pytest.raises(StartError, match="start_command failed with exit status 3: no such pod"):
        arm.start(tmp_path / "log")
    arm = make_arm("a", attached(url="http://127.0.0.1:1", start_command=["no-such-command"]))
    with pytest.raises(StartError, match="start_command cannot be run: no-such-command"):
        arm.start(tmp_path / "log")
    slow = attached(url="http://127.0.0.1:1", start_command=["sleep", "60"], command_timeout_s=0.1)
    with pytest.raises(StartError, match=r"start_command did not end within 0\.1 s"):
        make_arm("a", slow).start(tmp_path / "log")


def test_a_reset_that_fails_and_a_server_that_stays_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakeven.lab.arms.attach._SILENCE_S", 0.2)
    url = f"http://127.0.0.1:{free_port()}"
    commands = {"start_command": ["sh", "-c", background(url, tmp_path)], "stop_command": ["true"]}
    arm = make_arm("a", attached(url=url, reset_command=["false"], startup_timeout_s=20, **commands))
    arm.start(tmp_path / "log")
    try:
        arm.wait_ready(PROBE)
        with pytest.raises(ResetError, match="reset_command failed with exit status 1"):
            arm.reset()
        report = arm.stop()
        assert report.problems == (f"{url} still answers 0.2 s after stop_command",)
        assert arm.stop().problems == ()  # only once
        again = make_arm("a", attached(url=url, **commands))
        with pytest.raises(StartError, match="something already answers at"):
            again.start(tmp_path / "log")
        assert again.stop().problems == ()  # what is not its own is not stopped
    finally:
        subprocess.run(["sh", "-c", f"kill $(cat {tmp_path}/pid)"], check=True)


def background(url: str, tmp_path: Path) -> str:
    """A start_command of a shell: the mock server, its process number in a file."""
    return (
        f"{sys.executable} -m breakeven.lab.mock --port {url.rpartition(':')[2]} --script '{json.dumps(QUICK)}' "
        f">/dev/null 2>&1 & echo $! > {tmp_path}/pid"
    )


class _Proxy(http.server.BaseHTTPRequestHandler):
    """An ingress with nothing behind it."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *args: Any) -> None:
        pass


def test_a_proxy_that_says_that_nothing_is_behind_it_is_no_server(tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        arm = make_arm("a", attached(url=url, start_command=["true"], stop_command=["true"]))
        arm.start(tmp_path / "log")
        assert arm.stop().problems == ()
        proxy.shutdown()


def test_a_killed_runs_server_is_stopped_before_the_first_launch_of_a_resume(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    stop = f"kill $(cat {tmp_path}/pid); echo stopped >> {tmp_path}/seen"
    arms = {name: hooks(url, tmp_path, start=background(url, tmp_path), stop=stop) for name in ("a", "b")}
    given = campaign(arms, baseline="a", blocks=1, levels=[1])
    schedule = build_schedule(given, load_suites(given))
    run = RunDirectory.create(tmp_path / "run", given, "", prepare(given, schedule))
    make_arm("a", given.arms["a"]).start(tmp_path / "log")
    with run.lock():
        run.journal("arm_started", block=0, arm="a", launch=1, pid=None, pid_created=None, command=[])
    told: list[str] = []
    run, outcome = execute(tmp_path / "run", given, lambda event: told.append(str(event)))
    assert not outcome.invalid
    assert not outcome.start_failures
    assert (tmp_path / "seen").read_text().split() == ["stopped"] * 3
    assert any("an earlier start had left its server running: ran its stop_command" in words for words in told)


def test_commands_that_cannot_keep_servers_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="stop_command without start_command"):
        attached(url="http://h", stop_command=["true"])
    alone = {"type": "attach", "url": "http://h:1/v1", "start_command": ["true"]}
    with pytest.raises(ValueError, match="no stop_command, and b is at the same URL"):
        campaign({"a": alone, "b": {"type": "attach", "url": "http://h:1"}}, baseline="a")
    with pytest.raises(ValueError, match="no stop_command, and a-aa is at the same URL"):
        campaign({"a": alone, "b": {"type": "attach", "url": "http://h:2"}}, baseline="a", aa=True)
    assert attached(**{k: v for k, v in alone.items() if k != "type"}).stop_command is None


def test_one_way_to_reset_is_enough() -> None:
    with pytest.raises(ValueError, match="not both"):
        attached(url="http://h", reset_url="http://h/r", reset_command=["true"])
