"""The acceptance length that breaks even at each load, in the summary's terms."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from breakeven.lab.campaign import Campaign
from breakeven.lab.engines.traps import PRETENDING
from breakeven.lab.stats.needed import needed_acceptance
from breakeven.lab.summary import ALL, Comparison, NeededAcceptanceSummary

# Where engines are told an acceptance length: keys of mappings, and llama.cpp's flags.
_SET_BY = ("synthetic_acceptance_length", "synthetic_acceptance_rates", *PRETENDING)
_SET_BY_FLAG = ("--spec-synth-len", "--spec-synth-rates")


def needed_acceptances(
    campaign: Campaign, pretending: Mapping[str, float | None], comparisons: Sequence[Comparison]
) -> list[NeededAcceptanceSummary]:
    """A row for each level and each group of synthetic arms that differ in the acceptance length alone.

    `pretending`: acceptance length by arm; those whose length is unknown are left out. Only throughput is asked: the
    time of a round, and so the first token's, does not depend on what is accepted. [] where the acceptance of the
    baseline is synthetic too.
    """
    if campaign.baseline in pretending:
        return []
    synthetic = {name: length for name, length in pretending.items() if length is not None}
    groups: dict[str, list[str]] = {}
    for name in campaign.arms:
        if name in synthetic:
            groups.setdefault(_but_for_the_length(campaign.arms[name]), []).append(name)
    rows = []
    for members in groups.values():
        for level in sorted(campaign.levels):
            found = [
                c
                for c in comparisons
                if (c.metric, c.condition, c.level) == ("throughput", ALL, level)
                and c.arm in members
                and c.block_ratios
            ]
            if found:
                rows.append(_row(campaign, level, members, synthetic, found))
    return rows


def _row(
    campaign: Campaign,
    level: int,
    members: Sequence[str],
    synthetic: Mapping[str, float],
    found: Sequence[Comparison],
) -> NeededAcceptanceSummary:
    lengths = sorted({synthetic[c.arm] for c in found})
    blocks = sorted({block for c in found for block in c.block_ratios})
    table = [
        [_mean([math.log(c.block_ratios[b]) for c in found if synthetic[c.arm] == a and b in c.block_ratios])
         for a in lengths]
        for b in blocks
    ]  # fmt: skip
    needed = needed_acceptance(
        lengths, table, campaign.confidence, seed=campaign.seed, anytime=campaign.stop.rule == "confidence_sequence"
    )
    return NeededAcceptanceSummary(
        arms=list(members),
        level=level,
        length=needed.length,
        ci_low=needed.ci_low,
        ci_high=needed.ci_high,
        low_open=needed.low_open,
        high_open=needed.high_open,
        bootstrap_low=needed.bootstrap_low,
        bootstrap_high=needed.bootstrap_high,
        lengths=list(needed.lengths),
        fitted=[math.exp(value) for value in needed.fitted],
        blocks=needed.blocks,
        note=needed.note,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _but_for_the_length(arm: Any) -> str:
    """The arm's settings without the acceptance length, wherever it is set: arms equal in it form one curve."""
    return json.dumps(_scrubbed(arm.model_dump(mode="json")), sort_keys=True)


def _scrubbed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _scrubbed(item) for name, item in value.items() if name not in _SET_BY}
    if isinstance(value, list):
        before = (None, *value)
        return [_scrubbed(item) for flag, item in zip(before, value, strict=False) if flag not in _SET_BY_FLAG]
    if isinstance(value, str):
        name = value.partition("=")[0]
        if name in _SET_BY_FLAG:
            return name
        if value.lstrip().startswith("{"):  # a JSON mapping among flags, such as vLLM's --speculative-config
            with suppress(ValueError):
                return _scrubbed(json.loads(value))
    return value
