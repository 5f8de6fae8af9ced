"""All sources together: as many prompts of each domain as asked for, distinct, and none that is held out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from breakeven.train.config import Domain, PromptsConfig
from breakeven.train.prompts.catalogue import chat_prompts, encyclopedic_prompts
from breakeven.train.prompts.decontaminate import HeldOut, measurement_prompts
from breakeven.train.prompts.source_code import (
    Function,
    coding_prompts,
    functions,
    permissive_packages,
    prose_passages,
    source_files,
)
from breakeven.train.prompts.tools import bfcl_prompts, own_agentic_prompts
from breakeven.train.prompts.types import PromptRow

_ATTEMPTS = 6  # prompts generated for each one wanted, at most: word lists repeat themselves


@dataclass(slots=True)
class PromptReport:
    """What was built: counts per domain and source, what was left out and why, and the packages' licences."""

    per_domain: dict[str, int] = field(default_factory=dict)
    per_source: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0
    held_out: int = 0
    too_long: int = 0
    licences: dict[str, str] = field(default_factory=dict)


def build_prompts(
    config: PromptsConfig,
    domains: Sequence[Domain],
    seed: int,
    held_out_texts: Sequence[str],
    bfcl: Path | None,
    log: Callable[[str], None],
) -> tuple[list[PromptRow], PromptReport]:
    """Prompts in a shuffled order that depends on the seed (and on what is installed). Fewer than asked for where the
    material runs out, which the report shows. `held_out_texts` come on top of breakeven's own measurement prompts."""
    report = PromptReport()
    shares = {domain: config.shares.get(domain, 0.0) for domain in domains}
    total_share = sum(shares.values()) or 1.0
    wanted = {domain: round(config.total * share / total_share) for domain, share in shares.items()}
    packages = permissive_packages(config.packages)
    report.licences = packages
    items: list[Function] = []
    if wanted.get("coding") or wanted.get("chat"):
        files = source_files(list(packages), config.max_source_files, seed)
        items = list(functions(files))
        random.Random(seed).shuffle(items)
        log(f"prompts: {len(items):,} documented functions in {len(files):,} files of {len(packages)} packages")
    streams: dict[Domain, Callable[[int], Iterator[PromptRow]]] = {
        "coding": lambda count: coding_prompts(items, seed),
        "agentic": lambda count: _mixed(
            bfcl_prompts(bfcl, seed) if bfcl is not None else (), own_agentic_prompts(count * _ATTEMPTS, seed)
        ),
        "encyclopedic": lambda count: encyclopedic_prompts(count * _ATTEMPTS, seed),
        "chat": lambda count: chat_prompts(count * _ATTEMPTS, seed, prose_passages(items, list(packages))),
    }
    keep = _Filter(HeldOut([*measurement_prompts(), *held_out_texts]), config.max_characters, report)
    rows: list[PromptRow] = []
    for domain, count in wanted.items():
        found = 0
        for row in streams[domain](count):
            if found >= count:
                break
            if keep(row):
                rows.append(row)
                found += 1
        report.per_domain[domain] = found
        log(f"prompts: {found:,} of {count:,} for {domain}")
    random.Random(seed).shuffle(rows)
    for row in rows:
        report.per_source[row.source] = report.per_source.get(row.source, 0) + 1
    return rows, report


def _mixed(first: Iterable[PromptRow], second: Iterable[PromptRow]) -> Iterator[PromptRow]:
    """Two of the first for one of the second; what is left of either at the end."""
    one, other = iter(first), iter(second)
    while True:
        pair = list(itertools.islice(one, 2))
        third = next(other, None)
        if not pair and third is None:
            return
        yield from pair
        if third is not None:
            yield third


class _Filter:
    """Each prompt once, not too long, not held out; what is dropped is counted in the report."""

    def __init__(self, held_out: HeldOut, max_characters: int, report: PromptReport) -> None:
        self._held_out, self._limit, self._report = held_out, max_characters, report
        self._seen: set[str] = set()

    def __call__(self, row: PromptRow) -> bool:
        if len(row.text) > self._limit:
            self._report.too_long += 1
        elif row.id in self._seen:
            self._report.duplicates += 1
        elif any(self._held_out.contains(content) for role, content in row.messages if role == "user"):
            self._report.held_out += 1
        else:
            self._seen.add(row.id)
            return True
        return False
