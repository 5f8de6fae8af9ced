"""Progress of the stages: a live bar in a terminal, plain lines elsewhere, always to standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_SECONDS = 10.0


class Reporter:
    """One run's voice. `quiet`: says nothing (the other processes of torchrun)."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._started = time.monotonic()
        self._last_line = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def log(self, line: str) -> None:
        """One line, with the seconds since the start."""
        if not self._quiet:
            self._console.print(f"[{time.monotonic() - self._started:7.1f} s] {line}", markup=False)

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[None]:
        """A bar of `total` units while the block runs; updated with `advance`."""
        if self._quiet or not self._console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            self._bar, self._task = bar, bar.add_task(name, total=total)
            try:
                yield
            finally:
                self._bar = self._task = None

    def advance(self, done: int, note: str) -> None:
        """`done` units so far; outside a terminal a line now and then."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, description=note)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.log(note)
