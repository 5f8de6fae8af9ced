"""From an arm's configuration to the arm."""

from __future__ import annotations

from breakeven.lab.arms.attach import Attached
from breakeven.lab.arms.base import Arm
from breakeven.lab.arms.embedded import embedded_arm
from breakeven.lab.arms.engine import engine_arm
from breakeven.lab.arms.http import HttpOptions, authorised
from breakeven.lab.arms.launched import LaunchedArm
from breakeven.lab.campaign import AttachArm, CommandArm, EmbeddedArm
from breakeven.lab.engines import EngineArm
from breakeven.lab.engines.traps import NOT_INHERITED


def make_arm(name: str, config: EmbeddedArm | AttachArm | CommandArm | EngineArm) -> Arm:
    """The arm of a campaign. StartError if its API key is wanted and not there."""
    if isinstance(config, EmbeddedArm):
        return embedded_arm(name, config)
    if isinstance(config, AttachArm):
        return Attached(name, config)
    if isinstance(config, EngineArm):
        return engine_arm(name, config)
    options = HttpOptions(
        "",
        model=config.model,
        headers=authorised(config.headers, config.api_key_env, name),
        verify_tls=config.verify_tls,
        health_url=config.health_url,
        reset_url=config.reset_url,
        metrics_url=config.metrics_url,
    )
    return LaunchedArm(
        name,
        config.command,
        options,
        port=config.port,
        env={**dict.fromkeys(NOT_INHERITED), **config.env},
        startup_timeout_s=config.startup_timeout_s,
        stop_timeout_s=config.stop_timeout_s,
        continuous_usage=config.continuous_usage,
    )
