"""From a campaign to its schedule: every launch, cell, prompt and seed, fixed before anything runs.

Pure, except for `load_suites` and the reading of a trace of arrivals.

The schedule is a function of the campaign and its prompts, so a resumed run has the same one; its hash is stored with
the run to prove it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from breakeven.lab import lints
from breakeven.lab.campaign import JOIN, SENTINEL, AttachArm, Campaign
from breakeven.lab.data_files import DataFile, incomplete, name_of, read_data_files
from breakeven.lab.design import (
    CellPromptSelection,
    arm_orders,
    condition_orders,
    level_orders,
    request_seed,
    select_cell_prompts,
    stable_hash,
    stable_shuffle,
)
from breakeven.lab.known_traps import trap_sentences, why_not_reset
from breakeven.lab.play import turns_in
from breakeven.lab.records import CellKey
from breakeven.lab.stats.power import smallest_detectable
from breakeven.lab.workload.arrivals import schedule as arrival_times
from breakeven.lab.workload.prompt import Prompt, PromptError, Suite, make_suite
from breakeven.lab.workload.suite import load_suite, read_prompts_file
from breakeven.lab.workload.traces import Trace, read_trace

_WARMUP_SHARE = 4  # at most one in so many prompts of a suite is kept for warming up
_SPARE_WARMUP = Prompt(
    "warmup", "warmup", ({"role": "user", "content": "Describe a lighthouse in winter, in a few sentences."},)
)
_ASSUMED_TURNS = 3  # of a session
_STOP_S = 1.0  # assumed for ending a server


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell: its prompts in the order in which they are sent, and a seed for each (None: none is sent).

    `offsets`: when each is sent, in seconds from the start, the same for every arm; None in closed loop.
    """

    key: CellKey
    prompt_ids: tuple[str, ...]
    seeds: tuple[int | None, ...]
    offsets: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch of one arm in one block, and its cells in order. `position`: of the arm within the block, from 0."""

    block: int
    arm: str
    position: int
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that will be measured, in order. `notes`: what the reader should know of it, in plain words.

    `suites`: by domain, of which a condition's name is the first part. `files`: the data sets that they come from, if
    any.
    """

    launches: tuple[PlannedLaunch, ...]
    conditions: tuple[str, ...]
    suites: Mapping[str, Suite]
    warmup: tuple[Prompt, ...]
    notes: tuple[str, ...]
    sha256: str
    files: tuple[DataFile, ...] = ()

    def cells(self) -> Iterator[PlannedCell]:
        return itertools.chain.from_iterable(launch.cells for launch in self.launches)

    def prompt(self, condition: str, prompt_id: str) -> Prompt:
        return next(p for p in self.suites[condition.split(JOIN)[0]].prompts if p.id == prompt_id)


def load_suites(campaign: Campaign, files: Sequence[DataFile] | None = None) -> dict[str, Suite]:
    """The prompts of each condition: shipped suites, or the domains of the campaign's own files.

    `files`: those of the workload where they have been read already (`read_data_files`). Raises PromptError for a
    domain that has no prompts, or a file that cannot be used.
    """
    workload = campaign.workload
    of_domain: dict[str, list[Prompt]] = {}
    if workload.prompts_file is not None:
        source = workload.prompts_file
        given: Iterable[Prompt] = read_prompts_file(source).prompts
    elif workload.files:
        source = "; ".join(map(name_of, workload.files))
        read = read_data_files(workload.files) if files is None else files
        given = itertools.chain.from_iterable(file.prompts for file in read)
    else:
        return {domain: load_suite(domain) for domain in workload.domains or ()}
    for prompt in given:
        of_domain.setdefault(prompt.domain, []).append(prompt)
    wanted = workload.domains or tuple(sorted(of_domain))
    for domain in wanted:
        if domain not in of_domain:
            raise PromptError(
                f"{source} holds no prompt of the domain {domain!r}: it has {', '.join(sorted(of_domain))}"
            )
    if SENTINEL in wanted:
        raise PromptError(f"{source}: {SENTINEL!r} is the name of the sentinel cells: call this domain differently")
    if "all" in wanted:
        raise PromptError(f"{source}: 'all' is the name of all domains pooled: call this one differently")
    return {domain: make_suite(domain, of_domain[domain]) for domain in wanted}


