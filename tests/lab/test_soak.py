"""Starting and stopping servers again and again leaves nothing behind: no process, port, file or thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_helpers import mock_arm

from breakeven.lab.arms import Probe, StartError, make_arm
from breakeven.lab.arms.process import port_is_free
from breakeven.lab.campaign import CommandArm

PROBE = Probe("/v1/chat/completions", lambda model: b'{"model": "%b", "messages": [], "stream": true}' % model.encode())


def _config(script: dict[str, Any] | None = None, **fields: Any) -> CommandArm:
    value = mock_arm(script, startup_timeout_s=30.0, **fields)
    return CommandArm(**{**value, "command": tuple(value["command"])})


def _held() -> tuple[int, int, set[int]]:
    """Open files and connections of this process, its threads, and its living descendants."""
    me = psutil.Process()
    children = {p.pid for p in me.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}
    return me.num_fds(), threading.active_count(), children


def _cycle(number: int, log: Path) -> None:
    """One life of a server; they differ in how they end."""
    if number % 10 == 9:  # it does not even start
        arm = make_arm("arm", CommandArm(type="command", command=("false", "{port}"), startup_timeout_s=30.0))
        arm.start(log)
        with pytest.raises(StartError, match="exit status 1"):
            arm.wait_ready(PROBE)
        assert arm.stop().problems == ()
        return
    arm = make_arm("arm", _config())
    identity = arm.start(log)
    assert identity is not None
    port = int(arm.endpoint("").url.rpartition(":")[2])
    if number % 5 != 4:  # else ended while it starts
        arm.wait_ready(PROBE)
        arm.reset()
        assert arm.counters() is not None
    if number % 5 == 3:
        os.kill(identity.pid, signal.SIGKILL)
    report = arm.stop()
    assert [p for p in report.problems if "less memory is free" not in p] == []  # other programs run beside this
    assert not psutil.pid_exists(identity.pid)
    assert port_is_free(port)


def _soak(numbers: Sequence[int], tmp_path: Path) -> None:
    _cycle(0, tmp_path / "log")  # what is made once and kept (threads of libraries, caches) is there from now on
    before = _held()
    files = sorted(tmp_path.iterdir())
    for number in numbers:
        _cycle(number, tmp_path / "log")
    assert _held() == before
    assert sorted(tmp_path.iterdir()) == files


def test_a_life_of_each_kind_leaves_nothing_behind(tmp_path: Path) -> None:
    _soak((0, 3, 4, 9), tmp_path)


@pytest.mark.slow
def test_a_hundred_lives_of_a_server_leave_nothing_behind(tmp_path: Path) -> None:
    _soak(range(100), tmp_path)
