"""How truthful is the load generator, and how far? Against a mock server of known truth, on one core each.

    python benchmarks/client_capacity.py [--json FILE] [--quick]

Two parts. First, many streams started at once: what the client reports (TTFT, TPOT, gaps between chunks) against what
the mock sent. Then a ladder of paced rates: the highest at which the mean TTFT error stays within 5 ms and the mean
error of a gap within 5% of the true gap, with what an event costs in CPU time, while receiving and while parsing.
Linux with two cores; on other systems nothing is pinned and the figures are of the whole machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from breakeven.lab.client import Endpoint, LoadResult, RequestResult, RequestSpec, parse_exchange, run_closed_loop
from breakeven.lab.mock import MockProcess, MockScript

MAX_TTFT_ERROR_MS = 5.0
MAX_GAP_ERROR = 0.05
MIN_ACHIEVED = 0.97  # of the rate asked for: below, the mock did not keep up and the step says nothing of the client
LADDER = (20_000, 40_000, 60_000, 70_000, 80_000, 100_000, 120_000)


@dataclass(frozen=True)
class Error:
    """Reported minus true, in ms: the mean, and the mean and 99th percentile of its absolute value."""

    mean: float
    mean_abs: float
    p99_abs: float

    @classmethod
    def of(cls, differences_ns: Sequence[float] | np.ndarray) -> Error:
        values = np.asarray(differences_ns, dtype=float) / 1e6
        size = np.abs(values)
        return cls(float(values.mean()), float(size.mean()), float(np.percentile(size, 99)))


@dataclass(frozen=True)
class Run:
    """One run against the truth. A chunk event is one content chunk; events that a read glued together count each."""

    streams: int
    events: int
    requested_per_s: float
    achieved_per_s: float  # as the mock sent them, between its first and last chunk
    ttft: Error  # from the intended send
    ttft_from_send: Error
    send_lag: Error
    burst_ms: float  # from the start until the last stream's request had left
    tpot: Error
    gap: Error
    gap_relative: float  # mean absolute error of a gap over the true mean gap
    client_us_per_event: float
    parse_us_per_event: float
    failed: int
    stolen_ms: float  # CPU time that the host took from this (virtual) machine meanwhile; 0 where it is not known

    @property
    def sustained(self) -> bool:
        """The client kept the limits."""
        kept = abs(self.ttft.mean) <= MAX_TTFT_ERROR_MS and self.gap_relative <= MAX_GAP_ERROR
        return bool(kept and self.failed == 0)

    @property
    def paced(self) -> bool:
        """The mock kept its pace."""
        return bool(self.achieved_per_s >= MIN_ACHIEVED * self.requested_per_s)


def specs(count: int, continuous: bool = True) -> list[RequestSpec]:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    return [
        RequestSpec(
            f"r{i}",
            f"p{i}",
            json.dumps(
                {"model": "mock", "prompt": "x", "stream": True, "user": f"r{i}", "stream_options": options}
            ).encode(),
        )
        for i in range(count)
    ]


def stolen_ms() -> float:
    """The time stolen by the host since boot, over all cores (Linux: the eighth figure of /proc/stat's first line)."""
    try:
        return float(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) * 1000 / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def measure(mock: MockProcess, script: MockScript, streams: int) -> Run:
    mock.play(script)
    stolen_before = stolen_ms()
    load = run_closed_loop(Endpoint(f"{mock.url}/v1/completions"), specs(streams), streams, timeout_s=60)
    stolen = stolen_ms() - stolen_before
    truth = {request["user"]: request for request in mock.truth()["requests"]}
    began = time.process_time()
    results = [parse_exchange(exchange) for exchange in load.exchanges]
    parse_s = time.process_time() - began
    return compare(load, results, truth, script, parse_s, stolen)


def compare(
    load: LoadResult,
    results: Sequence[RequestResult],
    truth: dict[str, dict[str, list[int]]],
    script: MockScript,
    parse_s: float,
    stolen: float,
) -> Run:
    """Reported against true. True TTFT: from the request's arrival at the server to the send of its first chunk."""
    ttft: list[float] = []
    from_send: list[float] = []
    tpot: list[float] = []
    gaps: list[np.ndarray] = []
    true_gaps: list[np.ndarray] = []
    sent: list[int] = []
    good = [r for r in results if r.error is None and len(r.chunks) == len(truth[r.request_id]["chunk_ns"])]
    for result in good:
        true = truth[result.request_id]
        arrivals = np.array([chunk.arrival_ns for chunk in result.chunks])
        sends = np.array(true["chunk_ns"])
        true_ttft = true["chunk_ns"][0] - true["received_ns"]
        ttft.append(arrivals[0] - result.intended_send_ns - true_ttft)
        from_send.append(arrivals[0] - result.send_ns - true_ttft)
        tokens = sum(true["tokens"][1:])
        tpot.append((arrivals[-1] - arrivals[0] - (sends[-1] - sends[0])) / tokens)
        gaps.append(np.diff(arrivals) - np.diff(sends))
        true_gaps.append(np.diff(sends))
        sent += (sends[0], sends[-1])
    if not good:
        raise SystemExit(
            f"no request came through whole: {next((r.error for r in results if r.error), 'no reason given')}"
        )
    gap = np.concatenate(gaps)
    events = sum(len(r.chunks) for r in good)
    return Run(
        streams=len(results),
        events=events,
        requested_per_s=len(results) / script.gap_s,
        achieved_per_s=float(events / ((max(sent) - min(sent)) / 1e9 + script.gap_s)),
        ttft=Error.of(ttft),
        ttft_from_send=Error.of(from_send),
        send_lag=Error.of([r.send_ns - r.intended_send_ns for r in results]),
        burst_ms=(max(r.send_ns for r in results) - load.start_ns) / 1e6,
        tpot=Error.of(tpot),
        gap=Error.of(gap),
        gap_relative=float(np.abs(gap).mean() / np.concatenate(true_gaps).mean()),
        client_us_per_event=load.client_cpu_s / events * 1e6,
        parse_us_per_event=parse_s / events * 1e6,
        failed=len(results) - len(good),
        stolen_ms=stolen,
    )


def show_burst(run: Run) -> None:
    print(f"\n{run.streams} streams at once, first chunk after 50 ms, then one every 20 ms; errors in ms")
    print(f"{'':26}{'mean':>9}{'mean abs':>10}{'p99 abs':>9}")
    for name, error in (
        ("TTFT from intended send", run.ttft),
        ("TTFT from actual send", run.ttft_from_send),
        ("send lag", run.send_lag),
        ("TPOT", run.tpot),
        ("gap between chunks", run.gap),
    ):
        print(f"{name:26}{error.mean:9.3f}{error.mean_abs:10.3f}{error.p99_abs:9.3f}")
    print(f"the last of {run.streams} requests left {run.burst_ms:.1f} ms after the start (planned spacing included)")


def show_step(run: Run) -> None:
    verdict = "ok" if run.sustained and run.paced else "client limit" if not run.sustained else "mock limit"
    print(
        f"{run.requested_per_s:9,.0f}{run.achieved_per_s:10,.0f}{run.ttft.mean:10.2f}{100 * run.gap_relative:9.2f}"
        f"{run.gap.p99_abs:9.2f}{run.client_us_per_event:10.1f}{run.parse_us_per_event:10.1f}"
        f"{run.stolen_ms:8.0f}  {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--streams", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=3, help="runs of a ladder step until one keeps the limits")
    parser.add_argument("--quick", action="store_true", help="fewer steps, one run each")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = len(cores) >= 2
    if pinned:
        os.sched_setaffinity(0, {cores[0]})
    else:
        print("fewer than two cores to pin to: client and mock share what there is", file=sys.stderr)
    with MockProcess(cpu=cores[1] if pinned else None) as mock:
        burst = measure(mock, MockScript(chunks=100, first_chunk_s=0.05, gap_s=0.02), options.streams)
        show_burst(burst)
        print(f"\nladder of paced rates over {options.streams} streams, about 2 s each, one core for the client")
        print(
            "stolen: ms of CPU time that the host took from this machine meanwhile (steps with much of it prove little)"
        )
        print(
            f"{'asked/s':>9}{'sent/s':>10}{'TTFT ms':>10}{'gap %':>9}{'p99 ms':>9}"
            f"{'CPU µs':>10}{'parse µs':>10}{'stolen':>8}"
        )
        steps: list[Run] = []
        best = 0.0
        failures = 0
        for rate in LADDER[:: 3 if options.quick else 1]:
            gap = options.streams / rate
            script = MockScript(chunks=max(20, round(2 / gap)), first_chunk_s=0.2, gap_s=gap)
            runs: list[Run] = []
            for _ in range(1 if options.quick else options.repeats):
                runs.append(measure(mock, script, options.streams))
                if runs[-1].sustained and runs[-1].paced:
                    break
            run = min(runs, key=lambda r: (not r.sustained, not r.paced, r.gap_relative))
            steps.append(run)
            show_step(run)
            if run.sustained and run.paced:
                best = run.achieved_per_s
                failures = 0
            else:
                failures += 1  # one failed step below a good one is the machine's doing, two in a row are the limit
                if failures == 2:
                    break
    suffix = ", at least: the ladder ended, or the mock sent no faster" if steps[-1].sustained else ""
    print(f"\nhighest sustained: {best:,.0f} chunk events/s on one core{suffix}")
    if options.json:
        figures = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.platform(),
            "pinned": pinned,
            "burst": asdict(burst),
            "ladder": [asdict(step) | {"sustained": step.sustained, "paced": step.paced} for step in steps],
            "highest_sustained_per_s": best,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
