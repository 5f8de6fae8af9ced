"""The load generator: raw bytes and arrival times while measuring, meaning afterwards."""

from __future__ import annotations

from breakeven.lab.client.generator import run_closed_loop, run_open_loop
from breakeven.lab.client.parse import parse_exchange
from breakeven.lab.client.types import Chunk, Endpoint, LoadResult, RawExchange, RequestResult, RequestSpec
from breakeven.lab.client.workers import LoadClient, WorkerError

__all__ = [
    "Chunk",
    "Endpoint",
    "LoadClient",
    "LoadResult",
    "RawExchange",
    "RequestResult",
    "RequestSpec",
    "WorkerError",
    "parse_exchange",
    "run_closed_loop",
    "run_open_loop",
]
