"""The campaigns that a tuning consists of: rounds of the search, and the confirmation. Pure but for reading suites.

Search and confirmation share no prompt: each domain's prompts are split in two by lot, and each stage draws from its
own half with a seed of its own. So what the search chooses is confirmed on text that it has not seen, in new launches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from breakeven.lab.campaign import Campaign
from breakeven.lab.design import stable_hash, stable_shuffle
from breakeven.lab.tune.space import TuneError
from breakeven.lab.workload.prompt import Suite, make_suite


def stage_seed(campaign: Campaign, stage: str) -> int:
    """The seed of a stage: 31 bits from the campaign's."""
    return stable_hash("tune", campaign.seed, stage) % 2**31


def search_campaign(campaign: Campaign, number: int, arms: Mapping[str, Any], blocks: int) -> Campaign:
    """A round of the search: the baseline and the candidates that are left, in so many new blocks."""
    return _stage(
        campaign,
        f"round-{number}",
        arms,
        {
            "name": f"{campaign.name[:150]}: search, round {number}",
            "blocks": blocks,
            "aa": False,
            "sentinel": None,
            "stop": {"rule": "fixed"},
        },
    )


def confirm_campaign(campaign: Campaign, arms: Mapping[str, Any], levels: Sequence[int]) -> Campaign:
    """The confirmation: the baseline, the winner and its schedule, at the campaign's levels and at each threshold."""
    return _stage(campaign, "confirm", arms, {"name": f"{campaign.name[:150]}: confirmation", "levels": list(levels)})


def _stage(campaign: Campaign, stage: str, arms: Mapping[str, Any], changes: Mapping[str, Any]) -> Campaign:
    fields = campaign.model_dump(mode="json")
    baseline = campaign.arms[campaign.baseline]
    fields |= {
        "arms": {name: arm.model_dump(mode="json") for name, arm in {campaign.baseline: baseline, **arms}.items()},
        "seed": stage_seed(campaign, stage),
        "tune": None,
        **changes,
    }
    return Campaign.model_validate_json(json.dumps(fields))


def halves(campaign: Campaign, suites: Mapping[str, Suite]) -> tuple[dict[str, Suite], dict[str, Suite]]:
    """The prompts of the search and those of the confirmation, by domain. TuneError for a domain of one prompt."""
    search, confirm = {}, {}
    for name, suite in suites.items():
        order = stable_shuffle(suite.prompts, campaign.seed, "tune", name)
        if len(order) < 2:
            raise TuneError(
                f"the domain {name!r} has {len(order)} prompt, but search and confirmation share none: give it more"
                " prompts, or leave it out"
            )
        middle = len(order) // 2
        search[name] = make_suite(suite.name, order[:middle])
        confirm[name] = make_suite(suite.name, order[middle:])
    return search, confirm
