"""Executes a schedule: launch by launch, cell by cell; writes every cell before it begins the next; resumes.

What is on disk decides what is left to do. A cell that was measured, validly or not, is never measured again; cells
of a server that did not start are recorded as invalid and are tried again when the run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from breakeven.lab import environment, front_end, gates, texts
from breakeven.lab.arms import Arm, Probe, ProcessIdentity, Ready, ResetError, StartError, make_arm
from breakeven.lab.arms.attach import Attached
from breakeven.lab.arms.process import StopReport, kill_leftover
from breakeven.lab.arms.prometheus import Rise, rise
from breakeven.lab.calibration import CalibrationError, Capacity, quick, read_capacity
from breakeven.lab.campaign import SENTINEL, AttachArm, Campaign, Sessions
from breakeven.lab.client.make import make_client
from breakeven.lab.client.parse import parse_exchange
from breakeven.lab.client.sessions import Messages, Session, run_sessions
from breakeven.lab.client.types import LoadBackend, LoadResult, RequestResult, RequestSpec
from breakeven.lab.client.workers import LoadClient, WorkerError
from breakeven.lab.design import stable_hash
from breakeven.lab.events import (
    CellBegan,
    CellEnded,
    CellProgress,
    Event,
    LaunchBegan,
    LaunchEnded,
    LaunchFailed,
    LaunchReady,
    Notice,
    RunBegan,
)
from breakeven.lab.known_traps import trap_sentences
from breakeven.lab.load import load_figures
from breakeven.lab.plan import PlannedCell, PlannedLaunch, Schedule, cell_salt
from breakeven.lab.play import session_of, turn_of, turn_seed, turns_in
from breakeven.lab.records import CellKey, CellRecord, RecordError, RunDirectory
from breakeven.lab.stopping import Looks
from breakeven.lab.workload.prompt import Prompt, salted
from breakeven.lab.workload.request import chat_body, completion_body

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_PROBE_PROMPT = Prompt("ready", "ready", ({"role": "user", "content": "Say hello."},))
_PROBE_TOKENS = 2
_AHEAD = 256  # connections opened before an open loop, at most
_DYING_S = 1.0  # how long a server that failed requests is watched for its end
_DYING_POLL_S = 0.05
_CLOCK_TRIES = 20
_CLOCKS_TOGETHER_NS = 50_000
_WORDS = 300  # of an error message that is quoted
_CELL_BYTES = 65_536  # set aside for a cell, besides…
_REQUEST_BYTES = 4_096  # …this for each request…
_TOKEN_BYTES = 48  # …and this for each token, which may be a chunk and some text

ArmFactory = Callable[[str, Any], Arm]


class ServerDiedError(RuntimeError):
    """A server failed, and the campaign says to stop then (on_server_death: stop)."""


@dataclass(slots=True)
class Outcome:
    """How a run ended. `invalid`: reasons by cell, over the whole run. `start_failures`: messages of this start."""

    cells: int
    measured: int
    invalid: Mapping[str, tuple[str, ...]]
    start_failures: tuple[str, ...] = ()
    stopped: bool = False  # by a server's death


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a cell sends: requests that are ready, or sessions, whose requests are made and noted as they are played."""

    specs: Sequence[RequestSpec]
    sessions: Sequence[Session]
    body: Callable[[Messages, str], bytes]
    made: Mapping[str, tuple[str, bytes]]  # request → prompt and body, of sessions

    def sent(self) -> list[tuple[str, str, bytes]]:
        """(request, prompt, body) in the cell's order, whatever the order of sending was."""
        if not self.sessions:
            return [(spec.request_id, spec.prompt_id, spec.body) for spec in self.specs]
        return [(name, *self.made[name]) for name in sorted(self.made, key=self.position)]

    def position(self, request_id: str) -> tuple[int, str, int]:
        """Where a request stands in the cell: its name ends in its number, and in a session in that of its turn."""
        name = request_id.rpartition("/")[0] if self.sessions else request_id
        return len(name), name, turn_of(request_id)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for _, _, body in self.sent():
            digest.update(body + b"\n")
        return digest.hexdigest()


@dataclass(slots=True)
class _Launch:
    """A launch under way."""

    plan: PlannedLaunch
    arm: Arm
    number: int  # of this arm in this block, from 1: more than one after a death or a resumption
    ready: Ready | None = None
    cells_s: float = 0.0
    cells: int = 0  # that were sent
    tokenizes: bool = True  # until the server has shown that it cannot


