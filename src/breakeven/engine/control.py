"""Which speculation the next step uses. Sees counts only, never a tensor, so it can be replayed from a log."""

from __future__ import annotations

from typing import Protocol

from breakeven.engine.config import SpeculationConfig


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
