"""Speculation in one vocabulary for all engines: what is drafted each round, and at which loads. Pure.

Shapes are named as in SGLang: `num_steps` is the depth of a draft, `eagle_topk` its breadth, `num_draft_tokens` the
nodes that are verified, the root included. Schedules are vLLM's: rows of [first, last, tokens] with inclusive batch
sizes. Each engine's file translates this to its own flags, or refuses it with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from breakeven.lab.section import Section, rows_as_tuples

Method = Literal["ngram", "draft_model", "eagle3", "mtp", "dflash"]
METHODS: tuple[Method, ...] = get_args(Method)
MAX_BATCH = 10_000  # a schedule's last row holds for all larger batches; where an engine wants a number, this one

ScheduleRow = tuple[int, int, int]  # first and last batch size, both inclusive; tokens drafted per round


class RefusedError(ValueError):
    """An engine has no such thing; the message names the engine, what it lacks, and what to do."""


class EngineSpeculation(Section):
    """What an engine drafts each round. What is None is left to the engine's own default.

    `num_steps`: the depth of a draft; for a chain, the tokens drafted. `eagle_topk`: breadth (1: a chain).
    `num_draft_tokens`: nodes verified, root included. `ngram_min`, `ngram_max`: lengths of the suffix that is looked
    up. `schedule`: tokens drafted by batch size, as vLLM writes it; gaps and larger batches keep the row before.
    `adaptive`: the engine's own control of the depth by acceptance, and its settings if given as a mapping.
    `synthetic_acceptance_length`: rounds are accepted by lot so that this many tokens come out of each, root included;
    the text means nothing. `acceptance_threshold`, `acceptance_threshold_acc`: below 1.0 more drafts are accepted than
    the target model would have sampled. `extra`: further keys of the engine's own speculation mapping.
    """

    method: Method
    draft_model_path: str | None = None
    num_steps: int | None = Field(default=None, ge=1, le=128)
    eagle_topk: int | None = Field(default=None, ge=1, le=64)
    num_draft_tokens: int | None = Field(default=None, ge=2, le=1024)
    ngram_min: int | None = Field(default=None, ge=1, le=1024)
    ngram_max: int | None = Field(default=None, ge=1, le=1024)
    schedule: tuple[ScheduleRow, ...] | None = None
    adaptive: bool | dict[str, Any] = False
    synthetic_acceptance_length: float | None = Field(default=None, ge=1)
    acceptance_threshold: float | None = Field(default=None, gt=0, le=1)
    acceptance_threshold_acc: float | None = Field(default=None, gt=0, le=1)
    extra: dict[str, Any] = Field(default_factory=dict)

    _lists = field_validator("schedule", mode="before")(rows_as_tuples)

    @field_validator("schedule")
    @classmethod
    def _rows(cls, rows: tuple[ScheduleRow, ...] | None) -> tuple[ScheduleRow, ...] | None:
        if rows is None:
            return None
        if not rows:
            raise ValueError("holds no row: write [[first, last, tokens], …]")
        if rows[0][0] != 1:
            raise ValueError(f"the first row must start at batch size 1, not {rows[0][0]}")
        for first, last, tokens in rows:
            if first > last:
                raise ValueError(f"[{first}, {last}, {tokens}] ends before it starts: write [first, last, tokens]")
            if tokens < 0:
                raise ValueError(f"[{first}, {last}, {tokens}] drafts fewer than 0 tokens")
        for (_, last, _), (first, _, _) in itertools.pairwise(rows):
            if first <= last:
                raise ValueError(f"rows overlap or are out of order: one ends at {last}, the next starts at {first}")
        return rows

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.method in ("draft_model", "eagle3", "dflash") and self.draft_model_path is None:
            raise ValueError(f"{self.method} needs draft_model_path")
        if self.method == "ngram" and self.draft_model_path is not None:
            raise ValueError("ngram drafts from the text itself: leave draft_model_path out")
        if self.method != "ngram" and (self.ngram_min is not None or self.ngram_max is not None):
            raise ValueError(f"ngram_min and ngram_max mean nothing to {self.method}")
        if self.ngram_min is not None and self.ngram_max is not None and self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) is above ngram_max ({self.ngram_max})")
        nodes, steps = self.num_draft_tokens, self.num_steps
        if nodes is not None and steps is not None:
            if not self.is_tree and nodes != steps + 1:
                raise ValueError(
                    f"a chain of {steps} steps has {steps + 1} tokens to verify, root included, but num_draft_tokens "
                    f"is {nodes}: leave it out, or set eagle_topk for a tree"
                )
            if self.is_tree and nodes > (most := most_nodes(self.eagle_topk or 1, steps)):
                raise ValueError(
                    f"a tree of {steps} steps with topk {self.eagle_topk} has at most {most} tokens, root included, "
                    f"but num_draft_tokens is {nodes}"
                )
        if self.schedule is not None and self.num_steps is not None and (top := self._top()) > self.num_steps:
            raise ValueError(f"the schedule drafts {top} tokens, but num_steps is {self.num_steps}")
        if self.schedule is not None and self._top() == 0:
            raise ValueError("the schedule never drafts: write speculation: off")
        if self.schedule is not None and self.adaptive:
            raise ValueError("give a schedule or adaptive, not both")
        length, depth = self.synthetic_acceptance_length, self.depth
        if length is not None and depth is not None and length > depth + 1:
            raise ValueError(
                f"a round of {depth} drafted tokens yields at most {depth + 1}, but synthetic_acceptance_length is "
                f"{length:g}"
            )
        return self

    def _top(self) -> int:
        return max(tokens for _, _, tokens in self.schedule or ((1, 1, 0),))

    @property
    def is_tree(self) -> bool:
        return (self.eagle_topk or 1) > 1

    @property
    def depth(self) -> int | None:
        """Tokens that a round can have accepted at most; None where that is the engine's choice."""
        if self.num_steps is not None:
            return self.num_steps
        if self.schedule is not None:
            return self._top()
        if self.num_draft_tokens is not None and not self.is_tree:
            return self.num_draft_tokens - 1
        return None

    @property
    def ranges(self) -> tuple[tuple[int, int | None, int], ...]:
        """The schedule without gaps: (first, last, tokens), the last of the last row None for "and above"."""
        rows = self.schedule or ()
        return tuple(
            (first, rows[index + 1][0] - 1 if index + 1 < len(rows) else None, tokens)
            for index, (first, _, tokens) in enumerate(rows)
        )