def build_schedule(campaign: Campaign, suites: Mapping[str, Suite], files: Sequence[DataFile] = ()) -> Schedule:
    """Lays out blocks, launches and cells. `files`: what the suites were read from, for the record.

    Conditions that differ by a factor alone (temperature, cache, arrivals) have the same prompts in the same block, so
    that the factor's effect is paired; their seeds are their own.

    Raises PromptError where names of arms and domains collide, where a band of lengths holds no prompt, or where a
    trace of arrivals cannot be read.
    """
    conditions = tuple(campaign.condition_names(suites))
    if campaign.workload.sessions is not None:
        suites = {name: _of_several_turns(suite) for name, suite in suites.items()}
    traces = _traces(campaign, conditions)
    blocks, seed = campaign.blocks, campaign.seed
    warmup, measured_ids = _keep_for_warmup(campaign, suites)
    sentinel = _keep_for_sentinel(campaign, suites, measured_ids)
    if sentinel is not None:
        suites = {**suites, SENTINEL: sentinel}
    chosen = _choose(campaign, conditions, suites, measured_ids)
    arms = arm_orders(list(campaign.arms), blocks, seed)
    levels = level_orders(campaign.levels, blocks, seed)
    order = condition_orders(conditions, blocks, seed)
    launches = tuple(
        PlannedLaunch(
            block,
            arm,
            position,
            (
                *(_sentinel_cell(campaign, block, arm, sentinel, traces) if sentinel is not None else ()),
                *(
                    _cell(
                        campaign, CellKey(block, arm, condition, level), chosen[condition].cells[block][level], traces
                    )
                    for condition in order[block]
                    for level in levels[block]
                ),
            ),
        )
        for block in range(blocks)
        for position, arm in enumerate(arms[block])
    )
    ids = Counter(cell.key.id.lower() for launch in launches for cell in launch.cells)
    collision = next((name for name, count in ids.items() if count > 1), None)
    if collision is not None:
        raise PromptError(f"two cells would have the same name {collision!r}: rename an arm or a domain")
    notes = [f"{name}: {chosen[name].reuse.note}" for name in conditions if chosen[name].reuse.note]
    if campaign.salts_prompts:
        unresettable = [name for name, arm in campaign.arms.items() if not arm.can_reset]
        reasons = [why_not_reset(campaign.arms[name]) for name in unresettable]
        why = "; ".join(dict.fromkeys(reasons))
        notes.append(
            f"prompts carry a salt in their first message, because the prefix cache of {', '.join(unresettable)} is "
            f"not reset ({why})"
        )
    if campaign.warm:
        notes.append(
            f"declared warm cache: each warm cell's prompts are sent once, before it, for a single token; a cell in "
            f"which less than {campaign.gates.min_warm_share:.0%} of the prompt tokens is then in the cache is invalid"
        )
    sessions = campaign.workload.sessions
    if sessions is not None:
        turns = [turns_in(prompt, sessions) for name in dict.fromkeys(c.split(JOIN)[0] for c in conditions)
                 for prompt in suites[name].prompts]  # fmt: skip
        notes.append(
            f"sessions: {len(turns)} prompts of several turns ({sum(turns) / len(turns):.1f} on average) are played "
            f"turn by turn; a level is a number of sessions in play, and requests are counted in sessions"
        )
    notes += incomplete({"files": [file.record() for file in files]})
    notes += [*trap_sentences(campaign), *lints.thresholds(campaign), *lints.unlike_metrics(campaign)]
    sha256 = _hash(campaign, suites, launches, warmup, traces)
    return Schedule(launches, conditions, dict(suites), warmup, tuple(notes), sha256, tuple(files))


