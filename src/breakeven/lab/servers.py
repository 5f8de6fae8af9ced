"""What the servers said of themselves, from a run's journal, for the report's provenance. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_OWN = frozenset(("port", "host", "pid", "seed_port", "nccl_port", "dist_init_addr"))  # another at every launch


def servers(journal: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By arm: version, arguments, captured graphs and warnings of its first launch, and what differed later.

    Arms whose logs say nothing are left out; the version by itself stands with the cells.
    """
    found: dict[str, dict[str, Any]] = {}
    for event in journal:
        if event.get("event") != "arm_ready":
            continue
        facts = _facts(event)
        first = found.get(str(event.get("arm")))
        if first is None:
            found[str(event.get("arm"))] = facts
            continue
        differing = first.get("differing", [])
        changed = [name for name in _differing(first, facts) if name not in differing]
        if changed:
            first["differing"] = [*differing, *changed]
    return {arm: facts for arm, facts in found.items() if set(facts) - {"version"}}


def leftovers(journal: Iterable[Mapping[str, Any]]) -> list[str]:
    """What servers left behind that the next one had to live with, as sentences; main memory is shared with others."""
    return [
        f"{event.get('arm')} in block {event.get('block')} did not leave the machine as it was: {problem}. What was "
        "launched after it may have suffered"
        for event in journal
        if event.get("event") == "arm_stopped"
        for problem in event.get("problems") or ()
        if "less memory is free" not in str(problem)
    ]


def _facts(event: Mapping[str, Any]) -> dict[str, Any]:
    told = event.get("server")
    facts = {name: value for name, value in told.items() if name != "errors"} if isinstance(told, Mapping) else {}
    arguments = facts.get("arguments")
    if isinstance(arguments, Mapping):
        facts["arguments"] = {name: value for name, value in arguments.items() if name not in _OWN}
    if event.get("version") is not None:
        facts["version"] = event["version"]
    return facts


def _differing(first: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """Names of facts that a later launch states otherwise. Warnings come and go, so they are not compared."""
    names = [name for name in ("version", "graph_sizes") if first.get(name) != later.get(name)]
    ours, theirs = first.get("arguments") or {}, later.get("arguments") or {}
    return names + sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
