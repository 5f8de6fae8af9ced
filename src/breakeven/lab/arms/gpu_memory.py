"""Whether the GPUs' memory is back to where it was, by NVML (the optional package nvidia-ml-py)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_SLACK = 256 * 2**20  # bytes that may be missing afterwards: drivers keep some
_WAIT_S, _POLL_S = 15.0, 0.25
NOT_INSTALLED = "not checked: nvidia-ml-py is not installed (pip install breakeven[gpu])"
NO_GPU = "not checked: NVML finds no GPU"
NO_GPU_OF_ITS_OWN = "not checked: the server has none of this machine's GPUs"


def visible(variable: str | None) -> tuple[str, ...] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number or UUID; None for all of them, () for none. Pure.

    A slice of a GPU (MIG) has no memory of its own in NVML's list, so all GPUs are looked at then.
    """
    if variable is None:
        return None
    names = tuple(name.strip() for name in variable.split(",") if name.strip() not in ("", "-1", "NoDevFiles"))
    return None if any(name.startswith("MIG-") for name in names) else names


def used_memory(gpus: Sequence[str] | None = None) -> Mapping[str, int] | str:
    """Bytes in use on each of the named GPUs of this machine (None: all), by UUID; where that cannot be told, why.

    Numbers are NVML's, which are CUDA's too where CUDA_DEVICE_ORDER is PCI_BUS_ID, or all GPUs are of one kind.
    """
    if gpus is not None and not gpus:
        return NO_GPU_OF_ITS_OWN
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
            told: Any = pynvml.nvmlDeviceGetUUID(handle)
            name = told.decode() if isinstance(told, bytes) else str(told)
            if gpus is None or any(gpu == str(index) or name.startswith(gpu) for gpu in gpus):
                found[name] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        return found or (NO_GPU if gpus is None else NO_GPU_OF_ITS_OWN)
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
    """What was in use when this was made, to be compared after a server has ended. `gpus`: None for all, () for none.

    Only the server's own are compared: what others do on other GPUs meanwhile is not its doing.
    """

    def __init__(
        self,
        gpus: Sequence[str] | None = None,
        read: Callable[[Sequence[str] | None], Mapping[str, int] | str] = used_memory,
    ) -> None:
        self._gpus = gpus
        self._read = read
        self._before = read(gpus)

    def returned(self, wait_s: float = _WAIT_S) -> tuple[str, str]:
        """(a problem or nothing, what was found), having waited for a driver that takes its time."""
        if isinstance(self._before, str):
            return "", self._before
        deadline = time.monotonic() + wait_s
        while True:
            after = self._read(self._gpus)
            if isinstance(after, str):
                return "", after
            extra = not_returned(self._before, after)
            if not extra:
                return "", f"back to where it was on {len(self._before)} GPU{'s' if len(self._before) > 1 else ''}"
            if time.monotonic() >= deadline:
                told = ", ".join(f"{size / 2**20:.0f} MiB on {name}" for name, size in extra.items())
                return f"GPU memory is not back {wait_s:g} s after the server ended: {told}", "not back"
            time.sleep(_POLL_S)