def _traces(campaign: Campaign, conditions: Sequence[str]) -> dict[str, Trace]:
    """The recorded arrivals that the conditions follow, by path."""
    paths = (campaign.setting(condition).arrivals.trace for condition in conditions)
    return {path: read_trace(path) for path in dict.fromkeys(paths) if path is not None}


def _choose(
    campaign: Campaign,
    conditions: Sequence[str],
    suites: Mapping[str, Suite],
    measured_ids: Mapping[str, Sequence[str]],
) -> dict[str, CellPromptSelection]:
    """The prompts of each condition's cells; the same for conditions with one domain, band and number of requests."""
    drawn: dict[tuple[object, ...], CellPromptSelection] = {}
    chosen = {}
    for condition in conditions:
        setting = campaign.setting(condition)
        needs = {level: campaign.requests_at(level, condition) for level in campaign.levels}
        same = (setting.domain, setting.words, tuple(needs.items()))
        if same not in drawn:
            ids = _within(suites[setting.domain], measured_ids[setting.domain], setting.words)
            drawn[same] = select_cell_prompts(ids, needs, campaign.blocks, campaign.seed)
        chosen[condition] = drawn[same]
    return chosen


def _of_several_turns(suite: Suite) -> Suite:
    """The prompts that can be played. PromptError if none can."""
    several = [p for p in suite.prompts if sum(message["role"] == "user" for message in p.messages) > 1]
    if not several:
        raise PromptError(
            f"{suite.name} has no prompt of several turns, so there is no session to play: take the agentic suite, or "
            f"files of dialogues (sharegpt, swe-bench)"
        )
    return make_suite(suite.name, several)


def _within(suite: Suite, ids: Sequence[str], words: tuple[int, int] | None) -> Sequence[str]:
    """The ids of the prompts whose messages have that many words together. PromptError if there are none."""
    if words is None:
        return ids
    wanted = set(ids)
    lengths = {p.id: sum(len(m["content"].split()) for m in p.messages) for p in suite.prompts if p.id in wanted}
    found = [name for name in ids if words[0] <= lengths[name] <= words[1]]
    if not found:
        raise PromptError(
            f"{suite.name} has no prompt of {words[0]} to {words[1]} words: they have {min(lengths.values())} to "
            f"{max(lengths.values())}; choose another band, or a suite of that length (breakeven's retrieval suites)"
        )
    return found


def _cell(campaign: Campaign, key: CellKey, prompt_ids: tuple[str, ...], traces: Mapping[str, Trace]) -> PlannedCell:
    wanted = campaign.setting(key.condition).sampling.seed
    seeds = tuple(
        request_seed(campaign.seed, key.block, key.condition, key.level, index) if wanted == "per_request" else wanted
        for index in range(len(prompt_ids))
    )
    return PlannedCell(key, prompt_ids, seeds, _offsets(campaign, key, len(prompt_ids), traces))


def _offsets(campaign: Campaign, key: CellKey, count: int, traces: Mapping[str, Trace]) -> tuple[float, ...] | None:
    """The cell's arrivals: fresh in each block, the same for all its arms."""
    arrivals = campaign.setting(key.condition).arrivals
    trace = traces[arrivals.trace] if arrivals.trace is not None else None
    if arrivals.process == "closed":
        return None
    return arrival_times(
        arrivals.rate(key.level),
        count,
        stable_hash("arrivals", campaign.seed, key.block, key.condition, key.level),
        process=arrivals.process,
        cv=arrivals.cv,
        trace=trace.times_s if trace else None,
        ramp=arrivals.ramp or (1.0, 1.0),
    )


def _sentinel_cell(
    campaign: Campaign, block: int, arm: str, suite: Suite, traces: Mapping[str, Trace]
) -> tuple[PlannedCell]:
    """The same prompts and seeds in every block and arm."""
    ids = tuple(itertools.islice(itertools.cycle(prompt.id for prompt in suite.prompts), campaign.sentinel_requests))
    first = _cell(campaign, CellKey(0, arm, SENTINEL, campaign.sentinel_level), ids, traces)
    return (replace(first, key=CellKey(block, arm, SENTINEL, campaign.sentinel_level)),)