def prepare(
    campaign: Campaign, schedule: Schedule, invocation: Sequence[str] = (), *, run_id: str | None = None
) -> dict[str, Any]:
    """What `environment.json` holds of a new run."""
    commands = {name: _command(name, config) for name, config in campaign.arms.items()}
    found = environment.collect(commands, invocation)
    found["run_id"] = run_id or hashlib.sha256(f"{time.time_ns()}{invocation}".encode()).hexdigest()[:16]
    found["schedule_sha256"] = schedule.sha256
    found["suites"] = {
        name: {
            "sha256": suite.sha256,
            "prompts": len(suite.prompts),
            "common_word_share": texts.common_word_share([m["content"] for p in suite.prompts for m in p.messages]),
        }
        for name, suite in schedule.suites.items()
    }
    if schedule.files:
        found["files"] = [file.record() for file in schedule.files]
    return found


def _command(name: str, config: Any) -> tuple[str, ...]:
    with suppress(StartError):  # a missing key is told when the arm is started
        return make_arm(name, config).command()
    return ()


def check_requests(campaign: Campaign) -> None:
    """ValueError if the campaign's requests cannot be written, such as for an extra_body that overrides a field."""
    make = chat_body if campaign.workload.template == "chat" else completion_body
    workload = campaign.workload
    for condition in (SENTINEL, *campaign.condition_names(("one",))):
        fields = campaign.setting(condition).sampling.fields()
        make(_PROBE_PROMPT, "model", fields, workload.max_tokens, None, workload.extra_body)


def check_resumable(run: RunDirectory, campaign: Campaign, schedule: Schedule) -> None:
    """RecordError unless the run on disk is of this very campaign, with these very prompts."""
    if run.campaign != campaign:
        old, new = run.campaign.model_dump(mode="json"), campaign.model_dump(mode="json")
        changed = ", ".join(name for name in new if new[name] != old.get(name))
        raise RecordError(
            f"{run.path} was begun with another campaign (changed since: {changed}): undo the change, or run into "
            f"another directory"
        )
    if run.environment.get("schedule_sha256") != schedule.sha256:
        raise RecordError(
            f"{run.path} was begun with other prompts, or by another version of breakeven "
            f"({run.environment.get('versions', {}).get('breakeven')}): run into another directory"
        )


