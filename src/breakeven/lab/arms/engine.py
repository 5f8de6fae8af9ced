"""An engine's arm: the launch that follows from its configuration, started, driven and ended like any other server."""

from __future__ import annotations

from breakeven.lab.arms.http import HttpOptions
from breakeven.lab.arms.launched import LaunchedArm
from breakeven.lab.engines import EngineArm, EngineSpeculation, TrtLlmArm
from breakeven.lab.engines.traps import NOT_INHERITED

_KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY", "SGLANG_API_KEY")  # a key that the user's shell holds is not for this server


def _drafted_per_round(config: EngineArm) -> int | None:
    """TensorRT-LLM counts drafted tokens and no rounds; without a schedule or a tree all rounds are alike."""
    speculation = config.speculation
    if not isinstance(config, TrtLlmArm) or not isinstance(speculation, EngineSpeculation):
        return None
    return None if speculation.schedule is not None or speculation.is_tree else speculation.depth


def engine_arm(name: str, config: EngineArm) -> LaunchedArm:
    """An arm for an engine that the lab starts."""
    launch = config.launch()
    options = HttpOptions(
        "",
        model=config.served_model_name,
        reset_url=launch.reset_path,
        metrics_url=launch.metrics_path,
        drafted_per_round=_drafted_per_round(config),
    )
    return LaunchedArm(
        name,
        launch.command,
        options,
        port=config.port,
        env={**dict.fromkeys((*_KEYS, *NOT_INHERITED)), **launch.env},
        startup_timeout_s=config.startup_timeout_s,
        stop_timeout_s=config.stop_timeout_s,
        continuous_usage=config.continuous_usage,
        host=config.bind,
        files=launch.files,
        address=config.address,
        ssh=config.ssh,
    )
