"""What a mock server is to do: pace, tokens, and faults. Pure data with validation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from breakeven.lab.mock.faults import FAULTS

NewLine = Literal["lf", "crlf", "cr"]
Death = Literal["exit", "reset", "close"]
Closing = Literal["keep", "announced", "silent"]


@dataclass(frozen=True, slots=True)
class MockScript:
    """The truth that a mock server plays. Times are in seconds; every default is a well-behaved server.

    Faults touch request number `fault_from` (counted from 0) and then every `fault_every`-th one.
    """

    # Pace
    first_chunk_s: float = 0.05  # from the arrival of a request to its first content chunk
    gap_s: float = 0.02  # between content chunks, on a fixed schedule (lateness does not add up)
    gap_per_stream_s: float = 0.0  # added to each gap for every request in flight: a server that saturates
    slow_first_requests: int = 0  # how many requests (a cold server's) wait longer for their first chunk…
    slow_first_s: float = 0.0  # …and by how much
    ready_after_s: float = 0.0  # until then /health answers 503
    never_ready: bool = False

    # Content
    chunks: int = 100  # content chunks a request, unless its max_tokens ends it before
    tokens_per_chunk: int | tuple[int, ...] = 1  # a pattern is repeated
    bytes_per_chunk: int = 250  # least size of an event; short ones are padded with text
    prompt_tokens: int = 32
    cached_tokens: int | None = None
    finish_reason: str = "stop"
    model: str = "mock"

    # Wire
    newline: NewLine = "lf"
    chunked: bool = True  # False: the body of a stream ends with the connection
    http10: bool = False
    closing: Closing = "keep"  # what happens to the connection after a response
    early_head: bool = False  # send the headers at once, not with the first chunk
    comments: bool = False  # a comment line before every event
    split_bytes: int | None = None  # send each chunk in pieces of this size…
    split_gap_s: float = 0.0  # …this far apart

    # Speculation
    draft_tokens: int = 0  # drafted per step; 0: no speculation and no counters
    report_speculation: bool = False  # metrics.speculative_decoding in the last chunk
    metrics_prefix: str = "vllm"

    # The engine's own clock
    engine_gap_s: float | None = None  # between chunks by /metrics (None: untold); below gap_s: a slow API server

    # Answers that depend on the request (see `lifelike`)
    lifelike: bool = False  # then prompt_tokens, cached_tokens and bytes_per_chunk say nothing
    prefill_s_per_token: float = 0.0  # added to the first chunk for every prompt token that is not cached
    context_limit: int = 2048

    # Faults
    faults: tuple[str, ...] = ()  # names of `faults.FAULTS`; most of them need `lifelike`
    fault_from: int = 0
    fault_every: int = 1
    no_usage: bool = False
    usage_offset: int = 0  # added to the reported completion_tokens: a server that counts wrongly
    http_status: int = 200
    malformed_at: int | None = None  # this chunk is broken JSON
    error_event_at: int | None = None  # this chunk is an error object, and the stream ends after it
    die_after: int | None = None  # after this many chunks…
    death: Death = "reset"  # …the process exits, or the connection is reset or closed
    stall_after: int | None = None  # after this many chunks nothing comes any more
    cut_after: int | None = None  # after this many chunks the response ends properly, without finish_reason and [DONE]

    def __post_init__(self) -> None:
        if not self.token_pattern or any(t < 1 for t in self.token_pattern):
            raise ValueError("tokens_per_chunk must be a positive number or a list of them")
        for name in ("chunks", "fault_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        seconds = ("first_chunk_s", "gap_s", "gap_per_stream_s", "slow_first_s", "split_gap_s", "ready_after_s")
        for name in (*seconds, "prefill_s_per_token"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, and is {getattr(self, name)}")
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"split_bytes must be at least 1, not {self.split_bytes}")
        for name, allowed in (
            ("newline", ("lf", "crlf", "cr")),
            ("death", ("exit", "reset", "close")),
            ("closing", ("keep", "announced", "silent")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

        unknown = sorted(set(self.faults) - set(FAULTS))
        if unknown:
            raise ValueError(f"there is no fault {unknown[0]!r}: known are {', '.join(FAULTS)}")

    @property
    def token_pattern(self) -> tuple[int, ...]:
        pattern = self.tokens_per_chunk
        return (pattern,) if isinstance(pattern, int) else tuple(pattern)

    def without_faults(self) -> MockScript:
        """The same server behaving well: what a request gets that the faults do not touch."""
        return replace(
            self,
            faults=(),
            no_usage=False,
            usage_offset=0,
            http_status=200,
            malformed_at=None,
            error_event_at=None,
            die_after=None,
            stall_after=None,
            cut_after=None,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> MockScript:
        """Raises ValueError, in plain words, for anything that is not a script."""
        try:
            given = json.loads(text)
        except ValueError as problem:
            raise ValueError(f"the mock's script is not valid JSON: {problem}") from None
        return cls.from_mapping(given)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> MockScript:
        if not isinstance(given, Mapping):
            raise ValueError("the mock's script must be a JSON object")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(f"the mock's script has unknown fields: {', '.join(unknown)}")
        values = dict(given)
        for name in ("tokens_per_chunk", "faults"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            return cls(**values)
        except TypeError as problem:
            raise ValueError(f"the mock's script has a value of the wrong type: {problem}") from None
