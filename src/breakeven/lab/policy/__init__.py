"""From what a campaign measured to a schedule that engines can be told: how deep to draft at which load. Pure.

`shapes` reads how deep each arm drafts from its settings, `decide` chooses a depth at each level and the batch sizes
between them, `export` writes the schedule in the terms of an engine.
"""

from __future__ import annotations

from breakeven.lab.policy.decide import LevelChoice, Policy, PolicyError, decide
from breakeven.lab.policy.export import ENGINES, Exported, as_arm, export

__all__ = ["ENGINES", "Exported", "LevelChoice", "Policy", "PolicyError", "as_arm", "decide", "export"]
