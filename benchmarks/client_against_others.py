"""breakeven's client beside `vllm bench serve` and AIPerf: the same truth for all, in one run, in interleaved rounds.

    python benchmarks/client_against_others.py --tokenizer DIR [--vllm PATH/TO/bin/vllm] [--aiperf PATH/TO/bin/aiperf]
        [--rounds 3] [--json FILE]

The mock server of known truth has one core, the client under test another. Every client is a program that is started
for each measurement, breakeven's too, with the loop and the parser that a campaign's cell uses. In each round every
client plays

- bursts: 250 and 1000 streams started at once (first chunk after 50 ms, then one every 20 ms, 100 a request);
- a ladder of paced rates: a request every 100/rate seconds, whose answers are as above. A rate at which a client fails
  or takes too long counts as not sustained, and the table marks it.

Errors are what a client reports for a request minus what the mock noted for that request (it is told apart by its
X-Request-ID, or `user` for breakeven): the kernel's receive time of the request and the clock right before each send. A
server that was late is therefore no error of a client; how late it was is shown beside it. Clients that are not named
are left out. Linux, two cores or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breakeven.lab.calibration import BURST_SCRIPT, MAX_GAP_ERROR, MAX_TTFT_ERROR_MS, MIN_ACHIEVED, specs
from breakeven.lab.mock import MockProcess

BURSTS = (250, 1000)
RATES = (4_000, 6_000, 8_000, 10_000, 12_500, 15_000, 20_000, 25_000, 30_000, 40_000, 60_000, 80_000, 100_000, 120_000)
CHUNKS = BURST_SCRIPT.chunks
FIRST_TRY = {"breakeven": 80_000, "vllm bench serve": 15_000, "AIPerf": 4_000}  # where a ladder is entered
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Reported:
    """What a client says of its requests, by the id that the server saw too. Times in ms."""

    ttft: Mapping[str, float]
    gaps: Mapping[str, Sequence[float]]  # between successive chunks
    cpu: Mapping[str, float]  # breakeven only: seconds of CPU while receiving and while parsing


@dataclass(frozen=True, slots=True)
class Row:
    """One client playing one load. `requested_per_s` 0: a burst."""

    client: str
    round: int
    requests: int
    requested_per_s: float
    achieved_per_s: float  # chunk events/s that the mock sent, once streams have begun to end (paced), or over all
    ttft_error_ms: float  # mean of reported minus true
    gap_error: float  # mean absolute error of a gap over the true mean gap
    gap_p99_ms: float  # as the client reports it
    gap_p99_true_ms: float
    reached: int  # the most streams that the mock saw at once, of those that the client reports
    missing: int  # requests without a usable figure
    server_late_ms: float  # mean true TTFT minus the planned one
    server_gap_error: float  # mean absolute error of a true gap against the planned one, as a share of it
    cpu_s: float  # of the client's processes, start and end included
    load_cpu_s: float  # of the same from the first such request that the server saw to their last chunk
    own_cpu: Mapping[str, float]

    @property
    def sustained(self) -> bool:
        """The rule of the ladder: small errors, every request there, and the rate that was asked for."""
        return (
            abs(self.ttft_error_ms) < MAX_TTFT_ERROR_MS
            and self.gap_error < MAX_GAP_ERROR
            and self.missing == 0
            and self.achieved_per_s >= MIN_ACHIEVED * self.requested_per_s
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A load that a client did not get through, or whose results could not be read. `requested_per_s` 0: a burst."""

    client: str
    round: int
    requests: int
    requested_per_s: float
    problem: str

    def __str__(self) -> str:
        what = _load(self.requests, self.requested_per_s)
        return f"round {self.round}, {self.client}, {what}: {self.problem}"


def _load(requests: int, per_s: float) -> str:
    return f"{per_s:,.0f}/s" if per_s else f"{requests} at once"


