"""Engines that the lab can start: their arms in a campaign file, translated to command lines. Pure."""

from __future__ import annotations

from breakeven.lab.engines import llamacpp, sglang, trtllm, vllm
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
    "launch_of",
]


def launch_of(arm: EngineArm) -> Launch:
    """How an arm's server is started. TypeError for an engine that is not known here."""
    match arm:
        case VllmArm():
            return vllm.launch(arm)
        case SglangArm():
            return sglang.launch(arm)
        case LlamaCppArm():
            return llamacpp.launch(arm)
        case TrtLlmArm():
            return trtllm.launch(arm)
    raise TypeError(f"no launch is known for {type(arm).__name__}")
