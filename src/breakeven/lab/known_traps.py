"""The known traps of a campaign's arms, found before anything is started: in the plan, the journal and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from breakeven.lab.campaign import Campaign, CommandArm, EmbeddedArm, Speculation
from breakeven.lab.engines import EngineArm
from breakeven.lab.engines.traps import dominated, is_synthetic, synthetic_length, traps


def started_with(arm: object) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Command line and variables of an arm's server, as far as its configuration tells; empty for one not ours."""
    if isinstance(arm, EngineArm):
        launch = arm.launch()
        return launch.command, launch.env
    if isinstance(arm, CommandArm):
        return arm.command, arm.env
    if isinstance(arm, EmbeddedArm):
        return arm.flags, arm.env
    return (), {}


def trap_sentences(campaign: Campaign) -> Iterator[str]:
    """One sentence for each trap of each arm, its name first."""
    for name, arm in campaign.arms.items():
        command, env = started_with(arm)
        levels = () if campaign.open_loop else campaign.levels
        for sentence in traps(command, env, sorted(levels), campaign.open_loop):
            yield f"{name} {sentence}"
        if isinstance(arm, EmbeddedArm) and isinstance(arm.speculation, Speculation):
            shape = arm.speculation
            if shape.num_steps and shape.eagle_topk and shape.num_draft_tokens:
                for sentence in dominated(shape.num_steps, shape.eagle_topk, shape.num_draft_tokens):
                    yield f"{name} {sentence}"


def synthetic_arms(campaign: Campaign) -> dict[str, float | None]:
    """The arms whose acceptance is set and not earned, with the acceptance length that they pretend.

    None where the settings do not tell the length: acceptance is synthetic there all the same.
    """
    servers = {name: started_with(arm) for name, arm in campaign.arms.items()}
    return {name: synthetic_length(*server) for name, server in servers.items() if is_synthetic(*server)}


def unjudged_arms(campaign: Campaign) -> frozenset[str]:
    """The arms whose comparison with the baseline gets no verdict, because one side's acceptance is synthetic."""
    pretending = synthetic_arms(campaign)
    return frozenset(campaign.arms if campaign.baseline in pretending else pretending) - {campaign.baseline}


def why_not_reset(arm: object) -> str:
    """Why an arm's prefix cache cannot be emptied."""
    return arm.launch().why_no_reset if isinstance(arm, EngineArm) else "no reset_url"