def parse_vllm(result: Any, prefix: str) -> Reported:
    """From the JSON of `vllm bench serve --save-result --save-detailed`: lists over requests, in seconds.

    Request i was sent with the id PREFIXi. Failed requests are left out. ValueError without details, or for what is no
    list of times.
    """
    if not isinstance(result, dict):
        raise ValueError(f"the result of vllm bench serve is no JSON object but {type(result).__name__}")
    ttfts, itls, errors = result.get("ttfts"), result.get("itls"), result.get("errors")
    if not isinstance(ttfts, list) or not isinstance(itls, list) or len(ttfts) != len(itls):
        raise ValueError("the result of vllm bench serve holds no times per request: is --save-detailed there?")
    failed = errors if isinstance(errors, list) and len(errors) == len(ttfts) else [""] * len(ttfts)
    good = [i for i in range(len(ttfts)) if not failed[i]]
    try:
        return Reported(
            {f"{prefix}{i}": 1000 * float(ttfts[i]) for i in good},
            {f"{prefix}{i}": [1000 * float(gap) for gap in itls[i]] for i in good},
            {},
        )
    except TypeError as problem:
        raise ValueError(f"the result of vllm bench serve holds something else than times: {problem}") from None


def parse_aiperf(lines: Iterable[str]) -> Reported:
    """From AIPerf's `profile_export.jsonl`, one record a request; warm-up, cancelled and failed requests left out.

    ValueError for a line that is no record, or not one as version 0.13 writes it, or a unit other than milliseconds.
    """
    ttft: dict[str, float] = {}
    gaps: dict[str, list[float]] = {}
    for line in filter(str.strip, lines):
        try:
            found = _aiperf_record(json.loads(line))
        except (AttributeError, KeyError, TypeError) as problem:
            what = f"{type(problem).__name__}: {problem}"
            raise ValueError(f"no record of AIPerf as version 0.13 writes it: {line[:80]!r} ({what})") from None
        if found:
            name, first, between = found
            ttft[name], gaps[name] = first, between
    return Reported(ttft, gaps, {})


def _aiperf_record(record: Any) -> tuple[str, float, list[float]] | None:
    """Id, TTFT and gaps in ms; None for a request that does not count. Raises as its parts do where one is missing."""
    metadata, metrics = record["metadata"], record["metrics"]
    if metadata.get("benchmark_phase") != "profiling" or metadata.get("was_cancelled") or record.get("error"):
        return None
    first, between = metrics.get("time_to_first_token"), metrics.get("inter_chunk_latency")
    if not first or not between:
        return None
    if (first["unit"], between["unit"]) != ("ms", "ms"):
        raise ValueError(f"times in {first['unit']} and {between['unit']}, and not in ms")
    return str(metadata["x_request_id"]), float(first["value"]), [float(gap) for gap in between["value"]]


def most_at_once(spans: Iterable[tuple[int, int]]) -> int:
    """The most spans [begin, end) that overlap."""
    running = most = 0
    for _, change in sorted(edge for begin, end in spans for edge in ((begin, 1), (end, -1))):
        running += change
        most = max(most, running)
    return most


def next_rate(tried: Mapping[int, bool], count: int, start: int) -> int | None:
    """The ladder's next index of `count`, given which were sustained; None once its highest sustained one is known.

    Entered at `start`, in doubling strides until one was sustained and one was not, then by bisection. The highest
    sustained index counts, should a lower one have failed.
    """
    if not tried:
        return start
    low = max((i for i, kept in tried.items() if kept), default=-1)
    high = min((i for i, kept in tried.items() if not kept and i > low), default=count)
    if high - low == 1:
        return None
    stride = 1 << (len(tried) - 1)
    if high == count:
        return min(low + stride, count - 1)
    if low == -1:
        return max(high - stride, 0)
    return (low + high) // 2


