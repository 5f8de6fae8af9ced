"""The campaign that imported runs amount to: what a report needs to name arms, conditions, levels and blocks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from breakeven.lab.campaign import Campaign
from breakeven.lab.section import Section


class ImportedArm(Section):
    """An arm that somebody else measured. `known_as`: its name in the files; `facts`: what these say of it."""

    type: Literal["imported"] = "imported"
    known_as: str
    tool: str
    facts: dict[str, Any] = Field(default_factory=dict)

    @property
    def can_reset(self) -> bool:
        return True


class ImportedCampaign(Campaign):
    """A campaign whose arms cannot be started."""

    arms: dict[str, ImportedArm]  # type: ignore[assignment]
