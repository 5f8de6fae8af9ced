"""Which speculation the next step uses. Sees counts only, never a tensor, so it can be replayed from a log."""

from __future__ import annotations

from typing import Protocol

from breakeven.engine.config import SpeculationConfig, SpeculationSchedule


class Controller(Protocol):
    """Decides between steps. The output tokens do not depend on its choices, only the speed does."""

    def choose(self, num_decoding: int) -> SpeculationConfig | None:
        """The shape for a step in which `num_decoding` sequences decode; None: no speculation."""
        ...


class FixedController:
    """The same choice at every step: the configured shape, or off."""

    def __init__(self, speculation: SpeculationConfig | None) -> None:
        self._speculation = speculation

    def choose(self, num_decoding: int) -> SpeculationConfig | None:
        """The configured shape."""
        return self._speculation


class ScheduledController:
    """Depth by the number of decoding sequences, at every step anew. A function of that number alone, so there is no
    hysteresis: switching costs this engine nothing but what the drafter must catch up with."""

    def __init__(self, speculation: SpeculationConfig, schedule: SpeculationSchedule) -> None:
        """`speculation`: the deepest shape; shallower ones keep its branching."""
        self._schedule = schedule
        self._shapes = {depth: speculation.at_depth(depth) for depth in schedule.depths}

    def choose(self, num_decoding: int) -> SpeculationConfig | None:
        """The shape that the schedule names; None where it says 0."""
        return self._shapes[self._schedule.num_steps(num_decoding)]
