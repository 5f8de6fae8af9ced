"""Small campaigns on mock servers, and a way to run one in a process that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from breakeven.lab.campaign import Campaign
from breakeven.lab.events import Event
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.records import RunDirectory
from breakeven.lab.runner import CampaignRunner, Outcome, prepare

QUICK = {"first_chunk_s": 0.002, "gap_s": 0.001, "chunks": 6}


def mock_arm(script: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A `command` arm that starts the mock server with a script."""
    command = [sys.executable, "-m", "breakeven.lab.mock", "--port", "{port}"]
    command += ["--script", json.dumps({**QUICK, **(script or {})})]
    return {"type": "command", "command": command, "reset_url": "/reset_prefix_cache", **fields}


def campaign(arms: dict[str, Any] | None = None, **fields: Any) -> Campaign:
    """2 arms, 1 domain, 2 levels, 2 blocks: 8 cells, unless said otherwise."""
    value: dict[str, Any] = {
        "name": "test",
        "arms": arms or {"off": mock_arm(), "on": mock_arm({"draft_tokens": 3, "tokens_per_chunk": [1, 3]})},
        "baseline": "off",
        "workload": {"domains": ["coding"], "max_tokens": 32, "request_timeout_s": 20.0},
        "levels": [1, 3],
        "requests": {"requests_per_stream": 1, "min_requests": 3},
        "blocks": 2,
        "warmup": {"requests": 1},
        "client": {"calibration": "off"},
        "gates": {"max_send_lag_ms": 5000, "max_client_cpu_share": 1.0},
    }
    value.update(fields)
    return Campaign.model_validate_json(json.dumps(value))


def execute(
    path: Path, given: Campaign, on_event: Callable[[Event], None] = lambda event: None
) -> tuple[RunDirectory, Outcome]:
    """Runs a campaign, or what is left of it, into a directory."""
    schedule = build_schedule(given, load_suites(given))
    if RunDirectory.is_run(path):
        run = RunDirectory.open(path)
    else:
        run = RunDirectory.create(path, given, "", prepare(given, schedule))
    return run, CampaignRunner(run, given, schedule, on_event=on_event).execute()


def start_in_process(path: Path, given: Campaign) -> subprocess.Popen[bytes]:
    """The same in a process of its own."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import run_helpers as h; "
        "from breakeven.lab.campaign import Campaign; "
        "h.execute(Path(sys.argv[2]), Campaign.model_validate_json(sys.argv[3]))"
    )
    folder = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", code, folder, str(path), given.model_dump_json()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ},
    )


def servers_left(run: RunDirectory) -> list[int]:
    """The servers of a run that are still alive."""
    left = []
    for event in run.read_journal():
        if event.get("event") == "arm_started" and event.get("pid"):
            try:
                process = psutil.Process(event["pid"])
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and abs(process.create_time() - event["pid_created"]) < 1:
                    left.append(event["pid"])
            except psutil.Error:
                pass
    return left
