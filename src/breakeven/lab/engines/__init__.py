"""Engines that the lab can start: their arms in a campaign file, translated to command lines. Pure."""

from __future__ import annotations

from breakeven.lab.engines.base import EngineArm, Launch
from breakeven.lab.engines.llamacpp import LlamaCppArm
from breakeven.lab.engines.sglang import SglangArm
from breakeven.lab.engines.speculation import METHODS, EngineSpeculation, RefusedError
from breakeven.lab.engines.trtllm import TrtLlmArm
from breakeven.lab.engines.vllm import VllmArm

__all__ = [
    "METHODS",
    "EngineArm",
    "EngineSpeculation",
    "Launch",
    "LlamaCppArm",
    "RefusedError",
    "SglangArm",
    "TrtLlmArm",
    "VllmArm",
]
