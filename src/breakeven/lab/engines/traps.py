"""What is known to go wrong, or to be misread, seen from a command line before anything is started. Pure.

Each trap is one sentence without a subject: the caller puts the arm's name before it. Command lines and environment are
those that the server gets, so an arm that was written by hand is looked at like a typed one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from breakeven.lab.engines.base import has_option, option_values

_DEPTH_CAPS = 3  # a tree this shallow yields few tokens however broad it is, …
_ROWS = 4  # …so one that verifies this many times the tokens of a chain one step deeper is a waste
_SGLANG_RUNNING = 48  # what SGLang lowers --max-running-requests to under speculation (speculative_hook.py)
_ADAPTIVE = ("EAGLE", "EAGLE3", "NEXTN")
_GRAPH_SIZES = ("--cudagraph-capture-sizes", "--cuda-graph-sizes")
_LARGEST_GRAPH = (
    "--max-cudagraph-capture-size",
    "--compilation-config.max-cudagraph-capture-size",
    "-cc.max_cudagraph_capture_size",
)
_BACKEND_SAMPLING = ("--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling")  # llama-server's: on, off
_LLAMA_SLOTS = 4  # what llama-server takes where it is not told (--parallel below 1)
# Variables by which a server is told to accept by lot: one that the user's shell holds is not for a measured server.
PRETENDING = ("SGLANG_SIMULATE_ACC_LEN", "LLAMA_ARG_SPEC_SYNTH_LEN", "LLAMA_ARG_SPEC_SYNTH_RATES")
# Nor is a folder in which the processes of several servers would add up their metrics.
NOT_INHERITED = (*PRETENDING, "PROMETHEUS_MULTIPROC_DIR")


def traps(
    command: Sequence[str], env: Mapping[str, str], levels: Sequence[int] = (), open_loop: bool = False
) -> Iterator[str]:
    """The traps of one server. `levels`: the loads that it will be measured at, in streams; none where requests come
    at a rate (`open_loop`), since how many run together is then not known beforehand."""
    flags = tuple(command)
    config = _vllm_config(flags)
    yield from _synthetic(flags, env)
    yield from _lossy(flags, config)
    yield from _shape(flags)
    if config is not None:
        yield from _vllm(flags, config, levels)
    if has_option(flags, "--speculative-algorithm") and any("sglang" in part for part in flags[:4]):
        yield from _sglang(flags, levels)
    if has_option(flags, "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"):
        yield from _beyond_graphs(flags, levels)
    if any(re.search(r"llama-server(\.exe)?\Z", part) for part in flags[:2]):
        yield from _slots(flags, levels)
        yield from _drafts_of_several(flags, env, levels, open_loop)


def synthetic_length(command: Sequence[str], env: Mapping[str, str]) -> float | None:
    """The acceptance length that a server is told to pretend, root included; None if it is told none that is known."""
    flags = tuple(command)
    config = _vllm_config(flags) or {}
    for stated in (
        config.get("synthetic_acceptance_length"),
        env.get("SGLANG_SIMULATE_ACC_LEN"),
        *option_values(flags, "--spec-synth-len"),
        env.get("LLAMA_ARG_SPEC_SYNTH_LEN"),
    ):
        value = _number(stated)
        if value is not None and value > 0:
            return value
    rates = _rates(flags, env, config)
    given = rates.split(",") if isinstance(rates, str) else rates
    chances = [_number(rate) for rate in given] if isinstance(given, list) else []
    if chances and None not in chances:
        return 1 + sum(chance or 0.0 for chance in chances)
    return None


def is_synthetic(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a server is told to accept by lot, be it at a length that cannot be read from its settings."""
    flags = tuple(command)
    config = _vllm_config(flags) or {}
    stated = config.get("rejection_sample_method") == "synthetic" or bool(_rates(flags, env, config))
    return stated or synthetic_length(command, env) is not None


def _rates(flags: tuple[str, ...], env: Mapping[str, str], config: Mapping[str, Any]) -> Any:
    """The chances by position that are stated, unread: should be a list, or text with commas."""
    return (
        config.get("synthetic_acceptance_rates")
        or next(option_values(flags, "--spec-synth-rates"), None)
        or env.get("LLAMA_ARG_SPEC_SYNTH_RATES")
    )


