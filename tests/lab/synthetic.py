"""Runs of known truth: cells whose throughput, acceptance and texts are as asked, written like measured ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from breakeven.lab.campaign import Campaign
from breakeven.lab.client.types import Chunk, RequestResult
from breakeven.lab.records import CellKey, CellRecord, RunDirectory

START_NS = 1_700_000_000_000_000_000
TOKENS = 48
LEVELS = (1, 2, 5, 10)
BASE = {1: 30.0, 2: 55.0, 5: 110.0, 10: 145.0}  # tok/s of the baseline
RATIOS = {1: 1.85, 2: 1.6, 5: 1.15, 10: 0.85}
EXAMPLE_RATIOS = {1: 1.62, 2: 1.38, 5: 1.05, 10: 0.84}  # of docs/reading-a-report.md
ENVIRONMENT: dict[str, Any] = {
    "invocation": ["breakeven", "quickstart", "--out", "runs/first"],
    "commands": {
        "off": ["breakeven", "serve", "--model", "smollm2-135m"],
        "ngram": ["breakeven", "serve", "--model", "smollm2-135m", "--speculative-algorithm", "NGRAM"],
    },
    "versions": {"python": "3.11.9", "breakeven": "0.1.0", "torch": "2.13.0"},
    "cpu": {"model": "Example CPU", "usable_cores": 2, "governor": None},
    "gpus": [],
    "suites": {
        name: {"sha256": "0" * 64, "prompts": 40, "common_word_share": 0.3} for name in ("coding", "encyclopedic")
    },
    "load_average": [0.1, 0.2, 0.3],
}

Ratio = Callable[[str, str, int], float]  # (arm, condition, level) → true ratio to the baseline


def campaign(**fields: Any) -> Campaign:
    """Two arms, two domains, four levels, five blocks, unless said otherwise."""
    value: dict[str, Any] = {
        "name": "synthetic",
        "arms": {
            "off": {"type": "embedded"},
            "ngram": {"type": "embedded", "speculation": {"algorithm": "ngram", "num_steps": 3}},
        },
        "baseline": "off",
        "workload": {"domains": ("coding", "encyclopedic"), "max_tokens": TOKENS},
        "levels": LEVELS,
        "blocks": 5,
        "seed": 7,
    }
    return Campaign.model_validate({**value, **fields}, strict=False)


def by_level(ratios: Mapping[int, float] = RATIOS) -> Ratio:
    """Every arm but the first has these ratios, in every domain."""
    return lambda arm, condition, level: 1.0 if arm == "off" else ratios[level]


def cell(
    key: CellKey, tokens_per_s: float, *, tokens_per_chunk: int = 1, requests: int | None = None, ttft_s: float = 0.0
) -> CellRecord:
    """A cell whose streams are all busy and produce exactly `tokens_per_s` together.

    Each chunk arrives when its last token would, so cumulative tokens are linear in time and every window gives the
    same throughput (`ttft_s`, added before the first chunk, breaks that).
    """
    gap_ns = 1e9 * key.level / tokens_per_s
    count = requests or 2 * key.level
    results = []
    for index in range(count):
        stream, turn = index % key.level, index // key.level
        start = START_NS + round(turn * (TOKENS * gap_ns + ttft_s * 1e9))
        first = start + ttft_s * 1e9
        ends = range(tokens_per_chunk, TOKENS + 1, tokens_per_chunk)
        chunks = tuple(Chunk(round(first + n * gap_ns), tokens_per_chunk, 4 * tokens_per_chunk) for n in ends)
        results.append(
            RequestResult(
                request_id=f"{key.id}-{index:05d}",
                prompt_id=f"{key.condition}-{key.block}-{index}",
                stream=stream,
                intended_send_ns=start,
                send_ns=start,
                first_byte_ns=chunks[0].arrival_ns,
                end_ns=chunks[-1].arrival_ns,
                http_status=200,
                chunks=chunks,
                text=f"The answer to {key.condition} question {key.block}-{index}, told in full.",
                finish_reason="length",
                prompt_tokens=40,
                completion_tokens=TOKENS,
                cached_tokens=0,
                error=None,
            )
        )
    end = max(r.end_ns for r in results)
    drafting = key.arm != "off"
    drafts = count * (TOKENS - 1) / 2
    counters = {
        "num_drafts": drafts,
        "num_draft_tokens": 3 * drafts,
        "num_accepted_tokens": drafts,
        "accepted_pos_0": 0.6 * drafts,
        "accepted_pos_1": 0.3 * drafts,
        "accepted_pos_2": 0.1 * drafts,
    }
    return CellRecord(
        key=key, started_ns=START_NS, ended_ns=end, requests=tuple(results), counters=counters if drafting else {},
        client_cpu_s=0.01, send_lag_p99_ms=0.02,
    )  # fmt: skip


def cells(given: Campaign, ratio: Ratio, *, noise: float = 0.01, seed: int = 1) -> list[CellRecord]:
    """Every cell of a campaign. `noise`: standard deviation of each cell's log throughput; 0 for none."""
    random_source = random.Random(seed)
    records = []
    for block in range(given.blocks):
        for arm in given.arms:
            for condition in given.condition_names(given.workload.domains or ()):
                for level in given.levels:
                    wobble = math.exp(random_source.gauss(0, noise)) if noise else 1.0
                    rate = BASE[level] * ratio(arm, condition, level) * wobble
                    record = cell(
                        CellKey(block, arm, condition, level), rate, tokens_per_chunk=1 if arm.startswith("off") else 2
                    )
                    records.append(record)
    return records


def spoil(record: CellRecord, *reasons: str) -> CellRecord:
    """The cell, invalid."""
    return replace(record, invalid=tuple(reasons))


def write(
    path: Path, given: Campaign, records: list[CellRecord], environment: Mapping[str, Any] = ENVIRONMENT
) -> RunDirectory:
    """The run on disk."""
    run = RunDirectory.create(path, given, "", environment)
    for record in records:
        run.write_cell(record)
    return run
