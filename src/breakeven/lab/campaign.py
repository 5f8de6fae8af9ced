"""The campaign: what is compared, on which workload, at which loads, how often, and what makes a cell invalid.

These are the models of the campaign file (docs/campaign.md); `campaign_file` reads it from YAML. All are frozen, and
all unknown fields are refused. A resolved campaign, with every default written out, is stored beside each run.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from breakeven.lab.engines import LlamaCppArm, SglangArm, TrtLlmArm, VllmArm
from breakeven.lab.section import Section, rows_as_tuples

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z")  # parts of file names
_DATA_SET = re.compile(r"(?!datasets/)([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*\Z", re.ASCII)
MAX_LEVEL = 10_000
MAX_CELLS = 100_000
MAX_WORDS = 1_000_000
SENTINEL = "sentinel"  # the condition of sentinel cells
JOIN = "+"  # between a domain and the values of the factors in a condition's name; in none of these
DOMAIN = "domain"  # the factor that every campaign has
AA_SUFFIX = "-aa"  # of the name of the baseline's second launch
# The names of the readers in `workload.datasets`, a test compares them: the campaign's models import no reader.
FILE_FORMATS = (
    *("auto", "prompts", "sharegpt", "humaneval", "mbpp", "spec-bench", "speed-bench", "gsm8k", "bfcl", "swe-bench"),
    *("csv", "text"),
)


def batch_ranges(ranges: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """A schedule's ranges (first, last, steps) by rising batch size, by the rules of vLLM's
    `num_speculative_tokens_per_batch_size`. ValueError says which rule is broken."""
    if not ranges:
        raise ValueError("a schedule needs at least one range, such as [1, 4, 3]: 3 steps at 1 to 4 sequences")
    for first, last, steps in ranges:
        if first < 1 or last < first or steps < 0:
            raise ValueError(
                f"[{first}, {last}, {steps}] is not a range [first, last, steps] with 1 <= first <= last and steps >= 0"
            )
    ordered = tuple(sorted(ranges))
    if ordered[0][0] != 1:
        raise ValueError(f"the first range must start at 1, not at {ordered[0][0]}: every batch size needs an answer")
    for before, after in itertools.pairwise(ordered):
        if after[0] <= before[1]:
            raise ValueError(f"the ranges {list(before)} and {list(after)} overlap")
    return ordered


_MODELS_WITH_A_DRAFTER = ("smollm2-135m",)


class Speculation(Section):
    """What the embedded engine drafts each round, in SGLang's terms. None: the engine's own default."""

    algorithm: Literal["ngram", "eagle3"]
    num_steps: int | None = Field(default=None, ge=1, le=64)
    eagle_topk: int | None = Field(default=None, ge=1, le=64)
    num_draft_tokens: int | None = Field(default=None, ge=2, le=64)
    draft_model_path: str | None = None  # None: the drafter in the box
    ngram_min: int | None = Field(default=None, ge=1)
    ngram_max: int | None = Field(default=None, ge=1)
    # Depth by decoding sequences, (first, last, num_steps) inclusive, 0: off. None: the same at any load.
    schedule: tuple[tuple[int, int, int], ...] | None = None

    _rows = field_validator("schedule", mode="before")(rows_as_tuples)

    @field_validator("schedule")
    @classmethod
    def _ranges(cls, ranges: tuple[tuple[int, int, int], ...] | None) -> tuple[tuple[int, int, int], ...] | None:
        return None if ranges is None else batch_ranges(ranges)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        deepest = max((steps for _, _, steps in self.schedule or ()), default=0)
        if self.num_steps is not None and deepest > self.num_steps:
            raise ValueError(
                f"the schedule asks for {deepest} steps, but num_steps is {self.num_steps}: raise it, or leave it out"
            )
        if (
            self.num_draft_tokens is not None
            and (self.eagle_topk or 1) == 1
            and self.num_steps is not None
            and self.num_draft_tokens > self.num_steps + 1
        ):
            raise ValueError(
                f"a chain of {self.num_steps} steps has {self.num_steps + 1} nodes, root included, but "
                f"num_draft_tokens is {self.num_draft_tokens}: lower it, or raise num_steps or eagle_topk"
            )
        return self


def _refuse_options_of_ours(flags: tuple[str, ...]) -> tuple[str, ...]:
    for flag in flags:
        option = flag.split("=", 1)[0]
        if option in ("--host", "--port", "--api-key"):
            raise ValueError(f"{option} is set by the lab itself: leave it out of the flags")
    return flags


class EmbeddedArm(Section):
    """`breakeven serve`, started for each block in a process of its own."""

    type: Literal["embedded"]
    model: str = "smollm2-135m"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(default=None, ge=1, le=1024)
    speculation: Speculation | Literal["off"] = "off"
    flags: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    port: int | None = Field(default=None, ge=1, le=65535)
    startup_timeout_s: float = Field(default=180.0, gt=0)
    stop_timeout_s: float = Field(default=15.0, gt=0)

    @field_validator("speculation", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        if value is None or value is False:
            return "off"
        if isinstance(value, str) and value != "off":
            raise ValueError(f"must be 'off' or a mapping with an algorithm, for example {{algorithm: {value}}}")
        return value

    @field_validator("flags")
    @classmethod
    def _flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        return _refuse_options_of_ours(flags)

    @model_validator(mode="after")
    def _has_drafter(self) -> Self:
        speculation = self.speculation
        if (
            isinstance(speculation, Speculation)
            and speculation.algorithm == "eagle3"
            and speculation.draft_model_path is None
            and self.model not in _MODELS_WITH_A_DRAFTER
        ):
            raise ValueError(
                f"eagle3 needs speculation.draft_model_path for the model {self.model!r}: the drafter in the box is "
                f"for {' and '.join(_MODELS_WITH_A_DRAFTER)}"
            )
        return self

    @property
    def can_reset(self) -> bool:
        return True


def _check_url(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL of a server: write it as http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise ValueError("a URL must not carry a password, because it is stored with the run: use api_key_env")
    try:
        parts.port  # noqa: B018  # raises for a port out of range
    except ValueError:
        raise ValueError(f"{url!r} has a port that is not between 0 and 65535") from None
    return url.rstrip("/")


class _HttpServer(Section):
    """How to talk to a server that is not ours."""

    model: str | None = None
    api_key_env: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    reset_url: str | None = None
    metrics_url: str | None = None
    health_url: str | None = None
    continuous_usage: bool = True
    verify_tls: bool = True

    @field_validator("headers")
    @classmethod
    def _no_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if name.lower() in ("authorization", "x-api-key", "api-key"):
                raise ValueError(f"{name} would be stored with the run in plain text: use api_key_env instead")
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[\r\n\0]", value):
                raise ValueError(f"{name!r} is not a header that HTTP allows")
        return headers

    @property
    def can_reset(self) -> bool:
        return self.reset_url is not None


class AttachArm(_HttpServer):
    """A server that is already running, or is brought up and down by commands of the user's own.

    `start_command`, `stop_command` and `reset_command` must end by themselves; the server may be anywhere.
    """

    type: Literal["attach"]
    url: str
    startup_timeout_s: float = Field(default=30.0, gt=0)
    start_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    stop_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    reset_command: tuple[str, ...] | None = Field(default=None, min_length=1)
    command_timeout_s: float = Field(default=600.0, gt=0)

    @property
    def can_reset(self) -> bool:
        return self.reset_url is not None or self.reset_command is not None

    @model_validator(mode="after")
    def _one_reset(self) -> Self:
        if self.reset_url is not None and self.reset_command is not None:
            raise ValueError("give reset_url or reset_command, not both")
        if self.stop_command is not None and self.start_command is None:
            raise ValueError("stop_command without start_command would end a server that nothing starts again")
        return self

    @field_validator("url", "reset_url", "metrics_url", "health_url")
    @classmethod
    def _urls(cls, url: str | None) -> str | None:
        return _check_url(url)


class CommandArm(_HttpServer):
    """Any OpenAI-compatible server started by a command line; `{port}` in it is replaced by a free port.

    `reset_url`, `metrics_url` and `health_url` may be paths, such as /reset_prefix_cache.
    """

    type: Literal["command"]
    command: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    port: int | None = Field(default=None, ge=1, le=65535)
    startup_timeout_s: float = Field(default=600.0, gt=0)
    stop_timeout_s: float = Field(default=30.0, gt=0)

    @field_validator("reset_url", "metrics_url", "health_url")
    @classmethod
    def _urls(cls, url: str | None) -> str | None:
        return url if url is not None and url.startswith("/") else _check_url(url)

    @model_validator(mode="after")
    def _port_is_told(self) -> Self:
        if self.port is None and not any("{port}" in part for part in self.command):
            raise ValueError("the command must hold {port}, which is replaced by a free port, or else set port")
        return self


ArmConfig = Annotated[
    EmbeddedArm | AttachArm | CommandArm | VllmArm | SglangArm | LlamaCppArm | TrtLlmArm, Field(discriminator="type")
]
ARM_TYPES: Mapping[str, type[Section]] = {
    "embedded": EmbeddedArm,
    "vllm": VllmArm,
    "sglang": SglangArm,
    "llamacpp": LlamaCppArm,
    "trtllm": TrtLlmArm,
    "attach": AttachArm,
    "command": CommandArm,
}


class PromptFile(Section):
    """A file of a public data set, or of one's own: `datasets` knows the formats.

    A local one by its `path`; with `hub`, `path` is that of a file in the data set at the Hugging Face hub, at
    `revision`: a branch, a tag or a commit, `main` if left out.
    """

    path: str = Field(min_length=1)
    hub: str | None = None
    revision: str | None = Field(default=None, min_length=1, max_length=200)
    format: str = "auto"
    domain: str | None = None
    limit: int | None = Field(default=None, ge=1)

    @field_validator("format")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in FILE_FORMATS:
            raise ValueError(f"{name!r} is not a format that can be read: choose one of {', '.join(FILE_FORMATS)}")
        return name

    @field_validator("domain")
    @classmethod
    def _domain(cls, domain: str | None) -> str | None:
        if domain is not None and (not _NAME.match(domain) or domain == "all"):
            raise ValueError(f"{domain!r} must be 1 to 40 letters, digits, dots, dashes and underscores, and not 'all'")
        return domain

    @field_validator("hub")
    @classmethod
    def _data_set(cls, name: str | None) -> str | None:
        if name is not None and not _DATA_SET.match(name):
            raise ValueError(f"{name!r} is not a data set's name at the hub: write OWNER/NAME, as in openai/gsm8k")
        return name

    @model_validator(mode="after")
    def _within_the_data_set(self) -> Self:
        if self.hub is None and self.revision is not None:
            raise ValueError("revision is that of a data set at the hub: name it (hub: OWNER/NAME), or leave it out")
        if self.hub is not None and ("\\" in self.path or not set(self.path.split("/")).isdisjoint(("", ".", ".."))):
            raise ValueError(f"{self.path!r} must be the path of a file in the data set, such as data/test.parquet")
        return self


class Sessions(Section):
    """Prompts of several turns are played turn by turn, as agents do; a level is then a number of sessions in play.

    `think_s`: from an answer to the next turn (a tool at work, a reader), the mean where it is spread exponentially.
    `answers`: what goes into the context for the model's turns, the prompt's recorded ones or the model's own.
    """

    think_s: float = Field(default=1.0, ge=0, le=3600)
    think_spread: Literal["constant", "exponential"] = "constant"
    answers: Literal["recorded", "own"] = "recorded"
    max_turns: int | None = Field(default=None, ge=2, le=1000)


class Workload(Section):
    """What is asked. Without `prompts_file` and `files` the prompts are those of the suites of breakeven."""

    domains: tuple[str, ...] | None = Field(default=None, min_length=1)
    prompts_file: str | None = None
    files: tuple[PromptFile, ...] = ()
    max_tokens: int = Field(default=128, ge=1)
    template: Literal["chat", "completions"] = "chat"
    extra_body: dict[str, Any] = Field(default_factory=dict)
    request_timeout_s: float = Field(default=600.0, gt=0)
    sessions: Sessions | None = None

    @field_validator("sessions", mode="before")
    @classmethod
    def _sessions(cls, value: Any) -> Any:
        return Sessions() if value is True else None if value is False else value

    @field_validator("domains")
    @classmethod
    def _names(cls, domains: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for domain in domains or ():
            if not _NAME.match(domain):
                raise ValueError(f"{domain!r} must be 1 to 40 letters, digits, dots, dashes and underscores")
            if domain == SENTINEL:
                raise ValueError(f"{SENTINEL!r} is the name of the sentinel cells: call this one something else")
            if domain == "all":
                raise ValueError("'all' is the name of all domains pooled: call this one something else")
        return _distinct(domains) if domains is not None else None

    @model_validator(mode="after")
    def _default_domains(self) -> Self:
        if self.prompts_file is not None and self.files:
            raise ValueError("give prompts_file or files, not both: files reads prompt files too (format: prompts)")
        if self.domains is None and self.prompts_file is None and not self.files:
            object.__setattr__(self, "domains", ("coding", "encyclopedic"))
        return self


class Arrivals(Section):
    """When requests are sent. In closed loop a level is a number of streams; else a rate, `level × unit_rate` per s."""

    process: Literal["closed", "poisson", "gamma", "constant", "trace"] = "closed"
    cv: float = Field(default=2.0, gt=0, le=20)
    trace: str | None = None
    ramp: tuple[float, float] | None = None
    unit_rate: float = Field(default=1.0, gt=0)
    duration_s: float = Field(default=30.0, gt=0)

    @field_validator("ramp")
    @classmethod
    def _ramp(cls, ramp: tuple[float, float] | None) -> tuple[float, float] | None:
        if ramp is not None and (min(ramp) < 0 or sum(ramp) <= 0):
            raise ValueError("a ramp is two shares of the mean rate, such as [0.5, 1.5], not below 0 and not both 0")
        return ramp

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("a trace file and process: trace belong together: give both or neither")
        fields = type(self).model_fields
        given = [name for name, field in fields.items() if name != "process" and getattr(self, name) != field.default]
        if self.process == "closed" and given:
            raise ValueError(f"{', '.join(given)} means nothing in closed loop: choose another process")
        return self

    @property
    def open(self) -> bool:
        """Requests are sent by a schedule, whatever the server does."""
        return self.process != "closed"

    def rate(self, level: int) -> float:
        """Requests per second at a level."""
        return level * self.unit_rate


class Client(Section):
    """The load generator: processes, and how its capacity is known (docs/client.md).

    `calibration`: quick (about two seconds at the start of a run), off, or a file of `breakeven bench-client --json`.
    `backend`: processes of this machine (local), or actors on the nodes of a Ray cluster, `address` being its head's
    (None: the cluster that this machine belongs to). Beyond `max_clock_error_ms`, how well the nodes' clocks could be
    compared, the report says so.
    """

    workers: int = Field(default=1, ge=1, le=256)
    calibration: str = Field(default="quick", min_length=1)
    backend: Literal["local", "ray"] = "local"
    address: str | None = None
    max_clock_error_ms: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _address_fits(self) -> Self:
        if self.address is None:
            return self
        if self.backend != "ray":
            raise ValueError("address is that of a Ray cluster: set backend: ray, or leave it out")
        if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):\d{1,5}", self.address):
            raise ValueError(
                f"{self.address!r} is not HOST:PORT of a Ray cluster's head, such as 10.0.0.1:6379 (ray:// is not: run "
                f"breakeven on a machine that has joined the cluster)"
            )
        return self


class Requests(Section):
    """How many requests a cell has: requests_per_stream × level, within the bounds."""

    requests_per_stream: float = Field(default=2.0, gt=0)
    min_requests: int = Field(default=8, ge=1)
    max_requests: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_requests is not None and self.max_requests < self.min_requests:
            raise ValueError(f"max_requests ({self.max_requests}) is below min_requests ({self.min_requests})")
        return self

    def at(self, level: int) -> int:
        """Requests of a cell at `level` streams. Never fewer than the level, so that every stream has work."""
        wanted = max(self.min_requests, math.ceil(self.requests_per_stream * level))
        if self.max_requests is not None:
            wanted = min(wanted, self.max_requests)
        return max(wanted, level)


class Sampling(Section):
    """How tokens are chosen: only what is set is sent. `seed`: one per request, a fixed number, or null for none."""

    temperature: float | None = Field(default=0.0, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    seed: int | Literal["per_request"] | None = "per_request"

    def fields(self) -> dict[str, Any]:
        """The fields of a request body, without the seed; what is not set is left out."""
        values = self.model_dump(exclude={"seed"}, exclude_none=True)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


Cache = Literal["cold", "warm"]
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,19}\Z")  # values of factors are parts of file names, too


class Conditions(Section):
    """Factors besides the domain, each with two values or more. A condition is a domain with one value of each.

    `temperature`: replaces that of `sampling`. `sampling`, `arrivals`: whole sections by name. `input_words`: bands of
    the prompts' length by name, in words, both ends included. `cache`: cold and warm.
    """

    temperature: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    sampling: dict[str, Sampling] | None = None
    input_words: dict[str, tuple[int, int]] | None = None
    arrivals: dict[str, Arrivals] | None = None
    cache: tuple[Cache, ...] | None = None

    @field_validator("input_words")
    @classmethod
    def _bands(cls, bands: dict[str, tuple[int, int]] | None) -> dict[str, tuple[int, int]] | None:
        for name, (least, most) in (bands or {}).items():
            if not 1 <= least <= most <= MAX_WORDS:
                raise ValueError(
                    f"{name}: a band is the fewest and the most words of a prompt, such as [1, 60], and not "
                    f"[{least}, {most}]"
                )
        return bands

    @field_validator("arrivals")
    @classmethod
    def _one_kind(cls, given: dict[str, Arrivals] | None) -> dict[str, Arrivals] | None:
        if given and not all(arrivals.open for arrivals in given.values()):
            raise ValueError(
                "closed loop has no variants, and cannot be crossed with open loop: a level is a number of streams in "
                "the one and a rate in the other"
            )
        if given and len({arrivals.unit_rate for arrivals in given.values()}) > 1:
            raise ValueError("all must have the same unit_rate, so that a level is one rate in all of them")
        return given

    @model_validator(mode="after")
    def _factors(self) -> Self:
        if not self.factors:
            raise ValueError(f"give at least one factor: {', '.join(type(self).model_fields)}")
        if self.temperature is not None and self.sampling is not None:
            raise ValueError("temperature and sampling are the same factor: give the temperatures within sampling")
        for factor, values in self.factors.items():
            if len(values) < 2:
                raise ValueError(f"{factor} has {len(values)} value(s), and a factor needs two: set it outside instead")
            for value in values:
                if not _VALUE.match(value):
                    raise ValueError(
                        f"{factor}: {value!r} must be 1 to 20 letters, digits, dots, dashes and underscores"
                    )
            if len({value.lower() for value in values}) < len(values):
                raise ValueError(f"{factor}: two values have the same name (upper and lower case count as one)")
        return self

    @property
    def factors(self) -> dict[str, tuple[str, ...]]:
        """The names of each factor's values, in the order in which they stand in a condition's name."""
        found: dict[str, tuple[str, ...]] = {}
        for name in type(self).model_fields:
            values = getattr(self, name)
            if values is not None:
                found[name] = tuple(f"t{v:g}" if name == "temperature" else str(v) for v in values)
        return found


@dataclass(frozen=True, slots=True)
class Setting:
    """What one condition is: everything that is not the arm's and not the level. `words`: the prompts' band, if any."""

    domain: str
    sampling: Sampling
    arrivals: Arrivals
    cache: Cache
    words: tuple[int, int] | None = None

    @property
    def natural(self) -> bool:
        """Real text that ends by itself: without it, acceptance means nothing (docs/statistics.md)."""
        return not self.sampling.ignore_eos and not self.sampling.min_tokens


class Warmup(Section):
    """Requests after each launch whose prompts are never measured."""

    requests: int = Field(default=4, ge=0, le=1000)
    max_tokens: int = Field(default=16, ge=1)


class Gates(Section):
    """When a cell is invalid; decided before anything is measured. Shares are between 0 and 1."""

    max_send_lag_ms: float = Field(default=50.0, gt=0)
    max_failed_share: float = Field(default=0.0, ge=0, le=1)
    require_usage: bool = True
    max_cached_share: float = Field(default=0.5, ge=0, le=1)
    min_warm_share: float = Field(default=0.5, ge=0, le=1)
    max_client_cpu_share: float = Field(default=0.8, gt=0, le=1)


class Sentinel(Section):
    """A cell that is the same in every launch, prompts and seeds included; it is measured first. None: the default.

    `domain`: of its prompts, the campaign's first. `level`: streams, the campaign's lowest.
    """

    domain: str | None = None
    level: int | None = Field(default=None, ge=1, le=MAX_LEVEL)
    requests: int = Field(default=8, ge=1, le=1000)


class Stop(Section):
    """When a campaign ends: after its blocks (`fixed`), or earlier, as soon as every comparison of the primary metric
    is decided by a confidence sequence (`confidence_sequence`), which is looked at after each block from `min_blocks`.
    """

    rule: Literal["fixed", "confidence_sequence"] = "fixed"
    min_blocks: int = Field(default=3, ge=2)


_Choices = Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1)]


class Tune(Section):
    """What `breakeven tune` tries (every combination of the values given) and how it searches (docs/tuning.md).

    `arm`: which one; None: the only one that speculates. `eta`: one in so many stays after each round. `first_blocks`:
    of the first round; later rounds have more as candidates get fewer. `finalists`: stay at the end.
    """

    arm: str | None = None
    num_steps: _Choices | None = None
    eagle_topk: _Choices | None = None
    num_draft_tokens: _Choices | None = None
    ngram_min: _Choices | None = None
    ngram_max: _Choices | None = None
    eta: int = Field(default=2, ge=2, le=16)
    first_blocks: int = Field(default=2, ge=1, le=100)
    finalists: int = Field(default=2, ge=1, le=16)


class Assumptions(Section):
    """What `breakeven plan` assumes of a server's speed before anything is measured; no result depends on it.

    Throughput at n streams is taken as tokens_per_second · n / (1 + (n − 1) / saturation_streams).
    """

    tokens_per_second: float = Field(default=35.0, gt=0)
    saturation_streams: float = Field(default=6.0, gt=0)
    startup_s: float = Field(default=8.0, ge=0)
    gpus: int = Field(default=0, ge=0, le=100_000)
    launch_scatter: float | None = Field(default=None, gt=0, lt=1)


def _origin(url: str) -> str:
    """A server's URL, written with /v1 or without."""
    return url.rstrip("/").removesuffix("/v1").lower()