def compare(
    client: str,
    number: int,
    requests: int,
    rate: float,
    reported: Reported,
    truth: Sequence[Any],
    cpu_s: float,
    samples: Sequence[tuple[int, float]],
) -> Row:
    """What a client reports against what the mock sent. `samples`: (ns, seconds of CPU until then), in order.

    What the client does not report is no part of the load: some send a request before it, to see whether the server is
    there. ValueError if no request can be told apart.
    """
    by_id = {name: record for record in truth if (name := record["user"] or record["request_id"]) in reported.ttft}
    # vLLM also times the event that ends an answer, which has no text and is sent with the last chunk: that gap is cut.
    whole = {n: r for n, r in by_id.items() if 0 <= len(reported.gaps[n]) - len(r["chunk_ns"]) + 1 <= 1}
    if not whole:
        raise ValueError(f"none of {client}'s {len(reported.ttft)} requests is one of {len(truth)} that the mock saw")
    true_ttft = np.array([(r["chunk_ns"][0] - r["received_ns"]) / 1e6 for r in whole.values()])
    ttft = np.array([reported.ttft[name] for name in whole])
    gaps = np.concatenate([np.array(reported.gaps[n][: len(r["chunk_ns"]) - 1], float) for n, r in whole.items()])
    true_gaps = np.concatenate([np.diff(r["chunk_ns"]) / 1e6 for r in whole.values()])
    planned_gap = BURST_SCRIPT.gap_s * 1e3
    load = list(by_id.values())
    sent = np.concatenate([r["chunk_ns"] for r in load])
    begin, end = int(sent.min()), int(sent.max())
    if rate:  # between the first end of a stream and the last start of one
        begin, end = min(r["chunk_ns"][-1] for r in load), max(r["chunk_ns"][0] for r in load)
    events = int(((sent >= begin) & (sent < end)).sum())
    return Row(
        client=client,
        round=number,
        requests=requests,
        requested_per_s=rate,
        achieved_per_s=events / ((end - begin) / 1e9) if end > begin else 0.0,
        ttft_error_ms=float((ttft - true_ttft).mean()),
        gap_error=float(np.abs(gaps - true_gaps).mean() / true_gaps.mean()),
        gap_p99_ms=float(np.percentile(gaps, 99)),
        gap_p99_true_ms=float(np.percentile(true_gaps, 99)),
        reached=most_at_once((r["received_ns"], r["chunk_ns"][-1]) for r in load),
        missing=requests - len(whole),
        server_late_ms=float(true_ttft.mean()) - BURST_SCRIPT.first_chunk_s * 1e3,
        server_gap_error=float(np.abs(true_gaps - planned_gap).mean() / planned_gap),
        cpu_s=cpu_s,
        load_cpu_s=cpu_between(samples, min(r["received_ns"] for r in load), int(sent.max())),
        own_cpu=reported.cpu,
    )


def cpu_between(samples: Sequence[tuple[int, float]], begin_ns: int, end_ns: int) -> float:
    """Seconds of CPU used between two moments, by straight lines between samples."""
    times, used = zip(*samples, strict=True)
    # From the first sample on, since doubles do not hold nanoseconds since 1970.
    first, last = np.interp([begin_ns - times[0], end_ns - times[0]], [t - times[0] for t in times], used)
    return float(last - first)


def summarise(rows: Sequence[Row], failures: Sequence[Failure] = ()) -> dict[str, Any]:
    """One client's medians over rounds. CPU per event: of the smallest burst, with the parsing afterwards for ours.

    A round in which it failed at every rate counts with 0 events/s.
    """
    found: dict[str, Any] = {"bursts": {}}
    failed = [f for f in failures if f.requested_per_s]
    by_round: dict[int, list[Row]] = {f.round: [] for f in failed}
    for row in rows:
        by_round.setdefault(row.round, []).append(row)
    for streams in sorted({r.requests for r in rows if not r.requested_per_s}):
        those = [r for r in rows if not r.requested_per_s and r.requests == streams]
        fields = ("ttft_error_ms", "gap_error", "gap_p99_ms", "gap_p99_true_ms", "reached", "missing", "server_late_ms")
        found["bursts"][streams] = {name: statistics.median(getattr(r, name) for r in those) for name in fields}
        found["bursts"][streams]["ttft_error_range_ms"] = [
            min(r.ttft_error_ms for r in those), max(r.ttft_error_ms for r in those)
        ]  # fmt: skip
    best, cpu, parsing = [], [], []
    for number, its in by_round.items():
        paced = [r for r in its if r.requested_per_s]
        if paced or any(f.round == number for f in failed):
            best.append(max((r.achieved_per_s for r in paced if r.sustained), default=0.0))
        bursts = [r for r in its if not r.requested_per_s]
        if bursts:
            few = min(bursts, key=lambda r: r.requests)
            events = few.requests * CHUNKS
            after = few.own_cpu.get("parsing", 0.0)
            cpu.append((few.load_cpu_s + after) / events * 1e6)
            if few.own_cpu:
                parsing.append(after / events * 1e6)
    found["sustained_per_s"] = statistics.median(best) if best else None
    found["sustained_range"] = [min(best), max(best)] if best else None
    found["failed_at_per_s"] = sorted({f.requested_per_s for f in failed})
    found["cpu_us_per_event"] = statistics.median(cpu) if cpu else None
    found["parsing_us_per_event"] = statistics.median(parsing) if parsing else None
    return found


