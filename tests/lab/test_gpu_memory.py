"""GPU memory before a server and after it, by an NVML that is made up."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakeven.lab.arms.gpu_memory import (
    NO_GPU,
    NO_GPU_OF_ITS_OWN,
    NOT_INSTALLED,
    GpuMemory,
    not_returned,
    used_memory,
    visible,
)

MIB = 2**20


class NvmlError(Exception):
    pass


def install(monkeypatch: pytest.MonkeyPatch, used: list[int], fails: str = "") -> ModuleType:
    class Memory:
        def __init__(self, bytes_used: int) -> None:
            self.used = bytes_used

    module: Any = ModuleType("pynvml")
    module.NVMLError = NvmlError

    def nothing() -> None:
        if fails == "init":
            raise NvmlError("driver not loaded")

    module.nvmlInit = nothing
    module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: len(used)
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}".encode() if handle else "GPU-0"

    def memory(handle: int) -> Memory:
        if fails == "memory":
            raise NvmlError("no permission")
        return Memory(used[handle])

    module.nvmlDeviceGetMemoryInfo = memory
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_memory_is_read_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [5, 7])
    assert used_memory() == {"GPU-0": 5, "GPU-1": 7}


def test_only_the_servers_own_gpus_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [5, 7, 0]
    install(monkeypatch, used)
    assert used_memory(("1",)) == used_memory(("GPU-1",)) == {"GPU-1": 7}
    assert used_memory(()) == used_memory(("9",)) == NO_GPU_OF_ITS_OWN
    memory = GpuMemory(("1", "2"))
    used[0] = 900 * MIB  # somebody else's
    assert memory.returned(0.0) == ("", "back to where it was on 2 GPUs")
    used[2] = 900 * MIB
    assert memory.returned(0.0)[0].endswith("900 MiB on GPU-2")


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [(None, None), ("0,3", ("0", "3")), (" GPU-ab , 1", ("GPU-ab", "1")), ("", ()), ("-1", ()), ("MIG-1", None)],
)
def test_the_servers_gpus_are_those_that_cuda_shows_it(variable: str | None, gpus: tuple[str, ...] | None) -> None:
    assert visible(variable) == gpus


def test_what_keeps_it_from_being_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert used_memory() == NOT_INSTALLED
    assert GpuMemory().returned() == ("", NOT_INSTALLED)
    install(monkeypatch, [], fails="init")
    assert used_memory() == NO_GPU
    install(monkeypatch, [1], fails="memory")
    assert used_memory() == "not checked: NVML says no permission"
    install(monkeypatch, [])
    assert used_memory() == NO_GPU


def test_memory_that_comes_back_late_is_waited_for() -> None:
    readings = iter([{"a": 0}, {"a": 900 * MIB}, {"a": 100 * MIB}])
    memory = GpuMemory(None, lambda gpus: next(readings))
    assert memory.returned(5.0) == ("", "back to where it was on 1 GPU")


def test_memory_that_does_not_come_back_is_a_problem() -> None:
    readings = iter([{"a": 0, "b": 0}, {"a": 0, "b": 900 * MIB}])
    problem, _ = GpuMemory(None, lambda gpus: next(readings)).returned(0.0)
    assert problem == "GPU memory is not back 0 s after the server ended: 900 MiB on b"


_USED = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**6))


@given(_USED, _USED, st.integers(0, 1000))
def test_only_what_exceeds_the_slack_is_missing(
    before: Mapping[str, int], after: Mapping[str, int], slack: int
) -> None:
    found = not_returned(before, after, slack)
    for name in {*before, *after}:
        over = name in before and after.get(name, 0) - before[name] > slack
        assert (name in found) == over