def _synthetic(flags: tuple[str, ...], env: Mapping[str, str]) -> Iterator[str]:
    length = synthetic_length(flags, env)
    if is_synthetic(flags, env):
        stated = f" of {length:g} tokens a round" if length is not None else ""
        yield (
            f"accepts drafts by lot, at a set length{stated}: this is a condition, not a result. Its text means "
            "nothing, and it gets no verdict; it tells what a drafter of that acceptance would give"
        )


def _lossy(flags: tuple[str, ...], config: Mapping[str, Any] | None) -> Iterator[str]:
    for option in ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"):
        for value in option_values(flags, option):
            number = _number(value)
            if number is not None and number < 1:
                yield (
                    f"accepts drafts that the model would not have sampled ({option} {value} is below 1.0): its text "
                    "is another, so a gain in speed is not free"
                )


def _shape(flags: tuple[str, ...]) -> Iterator[str]:
    steps, topk, nodes = (
        _integer(next(option_values(flags, f"--speculative-{name}"), None))
        for name in ("num-steps", "eagle-topk", "num-draft-tokens")
    )
    if steps is not None and topk is not None and nodes is not None:
        yield from dominated(steps, topk, nodes)


def dominated(steps: int, topk: int, nodes: int) -> Iterator[str]:
    """A tree whose depth caps it, with the chain to try instead. `nodes`: tokens verified, root included.

    A tree of d steps yields at most d + 1 tokens a round; a chain of d + 1 steps verifies d + 2, and yields as many.
    """
    chain = steps + 1
    if topk > 1 and steps <= _DEPTH_CAPS and nodes >= _ROWS * (chain + 1):
        yield (
            f"verifies {nodes} tokens a round and can gain at most {steps + 1} of them, because its tree is {steps} "
            f"steps deep: a chain of {chain} (num_steps {chain}, eagle_topk 1) verifies {chain + 1} and can gain as "
            "many, so measure that too"
        )


def _vllm(flags: tuple[str, ...], config: Mapping[str, Any], levels: Sequence[int]) -> Iterator[str]:
    schedule = config.get("num_speculative_tokens_per_batch_size")
    ranks = _integer(next(option_values(flags, "--data-parallel-size", "-dp"), None)) or 1
    if schedule and ranks > 1:
        yield (
            "has a schedule by batch size and several data parallel ranks: vLLM then drops the schedule and drafts "
            "the same at every load"
        )
    tokens = {_integer(config.get("num_speculative_tokens")), *_scheduled(schedule)} - {None, 0}
    sizes, largest = _capture_sizes(flags)
    top = max([*sizes, *largest], default=0)
    for drafted in sorted(int(number or 0) for number in tokens):
        odd = [size for size in sizes if size % (drafted + 1)]
        if odd:
            yield (
                f"captures CUDA graphs of {_listed(odd)} tokens, which are no multiple of {drafted + 1}, what a request"
                f" brings to a round with {drafted} drafted: such rounds are padded or run without a graph"
            )
        wide = [level for level in levels if top and level * (drafted + 1) > top]
        if wide and drafted == max(int(number or 0) for number in tokens):
            yield (
                f"captures CUDA graphs of up to {top} tokens, and {_listed(wide)} streams bring {drafted + 1} each: "
                "those levels run without a graph"
            )


def _sglang(flags: tuple[str, ...], levels: Sequence[int]) -> Iterator[str]:
    algorithm = next(option_values(flags, "--speculative-algorithm"), "").upper()
    topk = _integer(next(option_values(flags, "--speculative-eagle-topk"), None)) or 1
    if has_option(flags, "--speculative-adaptive"):
        reason = ""
        if algorithm not in _ADAPTIVE:
            reason = f"with {algorithm}"
        elif topk > 1:
            reason = f"with --speculative-eagle-topk {topk}"
        elif has_option(flags, "--enable-dp-attention"):
            reason = "with --enable-dp-attention"
        elif has_option(flags, "--enable-two-batch-overlap"):
            reason = "with --enable-two-batch-overlap"
        if reason:
            yield (
                f"asks for adaptive speculation {reason}, where SGLang has none: it runs static, without an error. "
                "Take --speculative-adaptive away, or what is in its way"
            )
    crowded = [level for level in levels if level > _SGLANG_RUNNING]
    if crowded and not has_option(flags, "--max-running-requests"):
        yield (
            f"speculates without --max-running-requests, which SGLang then lowers to {_SGLANG_RUNNING}: at "
            f"{_listed(crowded)} streams requests queue, unlike in an arm without speculation. Set it in every arm"
        )


