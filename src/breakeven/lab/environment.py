"""Where and with what a campaign is measured: versions, processor, memory, GPUs, load, commands. No secrets.

Whatever this machine does not tell is null; collecting never fails.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("breakeven", "numpy", "scipy", "pyarrow", "pydantic", "torch", "tokenizers", "transformers", "uvicorn")
_GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "power.limit",
    "persistence_mode",
)
_COMMAND_TIMEOUT_S = 10


def collect(commands: Mapping[str, Sequence[str]], invocation: Sequence[str] = ()) -> dict[str, Any]:
    """Everything, as JSON holds it. `commands`: each arm's server command. `invocation`: how the lab was called."""
    return {
        "collected": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "invocation": list(invocation),
        "commands": {arm: list(command) for arm, command in commands.items()},
        "versions": versions(),
        "system": {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "host": platform.node(),
            "in_container": _in_container(),
        },
        "cpu": cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
        "load_average": load_average(),
        "git_commit": _git_commit(Path(__file__).parent),
        "variables": {
            name: os.environ[name]
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "KMP_AFFINITY", "LD_PRELOAD")
            if name in os.environ
        },
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter, null where one is not installed; imports none of them."""
    found: dict[str, str | None] = {"python": platform.python_version(), "implementation": sys.implementation.name}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["breakeven"] is None:  # run from a source tree
        from breakeven import __version__

        found["breakeven"] = __version__
    return found


def cpu() -> dict[str, Any]:
    """The processor: model, cores, those this process may use, governor, frequency and its limits in MHz."""
    frequency = None
    with suppress(Exception):  # psutil fails in its own ways on virtual machines
        frequency = psutil.cpu_freq()
    return {
        "model": _cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "turbo_off": _read("/sys/devices/system/cpu/intel_pstate/no_turbo"),
        "frequency_mhz": frequency.current if frequency else None,
        "frequency_max_mhz": (frequency.max or None) if frequency else None,
    }


def gpus() -> list[dict[str, str]]:
    """One entry per NVIDIA GPU, as nvidia-smi describes it; empty where there is none."""
    output = _run("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in (output or "").splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(_GPU_FIELDS)]


def load_average() -> list[float] | None:
    """Runnable processes over the last 1, 5 and 15 minutes."""
    with suppress(OSError, AttributeError):
        return [round(value, 2) for value in os.getloadavg()]
    return None


def moment() -> dict[str, Any]:
    """What may drift during a campaign, noted with each cell: load, frequency, temperature, free memory."""
    frequency = None
    with suppress(Exception):
        current = psutil.cpu_freq()
        frequency = round(current.current, 1) if current else None
    temperature = None
    with suppress(Exception):
        sensors = [entry.current for group in psutil.sensors_temperatures().values() for entry in group]
        temperature = max(sensors) if sensors else None
    return {
        "load_average": load_average(),
        "cpu_mhz": frequency,
        "temperature_c": temperature,
        "memory_available_bytes": psutil.virtual_memory().available,
    }


def _cpu_model() -> str | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.lower().startswith(("model name", "hardware", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _in_container() -> bool:
    return (
        Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ
    )


def _git_commit(folder: Path) -> str | None:
    """The commit of the source tree that runs, with a plus if it was changed; null for an installed package."""
    commit = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _run("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed else "")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _run(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
