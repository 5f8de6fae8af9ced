"""The table of README.md's section on 250 streams, from front-end.tar.gz.

    python examples/synthetic-acceptance/front_end.py

Each folder of the archive is one server, measured by attaching to it: `campaign.yaml`, the cells' requests (without
their chunks), the server's log, and `samples.jsonl`, its metrics once a second. Tokens/s are over the whole cell, for
each of the two passes. The lag is the mean time from send to end over the mean time in the engine (queue, prefill and
decode by the server's metrics); a dash stands where the samples around a cell hold other requests too.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ARCHIVE = Path(__file__).with_name("front-end.tar.gz")
SERVERS = {1: ("off-1-process", "al2.5-1-process"), 4: ("off-4-processes", "al2.5-4-processes")}
TOKENS = 128  # of every answer


def rows() -> Iterator[str]:
    """The table's lines, in Markdown."""
    with tarfile.open(ARCHIVE) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr]
    yield "| API processes | counts in each chunk | streams | off, tok/s | lag | 2.5 a round, tok/s | lag | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for processes, (off, drafts) in SERVERS.items():
        for arm, counts in (("counts", "yes"), ("plain", "no")):
            for level in (100, 250):
                base, other = (server(files, name, arm, level) for name in (off, drafts))
                ratios = ", ".join(f"{b / a:.2f}" for a, b in zip(base[0], other[0], strict=True))
                yield f"| {processes} | {counts} | {level} | {told(base)} | {told(other)} | {ratios} |"


def told(found: tuple[list[float], list[float | None]]) -> str:
    """Two cells of the table: tokens/s and lags of the two passes."""
    rates, lags = found
    return " | ".join(
        (", ".join(f"{rate:,.0f}" for rate in rates), ", ".join("–" if lag is None else f"{lag:.2f}" for lag in lags))
    )


def server(files: dict[str, bytes], name: str, arm: str, level: int) -> tuple[list[float], list[float | None]]:
    """Tokens/s and lags of a server's cells at a level, by pass."""
    samples = [json.loads(line) for line in files[f"{name}/samples.jsonl"].splitlines()]
    samples = [sample for sample in samples if "generation_tokens_total" in sample]
    rates: list[float] = []
    lags: list[float | None] = []
    for block in (0, 1):
        folder = f"{name}/cells/b0{block}-{arm}-encyclopedic-c{level}"
        cell = json.loads(files[f"{folder}/cell.json"])
        began, ended = cell["started_ns"] / 1e9, cell["ended_ns"] / 1e9
        rates.append(cell["requests"] * TOKENS / (ended - began))
        before = [sample for sample in samples if sample["t"] <= began][-1]
        after = next(sample for sample in samples if sample["t"] >= ended)
        if risen(before, after, "decode_time_seconds_count") != cell["requests"]:
            lags.append(None)
            continue
        parts = ("queue", "prefill", "decode")
        engine_s = sum(risen(before, after, f"{part}_time_seconds_sum") for part in parts)
        requests = pq.read_table(io.BytesIO(files[f"{folder}/requests.parquet"]), columns=["send_ns", "end_ns"])
        sends, ends = (sum(requests[column].to_pylist()) for column in ("send_ns", "end_ns"))
        lags.append((ends - sends) / 1e9 / engine_s)
    return rates, lags


def risen(before: dict[str, Any], after: dict[str, Any], name: str) -> float:
    """How far one of vLLM's figures of requests rose between two samples."""
    return float(after[f"request_{name}"] - before.get(f"request_{name}", 0.0))


if __name__ == "__main__":
    print("\n".join(rows()))
