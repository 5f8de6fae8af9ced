"""Runs a tuning stage by stage, each an ordinary run in a folder of its own; resumes from what is on disk.

Nothing but the stages' own files is kept: which candidates stay follows from the rounds' cells, so a tuning that was
interrupted anywhere goes on to the same end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from breakeven.lab.analysis import analyse
from breakeven.lab.arms import make_arm
from breakeven.lab.campaign import Campaign, Tune
from breakeven.lab.data_files import DataFile
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.policy.ranges import depth_at, probes, thresholds
from breakeven.lab.records import RunDirectory
from breakeven.lab.runner import ArmFactory, CampaignRunner, Outcome, check_resumable, prepare
from breakeven.lab.summary import ALL, Summary
from breakeven.lab.tune.choose import Proposal, mean_gains, propose, survivors
from breakeven.lab.tune.halving import Round, rounds
from breakeven.lab.tune.space import POLICY, Candidate, Space, TuneError, with_schedule
from breakeven.lab.tune.stages import confirm_campaign, halves, search_campaign
from breakeven.lab.workload.prompt import PromptError

CONFIRM = "confirm"

# Executes a stage's runner, with whatever shows its progress: (directory, its schedule, the runner) → outcome.
Execute = Callable[[RunDirectory, Any, CampaignRunner], Outcome]


class StageFailedError(RuntimeError):
    """A stage did not come to its end; the message says why. What was measured is kept."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """`arms`: what is measured against the baseline. `levels`: the campaign's, and both sides of each threshold."""

    arms: Mapping[str, Any]
    levels: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class Tuning:
    """One tuning in one directory. `say` is told what happens, in plain words; `execute` runs a stage.

    `files`: the data sets of the workload where they have been read already, so that all stages ask of one commit.
    """

    campaign: Campaign
    space: Space
    directory: Path
    say: Callable[[str], None]
    execute: Execute
    invocation: Sequence[str] = ()
    arm_factory: ArmFactory = make_arm
    files: tuple[DataFile, ...] | None = None

    @property
    def plan(self) -> tuple[Round, ...]:
        """The rounds of the search."""
        tune = self.campaign.tune or Tune()
        return rounds(
            len(self.space.candidates), eta=tune.eta, first_blocks=tune.first_blocks, finalists=tune.finalists
        )

    def run(self) -> RunDirectory | None:
        """The whole tuning, or what is left of it; the confirmation's run, None where the search found no gain at all.

        Raises StageFailedError where a stage cannot be finished, RecordError where a directory cannot be used, and
        passes KeyboardInterrupt on; all leave what can be resumed.
        """
        proposal = self.search()
        if not proposal.winner:
            self.say("no shape gains at any level in the search: there is nothing to confirm, leave speculation off")
            return None
        confirmation = self.confirmation(proposal)
        for note in confirmation.notes:
            self.say(note)
        return self._confirm(proposal, confirmation)

    def check(self) -> None:
        """Can every stage be laid out with its half of the prompts? TuneError if not, before anything is measured."""
        halved = halves(self.campaign, load_suites(self.campaign, self.files))
        arms = {candidate.name: candidate.config for candidate in self.space.candidates[:1]}
        stages = (
            search_campaign(self.campaign, 1, arms, 1),
            confirm_campaign(self.campaign, arms, self.campaign.levels),
        )
        for half, stage, suites in zip(("search", "confirmation"), stages, halved, strict=True):
            try:
                build_schedule(stage, suites)
            except PromptError as problem:
                raise TuneError(
                    f"the half of the prompts that the {half} gets does not do: {problem}. Give more prompts of that"
                    " kind, or another seed"
                ) from None

    def search(self) -> Proposal:
        """All rounds. What stays in each follows from all blocks measured so far."""
        self.check()
        search_suites, _ = halves(self.campaign, load_suites(self.campaign, self.files))
        left = list(self.space.candidates)
        gains: dict[str, dict[int, list[float]]] = {c.name: {n: [] for n in self.campaign.levels} for c in left}
        levels = sorted(self.campaign.levels)
        families = {candidate.name: candidate.shape.family for candidate in left}
        for step in self.plan:
            self.say(
                f"search, round {step.number} of {len(self.plan)}: {', '.join(c.name for c in left)} in {step.blocks}"
                f" block{'s' if step.blocks != 1 else ''}"
            )
            stage = search_campaign(self.campaign, step.number, {c.name: c.config for c in left}, step.blocks)
            run = self._stage(f"round-{step.number}", stage, search_suites, {})
            _add_gains(gains, analyse(run))
            means = mean_gains({c.name: gains[c.name] for c in left})
            failed = [name for name, by_level in means.items() if not by_level]
            if failed:
                self.say(f"no valid cell, so left out: {', '.join(failed)}")
            kept = survivors(means, families, levels, step.keep)
            if not kept:
                raise StageFailedError(
                    f"round {step.number} of the search has no cell that is valid beside a valid one of the baseline:"
                    f" see {run.path}"
                )
            left = [candidate for name in kept for candidate in left if candidate.name == name]
        final = mean_gains({candidate.name: gains[candidate.name] for candidate in left})
        proposal = propose(final, {c.name: c.shape for c in left}, levels)
        for candidate in left:
            found = final[candidate.name]
            ratios = ", ".join(f"{math.exp(found[n]):.2f} at {n}" for n in levels if n in found)
            self.say(f"{candidate.name}: {ratios} in the search")
        return proposal

    def confirmation(self, proposal: Proposal) -> Confirmation:
        """The winner by itself, and the schedule as an arm of its own where it is anything else."""
        by_name = {candidate.name: candidate for candidate in self.space.candidates}
        winner = by_name[proposal.winner]
        arms: dict[str, Any] = {winner.name: winner.config}
        levels = tuple(sorted(self.campaign.levels))
        steady = all(depth_at(proposal.ranges, level) == winner.shape.depth for level in levels)
        if steady and by_name[proposal.deepest].shape.family == winner.shape.family:
            return Confirmation(arms, levels, (f"{winner.name} gains at every level: confirmed by itself",))
        try:
            scheduled = with_schedule(by_name[proposal.deepest], proposal.ranges)
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            return Confirmation(arms, levels, (f"its engine takes no schedule, so {winner.name} alone: {reason}",))
        arms[POLICY] = scheduled
        # Above the highest level nothing is drafted, which no level can show.
        edges = tuple(n for n in probes(proposal.ranges, levels) if n <= max(levels))
        told = ", ".join(f"{last} and {last + 1}" for last in thresholds(proposal.ranges) if last < max(levels))
        note = f"to be confirmed: {winner.name} and the schedule {_rows(proposal)}"
        return Confirmation(arms, edges, (note + (f", at {told} streams too" if told else ""),))

    def _confirm(self, proposal: Proposal, confirmation: Confirmation) -> RunDirectory:
        _, suites = halves(self.campaign, load_suites(self.campaign, self.files))
        stage = confirm_campaign(self.campaign, confirmation.arms, confirmation.levels)
        blocks = sum(step.blocks for step in self.plan)
        return self._stage(
            CONFIRM,
            stage,
            suites,
            {
                "tuning": {
                    "searched": [candidate.name for candidate in self.space.candidates],
                    "winner": proposal.winner,
                    "schedule": [list(row) for row in proposal.ranges],
                    "statement": (
                        f"Tuned: {len(self.space.candidates)} shapes were searched in"
                        f" {blocks} block{'s' if blocks != 1 else ''} of their own."
                        " Everything below is from the confirmation alone: new launches, and prompts and seeds that"
                        " the search has not seen."
                    ),
                }
            },
        )

    def _stage(
        self, name: str, campaign: Campaign, suites: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> RunDirectory:
        """One stage to its end, from where it stands."""
        path = self.directory / name
        schedule = build_schedule(campaign, suites, self.files or ())
        if RunDirectory.is_run(path):
            run = RunDirectory.open(path)
            check_resumable(run, campaign, schedule)
        else:
            run = RunDirectory.create(
                path, campaign, "", {**prepare(campaign, schedule, self.invocation), **environment}
            )
        if not run.finished or _unmeasured(run, schedule):
            runner = CampaignRunner(run, campaign, schedule, arm_factory=self.arm_factory)
            outcome = self.execute(run, schedule, runner)
            if outcome.stopped:
                raise StageFailedError(f"{name}: a server died, and the campaign says to stop then")
        if not run.cell_ids():
            raise StageFailedError(f"{name}: nothing was measured")
        # A round that went on without them would choose otherwise than the same command does once they are measured.
        if name != CONFIRM and _unmeasured(run, schedule):
            raise StageFailedError(
                f"{name}: cells of the baseline {campaign.baseline!r} could not be measured, and what stays goes by"
                f" them: see {run.path}"
            )
        return run


def _unmeasured(run: RunDirectory, schedule: Any) -> bool:
    """Has the baseline cells that were never measured? A candidate that cannot start is an answer, a baseline not."""
    done = run.measured_ids()
    return any(cell.key.arm == run.campaign.baseline and cell.key.id not in done for cell in schedule.cells())


def _add_gains(gains: Mapping[str, Mapping[int, list[float]]], summary: Summary) -> None:
    """The log ratios of each block of a round, above 0 where better."""
    metric = str(summary.campaign.resolved.get("primary_metric", "throughput"))
    for c in summary.comparisons:
        if (c.metric, c.condition) == (metric, ALL) and c.arm in gains and c.level in gains[c.arm]:
            sign = 1 if c.better == "higher" else -1
            gains[c.arm][c.level].extend(sign * math.log(ratio) for ratio in c.block_ratios.values())


def _rows(proposal: Proposal) -> str:
    return str([list(row) for row in proposal.ranges])


__all__ = ["CONFIRM", "Candidate", "Confirmation", "StageFailedError", "TuneError", "Tuning"]
