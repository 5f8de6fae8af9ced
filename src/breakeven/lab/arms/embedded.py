"""The embedded engine as an arm: `breakeven serve` in a process of its own, driven over HTTP like any other server."""

from __future__ import annotations

import json
import sys

from breakeven.lab.arms.http import HttpOptions
from breakeven.lab.arms.launched import HOST, PORT, LaunchedArm
from breakeven.lab.campaign import EmbeddedArm, Speculation


def serve_command(config: EmbeddedArm) -> tuple[str, ...]:
    """The command line, with {port} where the port goes."""
    command = [sys.executable, "-m", "breakeven.cli.main", "serve"]
    command += ["--model", config.model, "--dtype", config.dtype, "--device", config.device]
    command += ["--host", HOST, "--port", PORT]
    if config.threads is not None:
        command += ["--threads", str(config.threads)]
    if isinstance(config.speculation, Speculation):
        command += speculation_flags(config.speculation)
    return (*command, *config.flags)


def speculation_flags(speculation: Speculation) -> list[str]:
    """`breakeven serve`'s flags for a speculation; what is not set is left to its defaults."""
    flags: list[str] = []
    for name, value in speculation.model_dump(exclude_none=True).items():
        if name == "schedule":
            flags += ["--speculative-num-steps-per-batch-size", json.dumps(value, separators=(",", ":"))]
            continue
        flags += [f"--speculative-{name.replace('_', '-')}", str(value)]
    return flags


def embedded_arm(name: str, config: EmbeddedArm) -> LaunchedArm:
    """An arm for `breakeven serve`."""
    return LaunchedArm(
        name,
        serve_command(config),
        HttpOptions("", reset_url="/reset_prefix_cache"),
        port=config.port,
        env={"BREAKEVEN_API_KEY": None, **config.env},  # a key that the user's shell holds is not for this server
        startup_timeout_s=config.startup_timeout_s,
        stop_timeout_s=config.stop_timeout_s,
    )
