"""Runs a compiled kernel on PyTorch's own OpenMP threads: a second pool would fight the first for the cores."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_ARCH_REQ_XCOMP_PERM = 0x1023  # Linux, arch_prctl: ask for the right to use tiles
_XFEATURE_XTILEDATA = 18
_SYS_ARCH_PRCTL = 158


@cache
def fork() -> Any:
    """libgomp's GOMP_parallel(function, data, threads, flags), or None where PyTorch runs on another OpenMP.

    The function runs once in each thread, the caller's included, and the call returns when all are done.
    """
    torch.get_num_threads()  # loads the library
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line}
    except OSError:
        return None
    if len(paths) != 1:
        return None
    function = ctypes.CDLL(paths.pop()).GOMP_parallel
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


@cache
def may_use_tiles() -> bool:
    """Whether the kernel lets this process use AMX: it must be asked once."""
    try:
        return ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
    except (OSError, AttributeError):
        return False
