"""A mock OpenAI server of known truth: chosen pace, tokens per chunk, and faults."""

from __future__ import annotations

from breakeven.lab.mock.process import MockProcess
from breakeven.lab.mock.script import MockScript
from breakeven.lab.mock.server import MockServer

__all__ = ["MockProcess", "MockScript", "MockServer"]
