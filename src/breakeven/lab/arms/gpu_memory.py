"""Whether the GPUs' memory is back to where it was, by NVML (the optional package nvidia-ml-py)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_SLACK = 256 * 2**20  # bytes that may be missing afterwards: drivers keep some
_WAIT_S, _POLL_S = 15.0, 0.25
NOT_INSTALLED = "not checked: nvidia-ml-py is not installed (pip install breakeven[gpu])"
NO_GPU = "not checked: NVML finds no GPU"


def used_memory() -> Mapping[str, int] | str:
    """Bytes in use on each GPU of this machine, by UUID; where that cannot be told, why."""
    try:
        pynvml: Any = importlib.import_module("pynvml")  # by name: the lab must not need it
    except ImportError:
        return NOT_INSTALLED
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return NO_GPU
    try:
        found: dict[str, int] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name: Any = pynvml.nvmlDeviceGetUUID(handle)
            found[name.decode() if isinstance(name, bytes) else str(name)] = int(
                pynvml.nvmlDeviceGetMemoryInfo(handle).used
            )
        return found or NO_GPU
    except pynvml.NVMLError as problem:
        return f"not checked: NVML says {problem}"
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def not_returned(before: Mapping[str, int], after: Mapping[str, int], slack: int = _SLACK) -> dict[str, int]:
    """Bytes that are in use on each GPU beyond what was before, where that is more than the slack. Pure."""
    extra = {name: after.get(name, 0) - used for name, used in before.items()}
    return {name: size for name, size in extra.items() if size > slack}


class GpuMemory:
    """What was in use when this was made, to be compared after a server has ended."""

    def __init__(self, read: Callable[[], Mapping[str, int] | str] = used_memory) -> None:
        self._read = read
        self._before = read()

    def returned(self, wait_s: float = _WAIT_S) -> tuple[str, str]:
        """(a problem or nothing, what was found), having waited for a driver that takes its time."""
        if isinstance(self._before, str):
            return "", self._before
        deadline = time.monotonic() + wait_s
        while True:
            after = self._read()
            if isinstance(after, str):
                return "", after
            extra = not_returned(self._before, after)
            if not extra:
                return "", f"back to where it was on {len(self._before)} GPU{'s' if len(self._before) > 1 else ''}"
            if time.monotonic() >= deadline:
                told = ", ".join(f"{size / 2**20:.0f} MiB on {name}" for name, size in extra.items())
                return f"GPU memory is not back {wait_s:g} s after the server ended: {told}", "not back"
            time.sleep(_POLL_S)