@dataclass(slots=True)
class CampaignRunner:
    """Runs what is left of a schedule into a run directory. Call `execute` once."""

    run: RunDirectory
    campaign: Campaign
    schedule: Schedule
    on_event: Callable[[Event], None] = lambda event: None
    arm_factory: ArmFactory = make_arm
    _start_failures: list[str] = field(default_factory=list)
    _client: LoadBackend = field(default_factory=LoadClient)
    _looks: Looks = field(init=False)
    _capacity: Capacity | None = None
    _capacity_note: str = "not calibrated (client.calibration: off)"

    def __post_init__(self) -> None:
        self._looks = Looks(self.run)

    def execute(self) -> Outcome:
        """Measures every cell that is not on disk yet. No server is left running, however it ends.

        Raises RecordError (DiskFullError, RunLockedError) when the directory cannot be used, and passes
        KeyboardInterrupt on; both leave a run that can be resumed.
        """
        check_resumable(self.run, self.campaign, self.schedule)
        with self.run.lock():
            return self._execute()

    def _execute(self) -> Outcome:
        self.run.remove_leftovers()
        self._end_leftover_servers()
        done = self.run.measured_ids()
        todo = [
            (launch, [cell for cell in launch.cells if cell.key.id not in done]) for launch in self.schedule.launches
        ]
        todo = [(launch, cells) for launch, cells in todo if cells]
        total = sum(1 for _ in self.schedule.cells())
        self.run.journal(
            "run_started",
            cells=total,
            done=len(done),
            version=environment.versions()["breakeven"],
            traps=list(trap_sentences(self.campaign)),
        )
        self.on_event(RunBegan(total, len(done), len(todo)))
        stopped = False
        try:
            if todo:
                self._start_client()
            for position, (launch, cells) in enumerate(todo):
                if self._ends_before(launch.block, new=position == 0 or todo[position - 1][0].block != launch.block):
                    break
                self._launch_until_done(launch, cells)
        except ServerDiedError as problem:
            stopped = True
            self.run.journal("run_stopped", reason=str(problem))
        except KeyboardInterrupt:
            with suppress(RecordError):
                self.run.journal("run_interrupted")
            raise
        finally:
            self._client.close()
            self.run.release()
        if not stopped:
            self.run.journal("run_finished")
        invalid = self._all_invalid()
        return Outcome(total, len(self.run.measured_ids()), invalid, tuple(self._start_failures), stopped)

    def _ends_before(self, block: int, *, new: bool) -> bool:
        """Does the campaign's stopping rule say that the blocks so far are enough? Asked once at each new block."""
        if not new or not self._looks.enough(block):
            return False
        self.run.journal("run_decided", blocks=block)
        self.on_event(
            Notice(
                f"every comparison of {self.campaign.primary_metric} is decided after {block} blocks: stopping there"
            )
        )
        return True

    def _start_client(self) -> None:
        """Starts the client's processes and finds out what they can take. Without that a run goes on, and says so."""
        config = self.campaign.client
        self._start_workers()
        if config.calibration == "off":
            return
        if config.calibration != "quick":
            try:
                self._capacity = read_capacity(config.calibration)
            except CalibrationError as problem:
                raise RecordError(str(problem)) from None
            scaled = (
                "" if self._capacity.workers == config.workers else f", with {self._capacity.workers} client processes"
            )
            self._capacity_note = f"from {config.calibration}{scaled}"
        else:
            try:
                self._capacity = quick(self._client)
            except CalibrationError as problem:
                self._capacity_note = str(problem)
                self.on_event(Notice(str(problem)))
                self._client.close()  # what failed may have been its workers, which the first cell needs
                self._start_workers()
                return
            self._capacity_note = "by CPU time per event, from two seconds against the mock server"
        self.run.journal("client_calibrated", **asdict(self._capacity), note=self._capacity_note)

    def _start_workers(self) -> None:
        config = self.campaign.client
        try:
            self._client = make_client(config)
        except WorkerError as problem:
            raise RecordError(f"the client's workers could not be started: {problem}") from None
        if config.backend != "local":
            self.run.journal("client_started", backend=config.backend, nodes=list(self._client.nodes))

    def _workers_failed(self, problem: WorkerError) -> str:
        """New workers for those that failed; returns what to say of it. RecordError where there are none to be had."""
        self.run.journal("client_failed", reason=str(problem))
        self._client.close()
        self._start_workers()
        return f"the load generator failed: {problem}"

    def _client_figures(self, events: int, events_per_s: float, load: LoadResult) -> dict[str, Any]:
        """Chunk events a second in the cell's busiest second, against what this client is known to take."""
        capacity = self._capacity.events_per_s if self._capacity else None
        return {
            "workers": self._client.workers,
            "backend": self.campaign.client.backend,
            "nodes": list(self._client.nodes),
            "clocks": [asdict(clock) for clock in load.clocks],
            "worker_cpu_s": list(load.worker_cpu_s),
            "events": events,
            "events_per_s": events_per_s,
            "capacity_per_s": capacity,
            "headroom": capacity / events_per_s if capacity and events_per_s else None,
            "note": self._capacity_note,
        }

    def _all_invalid(self) -> dict[str, tuple[str, ...]]:
        """The invalid cells on disk, of earlier starts too. Of a cell that was tried again, its last try counts."""
        known: dict[str, tuple[str, ...]] = {}
        for event in self.run.read_journal():
            name = str(event.get("cell"))
            if event.get("event") == "cell_invalid":
                known[name] = tuple(map(str, event.get("reasons", ())))
            elif event.get("event") == "cell_finished":
                known.pop(name, None)
        now = self.run.cell_ids()
        return {name: reasons for name, reasons in sorted(known.items()) if name in now}

    def _end_leftover_servers(self) -> None:
        """A run that was killed may have left its server. Its identity is in the journal."""
        open_launches: dict[int, ProcessIdentity] = {}
        open_elsewhere: dict[str, int] = {}  # block by arm, of those that commands of the user's own bring up
        for event in self.run.read_journal():
            if event.get("pid") is None and event.get("event") == "arm_started":
                open_elsewhere[str(event.get("arm"))] = int(event.get("block") or 0)
            elif event.get("pid") is None and event.get("event") == "arm_stopped":
                open_elsewhere.pop(str(event.get("arm")), None)
            if event.get("event") == "arm_started" and isinstance(event.get("pid"), int):
                identity = ProcessIdentity(event["pid"], float(event.get("pid_created") or 0.0))
                open_launches[identity.pid] = identity
            elif event.get("event") == "arm_stopped":
                open_launches.pop(event.get("pid", -1), None)
        for identity in open_launches.values():
            if kill_leftover(identity):
                self.on_event(Notice(f"ended a server that an earlier start had left running (process {identity.pid})"))
        for name, block in open_elsewhere.items():
            self._stop_elsewhere(name, block)

    def _stop_elsewhere(self, name: str, block: int) -> None:
        """Runs the stop_command of an arm, if it has one, for a launch that an earlier start could not end."""
        config = self.campaign.arms.get(name)
        if not isinstance(config, AttachArm) or config.stop_command is None:
            return
        try:
            report = Attached(name, config).stop_leftover(self.run.log_path(block, name))
        except StartError as problem:
            self.on_event(Notice(f"a server that an earlier start had left running was not stopped: {problem}"))
            return
        self._journal_stop(name, block, None, report)
        told = "; ".join(report.problems) or "ran its stop_command"
        self.on_event(Notice(f"{name}: an earlier start had left its server running: {told}"))

    def _journal_stop(self, arm: str, block: int, identity: ProcessIdentity | None, report: StopReport) -> None:
        self.run.journal(
            "arm_stopped",
            block=block,
            arm=arm,
            pid=identity.pid if identity else None,
            exit_status=report.exit_status,
            killed=report.killed,
            seconds=round(report.seconds, 3),
            problems=list(report.problems),
            gpu=report.gpu,
        )

    # Launches

    def _launch_until_done(self, plan: PlannedLaunch, cells: list[PlannedCell]) -> None:
        """Measures the cells, launching again if the server dies between them. Each launch takes at least one off."""
        number = 0
        while cells:
            number += 1
            cells = self._launch(plan, cells, number)

    def _launch(self, plan: PlannedLaunch, cells: list[PlannedCell], number: int) -> list[PlannedCell]:
        """One launch; returns the cells that are left because the server ended before their turn."""
        began = time.monotonic()
        log = self.run.log_path(plan.block, plan.arm)
        identity: ProcessIdentity | None = None
        launch: _Launch | None = None
        left = list(cells)
        try:
            arm = self.arm_factory(plan.arm, self.campaign.arms[plan.arm])
            launch = _Launch(plan, arm, number)
            self.on_event(LaunchBegan(plan.block, plan.arm, len(cells), arm.command()))
            identity = arm.start(log)
            self.run.journal(
                "arm_started",
                block=plan.block,
                arm=plan.arm,
                launch=number,
                pid=identity.pid if identity else None,
                pid_created=identity.created if identity else None,
                command=list(arm.command()),
            )
            launch.ready = arm.wait_ready(self._probe())
            facts = arm.facts()
            if launch.ready.version is None:
                launch.ready = replace(launch.ready, version=facts.version)
            self.run.journal(
                "arm_ready",
                block=plan.block,
                arm=plan.arm,
                seconds=round(launch.ready.seconds, 3),
                model=launch.ready.model,
                version=launch.ready.version,
                server=facts.as_json(),
            )
            self.on_event(LaunchReady(plan.block, plan.arm, time.monotonic() - began))
            self._warm_up(launch)
            while left:
                if launch.cells and not arm.alive():  # no cell has to suffer for that
                    self._server_failed(plan, f"{plan.arm}: the server ended between cells: {arm.obituary()}")
                    return left
                before = launch.cells
                died = self._cell(launch, left[0])
                # A server that ended before the cell's first request costs no cell: the next launch has it. A launch
                # that got no further than this in its first cell gives it up, since what comes before the requests
                # (filling its cache, say) may be what ends the server; without requests it is left to --resume.
                if not died or launch.cells > before or not before:
                    del left[0]
                if died:
                    self._server_failed(plan, died)
                    return left
        except StartError as problem:
            self._start_failures.append(str(problem))
            for cell in left:
                self._keep(_unmeasured(cell.key, f"not measured: {problem}"))
            self._server_failed(plan, str(problem))
        finally:
            if launch is not None:
                self._end(launch, identity, began)
        return []

    def _server_failed(self, plan: PlannedLaunch, message: str) -> None:
        self.run.journal("arm_failed", block=plan.block, arm=plan.arm, reason=message)
        self.on_event(LaunchFailed(plan.block, plan.arm, message))
        if self.campaign.on_server_death == "stop":
            raise ServerDiedError(message)

    def _end(self, launch: _Launch, identity: ProcessIdentity | None, began: float) -> None:
        plan = launch.plan
        report = launch.arm.stop()
        with suppress(RecordError):  # a full disk has been reported already, and must not hide what went wrong first
            self._journal_stop(plan.arm, plan.block, identity, report)
        self.on_event(LaunchEnded(plan.block, plan.arm, time.monotonic() - began - launch.cells_s, report.problems))

    def _warm_up(self, launch: _Launch) -> None:
        """Sends the warm-up. StartError where the server ends in it, or the load generator fails in it twice."""
        prompts = self.schedule.warmup
        if not prompts:
            return
        warm = self.campaign.warmup
        limit = min(warm.max_tokens, self.campaign.workload.max_tokens)
        specs = [
            RequestSpec(f"warmup-{index}", prompt.id, self._body(launch, prompt, SENTINEL, None, limit))
            for index, prompt in enumerate(prompts)
        ]
        streams = max(self.campaign.levels)
        try:
            load = self._send_unmeasured(launch, specs, streams)
        except WorkerError as problem:  # cells of a launch that is not warm would look like any others
            self.on_event(Notice(f"{launch.plan.arm}: the warm-up is sent again: {self._workers_failed(problem)}"))
            try:
                load = self._send_unmeasured(launch, specs, streams)
            except WorkerError as again:
                raise StartError(
                    f"{launch.plan.arm}: the warm-up was broken off twice: {self._workers_failed(again)}"
                ) from None
        bad = [r for r in map(parse_exchange, load.exchanges) if gates.failed(r)]
        if not _outlives(launch.arm, failures=bool(bad)):
            raise StartError(f"{launch.plan.arm}: the server ended during the warm-up: {launch.arm.obituary()}")
        if bad:
            self.on_event(Notice(f"{launch.plan.arm}: {len(bad)} warm-up requests failed: {bad[0].error}"))

    def _send_unmeasured(self, launch: _Launch, specs: Sequence[RequestSpec], streams: int) -> LoadResult:
        return self._client.closed_loop(
            launch.arm.endpoint(self._route),
            specs,
            min(len(specs), streams),
            timeout_s=self.campaign.workload.request_timeout_s,
            should_stop=_watch(launch.arm),
        )

    # Cells

    def _cell(self, launch: _Launch, cell: PlannedCell) -> str:
        """Measures one cell and writes it. Returns how the server died, empty if it lives."""
        requests = self._planned(cell)
        tokens = requests * self.campaign.workload.max_tokens
        self.run.reserve(_CELL_BYTES + requests * _REQUEST_BYTES + tokens * _TOKEN_BYTES)
        began = time.monotonic()
        self.on_event(CellBegan(cell.key, requests))
        record = self._measure(launch, cell)
        launch.cells += bool(record.requests)
        # Without requests something failed too, such as a reset by a server that was about to end.
        failures = not record.requests or any(gates.failed(request) for request in record.requests)
        died = "" if _outlives(launch.arm, failures=failures) else launch.arm.obituary()
        if died:
            reason = f"the server ended during the cell: {died}"
            record = _with_reason(record, reason)
            died = f"{launch.plan.arm}: {reason}"
        seconds = time.monotonic() - began
        launch.cells_s += seconds
        self._keep(record, seconds)
        return died

    def _measure(self, launch: _Launch, cell: PlannedCell) -> CellRecord:
        arm, key, campaign = launch.arm, cell.key, self.campaign
        salt = self._salt(key)
        asked = self._requests(launch, cell, salt)
        before = environment.moment()
        wall, steady = _clocks()
        if arm.can_reset:
            try:
                arm.reset()
            except ResetError as problem:
                return _unmeasured(key, f"not measured: {problem}")
        try:
            filled = self._fill_cache(launch, cell, salt)
            counters_before = arm.counters()
            load = self._send(arm, key, asked)
        except WorkerError as problem:
            return _unmeasured(key, f"not measured: {self._workers_failed(problem)}")
        counters = _rise(counters_before, arm)
        results: tuple[RequestResult, ...] = tuple(
            sorted(map(parse_exchange, load.exchanges), key=lambda r: asked.position(r.request_id))
        )
        invalid = gates.check_cell(
            results,
            campaign.gates,
            planned=self._planned(cell),
            max_tokens=campaign.workload.max_tokens,
            start_ns=load.start_ns,
            end_ns=load.end_ns,
            client_cpu_s=max(load.worker_cpu_s),
            cache=campaign.setting(key.condition).cache,
            fresh=None if campaign.workload.sessions is None else [r for r in results if turn_of(r.request_id) == 1],
        )
        if filled.get("cache_fill_failed"):
            invalid += (_not_filled(filled),)
        figures = load_figures(results)
        if counters.restarted:
            invalid += counters.problems
        later_wall, later_steady = _clocks()
        if step := gates.clock_step(later_wall - wall, later_steady - steady):
            invalid += (step,)
        invalid += gates.node_clocks(load.clocks, (load.end_ns - load.start_ns) / 1e9)
        seconds = max(1e-9, (load.end_ns - load.start_ns) / 1e9)
        return CellRecord(
            key=key,
            started_ns=load.start_ns,
            ended_ns=load.end_ns,
            requests=results,
            invalid=invalid,
            counters=counters.values,
            client_cpu_s=load.client_cpu_s,
            send_lag_p99_ms=gates.send_lag_p99_ms(results),
            extra={
                "arm_position": launch.plan.position,
                "cell_position": launch.plan.cells.index(cell),
                "launch": launch.number,
                "log": str(self.run.log_path(key.block, key.arm).relative_to(self.run.path)),
                "model": launch.ready.model if launch.ready else None,
                "server_version": launch.ready.version if launch.ready else None,
                "ready_s": launch.ready.seconds if launch.ready else None,
                "cache": "reset" if arm.can_reset else "salted",
                "salt": salt,
                **filled,
                "sampling": self._sampling_sent(key.condition),
                "rendered": self._rendered(launch, asked),
                "bodies_sha256": asked.sha256(),
                "clock": load.clock,
                "client_cpu_share": max(load.worker_cpu_s) / seconds,  # of the busiest process
                "client": self._client_figures(figures.events, figures.events_per_s, load),
                "load": asdict(figures),
                "cached_share": gates.cached_share(results),
                "counter_problems": list(counters.problems),
                **front_end.engine_times(results, counters.engine),
                "before": before,
                "after": environment.moment(),
            },
        )

    def _fill_cache(self, launch: _Launch, cell: PlannedCell, salt: str | None) -> dict[str, Any]:
        """In a cell whose cache is declared warm, sends each of its prompts once, for a single token.

        Returns what the cell's record says of it; empty for a cold cell. A request that failed leaves a part of the
        cache cold, which makes the cell invalid; whether the rest was kept is the gate's to judge, by the hits told.
        """
        key = cell.key
        if self.campaign.setting(key.condition).cache == "cold":
            return {}
        specs = [
            RequestSpec(f"{key.id}-fill-{index:05d}", prompt_id, self._body(launch, prompt, key.condition, None, 1))
            for index, prompt_id in enumerate(dict.fromkeys(cell.prompt_ids))
            for prompt in [self._prompt(key, prompt_id, salt)]
        ]
        load = self._send_unmeasured(launch, specs, key.level)
        bad = [result for result in map(parse_exchange, load.exchanges) if gates.failed(result)]
        unsent = len(specs) - len(load.exchanges)
        found = {"cache_regime": "warm", "cache_fill_requests": len(specs), "cache_fill_failed": len(bad) + unsent}
        if bad:
            found["cache_fill_error"] = bad[0].error or f"HTTP {bad[0].http_status}"
        return found

    def _sampling_sent(self, condition: str) -> dict[str, Any]:
        """What the cell's requests say of how tokens are chosen; whatever is not named here is the server's default."""
        workload, sampling = self.campaign.workload, self.campaign.setting(condition).sampling
        return {
            "fields": {**sampling.fields(), "max_tokens": workload.max_tokens},
            "seed": sampling.seed,
            "extra_body": dict(workload.extra_body),
            "template": workload.template,
        }

    def _rendered(self, launch: _Launch, asked: _Asked) -> dict[str, Any]:
        """A hash of what the server's template made of the cell's prompts, asked for after the cell.

        By the server's own /tokenize: token ids, so that BOS and the template's arguments count. The hash is over the
        ids of each distinct prompt in the order of first use, one JSON list a line. Of sessions whose context is what
        the model itself said, the first turns: the others are no arm's but its own.
        """
        digest, seen = hashlib.sha256(), set()
        sessions = self.campaign.workload.sessions
        first_only = sessions is not None and sessions.answers == "own"
        for request_id, prompt_id, body in asked.sent():
            turn = turn_of(request_id)
            if (prompt_id, turn) in seen or (first_only and turn > 1):
                continue
            ids = launch.arm.tokenize(json.loads(body)) if launch.tokenizes else None
            if ids is None:
                launch.tokenizes = False
                return {"sha256": None, "note": "the server does not tell its prompts' token ids (/tokenize)"}
            seen.add((prompt_id, turn))
            digest.update(json.dumps(ids).encode() + b"\n")
        return {"sha256": digest.hexdigest(), "prompts": len(seen)}

    def _send(self, arm: Arm, key: CellKey, asked: _Asked) -> LoadResult:
        timeout_s = self.campaign.workload.request_timeout_s

        def on_progress(done: int, failed: int) -> None:
            self.on_event(CellProgress(key, done, failed))

        endpoint, specs = arm.endpoint(self._route), asked.specs
        if asked.sessions:
            return run_sessions(
                endpoint,
                asked.sessions,
                key.level,
                asked.body,
                timeout_s=timeout_s,
                on_progress=on_progress,
                should_stop=_watch(arm),
            )
        if self.campaign.open_loop:
            ahead = min(len(specs), _AHEAD)
            return self._client.open_loop(
                endpoint,
                specs,
                connections=ahead,
                timeout_s=timeout_s,
                on_progress=on_progress,
                should_stop=_watch(arm),
            )
        return self._client.closed_loop(
            endpoint, specs, key.level, timeout_s=timeout_s, on_progress=on_progress, should_stop=_watch(arm)
        )

    def _keep(self, record: CellRecord, seconds: float = 0.0) -> None:
        """Writes a cell, then the journal's line about it."""
        self.run.write_cell(record)
        event = "cell_invalid" if record.invalid else "cell_finished"
        details: dict[str, Any] = {"reasons": list(record.invalid)} if record.invalid else {}
        self.run.journal(event, cell=record.key.id, seconds=round(seconds, 3), requests=len(record.requests), **details)
        tokens = sum(r.completion_tokens or 0 for r in record.requests)
        self.on_event(CellEnded(record.key, seconds, len(record.requests), tokens, record.invalid))

    # Requests

    @property
    def _route(self) -> str:
        return ROUTES[self.campaign.workload.template]

    def _planned(self, cell: PlannedCell) -> int:
        """Requests of a cell; of sessions, their turns."""
        sessions = self.campaign.workload.sessions
        if sessions is None:
            return len(cell.prompt_ids)
        return sum(turns_in(self.schedule.prompt(cell.key.condition, name), sessions) for name in cell.prompt_ids)

    def _salt(self, key: CellKey) -> str | None:
        if not self.campaign.salts_prompts:
            return None
        return cell_salt(self.campaign, key, str(self.run.environment.get("run_id", "")))

    def _requests(self, launch: _Launch, cell: PlannedCell, salt: str | None) -> _Asked:
        key, played = cell.key, self.campaign.workload.sessions
        if played is not None:
            return self._dialogues(launch, cell, salt, played)
        specs = []
        for index, (prompt_id, seed) in enumerate(zip(cell.prompt_ids, cell.seeds, strict=True)):
            body = self._body(launch, self._prompt(key, prompt_id, salt), key.condition, seed)
            offset = cell.offsets[index] if cell.offsets is not None else None
            specs.append(RequestSpec(f"{key.id}-{index:05d}", prompt_id, body, offset))
        return _Asked(specs, (), lambda messages, name: b"", {})

    def _dialogues(self, launch: _Launch, cell: PlannedCell, salt: str | None, played: Sessions) -> _Asked:
        """The cell's sessions. Bodies are made as they are played, and kept for their hashes."""
        key, campaign = cell.key, self.campaign
        sessions, seeds = [], {}
        for index, (prompt_id, seed) in enumerate(zip(cell.prompt_ids, cell.seeds, strict=True)):
            name = f"{key.id}-{index:05d}"
            block = 0 if key.condition == SENTINEL else key.block  # the sentinel is the same in every block
            draw = stable_hash("session", campaign.seed, block, key.condition, key.level, index)
            sessions.append(session_of(self._prompt(key, prompt_id, salt), name, played, draw))
            seeds[name] = seed
        per_request = campaign.setting(key.condition).sampling.seed == "per_request"
        bodies: dict[str, tuple[str, bytes]] = {}
        prompt_ids = {session.id: session.prompt_id or session.id for session in sessions}

        def body(messages: Messages, name: str) -> bytes:
            session_id = name.rpartition("/")[0]
            seed = turn_seed(seeds[session_id], turn_of(name), per_request=per_request)
            prompt = Prompt(prompt_ids[session_id], "session", tuple(messages))
            made = self._body(launch, prompt, key.condition, seed)
            bodies[name] = (prompt.id, made)
            return made

        return _Asked([], tuple(sessions), body, bodies)

    def _prompt(self, key: CellKey, prompt_id: str, salt: str | None) -> Prompt:
        prompt = self.schedule.prompt(key.condition, prompt_id)
        return salted(prompt, salt) if salt else prompt

    def _body(
        self, launch: _Launch, prompt: Prompt, condition: str, seed: int | None, max_tokens: int | None = None
    ) -> bytes:
        assert launch.ready is not None
        return self._build(launch.ready.model, prompt, condition, seed, max_tokens, launch.arm.continuous_usage)

    def _probe(self) -> Probe:
        # Without continuous usage: a server that refuses the option should say so in the first cell, with its words.
        return Probe(self._route, lambda model: self._build(model, _PROBE_PROMPT, SENTINEL, None, _PROBE_TOKENS, False))

    def _build(
        self,
        model: str,
        prompt: Prompt,
        condition: str,
        seed: int | None,
        max_tokens: int | None,
        continuous_usage: bool,
    ) -> bytes:
        workload = self.campaign.workload
        sampling = self.campaign.setting(condition).sampling.fields()
        if max_tokens is not None:  # not a measured request, and shorter than min_tokens may ask for
            sampling.pop("min_tokens", None)
        make = chat_body if workload.template == "chat" else completion_body
        return make(
            prompt,
            model,
            sampling,
            workload.max_tokens if max_tokens is None else max_tokens,
            seed,
            workload.extra_body,
            continuous_usage=continuous_usage,
        )


