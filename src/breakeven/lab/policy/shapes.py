"""How deep an arm drafts, read from its settings as a campaign resolves them; and which arms differ in depth alone.

A schedule varies one thing, the depth, so it can be put together only from arms that are the same but for it: a
*family*. Settings are the mapping of a campaign's arm (`ArmDigest.settings`). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from breakeven.lab.engines.base import option_name
from breakeven.lab.policy.ranges import depth_at

_DEPTH_FIELDS = ("num_steps", "num_draft_tokens", "schedule")
_EMBEDDED_STEPS = 3  # what `breakeven serve` drafts where nothing is said
_MOST_NODES = 64
SYNTHETIC = "its acceptance is synthetic: a condition, not a result"
_BY_FLAG = ("--speculative", "--spec-", "--draft")  # how the options of the engines begin
_BY_FLAG_TOO = ("-sc", "-md", "--model-draft")
# Options that begin so and leave it to the settings whether, by what and how deep is drafted.
_HARMLESS = (
    "--speculative-ngram-max-trie-depth", "--speculative-accept-threshold-single", "--speculative-accept-threshold-acc",
    "--speculative-attention-mode", "--speculative-draft-attention-backend", "--speculative-token-map",
    "--spec-draft-p-min",
)  # fmt: skip
# Keys of an engine's own speculation mapping that say the same as a setting, and overrule it.
_OVERRULES = (
    "method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "decoding_type", "max_draft_len",
    "draft_len_schedule", "max_concurrency",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """An arm's speculation. `depth`: the deepest it drafts. `nodes`: verified per round, root included; None where it
    follows from the depth (a chain). `ranges`: its own schedule, if it has one. `family`: equal for arms that differ in
    depth alone. `reason`: why the depth is not known, and then all else is empty."""

    engine: str
    method: str = ""
    depth: int = 0
    topk: int = 1
    nodes: int | None = None
    ranges: tuple[tuple[int, int, int], ...] = ()
    family: str = ""
    reason: str = ""

    @property
    def known(self) -> bool:
        return not self.reason

    def depth_at(self, level: int) -> int:
        """How deep it drafts while `level` sequences decode."""
        return depth_at(self.ranges, level) if self.ranges else self.depth


def shape(settings: Mapping[str, Any]) -> Shape:
    """The shape of an arm; `depth` 0 for one without speculation."""
    engine = str(settings.get("type", ""))
    if "speculation" not in settings:
        return Shape(engine, reason="its speculation is in a command line or on a server that was there already")
    if by_flag := sorted({name for name in map(option_name, settings.get("flags") or ()) if _speculates(name)}):
        return Shape(engine, reason=f"its flags set its speculation ({', '.join(by_flag)}): write it as speculation")
    if "speculative_config" in (settings.get("options") or {}):
        return Shape(engine, reason="its options set its speculation (speculative_config): write it as speculation")
    given = settings["speculation"]
    if not isinstance(given, Mapping):
        return Shape(engine)
    method = str(given.get("algorithm") or given.get("method") or "")
    if given.get("synthetic_acceptance_length") is not None:
        return Shape(engine, method, reason=SYNTHETIC)
    if overruled := [name for name in _OVERRULES if name in (given.get("extra") or {})]:
        told = ", ".join(overruled)
        return Shape(engine, method, reason=f"its extra sets its speculation ({told}): use the settings")
    if given.get("adaptive"):
        return Shape(engine, method, reason="the engine adapts its depth by itself")
    topk = int(given.get("eagle_topk") or 1)
    ranges = tuple((int(a), int(b), int(d)) for a, b, d in given.get("schedule") or ())
    nodes = given.get("num_draft_tokens")
    steps = given.get("num_steps") or max((d for _, _, d in ranges), default=0)
    if not steps and nodes is not None and topk == 1:
        steps = nodes - 1
    if not steps and engine == "embedded":
        steps = _EMBEDDED_STEPS
    if not steps:
        return Shape(engine, method, reason="its depth is left to the engine: set num_steps")
    if topk == 1:
        depth, kept = min(steps, nodes - 1) if nodes is not None else steps, None
    else:
        depth, kept = steps, int(nodes if nodes is not None else min(_MOST_NODES, 1 + steps * topk))
    return Shape(engine, method, int(depth), topk, kept, ranges, _family(settings, given, topk, kept))


def _speculates(option: str) -> bool:
    """Does an option of a server's command line say whether, by what or how deep it drafts?"""
    return option in _BY_FLAG_TOO or (option.startswith(_BY_FLAG) and option not in _HARMLESS)


def _family(settings: Mapping[str, Any], speculation: Mapping[str, Any], topk: int, nodes: int | None) -> str:
    kept = {name: value for name, value in speculation.items() if name not in _DEPTH_FIELDS and value is not None}
    rest = {name: value for name, value in settings.items() if name != "speculation"}
    return json.dumps([rest, {**kept, "eagle_topk": topk}, nodes], sort_keys=True, default=str)


def unlike(settings: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """The fields besides the speculation in which an arm and the baseline differ, sorted."""
    names = {*settings, *baseline} - {"speculation"}
    return sorted(name for name in names if settings.get(name) != baseline.get(name))