def most_nodes(topk: int, steps: int) -> int:
    """Nodes of the largest draft tree of EAGLE-2's kind, root included: each step expands `topk` of the last nodes.

    The first step gives `topk` nodes, each further one `topk` · `topk` candidates (EAGLE-2, arXiv 2406.16858, 4.1).
    """
    return 1 + topk + (steps - 1) * topk * topk


def refuse(engine: str, speculation: EngineSpeculation, **reasons: str) -> None:
    """RefusedError for the first of the named fields that is set. `reasons`: what the engine has instead."""
    for field, reason in reasons.items():
        value = getattr(speculation, field)
        if value is not None and value is not False and value != {}:
            raise RefusedError(f"{engine} has no {field}: {reason}")


def refuse_trees(engine: str, speculation: EngineSpeculation) -> None:
    """RefusedError for a tree, where an engine drafts chains only."""
    if speculation.is_tree:
        raise RefusedError(
            f"{engine} drafts chains only, so eagle_topk cannot be {speculation.eagle_topk}: leave it out, and set "
            f"num_steps to the length of the chain"
        )


def edges(speculation: EngineSpeculation) -> Iterator[int]:
    """Batch sizes after which a schedule drafts another number of tokens."""
    for (_, last, tokens), (_, _, after) in itertools.pairwise(speculation.ranges):
        if last is not None and tokens != after:
            yield last
