"""The shapes that a search tries: every combination that the arm's engine can run, but for known wasteful ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from breakeven.lab.campaign import Campaign, EmbeddedArm, Tune
from breakeven.lab.engines import EngineArm
from breakeven.lab.engines.traps import dominated
from breakeven.lab.known_traps import synthetic_arms
from breakeven.lab.policy.ranges import Range
from breakeven.lab.policy.shapes import Shape, shape

_STEPS = (1, 2, 3, 5)
_NGRAM_STEPS = (2, 4, 8)
_NGRAM_MAX = (3, 5)
MAX_CANDIDATES = 64
TUNED = (EmbeddedArm, EngineArm)


class TuneError(ValueError):
    """A campaign that cannot be tuned; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`config`: the arm's configuration with this shape."""

    name: str
    config: Any
    shape: Shape


@dataclass(frozen=True, slots=True)
class Space:
    """`left_out`: combinations that are not tried, each with the reason."""

    arm: str
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]


def tuned_arm(campaign: Campaign, name: str | None = None) -> str:
    """Which arm is tuned: the one named, else the campaign's only one that speculates. TuneError otherwise."""
    speculating = [
        arm
        for arm, config in campaign.arms.items()
        if arm != campaign.baseline and isinstance(config, TUNED) and not isinstance(config.speculation, str)
    ]
    wanted = name if name is not None else campaign.tune.arm if campaign.tune is not None else None
    if wanted is not None:
        if wanted not in campaign.arms:
            raise TuneError(f"{wanted!r} is not one of the arms: {', '.join(campaign.arms)}")
        if wanted not in speculating:
            raise TuneError(
                f"the arm {wanted!r} cannot be tuned: it must be no baseline, of a type whose speculation is a setting"
                " (embedded, vllm, sglang, trtllm, llamacpp), and speculate"
            )
        return wanted
    if len(speculating) != 1:
        found = f"these speculate: {', '.join(speculating)}; name one" if speculating else "none speculates"
        raise TuneError(f"one arm is tuned, but {found} (tune: {{arm: NAME}}, or --arm)")
    return speculating[0]


def search_space(campaign: Campaign, arm: str) -> Space:
    """All combinations of the campaign's `tune` section, or of the defaults, that are valid for this arm."""
    base = campaign.arms[arm]
    given = base.speculation.model_dump(mode="json")  # type: ignore[union-attr]  # of `tuned_arm`
    if arm in synthetic_arms(campaign):
        raise TuneError(f"the arm {arm!r} has synthetic acceptance, so nothing can be found out by measuring it")
    found: dict[str, Candidate] = {}
    left_out = []
    for name, fields in _combinations(campaign.tune or Tune(), given):
        problem = next(iter(_wasteful(fields)), None)
        try:
            config = with_speculation(base, {**given, "schedule": None, **fields})
        except ValidationError as error:
            problem = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        if problem is not None:
            left_out.append(f"{name}: {problem}")
            continue
        read = shape(config.model_dump(mode="json"))
        if not read.known:
            left_out.append(f"{name}: {read.reason}")
        elif not any(config == other.config for other in found.values()):
            found[name] = Candidate(name, config, read)
    if not found:
        raise TuneError(f"no shape is left to try for {arm!r}: {'; '.join(left_out)}")
    if len(found) > MAX_CANDIDATES:
        raise TuneError(f"{len(found)} shapes are more than {MAX_CANDIDATES}: give fewer values in the tune section")
    return Space(arm, tuple(found.values()), tuple(left_out))


def with_speculation(arm: Any, fields: Mapping[str, Any]) -> Any:
    """The arm with another speculation, validated anew. Raises ValidationError."""
    kept = {name: value for name, value in fields.items() if value is not None}
    copy = arm.model_dump(mode="json") | {"speculation": kept}
    return type(arm).model_validate_json(json.dumps(copy))


def with_schedule(candidate: Candidate, ranges: Sequence[Range]) -> Any:
    """The candidate's arm with a schedule of depths. Raises ValidationError where its engine has no such thing."""
    fields = candidate.config.speculation.model_dump(mode="json")
    deepest = max(depth for _, _, depth in ranges)
    nodes = fields.get("num_draft_tokens") if candidate.shape.topk > 1 else None
    return with_speculation(
        candidate.config,
        {**fields, "num_steps": deepest, "num_draft_tokens": nodes, "schedule": [list(row) for row in ranges]},
    )


def _wasteful(fields: Mapping[str, Any]) -> Iterator[str]:
    steps, topk, nodes = fields.get("num_steps"), fields.get("eagle_topk"), fields.get("num_draft_tokens")
    if steps and topk and nodes:
        yield from dominated(steps, topk, nodes)


def _combinations(tune: Tune, given: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and fields of each combination; what the section leaves out stays as the arm has it."""
    ngram = (given.get("algorithm") or given.get("method")) == "ngram"
    steps = tune.num_steps or (_NGRAM_STEPS if ngram else _STEPS)
    topks: Sequence[int | None] = tune.eagle_topk or (None,)
    nodes: Sequence[int | None] = tune.num_draft_tokens or (None,)
    shortest: Sequence[int | None] = tune.ngram_min or (None,)
    longest: Sequence[int | None] = tune.ngram_max or (_NGRAM_MAX if ngram else (None,))
    for depth, topk, size, low, high in itertools.product(steps, topks, nodes, shortest, longest):
        breadth = topk or given.get("eagle_topk") or 1
        fields: dict[str, Any] = {"num_steps": depth}
        name = f"s{depth}"
        if topk is not None:
            fields["eagle_topk"] = topk
            name += f"-k{topk}" if topk > 1 else ""
        if breadth > 1:
            wanted = size or given.get("num_draft_tokens")
            fields["num_draft_tokens"] = wanted
            name += f"-d{wanted}" if wanted else ""
        else:
            fields["num_draft_tokens"] = None  # a chain is verified whole
        for letter, field, value in (("min", "ngram_min", low), ("max", "ngram_max", high)):
            if value is not None:
                fields[field] = value
                name += f"-{letter}{value}"
        yield name, fields