def _distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    repeated = next((item for item in items if items.count(item) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} occurs twice")
    return items


def _leave_out(section: dict[str, Any], **defaults: Any) -> None:
    """Drops the fields that say no more than their default."""
    for name, default in defaults.items():
        if section[name] == default:
            del section[name]


class Campaign(Section):
    """One campaign file."""

    name: str = Field(default="campaign", min_length=1, max_length=200)
    arms: dict[str, ArmConfig]
    baseline: str
    workload: Workload = Workload()
    levels: tuple[Annotated[int, Field(ge=1, le=MAX_LEVEL)], ...] = Field(default=(1, 2, 5, 10), min_length=1)
    arrivals: Arrivals = Arrivals()
    requests: Requests = Requests()
    sampling: Sampling = Sampling()
    cache: Cache = "cold"
    conditions: Conditions | None = None
    blocks: int = Field(default=5, ge=1, le=1000)
    seed: int = Field(default=0, ge=0)
    margin: float = Field(default=0.03, gt=0, lt=1)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    warmup: Warmup = Warmup()
    client: Client = Client()
    gates: Gates = Gates()
    on_server_death: Literal["continue", "stop"] = "continue"
    primary_metric: Literal["throughput", "ttft", "tpot", "latency"] = "throughput"
    aa: bool = False
    sentinel: Sentinel | None = None
    stop: Stop = Stop()
    assumptions: Assumptions = Assumptions()
    tune: Tune | None = None

    @field_validator("arms")
    @classmethod
    def _arm_names(cls, arms: dict[str, Any]) -> dict[str, Any]:
        if len(arms) < 2:
            raise ValueError("at least two arms are needed: the baseline and one to compare with it")
        for name in arms:
            if not _NAME.match(name):
                raise ValueError(
                    f"the arm's name {name!r} must be 1 to 40 letters, digits, dots, dashes and underscores"
                )
        if len({name.lower() for name in arms}) < len(arms):
            raise ValueError("arms must differ by more than upper and lower case: their names become file names")
        return arms

    @field_validator("levels")
    @classmethod
    def _levels(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        return _distinct(levels)

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("must be one line of printable characters")
        return name

    @field_validator("baseline")
    @classmethod
    def _baseline(cls, baseline: str, info: Any) -> str:
        arms = info.data.get("arms")
        if arms is not None and baseline not in arms:
            raise ValueError(f"{baseline!r} is not one of the arms: {', '.join(arms)}")
        return baseline

    @field_validator("sentinel", mode="before")
    @classmethod
    def _sentinel(cls, value: Any) -> Any:
        return Sentinel() if value is True else None if value is False else value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _second_baseline(self) -> Self:
        """With A/A blocks the baseline is launched twice in each block, under another name."""
        if not self.aa:
            return self
        name, config = self.aa_arm, self.arms[self.baseline]
        if not _NAME.match(name):
            raise ValueError(f"the baseline's name must be at most {40 - len(AA_SUFFIX)} characters for aa: {name!r}")
        if name in self.arms and self.arms[name] != config:
            raise ValueError(f"{name!r} is what aa calls the second launch of {self.baseline!r}: rename that arm")
        object.__setattr__(self, "arms", {**self.arms, name: config})
        return self

    @model_validator(mode="after")
    def _shared_urls(self) -> Self:
        """A server that is started and never stopped would be measured as the next arm at its URL."""
        at = {name: _origin(arm.url) for name, arm in self.arms.items() if isinstance(arm, AttachArm)}
        for name, arm in self.arms.items():
            if not isinstance(arm, AttachArm) or arm.start_command is None or arm.stop_command is not None:
                continue
            other = next((o for o, url in at.items() if o != name and url == at[name]), None)
            if other is not None:
                raise ValueError(
                    f"{name} has a start_command and no stop_command, and {other} is at the same URL, so the server of "
                    f"one could be measured as the other: give both a stop_command, or URLs of their own"
                )
        return self

    @model_validator(mode="after")
    def _sessions_fit(self) -> Self:
        if self.workload.sessions is None:
            return self
        if self.open_loop:
            raise ValueError(
                "workload.sessions is a closed loop, in which a turn waits for the answer: leave arrivals out"
            )
        if self.client.workers > 1 or self.client.backend != "local":
            raise ValueError("workload.sessions run in one client process: set client.workers to 1, and no backend")
        if self.workload.template != "chat":
            raise ValueError("workload.sessions need the chat template: a dialogue as plain text has no turns")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        domains = self.workload.domains
        if self.sentinel is not None and domains and self.sentinel.domain not in (None, *domains):
            raise ValueError(
                f"sentinel.domain {self.sentinel.domain!r} is not one of the domains: {', '.join(domains)}"
            )
        factors = self.conditions
        for name, twice in (
            ("sampling", factors is not None and factors.sampling is not None and self.sampling != Sampling()),
            ("arrivals", factors is not None and factors.arrivals is not None and self.arrivals != Arrivals()),
            ("cache", factors is not None and factors.cache is not None and self.cache != "cold"),
        ):
            if twice:
                raise ValueError(f"{name} stands beside conditions.{name}, which replaces it: leave the outer one out")
        conditions = self.condition_names(self.workload.domains or ("one",))
        cells = self.blocks * len(self.arms) * len(self.levels) * len(conditions)
        if cells > MAX_CELLS:
            raise ValueError(f"{cells} cells are more than {MAX_CELLS}: use fewer blocks, levels, arms or conditions")
        for sampling in (self.setting(condition).sampling for condition in conditions):
            if sampling.min_tokens is not None and sampling.min_tokens > self.workload.max_tokens:
                raise ValueError(
                    f"sampling.min_tokens ({sampling.min_tokens}) is above workload.max_tokens "
                    f"({self.workload.max_tokens})"
                )
        return self

    @property
    def factors(self) -> dict[str, tuple[str, ...]]:
        """The factors besides the domain, and the names of their values; empty where the domain is the only one."""
        return self.conditions.factors if self.conditions is not None else {}

    def condition_names(self, domains: Iterable[str]) -> list[str]:
        """Every condition of these domains: the domain's name, or that and a value of each factor, joined by `+`."""
        values = list(itertools.product(*self.factors.values()))
        return [JOIN.join((domain, *row)) for domain in domains for row in values]

    def setting(self, condition: str) -> Setting:
        """What a condition stands for. A name without values (the sentinel's) has the first value of each factor."""
        domain, *given = condition.split(JOIN)
        chosen: dict[str, Any] = {}
        for index, (factor, names) in enumerate(self.factors.items()):
            values = dict(zip(names, self._values(factor), strict=True))
            chosen[factor] = values.get(given[index] if index < len(given) else names[0], values[names[0]])
        sampling: Sampling = chosen.get("sampling", self.sampling)
        if "temperature" in chosen:
            sampling = sampling.model_copy(update={"temperature": chosen["temperature"]})
        return Setting(
            domain=domain,
            sampling=sampling,
            arrivals=chosen.get("arrivals", self.arrivals),
            cache=chosen.get("cache", self.cache),
            words=chosen.get("input_words"),
        )

    def _values(self, factor: str) -> tuple[Any, ...]:
        values = getattr(self.conditions, factor)
        return tuple(values.values()) if isinstance(values, dict) else tuple(values)

    @property
    def open_loop(self) -> bool:
        """A level is a rate, and not a number of streams; the same in all conditions."""
        return self.setting(SENTINEL).arrivals.open

    @property
    def warm(self) -> bool:
        """A warm prefix cache is declared, for all conditions or for some."""
        return self.cache == "warm" or (self.conditions is not None and "warm" in (self.conditions.cache or ()))

    def requests_at(self, level: int, condition: str = SENTINEL) -> int:
        """Requests of a cell: by the streams in closed loop, by the rate and the duration in open loop."""
        arrivals = self.setting(condition).arrivals
        if not arrivals.open:
            return self.requests.at(level)
        wanted = max(self.requests.min_requests, math.ceil(arrivals.rate(level) * arrivals.duration_s))
        return wanted if self.requests.max_requests is None else min(wanted, self.requests.max_requests)

    @property
    def aa_arm(self) -> str:
        """The name of the baseline's second launch; an arm only if `aa` is set."""
        return self.baseline + AA_SUFFIX

    @property
    def sentinel_level(self) -> int:
        """Streams of the sentinel cell."""
        set_level = self.sentinel.level if self.sentinel is not None else None
        return set_level if set_level is not None else min(self.levels)

    @property
    def sentinel_requests(self) -> int:
        """Requests of the sentinel cell, so that every stream has work; sessions where these are played."""
        return max(self.sentinel.requests if self.sentinel is not None else 0, self.sentinel_level)

    @property
    def natural(self) -> bool:
        """Real text that ends by itself, in all conditions."""
        return all(self.setting(condition).natural for condition in self.condition_names(("one",)))

    def resolved(self) -> dict[str, Any]:
        """The campaign with every default written out, as JSON holds it.

        What asks for nothing and came later than the first run directories is left out, so that a campaign's hash does
        not change with the version of breakeven.
        """
        found = self.model_dump(mode="json")
        _leave_out(found, conditions=None, tune=None, cache="cold")
        _leave_out(found["workload"], sessions=None)
        _leave_out(found["client"], backend="local", address=None, max_clock_error_ms=5.0)
        if not self.warm:
            del found["gates"]["min_warm_share"]
        for arm in found["arms"].values():
            if arm["type"] == "embedded" and isinstance(arm["speculation"], dict):
                _leave_out(arm["speculation"], schedule=None)
            if arm["type"] == "attach" and not (arm["start_command"] or arm["stop_command"] or arm["reset_command"]):
                del arm["command_timeout_s"]
                _leave_out(arm, start_command=None, stop_command=None, reset_command=None)
        return found

    @property
    def salts_prompts(self) -> bool:
        """Some arm's prefix cache cannot be reset, so every cell's prompts carry a salt, the same in all arms."""
        return not all(arm.can_reset for arm in self.arms.values())