def summaries(rows: Sequence[Row], failures: Sequence[Failure] = ()) -> dict[str, dict[str, Any]]:
    """`summarise` for each client, in the order of their first rows; those that only failed come last."""
    names = dict.fromkeys(one.client for one in (*rows, *failures))
    return {
        name: summarise([r for r in rows if r.client == name], [f for f in failures if f.client == name])
        for name in names
    }


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"sustained": row.sustained}


def play(job: Mapping[str, Any]) -> None:
    """breakeven's own program: the loop of a campaign's cell, and the parser after it."""
    from dataclasses import replace

    from breakeven.lab.client import Endpoint, LoadClient, parse_exchange

    requests = specs(job["requests"])
    endpoint = Endpoint(f"{job['url']}/v1/completions")
    with LoadClient() as client:
        if job["rate"]:
            spaced = [replace(spec, offset_s=i * CHUNKS / job["rate"]) for i, spec in enumerate(requests)]
            load = client.open_loop(endpoint, spaced, timeout_s=60)
        else:
            load = client.closed_loop(endpoint, requests, job["requests"], timeout_s=60)
    began = time.process_time()
    results = [parse_exchange(exchange) for exchange in load.exchanges]
    parsing = time.process_time() - began
    good = [r for r in results if r.error is None and r.chunks]
    arrivals = {r.request_id: [chunk.arrival_ns for chunk in r.chunks] for r in good}
    found = {
        "ttft": {r.request_id: (arrivals[r.request_id][0] - r.intended_send_ns) / 1e6 for r in good},
        "gaps": {name: (np.diff(times) / 1e6).tolist() for name, times in arrivals.items()},
        "cpu": {"receiving": load.client_cpu_s, "parsing": parsing},
    }
    Path(job["file"]).write_text(json.dumps(found))


class CpuSampler(threading.Thread):
    """Notes how much CPU the processes of a session have used, 20 times a second. Linux.

    The usage of a program as a whole is mostly its imports, whose time varies by more than a load costs.
    """

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[int, float]] = []
        self._session = session
        self._used: dict[str, int] = {}  # ticks, by process; one that has ended keeps what it had
        self._over = threading.Event()

    def run(self) -> None:
        count = 0
        while not self._over.is_set():
            # Looking through all processes takes a millisecond or two: not every time.
            for pid in [p for p in os.listdir("/proc") if p.isdigit()] if count % 10 == 0 else list(self._used):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:  # ended meanwhile
                    continue
                if int(fields[3]) == self._session:
                    self._used[pid] = int(fields[11]) + int(fields[12])
            self.samples.append((time.time_ns(), sum(self._used.values()) / os.sysconf("SC_CLK_TCK")))
            count += 1
            self._over.wait(0.05)

    def finish(self) -> Sequence[tuple[int, float]]:
        self._over.set()
        self.join()
        return self.samples


