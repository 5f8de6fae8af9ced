"""What the arms of all engines share: their fields in a campaign file, and the launch that follows from them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from breakeven.lab.engines.speculation import EngineSpeculation
from breakeven.lab.section import Section

PORT, HOST, FILES = "{port}", "{host}", "{files}"  # of a launch's command: filled in when it is started
_DESTINATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(@[A-Za-z0-9_][A-Za-z0-9_.:-]*)?")
_OURS = ("--host", "--port", "--api-key")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started. `command` holds {port}, {host} and {files}: the folder where `files` will be.

    `files`: what is written there, as JSON or YAML by the name's ending. Paths are of the server's own address.
    `reset_path` None: the engine cannot empty its prefix cache, for the reason in `why_no_reset`.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics_path: str = "/metrics"
    reset_path: str | None = None
    why_no_reset: str = ""


class EngineArm(Section):
    """An engine that the lab starts for each block.

    `executable`: the program, or a list that begins its command line; None: the engine's own name, from PATH.
    `gpus`: which ones it may see, by number or name (CUDA_VISIBLE_DEVICES). `ssh`: user@host on which it is started;
    `host`: the address under which the lab reaches it (else that of `ssh`, else 127.0.0.1).
    """

    model: str = Field(min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1)
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    pipeline_parallel: int = Field(default=1, ge=1, le=1024)
    data_parallel: int = Field(default=1, ge=1, le=1024)
    expert_parallel: int = Field(default=1, ge=1, le=1024)
    gpus: tuple[int | str, ...] | None = Field(default=None, min_length=1)
    speculation: EngineSpeculation | Literal["off"] = "off"
    executable: str | tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    port: int | None = Field(default=None, ge=1, le=65535)
    host: str | None = Field(default=None, min_length=1)
    ssh: str | None = None
    startup_timeout_s: float = Field(default=1200.0, gt=0)
    stop_timeout_s: float = Field(default=60.0, gt=0)
    continuous_usage: bool = True

    @field_validator("speculation", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        if value is None or value is False:
            return "off"
        if isinstance(value, str) and value != "off":
            raise ValueError(f"must be 'off' or a mapping with a method, for example {{method: {value}}}")
        return value

    @field_validator("executable")
    @classmethod
    def _executable(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and (not value or not all(value)):
            raise ValueError("must name a program: a path, or a list that begins its command line")
        return value

    @field_validator("flags")
    @classmethod
    def _flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        for option in map(option_name, flags):
            if option in _OURS:
                raise ValueError(f"{option} is set by the lab itself: leave it out of the flags")
        return flags

    @field_validator("ssh")
    @classmethod
    def _ssh(cls, value: str | None) -> str | None:
        if value is not None and not _DESTINATION.fullmatch(value):
            raise ValueError(f"{value!r} is not a destination of ssh: write user@host, or a host of your ssh_config")
        return value

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.ssh is not None and self.port is None:
            raise ValueError("a server started over ssh needs a port: from here it cannot be seen which are free there")
        if self.host is not None and self.ssh is None and self.host not in ("127.0.0.1", "localhost", "0.0.0.0"):
            raise ValueError(f"the server is started here, so its host cannot be {self.host!r}: set ssh too")
        return self

    @model_validator(mode="after")
    def _translates(self) -> Self:
        self.launch()
        return self

    def launch(self) -> Launch:
        """How the server is started. RefusedError for what the engine does not have, which validation raises."""
        raise NotImplementedError(f"no launch is known for {type(self).__name__}")

    @property
    def can_reset(self) -> bool:
        """Whether its prefix cache can be emptied."""
        return self.launch().reset_path is not None

    @property
    def address(self) -> str:
        """Where the lab sends its requests."""
        if self.host is not None and self.host != "0.0.0.0":
            return self.host
        return "127.0.0.1" if self.ssh is None else self.ssh.rpartition("@")[2]

    @property
    def bind(self) -> str:
        """Where the server listens; elsewhere on all addresses, because `host` is how the lab reaches it."""
        return "0.0.0.0" if self.ssh is not None else self.host or "127.0.0.1"

    def program(self, *default: str) -> tuple[str, ...]:
        """What the command line begins with."""
        if self.executable is None:
            return default
        return (self.executable,) if isinstance(self.executable, str) else self.executable

    def environment(self, **more: str) -> dict[str, str]:
        """The engine's variables, then the GPUs, then the user's own."""
        visible = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        return {**more, **visible, **self.env}


def rank_flags(*ranks: tuple[str, int]) -> list[str]:
    """Flags with their numbers of ranks, without those of one rank, which is every engine's default."""
    return [word for flag, number in ranks if number > 1 for word in (flag, str(number))]


def option_name(flag: str) -> str:
    """`--a-b` of `--a_b=3`, which is the same to most parsers."""
    name = flag.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


def option_values(flags: tuple[str, ...], *names: str) -> Iterator[str]:
    """What follows the named options in a command line, whether after a space or an equals sign."""
    for position, flag in enumerate(flags):
        if option_name(flag) in names:
            if "=" in flag:
                yield flag.split("=", 1)[1]
            else:
                for value in flags[position + 1 :]:
                    if value.startswith("--"):
                        break
                    yield value


def has_option(flags: tuple[str, ...], *names: str) -> bool:
    return any(option_name(flag) in names for flag in flags)
