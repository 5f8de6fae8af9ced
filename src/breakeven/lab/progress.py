"""Progress of a run: live in a terminal, plain lines where the output goes to a file or a CI log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
from breakeven.lab.plan import Forecast, Schedule
from breakeven.lab.records import CellKey, RunDirectory

_REFRESH_PER_SECOND = 2  # drawing takes the interpreter from the client, so not more often than a person looks


def duration(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """Takes the runner's events; a context manager around the run."""

    def __init__(self, run: RunDirectory, schedule: Schedule, console: Console | None = None) -> None:
        self._console = console or Console()
        self._schedule = schedule
        self._campaign = run.campaign
        self._began = time.monotonic()
        self._forecast = Forecast(run.campaign)
        done = run.measured_ids()
        keys = {c.key.id: c.key for c in schedule.cells()}
        self._todo: dict[str, CellKey] = {name: key for name, key in keys.items() if name not in done}
        self._total = len(keys)
        self._launches_left = sum(
            any(cell.key.id in self._todo for cell in launch.cells) for launch in schedule.launches
        )
        for event in run.read_journal():  # what an earlier start has learnt about durations
            key = keys.get(str(event.get("cell")))
            if key is not None and event.get("requests") and isinstance(event.get("seconds"), (int, float)):
                self._forecast.cell_took(key, float(event["seconds"]))
        self._invalid: set[str] = set()
        self._state = "getting ready"
        self._key: CellKey | None = None
        self._cell_requests = 0
        self._cell_done = 0
        self._cell_failed = 0
        self._cell_began = 0.0
        self._live = (
            Live(
                console=self._console,
                get_renderable=self._draw,
                refresh_per_second=_REFRESH_PER_SECOND,
                transient=True,
            )
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case RunBegan():
                if event.done:
                    self._say(f"{event.done} of {event.cells} cells are measured already; going on with the rest")
                self._say(f"{event.cells - event.done} cells in {event.launches_left} launches, {self._left_words()}")
            case LaunchBegan():
                self._state = f"{self._where(event.block, event.arm)}: starting the server"
                if not event.command:
                    self._state = f"{self._where(event.block, event.arm)}: waiting for the server"
                if self._live is None:
                    self._say(self._state)
            case LaunchReady():
                self._state = (
                    f"{self._where(event.block, event.arm)}: ready after {duration(event.seconds)}, warming up"
                )
                if self._live is None:
                    self._say(self._state)
            case LaunchFailed():
                self._say(f"{self._where(event.block, event.arm)}: {event.message}", "red")
            case LaunchEnded():
                self._launches_left = max(0, self._launches_left - 1)
                self._forecast.launch_took(event.seconds)
                for problem in event.problems:
                    self._say(f"{self._where(event.block, event.arm)}: {problem}", "yellow")
            case CellBegan():
                # A cell whose server was found dead before it is tried again.
                self._todo[event.key.id] = event.key
                self._invalid.discard(event.key.id)
                self._key, self._cell_requests, self._cell_done, self._cell_failed = event.key, event.requests, 0, 0
                self._cell_began = time.monotonic()
            case CellProgress():
                self._cell_done, self._cell_failed = event.done, event.failed
            case CellEnded():
                self._cell_ended(event)
            case Notice():
                self._say(event.message, "yellow")

    def _cell_ended(self, event: CellEnded) -> None:
        self._key = None
        self._todo.pop(event.key.id, None)
        if event.requests:
            self._forecast.cell_took(event.key, event.seconds)
        if event.invalid:
            self._invalid.add(event.key.id)
            self._say(f"{self._cell_words(event.key)}: invalid: {event.invalid[0]}", "yellow")
        else:
            rate = f"{event.tokens / event.seconds:.1f} tok/s" if event.seconds > 0 else ""
            self._say(
                f"{self._cell_words(event.key)}: {event.requests} requests, {event.tokens} tokens in "
                f"{event.seconds:.1f} s ({rate}); {self._left_words()}"
            )

    # Words

    def _where(self, block: int, arm: str) -> str:
        return f"block {block + 1}/{self._campaign.blocks}, {arm}"

    def _cell_words(self, key: CellKey) -> str:
        streams = "stream" if key.level == 1 else "streams"
        return f"{self._where(key.block, key.arm)}, {key.condition}, {key.level} {streams}"

    def _left_s(self) -> float:
        left = self._forecast.remaining_s(self._todo.values(), self._launches_left)
        if self._key is not None:
            left -= min(time.monotonic() - self._cell_began, self._forecast.cell_s(self._key))
        return max(0.0, left)

    def _left_words(self) -> str:
        return f"about {duration(self._left_s())} left" if self._todo else "all cells measured"

    def _say(self, words: str, style: str = "") -> None:
        self._console.print(Text(words, style=style), soft_wrap=True, highlight=False)

    def _draw(self) -> RenderableType:
        done = self._total - len(self._todo)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(min_width=9)
        grid.add_column(width=30)
        grid.add_column()
        elapsed = duration(time.monotonic() - self._began)
        note = f"{done}/{self._total} cells, {elapsed} elapsed, {self._left_words()}"
        if self._invalid:
            note += f", {len(self._invalid)} invalid"
        grid.add_row("campaign", ProgressBar(total=self._total, completed=done, width=30), Text(note))
        if self._key is not None:
            failed = f", {self._cell_failed} failed" if self._cell_failed else ""
            bar = ProgressBar(total=self._cell_requests, completed=self._cell_done, width=30)
            grid.add_row("cell", bar, Text(f"{self._cell_done}/{self._cell_requests} requests{failed}"))
        state = self._cell_words(self._key) if self._key is not None else self._state
        return Group(Text(state, style="bold"), grid)
