"""A policy in the terms of an engine: flags, and the text of the file that they name. Pure.

The terms are those in which `lab.engines` starts an arm that has the schedule, so what is exported is what `as_arm`
would measure. How the engines read a schedule was read in vLLM 0.32 (`v1/spec_decode/dynamic/utils.py`), SGLang 0.5.23
(`srt/speculative/adaptive_spec_params.py`) and TensorRT-LLM 1.3 (`llmapi/llm_args.py`, pull request 10860).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from breakeven.lab.engines import EngineSpeculation, RefusedError, sglang, trtllm, vllm
from breakeven.lab.policy.decide import Policy, PolicyError
from breakeven.lab.policy.ranges import Range


@dataclass(frozen=True, slots=True)
class Exported:
    """`flags`: for the engine's command line; `{file}` in them stands for the path of `content`. `content`: the text of
    a file, empty where the flags say everything. `notes`: what the engine makes of it, in plain words."""

    engine: str
    flags: tuple[str, ...]
    content: str
    notes: tuple[str, ...]

    def command(self, file: str) -> str:
        """The flags as they are typed into a shell."""
        return shlex.join(flag.replace("{file}", file) for flag in self.flags)

    @property
    def names_file(self) -> bool:
        """Do the flags name the file themselves?"""
        return any("{file}" in flag for flag in self.flags)

    def command_reading(self, file: str) -> str:
        """The flags where `content` was written to `file`: a shell reads it for an engine that takes no path."""
        if self.names_file or not self.content:
            return self.command(file)
        return f'{shlex.join(self.flags[:-1])} "$(cat {shlex.quote(file)})"'


def export(policy: Policy, engine: str | None = None) -> Exported:
    """The policy for `engine` (None: the one it was measured on). PolicyError where that engine cannot follow it."""
    wanted = engine or policy.shape.engine
    if wanted not in ENGINES:
        raise PolicyError(
            f"the policy was measured on {wanted!r}, which takes no schedule: name one of {', '.join(ENGINES)}"
        )
    if policy.off:
        raise PolicyError("nothing pays at any level, so there is nothing to deploy: serve without speculation")
    try:
        found = _WRITERS[wanted](policy)
    except RefusedError as refused:
        raise PolicyError(str(refused)) from None
    if wanted != policy.shape.engine:
        notes = [f"measured on {policy.shape.engine}, not on {wanted}: loads carry over badly, so measure it there"]
        if extra := _given(policy).get("extra"):
            notes.append(f"left out, because it is {policy.shape.engine}'s own: {', '.join(map(str, extra))}")
        found = Exported(found.engine, found.flags, found.content, (*notes, *found.notes))
    return found


def as_arm(policy: Policy) -> str:
    """The `speculation` of an arm that follows the policy, in one line of YAML, to measure it as one. PolicyError as
    `export`."""
    if policy.off:
        raise PolicyError("nothing pays at any level, so there is no schedule to measure")
    fields = {name: value for name, value in _given(policy).items() if value not in (None, False, {})}
    if policy.shape.topk == 1:
        fields.pop("num_draft_tokens", None)
    fields |= {"num_steps": _deepest(policy), "schedule": [list(row) for row in policy.ranges]}
    return f"speculation: {json.dumps(fields, ensure_ascii=False)}"


def _deepest(policy: Policy) -> int:
    return max(depth for _, _, depth in policy.ranges)


def _given(policy: Policy) -> Mapping[str, Any]:
    given = policy.settings.get("speculation")
    return given if isinstance(given, Mapping) else {}


def _translated(policy: Policy, engine: str, name: str) -> EngineSpeculation:
    """The arm's speculation with the schedule, as a campaign of `engine` (`name` in words) would hold it.

    On the engine that was measured that is all of it; on another one, what is not the first one's own.
    """
    if policy.shape.topk > 1:  # SGLang would run static, without a word
        raise PolicyError(
            f"{name} varies the depth of chains only, but the arm {policy.arm!r} drafts trees (eagle_topk"
            f" {policy.shape.topk}): measure chains (eagle_topk: 1) to get a schedule for it"
        )
    given = {field: value for field, value in _given(policy).items() if value is not None}
    if given.get("draft_model_path") is None and policy.shape.method in ("eagle3", "draft_model", "dflash"):
        raise PolicyError(
            f"{name} needs the drafter's path, but the arm {policy.arm!r} uses the one in the box: export it"
            f" (docs/drafters.md), and name it as draft_model_path"
        )
    if policy.shape.engine != engine:
        given.pop("extra", None)
    given.pop("algorithm", None)
    given.pop("num_draft_tokens", None)  # of a chain, it follows from the depth
    given |= {"method": policy.shape.method, "num_steps": _deepest(policy), "schedule": [*map(list, policy.ranges)]}
    try:
        return EngineSpeculation.model_validate_json(json.dumps(given))
    except ValidationError as error:
        problem = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise PolicyError(f"the arm {policy.arm!r} cannot be written for {name}: {problem}") from None


def _rows(ranges: tuple[Range, ...]) -> str:
    return json.dumps([list(row) for row in ranges], separators=(",", ":"))


def _embedded(policy: Policy) -> Exported:
    if policy.shape.method not in ("ngram", "eagle3"):
        raise PolicyError(f"breakeven serve drafts by ngram or eagle3, not by {policy.shape.method}")
    given = _given(policy)
    thresholds = ("acceptance_threshold", "acceptance_threshold_acc")
    if lenient := [name for name in thresholds if given.get(name) is not None]:
        raise PolicyError(f"breakeven serve verifies exactly, but the arm {policy.arm!r} has {' and '.join(lenient)}")
    flags = ["--speculative-algorithm", policy.shape.method]
    for name in ("draft_model_path", "ngram_min", "ngram_max"):
        if given.get(name) is not None:
            flags += [f"--speculative-{name.replace('_', '-')}", str(given[name])]
    if policy.shape.topk > 1:
        flags += ["--speculative-eagle-topk", str(policy.shape.topk)]
        flags += ["--speculative-num-draft-tokens", str(policy.shape.nodes)]
    flags += ["--speculative-num-steps-per-batch-size", _rows(policy.ranges)]
    return Exported("embedded", tuple(flags), "", ("sequences that decode are counted; switching needs no hysteresis",))


def _vllm(policy: Policy) -> Exported:
    config = vllm.speculative_config(_translated(policy, "vllm", "vLLM"))
    notes = (
        "vLLM counts all requests of a step, prefills too, and has no hysteresis: a load that wavers about a threshold"
        " switches at every step",
        "with the first model runner a schedule turns full CUDA graphs off (see its log); with data parallelism vLLM"
        " ignores it",
    )
    return Exported("vllm", ("--speculative-config", json.dumps(config)), json.dumps(config, indent=1) + "\n", notes)


def _sglang(policy: Policy) -> Exported:
    speculation = _translated(policy, "sglang", "SGLang")
    flags = [*sglang.speculation_flags(speculation), "--speculative-adaptive-config", "{file}"]
    notes = (
        "one candidate for each range, so that the load alone decides: SGLang's own choice by acceptance, and the"
        " hysteresis that belongs to it, are out of play",
        "SGLang rounds the batch size up to a captured graph before it looks the depth up, so it switches up to one"
        " graph size early",
    )
    content = json.dumps(sglang.adaptive_config(speculation), indent=1) + "\n"
    return Exported("sglang", tuple(flags), content, notes)


def _trtllm(policy: Policy) -> Exported:
    first = policy.shape.engine == "trtllm" and policy.settings.get("schedule_keys") == "first"
    keys: Literal["last", "first"] = "first" if first else "last"
    config = trtllm.speculative_config(_translated(policy, "trtllm", "TensorRT-LLM"), keys)
    notes = (
        f"the keys of draft_len_schedule are the {keys} batch size of each range (the last from TensorRT-LLM 1.3 on,"
        " the first before)" + ("" if first else "; behind the last key nothing is drafted"),
    )
    content = "".join(f"{line}\n" for line in _yaml({"speculative_config": config}))
    return Exported("trtllm", ("--extra_llm_api_options", "{file}"), content, notes)


def _yaml(mapping: Mapping[Any, Any]) -> Iterator[str]:
    """Lines of YAML: mappings as blocks, everything else in JSON, which YAML reads, but for keys that are numbers."""
    for key, value in mapping.items():
        plain = not isinstance(key, str) or (key.isidentifier() and key.isascii() and "_" in key)
        name = str(key) if plain else json.dumps(key, ensure_ascii=False)
        if isinstance(value, Mapping) and value:
            yield f"{name}:"
            yield from (f"  {line}" for line in _yaml(value))
        else:
            yield f"{name}: {json.dumps(value, ensure_ascii=False)}"


_WRITERS: Mapping[str, Callable[[Policy], Exported]] = {
    "embedded": _embedded,
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
ENGINES = tuple(_WRITERS)
