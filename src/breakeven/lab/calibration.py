"""How far can this machine's client be trusted? The load generator against a mock server of known truth.

`measure` plays a script and compares what the client reports (TTFT, TPOT, gaps between chunks) with what the mock noted
right before each send. `calibrate` does so for bursts of streams and up a ladder of paced rates (`breakeven
bench-client`); `quick` takes the CPU time per event at one moderate rate, in about two seconds, for the headroom that a
run's cells carry. A chunk event is one content chunk; events that a read glued together count each.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from breakeven.lab.client import Endpoint, LoadClient, LoadResult, RequestResult, RequestSpec, parse_exchange
from breakeven.lab.client.types import LoadBackend
from breakeven.lab.mock import MockProcess, MockScript

MAX_TTFT_ERROR_MS = 5.0
MAX_GAP_ERROR = 0.05
MIN_ACHIEVED = 0.97  # of the rate asked for: below, the mock did not keep up and the step says nothing of the client
LADDER = (20_000, 40_000, 60_000, 70_000, 80_000, 100_000, 120_000)  # chunk events/s
BURSTS = (250, 1000)  # streams started at once
LADDER_STREAMS = 250
BURST_SCRIPT = MockScript(chunks=100, first_chunk_s=0.05, gap_s=0.02)
QUICK_RATE = 20_000
QUICK_STREAMS = 100


class CalibrationError(ValueError):
    """A calibration that failed, or a file that holds none; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Error:
    """Reported minus true, in ms: the mean, and the mean and 99th percentile of its absolute value."""

    mean: float
    mean_abs: float
    p99_abs: float

    @classmethod
    def of(cls, differences_ns: ArrayLike) -> Error:
        """From differences in nanoseconds, shape (n,), n > 0."""
        values = np.asarray(differences_ns, dtype=np.float64) / 1e6
        size = np.abs(values)
        return cls(float(values.mean()), float(size.mean()), float(np.percentile(size, 99)))


@dataclass(frozen=True, slots=True)
class Step:
    """One script played against the truth."""

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sustained": self.sustained, "paced": self.paced}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `breakeven bench-client` found. `events_per_s`: the highest sustained rate of chunk events, 0 for none."""

    workers: int
    pinned: bool
    bursts: tuple[Step, ...]
    ladder: tuple[Step, ...]
    events_per_s: float
    ladder_ended: bool  # the last step was sustained: the rate is a lower bound

    def to_json(self) -> dict[str, Any]:
        """The file's content; `events_per_s` and `ttft_error_ms` (mean, by streams started at once) are the summary."""
        rated = [step for step in self.ladder if step.sustained and step.paced] or list(self.ladder)
        return {
            "kind": "breakeven client calibration",
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.platform(),
            "processor_count": os.cpu_count(),
            "workers": self.workers,
            "pinned": self.pinned,
            "method": "ladder",
            "events_per_s": self.events_per_s,
            "lower_bound": self.ladder_ended,
            "ttft_error_ms": {str(step.streams): step.ttft.mean for step in self.bursts},
            "client_us_per_event": rated[-1].client_us_per_event if rated else None,
            "parse_us_per_event": rated[-1].parse_us_per_event if rated else None,
            "bursts": [step.to_json() for step in self.bursts],
            "ladder": [step.to_json() for step in self.ladder],
        }


@dataclass(frozen=True, slots=True)
class Capacity:
    """Chunk events a second that this machine's client is known to take, and how that is known."""

    events_per_s: float
    method: str  # "ladder": the highest rate whose errors stayed small; "cpu": cores ÷ CPU time per event
    workers: int
    client_us_per_event: float | None = None
    parse_us_per_event: float | None = None


def specs(count: int) -> list[RequestSpec]:
    """Requests whose answers the mock's truth can be told apart by (`user`)."""
    options = {"include_usage": True, "continuous_usage_stats": True}
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
    except (OSError, IndexError, ValueError):
        return 0.0