def _watch(arm: Arm) -> Callable[[], bool] | None:
    """Ends a cell soon after its server has ended. Only for servers of ours: asking others takes the client's time."""
    return (lambda: not arm.alive()) if arm.command() else None


def _clocks() -> tuple[int, int]:
    """The wall clock, which requests are timed with, and one that never jumps, read at one moment; in nanoseconds.

    A process may be put aside between the two reads, which must not look like a clock that was set: the closest pair of
    several tries is taken.
    """
    best = (2**63, 0, 0)
    for _ in range(_CLOCK_TRIES):
        before = time.monotonic_ns()
        wall = time.time_ns()
        apart = time.monotonic_ns() - before
        best = min(best, (apart, wall, before + apart // 2))
        if apart < _CLOCKS_TOGETHER_NS:
            break
    return best[1], best[2]


def _rise(before: Any, arm: Arm) -> Rise:
    after = arm.counters()
    if before is None and after is None:
        return Rise({})
    if before is None or after is None:
        return Rise({}, ("the server's counters could not be read",))
    return rise(before, after)


def _unmeasured(key: CellKey, reason: str) -> CellRecord:
    now = time.time_ns()
    return CellRecord(key, now, now, (), invalid=(reason,))


def _outlives(arm: Arm, *, failures: bool) -> bool:
    """Whether the server lives after what it was sent. One that broke connections may take a moment to end."""
    deadline = time.monotonic() + (_DYING_S if failures else 0.0)
    while arm.alive():
        if time.monotonic() >= deadline:
            return True
        time.sleep(_DYING_POLL_S)
    return False


def _not_filled(filled: Mapping[str, Any]) -> str:
    """Why a cell whose cache was to be warm is invalid. `filled`: what `_fill_cache` returned."""
    first = filled.get("cache_fill_error")
    return (
        f"{filled['cache_fill_failed']} of {filled['cache_fill_requests']} requests that fill the cache failed, so it "
        f"was not warm as declared" + (f"; the first error: {str(first)[:_WORDS]}" if first else "")
    )


def _with_reason(record: CellRecord, reason: str) -> CellRecord:
    return replace(record, invalid=(reason, *record.invalid))