class Contest:
    """The mock on one core, and clients that are started on another, one at a time."""

    def __init__(self, arguments: argparse.Namespace, mock: MockProcess, core: int, folder: Path) -> None:
        self._arguments = arguments
        self._mock = mock
        self._core = core
        self._folder = folder
        self.rows: list[Row] = []
        self.failures: list[Failure] = []

    def attempt(self, client: str, number: int, requests: int, rate: float) -> Row | None:
        """Measures and shows; None, with the failure noted, where that did not give a row."""
        try:
            row = self.measure(client, number, requests, rate)
        except (RuntimeError, ValueError, OSError) as problem:
            self.failures.append(Failure(client, number, requests, rate, str(problem)))
            print(self.failures[-1], flush=True)
            return None
        show(row)
        return row

    def measure(self, client: str, number: int, requests: int, rate: float) -> Row:
        """Starts the client, waits for its end and compares.

        RuntimeError if it fails or takes too long; ValueError and OSError if its results are not there or others.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        command, environment = self._command(client, requests, rate, folder)
        self._mock.play(BURST_SCRIPT)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | environment, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, {self._core}),
            )  # fmt: skip
            sampler = CpuSampler(process.pid)
            sampler.start()
            try:
                status = process.wait(TIMEOUT_S)
            except BaseException as problem:  # Ctrl-C too, which does not reach a session of its own
                _kill_session(process.pid)
                process.wait()
                if isinstance(problem, subprocess.TimeoutExpired):
                    raise RuntimeError(f"{client} took longer than {TIMEOUT_S} s") from None
                raise
            finally:
                samples = sampler.finish()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if status != 0:
            _kill_session(process.pid)  # workers that it left would disturb the next measurement
            raise RuntimeError(f"{client} ended with status {status}: {log.read_text(errors='replace')[-2000:]}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        truth = [r for r in self._mock.truth()["requests"] if len(r["chunk_ns"]) == CHUNKS]
        row = compare(client, number, requests, rate, self._reported(client, folder), truth, cpu_s, samples)
        self.rows.append(row)
        return row

    def _command(self, client: str, requests: int, rate: float, folder: Path) -> tuple[list[str], dict[str, str]]:
        url, tokenizer = self._mock.url, str(self._arguments.tokenizer)
        per_s = f"{rate / CHUNKS:g}"
        if client == "breakeven":
            job = {"url": url, "requests": requests, "rate": rate, "file": str(folder / "own.json")}
            return [sys.executable, __file__, "--play", json.dumps(job)], {}
        if client == "AIPerf":
            command = [self._arguments.aiperf, "profile", "--model", "mock", "--url", url]
            command += ["--endpoint-type", "completions", "--streaming", "--tokenizer", tokenizer, "--isl", "16"]
            command += ["--osl", str(CHUNKS), "--use-server-token-count", "--ui", "none", "--export-level", "records"]
            command += ["--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(folder)]
            command += ["--request-count", str(requests)]
            paced = ["--request-rate", per_s, "--arrival-pattern", "constant"]
            return [*command, *(paced if rate else ["--concurrency", str(requests)])], {}
        command = [self._arguments.vllm, "bench", "serve", "--backend", "openai", "--base-url", url]
        command += ["--model", "mock", "--tokenizer", tokenizer, "--dataset-name", "random"]
        command += ["--random-input-len", "16", "--random-output-len", str(CHUNKS), "--ignore-eos", "--disable-tqdm"]
        command += ["--num-prompts", str(requests), "--request-id-prefix", "v-", "--save-result", "--save-detailed"]
        command += ["--result-dir", str(folder), "--result-filename", "result.json", "--ready-check-timeout-sec", "0"]
        # A gamma process of this shape has gaps that are alike to a thousandth.
        paced = ["--request-rate", per_s, "--burstiness", "1000000"]
        return [*command, *(paced if rate else [])], {"HF_HUB_OFFLINE": "1"}

    def _reported(self, client: str, folder: Path) -> Reported:
        if client == "breakeven":
            return Reported(**json.loads((folder / "own.json").read_bytes()))
        if client == "AIPerf":
            with (folder / "profile_export.jsonl").open() as lines:
                return parse_aiperf(lines)
        return parse_vllm(json.loads((folder / "result.json").read_bytes()), "v-")

    def ladder(self, client: str, number: int, start: int, seconds: float) -> int:
        """Climbs; the index of the highest sustained rate, or 0 for none."""
        tried: dict[int, bool] = {}
        while (index := next_rate(tried, len(RATES), start)) is not None:
            rate = RATES[index]
            row = self.attempt(client, number, round(rate * seconds / CHUNKS), rate)
            tried[index] = row is not None and row.sustained
        return max((i for i, kept in tried.items() if kept), default=0)


def _kill_session(leader: int) -> None:
    """Ends what is left of a program that was started as the leader of a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def show(row: Row) -> None:
    what = _load(row.requests, row.requested_per_s)
    parts = (
        f"round {row.round} {row.client:17s}{what:>13s}: TTFT {row.ttft_error_ms:+8.2f} ms",
        f"gap {100 * row.gap_error:5.1f}%, p99 {row.gap_p99_ms:6.1f} (true {row.gap_p99_true_ms:5.1f})",
        f"streams {row.reached}, missing {row.missing}, sent {row.achieved_per_s:,.0f}/s",
        f"server late {row.server_late_ms:.2f} ms, {100 * row.server_gap_error:.1f}%",
        f"CPU {row.load_cpu_s:.2f} of {row.cpu_s:.1f} s",
    )
    print(", ".join(parts) + (", sustained" if row.requested_per_s and row.sustained else ""), flush=True)


