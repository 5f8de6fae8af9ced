"""Kernels for CPUs with AMX and AVX-512, compiled by numba when a model is loaded; PyTorch's serve everywhere else."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
from functools import cache

logger = logging.getLogger("breakeven.engine")

_FEATURES = frozenset(("amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"))


@cache
def missing() -> str | None:
    """Why the kernels cannot be used here, or None if they can. BREAKEVEN_CPU_KERNELS=0 turns them off."""
    if os.environ.get("BREAKEVEN_CPU_KERNELS", "1") == "0":
        return "BREAKEVEN_CPU_KERNELS is 0"
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.partition(":")[2].split() for line in file if line.startswith("flags")), [])
    except OSError:
        flags = []
    lacking = sorted(_FEATURES.difference(flags))
    if lacking:
        return f"the CPU lacks {', '.join(lacking)}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    from breakeven.engine.cpu import team

    if team.fork() is None:
        return "PyTorch does not run on libgomp's threads here"
    if not team.may_use_tiles():
        return "the kernel does not grant AMX to this process"
    start = time.perf_counter()
    try:
        importlib.import_module("breakeven.engine.cpu.ops")
    except Exception as error:  # whatever numba or LLVM make of this machine, PyTorch can serve it
        logger.warning("the CPU kernels could not be compiled, so PyTorch's are used: %s", error)
        return f"the kernels could not be compiled: {error}"
    logger.info("CPU kernels for AMX ready after %.1f s", time.perf_counter() - start)
    return None


def available() -> bool:
    """Whether the kernels can be used in this process; the first call compiles them, or loads numba's cached code."""
    return missing() is None