def _keep_for_sentinel(
    campaign: Campaign, suites: Mapping[str, Suite], measured_ids: dict[str, tuple[str, ...]]
) -> Suite | None:
    """Sets the sentinel's prompts aside from those to be measured (in place); at most a quarter of the domain's."""
    if campaign.sentinel is None:
        return None
    domain = campaign.sentinel.domain or next(iter(suites))
    if domain not in suites:
        raise PromptError(f"sentinel.domain {domain!r} is not one of the domains: {', '.join(suites)}")
    order = stable_shuffle(measured_ids[domain], campaign.seed, SENTINEL)
    count = min(campaign.sentinel_requests, max(1, len(order) // _WARMUP_SHARE))
    taken = set(order[:count])
    if len(order) > count:
        measured_ids[domain] = tuple(name for name in measured_ids[domain] if name not in taken)
    return make_suite(SENTINEL, [prompt for prompt in suites[domain].prompts if prompt.id in taken])


def _keep_for_warmup(
    campaign: Campaign, suites: Mapping[str, Suite]
) -> tuple[tuple[Prompt, ...], dict[str, tuple[str, ...]]]:
    """Sets prompts aside that are never measured, in turn from every condition; the rest is for measuring."""
    need = campaign.warmup.requests
    per_condition = -(-need // len(suites))
    kept: list[list[Prompt]] = []
    rest: dict[str, tuple[str, ...]] = {}
    for name, suite in suites.items():
        order = stable_shuffle(suite.prompts, campaign.seed, "warmup", name)
        count = min(per_condition, len(order) // _WARMUP_SHARE)
        kept.append(list(order[:count]))
        rest[name] = tuple(sorted(prompt.id for prompt in order[count:]))
    in_turn = [p for row in itertools.zip_longest(*kept) for p in row if p is not None] or [_SPARE_WARMUP]
    return tuple(itertools.islice(itertools.cycle(in_turn), need)), rest


def _hash(
    campaign: Campaign,
    suites: Mapping[str, Suite],
    launches: Iterable[PlannedLaunch],
    warmup: Iterable[Prompt],
    traces: Mapping[str, Trace],
) -> str:
    content: dict[str, Any] = {
        "suites": {name: suite.sha256 for name, suite in suites.items()},
        "warmup": [prompt.id for prompt in warmup],
        "cells": [(cell.key.id, cell.prompt_ids, cell.seeds) for launch in launches for cell in launch.cells],
        "max_tokens": campaign.workload.max_tokens,
    }
    if campaign.arrivals.open:  # its offsets follow from these
        content["arrivals"] = campaign.arrivals.model_dump(mode="json", exclude={"trace"})
        content["trace"] = _trace_hash(campaign.arrivals.trace, traces)
    if campaign.workload.sessions is not None:
        content["sessions"] = campaign.workload.sessions.model_dump(mode="json")
    if campaign.conditions is not None:
        named = (campaign.conditions.arrivals or {}).items()
        content["conditions"] = campaign.conditions.model_dump(mode="json", exclude={"arrivals"}) | {
            name: [arrivals.model_dump(mode="json", exclude={"trace"}), _trace_hash(arrivals.trace, traces)]
            for name, arrivals in named
        }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _trace_hash(path: str | None, traces: Mapping[str, Trace]) -> str | None:
    return traces[path].sha256 if path is not None and path in traces else None


def cell_salt(campaign: Campaign, key: CellKey, run_id: str) -> str:
    """Twelve digits for the prompts of one cell; the same in all arms, except where two arms are one server.

    Two arms with the same URL share its cache, so the second would find the first one's prompts in it. Digits, because
    a fixed number of them makes the same number of tokens. `run_id` keeps a second run apart from the first.
    """
    servers = Counter(arm.url for arm in campaign.arms.values() if isinstance(arm, AttachArm))
    arm = campaign.arms[key.arm]
    own = key.arm if isinstance(arm, AttachArm) and servers[arm.url] > 1 else ""
    number = stable_hash("salt", run_id, key.block, key.condition, key.level, own) % 10**12
    return f"{number:012d}"


# What it can show, and how long it takes

_LAUNCH_SCATTER = (0.01, 0.03, 0.10)  # standard deviations of a block's log ratio: quiet, usual, shared machine


def detectable(campaign: Campaign) -> list[tuple[float, float]]:
    """(scatter of the blocks' ratios, smallest effect shown with 80% probability), both shares; [] with one block."""
    found = []
    for scatter in _LAUNCH_SCATTER:
        effect = smallest_detectable(scatter, campaign.blocks, campaign.confidence)
        if effect is not None:
            found.append((scatter, effect))
    return found


def assumed_cell_s(campaign: Campaign, level: int, condition: str = SENTINEL) -> float:
    """How long a cell takes under the campaign's assumptions, every answer being max_tokens long."""
    requests, arrivals = campaign.requests_at(level, condition), campaign.setting(condition).arrivals
    sessions = campaign.workload.sessions
    turns = min(_ASSUMED_TURNS, sessions.max_turns or _ASSUMED_TURNS) if sessions is not None else 1
    tokens = requests * turns * campaign.workload.max_tokens
    if not arrivals.open:
        streams = min(level, requests)
        thinking = sessions.think_s * (turns - 1) * requests / streams if sessions is not None else 0.0
        return tokens / _assumed_rate(campaign, streams) + thinking
    # No sooner than the last arrival and its answer, and no sooner than a saturated server gets through them.
    alone = campaign.workload.max_tokens / _assumed_rate(campaign, 1)
    return max(requests / arrivals.rate(level) + alone, tokens / _assumed_rate(campaign, requests))


def assumed_launch_s(campaign: Campaign) -> float:
    """Start, warm-up and end of a server under the campaign's assumptions."""
    warm = campaign.warmup
    streams = max(1, min(warm.requests, max(campaign.levels)))
    return campaign.assumptions.startup_s + warm.requests * warm.max_tokens / _assumed_rate(campaign, streams) + _STOP_S


def _assumed_rate(campaign: Campaign, streams: int) -> float:
    assumed = campaign.assumptions
    return assumed.tokens_per_second * streams / (1 + (streams - 1) / assumed.saturation_streams)


@dataclass(slots=True)
class Forecast:
    """How long the rest will take: assumed at first, then corrected by what was measured."""

    campaign: Campaign
    _cells: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    _launches: list[float] = field(default_factory=list)

    def cell_took(self, key: CellKey, seconds: float) -> None:
        self._cells.setdefault((key.arm, key.condition, key.level), []).append(seconds)

    def launch_took(self, seconds: float) -> None:
        """What a launch took besides its cells."""
        self._launches.append(seconds)

    def cell_s(self, key: CellKey) -> float:
        """The mean of this arm, condition and level; else the assumption, scaled by how far others were off."""
        seen = self._cells.get((key.arm, key.condition, key.level))
        if seen:
            return sum(seen) / len(seen)
        return assumed_cell_s(self.campaign, key.level, key.condition) * self._scale()

    def launch_s(self) -> float:
        return sum(self._launches) / len(self._launches) if self._launches else assumed_launch_s(self.campaign)

    def remaining_s(self, cells: Iterable[CellKey], launches: int) -> float:
        return sum(map(self.cell_s, cells)) + launches * self.launch_s()

    def _scale(self) -> float:
        measured = assumed = 0.0
        for (_, condition, level), seen in self._cells.items():
            measured += sum(seen)
            assumed += len(seen) * assumed_cell_s(self.campaign, level, condition)
        return measured / assumed if assumed else 1.0