def print_table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """The summary as a table of Markdown, with the rates at which a client failed below it."""
    print("\n| client | sustained, events/s | CPU, µs/event |", end="")
    bursts = sorted({n for one in found.values() for n in one["bursts"]})
    print("".join(f" {n} at once: TTFT error, ms | p99 gap (true), ms | streams reached |" for n in bursts))
    print("|---|---|---|" + "---|---|---|" * len(bursts))
    for client, one in found.items():
        rate, cpu, parsing = one["sustained_per_s"], one["cpu_us_per_event"], one["parsing_us_per_event"]
        line = f"| {client} | {'-' if rate is None else format(rate, ',.0f')}"
        line += " \\*" if one["failed_at_per_s"] else ""
        line += f" | {'-' if cpu is None else format(cpu, '.1f')}"
        line += f" (parsing {parsing:.1f})" if parsing else ""
        for n in bursts:
            b = one["bursts"].get(n)
            if b is None:  # failed in every round
                line += " | - | - | -"
                continue
            line += f" | {b['ttft_error_ms']:+.2f} | {b['gap_p99_ms']:.1f} ({b['gap_p99_true_ms']:.1f})"
            line += f" | {b['reached']:.0f} of {n}"
        print(line + " |")
    for client, one in found.items():
        if one["failed_at_per_s"]:
            rates = ", ".join(f"{rate:,.0f}" for rate in one["failed_at_per_s"])
            print(f"\n\\* {client} failed in some round at {rates} events/s, which counts as not sustained.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("BREAKEVEN_VLLM"), help="vLLM's program (BREAKEVEN_VLLM)")
    parser.add_argument("--aiperf", help="AIPerf's program")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder: the other clients need one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bursts", type=int, nargs="*", default=list(BURSTS))
    parser.add_argument(
        "--step-s", type=float, default=4.0, help="seconds over which a paced step starts requests; 0: no ladder"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        play(json.loads(arguments.play))
        return 0
    answer_s = BURST_SCRIPT.first_chunk_s + CHUNKS * BURST_SCRIPT.gap_s
    if 0 < arguments.step_s < 1.5 * answer_s:
        parser.error(f"--step-s must be at least {1.5 * answer_s:.1f}: an answer takes {answer_s:.1f} s")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("the server and the client need a core each, and this process may use one only")
    programs = {"vllm bench serve": arguments.vllm, "AIPerf": arguments.aiperf}
    clients = ["breakeven", *(name for name, program in programs.items() if program)]
    for name in programs:
        if name not in clients:
            print(f"{name} is left out: its program was not named")
    if len(clients) > 1 and not (arguments.tokenizer and arguments.tokenizer.is_dir()):
        parser.error("--tokenizer must name a folder: vllm bench serve and AIPerf make their prompts with it")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
    began = time.monotonic()
    starts = {name: RATES.index(FIRST_TRY[name]) for name in clients}
    os.sched_setaffinity(0, {cores[-1]})  # what is done here between measurements is not done on the client's core
    with tempfile.TemporaryDirectory() as folder, MockProcess(cpu=cores[-1]) as mock:
        contest = Contest(arguments, mock, cores[0], Path(folder))
        for number in range(1, arguments.rounds + 1):
            turn = (number - 1) % len(clients)
            for client in clients[turn:] + clients[:turn]:
                played = all(contest.attempt(client, number, n, 0) is not None for n in arguments.bursts)
                if played and arguments.step_s:
                    starts[client] = contest.ladder(client, number, starts[client], arguments.step_s)
            if arguments.json:  # after each round, so that an interrupted run leaves what it measured
                out = {
                    "summary": summaries(contest.rows, contest.failures),
                    "rows": [as_json(row) for row in contest.rows],
                    "failures": [str(failure) for failure in contest.failures],
                }
                arguments.json.write_text(json.dumps(out, indent=1) + "\n")
    print_table(summaries(contest.rows, contest.failures))
    print(f"\n{time.monotonic() - began:.0f} s, {arguments.rounds} rounds, {platform.platform()}")
    return 1 if contest.failures else 0


if __name__ == "__main__":
    sys.exit(main())
