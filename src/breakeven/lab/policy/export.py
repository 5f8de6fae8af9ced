"""A policy in the terms of an engine: flags, and the text of the file that they name. Pure.

Formats and rules were read in vLLM 0.32 (`v1/spec_decode/dynamic/utils.py`), SGLang 0.5.23
(`srt/speculative/adaptive_spec_params.py`) and TensorRT-LLM 1.3 (`llmapi/llm_args.py`, pull request 10860).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from breakeven.lab.policy.decide import Policy, PolicyError
from breakeven.lab.policy.ranges import Range

_VLLM_METHODS = {"ngram": "ngram", "eagle3": "eagle3", "mtp": "mtp", "draft_model": "draft_model", "dflash": "dflash"}
_SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "mtp": "EAGLE"}
_TRTLLM_TYPES = {
    "ngram": "NGram", "eagle3": "Eagle3", "mtp": "MTP", "draft_model": "Draft_Target", "dflash": "DFlash",
}  # fmt: skip
_NO_HYSTERESIS = 0.0


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


def export(policy: Policy, engine: str | None = None) -> Exported:
    """The policy for `engine` (None: the one it was measured on). PolicyError where that engine cannot follow it."""
    wanted = engine or policy.shape.engine
    if wanted not in ENGINES:
        raise PolicyError(
            f"the policy was measured on {wanted!r}, which takes no schedule: name one of {', '.join(ENGINES)}"
        )
    if policy.off:
        raise PolicyError("nothing pays at any level, so there is nothing to deploy: serve without speculation")
    found = _WRITERS[wanted](policy)
    if wanted != policy.shape.engine:
        note = f"measured on {policy.shape.engine}, not on {wanted}: loads carry over badly, so measure it there"
        found = Exported(found.engine, found.flags, found.content, (note, *found.notes))
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


def _drafter(policy: Policy, engine: str) -> str | None:
    """The drafter's path. PolicyError if the method needs one and the arm names none."""
    path = _given(policy).get("draft_model_path")
    if path is None and policy.shape.method in ("eagle3", "draft_model", "dflash"):
        raise PolicyError(
            f"{engine} needs the drafter's path, but the arm {policy.arm!r} uses the one in the box: export it"
            f" (docs/drafters.md), and name it as draft_model_path"
        )
    return None if path is None else str(path)


def _chain_only(policy: Policy, engine: str) -> None:
    if policy.shape.topk > 1:
        raise PolicyError(
            f"{engine} varies the depth of chains only, but the arm {policy.arm!r} drafts trees (eagle_topk"
            f" {policy.shape.topk}): measure chains (eagle_topk: 1) to get a schedule for it"
        )


def _method(policy: Policy, engine: str, known: Mapping[str, str]) -> str:
    if policy.shape.method not in known:
        raise PolicyError(
            f"{engine} takes a schedule for {', '.join(known)} only, and the arm {policy.arm!r} drafts by"
            f" {policy.shape.method or 'something unnamed'}"
        )
    return known[policy.shape.method]


def _rows(ranges: tuple[Range, ...]) -> str:
    return json.dumps([list(row) for row in ranges], separators=(",", ":"))


def _embedded(policy: Policy) -> Exported:
    if policy.shape.method not in ("ngram", "eagle3"):
        raise PolicyError(f"breakeven serve drafts by ngram or eagle3, not by {policy.shape.method}")
    given = _given(policy)
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
    _chain_only(policy, "vLLM")
    given = _given(policy)
    config: dict[str, Any] = {"method": _method(policy, "vLLM", _VLLM_METHODS)}
    if (path := _drafter(policy, "vLLM")) is not None:
        config["model"] = path
    config["num_speculative_tokens"] = _deepest(policy)
    for ours, theirs in (("ngram_max", "prompt_lookup_max"), ("ngram_min", "prompt_lookup_min")):
        if given.get(ours) is not None:
            config[theirs] = given[ours]
    config["num_speculative_tokens_per_batch_size"] = [list(row) for row in policy.ranges]
    config |= {str(name): value for name, value in (given.get("extra") or {}).items()}
    text = json.dumps(config)
    notes = (
        "vLLM counts all requests of a step, prefills too, and has no hysteresis: a load that wavers about a threshold"
        " switches at every step",
        "with the first model runner a schedule turns full CUDA graphs off (see its log); with data parallelism vLLM"
        " ignores it",
    )
    return Exported("vllm", ("--speculative-config", text), json.dumps(config, indent=1) + "\n", notes)


def _sglang(policy: Policy) -> Exported:
    _chain_only(policy, "SGLang")  # with topk above 1 it would run static, without a word
    algorithm = _method(policy, "SGLang", _SGLANG_ALGORITHMS)
    deepest = _deepest(policy)
    flags = ["--speculative-algorithm", algorithm]
    if (path := _drafter(policy, "SGLang")) is not None:
        flags += ["--speculative-draft-model-path", path]
    flags += ["--speculative-num-steps", str(deepest), "--speculative-eagle-topk", "1"]
    flags += ["--speculative-num-draft-tokens", str(deepest + 1)]
    flags += ["--speculative-adaptive", "--speculative-adaptive-config", "{file}"]
    config = {
        str(first): {"candidate_steps": [depth], "up_hysteresis": _NO_HYSTERESIS, "down_hysteresis": _NO_HYSTERESIS}
        for first, _, depth in policy.ranges
    }
    notes = (
        "one candidate for each range, so that the load alone decides: SGLang's own choice by acceptance, and the"
        " hysteresis that belongs to it, are out of play",
        "SGLang rounds the batch size up to a captured graph before it looks the depth up, so it switches up to one"
        " graph size early",
    )
    return Exported("sglang", tuple(flags), json.dumps(config, indent=1) + "\n", notes)


def _trtllm(policy: Policy) -> Exported:
    _chain_only(policy, "TensorRT-LLM")
    deepest, ranges = _deepest(policy), policy.ranges
    if ranges[0][2] != deepest:
        raise PolicyError(
            f"TensorRT-LLM wants its longest drafts at the smallest batches, but the schedule is {ranges[0][2]} deep"
            f" from batch size 1 and up to {deepest} later"
        )
    lines = ["speculative_config:", f"  decoding_type: {_method(policy, 'TensorRT-LLM', _TRTLLM_TYPES)}"]
    lines.append(f"  max_draft_len: {deepest}")
    if policy.shape.method == "mtp":
        lines.append(f"  num_nextn_predict_layers: {deepest}")  # what 1.2 goes by
    if (path := _drafter(policy, "TensorRT-LLM")) is not None:
        lines.append(f"  speculative_model: {json.dumps(path, ensure_ascii=False)}")
    if (longest := _given(policy).get("ngram_max")) is not None:
        lines.append(f"  max_matching_ngram_size: {longest}")
    drafting = ranges[:-1]  # what lies behind the last key is off, which the last range always is
    if len(drafting) == 1:
        lines.append(f"  max_concurrency: {drafting[0][1]}")
    else:
        lines.append("  draft_len_schedule:")
        lines += [f"    {last}: {depth}" for _, last, depth in drafting]
    notes = (
        "the keys of draft_len_schedule are the last batch size of each range (from TensorRT-LLM 1.3; before, they were"
        " the first); behind the last key nothing is drafted",
    )
    return Exported("trtllm", ("--extra_llm_api_options", "{file}"), "\n".join(lines) + "\n", notes)


_WRITERS: Mapping[str, Callable[[Policy], Exported]] = {
    "embedded": _embedded,
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
ENGINES = tuple(_WRITERS)