def _beyond_graphs(flags: tuple[str, ...], levels: Sequence[int]) -> Iterator[str]:
    largest = max(
        (_integer(v) or 0 for v in option_values(flags, "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode")), default=0
    )
    wide = [level for level in levels if largest and level > largest]
    if wide:
        yield f"captures CUDA graphs for up to {largest} requests: {_listed(wide)} streams run without one"


def _slots(flags: tuple[str, ...], levels: Sequence[int]) -> Iterator[str]:
    told = _integer(next(option_values(flags, "--parallel", "-np"), None))
    slots = told if told is not None and told > 0 else _LLAMA_SLOTS
    crowded = [level for level in levels if level > slots]
    if crowded:
        default = "" if slots == told else ", llama-server's default without slots (--parallel)"
        yield f"serves {slots} requests at once{default}: at {_listed(crowded)} streams the others wait for a slot"


def _drafts_of_several(
    flags: tuple[str, ...], env: Mapping[str, str], levels: Sequence[int], open_loop: bool
) -> Iterator[str]:
    """llama.cpp's EAGLE-3 drafts of more than one slot, as build 11434 samples them (docs/engines.md)."""
    drafts = any("draft-eagle3" in value.split(",") for value in option_values(flags, "--spec-type"))
    switches = [flag for flag in flags if flag in _BACKEND_SAMPLING]
    stated = env.get("LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING", "") in ("0", "off", "false", "disabled")
    off = stated or "LLAMA_ARG_NO_SPEC_DRAFT_BACKEND_SAMPLING" in env
    on = switches[-1] == _BACKEND_SAMPLING[0] if switches else not off
    several = [level for level in levels if level > 1]
    told = _integer(next(option_values(flags, "--parallel", "-np"), None))
    if drafts and on and (several or open_loop) and told != 1:
        where = f"at {_listed(several)} streams" if several else "wherever requests overlap"
        yield (
            "samples the drafts of all slots in the backend, and llama.cpp (seen in build 11434, on a CPU) then drafts "
            f"badly for all but one of those that run together: acceptance falls {where} for no "
            "reason of the drafter's. Add --no-spec-draft-backend-sampling to its flags"
        )


def _capture_sizes(flags: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """vLLM's capture sizes, and the largest one, where they are set by hand."""
    sizes = [_integer(value) for value in option_values(flags, *_GRAPH_SIZES)]
    largest = [_integer(value) for value in option_values(flags, *_LARGEST_GRAPH)]
    for text in option_values(flags, "--compilation-config", "-cc"):
        try:
            given = json.loads(text)
        except ValueError:
            continue
        if not isinstance(given, dict):
            continue
        found = given.get("cudagraph_capture_sizes")
        sizes += [_integer(size) for size in found] if isinstance(found, list) else []
        largest.append(_integer(given.get("max_cudagraph_capture_size")))
    return sorted(size for size in sizes if size), [size for size in largest if size]


def _vllm_config(flags: tuple[str, ...]) -> dict[str, Any] | None:
    text = next(option_values(flags, "--speculative-config", "-sc"), None)
    try:
        config = json.loads(text) if text is not None else None
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _scheduled(schedule: Any) -> set[int | None]:
    if not isinstance(schedule, list):
        return set()
    return {_integer(row[2]) for row in schedule if isinstance(row, list) and len(row) == 3}


def _number(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and abs(number) < 1e9 and number == int(number) else None


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > 8:
        return f"{', '.join(map(str, numbers[:7]))} and {len(numbers) - 7} more"
    return ", ".join(map(str, numbers))