def measure(mock: MockProcess, client: LoadBackend, script: MockScript, streams: int) -> Step:
    """Plays a script to `streams` streams at once and compares. CalibrationError if no answer came through whole."""
    mock.play(script)
    stolen_before = stolen_ms()
    load = client.closed_loop(Endpoint(f"{mock.url}/v1/completions"), specs(streams), streams, timeout_s=60)
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
) -> Step:
    """Reported against true. True TTFT: from the request's arrival at the server to the send of its first chunk."""
    ttft: list[float] = []
    from_send: list[float] = []
    tpot: list[float] = []
    gaps: list[Any] = []
    true_gaps: list[Any] = []
    sent: list[int] = []
    good = [
        r
        for r in results
        if r.error is None and r.request_id in truth and len(r.chunks) == len(truth[r.request_id]["chunk_ns"])
    ]
    for result in good:
        true: Any = truth[result.request_id]
        arrivals = np.array([chunk.arrival_ns for chunk in result.chunks])
        sends = np.array(true["chunk_ns"])
        true_ttft = true["chunk_ns"][0] - true["received_ns"]
        ttft.append(arrivals[0] - result.intended_send_ns - true_ttft)
        from_send.append(arrivals[0] - result.send_ns - true_ttft)
        tokens = sum(true["tokens"][1:])
        tpot.append((arrivals[-1] - arrivals[0] - (sends[-1] - sends[0])) / tokens)
        gaps.append(np.diff(arrivals) - np.diff(sends))
        true_gaps.append(np.diff(sends))
        sent += (int(sends[0]), int(sends[-1]))
    if not good:
        reason = next((r.error for r in results if r.error), "no reason given")
        raise CalibrationError(f"no request to the mock server came through whole: {reason}")
    gap = np.concatenate(gaps)
    events = sum(len(r.chunks) for r in good)
    return Step(
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


def calibrate(
    workers: int = 1,
    *,
    bursts: Sequence[int] = BURSTS,
    rates: Sequence[int] = LADDER,
    streams: int = LADDER_STREAMS,
    step_s: float = 2.0,
    repeats: int = 3,
    on_burst: Callable[[Step], None] = lambda step: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Calibration:
    """The whole calibration: bursts, then paced rates until two in a row fail; up to `repeats` tries each.

    Where there are cores enough, each client process is pinned to one and the mock to another.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = len(cores) > workers
    try:
        if pinned and workers == 1:
            os.sched_setaffinity(0, {cores[0]})
        with (
            MockProcess(cpu=cores[-1] if pinned else None) as mock,
            LoadClient(workers, cores[:workers] if pinned else ()) as client,
        ):
            return _calibrate(mock, client, pinned, bursts, rates, streams, step_s, repeats, on_burst, on_step)
    finally:
        if pinned and workers == 1:
            os.sched_setaffinity(0, cores)


def _calibrate(
    mock: MockProcess,
    client: LoadClient,
    pinned: bool,
    bursts: Sequence[int],
    rates: Sequence[int],
    streams: int,
    step_s: float,
    repeats: int,
    on_burst: Callable[[Step], None],
    on_step: Callable[[Step], None],
) -> Calibration:
    begun: list[Step] = []
    for count in bursts:
        tries = [measure(mock, client, BURST_SCRIPT, count)]
        while abs(tries[-1].ttft.mean) > 1.0 and len(tries) < repeats:
            tries.append(measure(mock, client, BURST_SCRIPT, count))
        begun.append(min(tries, key=lambda step: abs(step.ttft.mean)))
        on_burst(begun[-1])
    steps: list[Step] = []
    best = 0.0
    failures = 0
    for rate in rates:
        gap = streams / rate
        script = replace(BURST_SCRIPT, chunks=max(20, round(step_s / gap)), first_chunk_s=0.2, gap_s=gap)
        runs: list[Step] = []
        for _ in range(repeats):
            runs.append(measure(mock, client, script, streams))
            if runs[-1].sustained and runs[-1].paced:
                break
        step = min(runs, key=lambda r: (not r.sustained, not r.paced, r.gap_relative))
        steps.append(step)
        on_step(step)
        if step.sustained and step.paced:
            best, failures = step.achieved_per_s, 0
        else:
            failures += 1  # one failed step below a good one is the machine's doing, two in a row are the limit
            if failures == 2:
                break
    ended = bool(steps) and steps[-1].sustained
    return Calibration(client.workers, pinned, tuple(begun), tuple(steps), best, ended)


def quick(client: LoadBackend) -> Capacity:
    """The capacity by CPU time: one core divided by what an event costs the client at 20,000 events/s, per worker.

    An event costs less at higher rates, where one look at the sockets finds more of them, so this is cautious; and it
    is CPU time, so a busy machine disturbs it little. CalibrationError where the mock server cannot be run.
    """
    gap = QUICK_STREAMS / QUICK_RATE
    script = MockScript(chunks=round(1.0 / gap), first_chunk_s=0.05, gap_s=gap)
    try:
        # Actors on other machines reach this one by its address in their cluster.
        with MockProcess(host="0.0.0.0" if client.nodes else "127.0.0.1") as mock:
            step = measure(mock, client, script, QUICK_STREAMS)
    except (OSError, RuntimeError) as problem:
        raise CalibrationError(f"the client could not be calibrated: {problem}") from None
    return Capacity(
        events_per_s=client.workers * 1e6 / step.client_us_per_event,
        method="cpu",
        workers=client.workers,
        client_us_per_event=step.client_us_per_event,
        parse_us_per_event=step.parse_us_per_event,
    )


def read_capacity(path: str | Path) -> Capacity:
    """The capacity that a file of `breakeven bench-client --json` holds. CalibrationError if it holds none."""
    try:
        found = json.loads(Path(path).read_bytes())
    except OSError as problem:
        raise CalibrationError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ValueError:
        found = None
    try:
        capacity = Capacity(
            float(found["events_per_s"]),
            str(found["method"]),
            int(found["workers"]),
            found.get("client_us_per_event"),
            found.get("parse_us_per_event"),
        )
    except (KeyError, TypeError, ValueError):
        raise CalibrationError(f"{path} is not a calibration: write one with breakeven bench-client --json") from None
    if not capacity.events_per_s > 0:
        raise CalibrationError(f"{path} found no rate that this client sustained: calibrate on a quieter machine")
    return capacity
