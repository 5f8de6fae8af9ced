"""The load generator: raw bytes and arrival times while measuring, meaning afterwards."""

from __future__ import annotations

from breakeven.lab.client.generator import run_closed_loop
from breakeven.lab.client.parse import parse_exchange
from breakeven.lab.client.types import Chunk, Endpoint, LoadResult, RawExchange, RequestResult, RequestSpec

__all__ = [
    "Chunk",
    "Endpoint",
    "LoadResult",
    "RawExchange",
    "RequestResult",
    "RequestSpec",
    "parse_exchange",
    "run_closed_loop",
]
