"""TensorRT-LLM: `trtllm-serve` with the PyTorch backend, and its file of LLM API options (1.2 and later). Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from breakeven.lab.engines.base import FILES, HOST, PORT, EngineArm, Launch, rank_flags
from breakeven.lab.engines.speculation import (
    MAX_BATCH,
    EngineSpeculation,
    Method,
    RefusedError,
    refuse,
    refuse_trees,
)

_NAME = "TensorRT-LLM"
_OPTIONS_FILE = "trtllm-options.yaml"
_TYPES: dict[Method, str] = {
    "ngram": "NGram",
    "draft_model": "Draft_Target",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "dflash": "DFlash",
}


class TrtLlmArm(EngineArm):
    """`trtllm-serve`. `options`: further LLM API options, written to its YAML file.

    `schedule_keys`: what the keys of `draft_len_schedule` mean. From 1.3 on they are the last batch size of a range
    (TensorRT-LLM pull request 10860), before that the first.
    """

    type: Literal["trtllm"]
    options: dict[str, Any] = Field(default_factory=dict)
    schedule_keys: Literal["last", "first"] = "last"

    def launch(self) -> Launch:
        return launch(self)


def launch(arm: TrtLlmArm) -> Launch:
    """The launch. RefusedError for what TensorRT-LLM does not have."""
    if arm.data_parallel > 1:
        raise RefusedError(f"{_NAME} has no data_parallel: set enable_attention_dp among the options")
    if arm.served_model_name is not None:
        raise RefusedError(f"{_NAME} serves under the model's own name: leave served_model_name out")
    command = [*arm.program("trtllm-serve"), "serve", arm.model, "--backend", "pytorch"]
    command += ["--host", HOST, "--port", PORT]
    if arm.max_model_len is not None:
        command += ["--max_seq_len", str(arm.max_model_len)]
    command += rank_flags(
        ("--tp_size", arm.tensor_parallel),
        ("--pp_size", arm.pipeline_parallel),
        ("--ep_size", arm.expert_parallel),
    )
    command += ["--extra_llm_api_options", f"{FILES}/{_OPTIONS_FILE}"]
    return Launch(
        (*command, *arm.flags),
        arm.environment(),
        {_OPTIONS_FILE: llm_options(arm)},
        metrics_path="/prometheus/metrics",
        why_no_reset="trtllm-serve has no route for it",
    )


def llm_options(arm: TrtLlmArm) -> dict[str, Any]:
    """What the YAML file holds. RefusedError for what TensorRT-LLM does not have."""
    options: dict[str, Any] = {"return_perf_metrics": True, "enable_iter_perf_stats": True}  # its Prometheus counters
    if arm.dtype != "auto":
        options["dtype"] = arm.dtype
    if isinstance(arm.speculation, EngineSpeculation):
        options["speculative_config"] = speculative_config(arm.speculation, arm.schedule_keys)
    return {**options, **arm.options}


def speculative_config(
    speculation: EngineSpeculation, schedule_keys: Literal["last", "first"] = "last"
) -> dict[str, Any]:
    """The `speculative_config` of the LLM API. RefusedError for what TensorRT-LLM does not have."""
    refuse(
        _NAME,
        speculation,
        ngram_min="it looks up n-grams of up to ngram_max tokens",
        synthetic_acceptance_length="it has no synthetic acceptance",
        adaptive="it follows a schedule by batch size (schedule: [[first, last, tokens], …])",
        acceptance_threshold="relaxed acceptance is for thinking models with MTP only: give its keys as extra",
        acceptance_threshold_acc="relaxed acceptance is for thinking models with MTP only: give its keys as extra",
    )
    config: dict[str, Any] = {"decoding_type": _TYPES[speculation.method]}
    depth = speculation.depth
    if depth is not None:
        config["max_draft_len"] = depth
        if speculation.method == "mtp":
            config["num_nextn_predict_layers"] = depth  # what 1.2 goes by, 1 unless it is set; later versions do not
    elif speculation.method != "mtp":
        raise RefusedError(f"{_NAME} wants to be told how many tokens {speculation.method} drafts: set num_steps")
    if speculation.draft_model_path is not None:
        config["speculative_model"] = speculation.draft_model_path
    if speculation.ngram_max is not None:
        config["max_matching_ngram_size"] = speculation.ngram_max
    if speculation.is_tree:
        config |= _tree(speculation)
    if speculation.schedule is not None:
        config |= _schedule(speculation, schedule_keys)
    return {**config, **speculation.extra}


def _tree(speculation: EngineSpeculation) -> dict[str, Any]:
    if speculation.method != "eagle3":
        refuse_trees(f"{_NAME}'s {_TYPES[speculation.method]}", speculation)
    topk, depth = speculation.eagle_topk or 1, speculation.depth or 1
    tree: dict[str, Any] = {"use_dynamic_tree": True, "dynamic_tree_max_topK": topk}
    if speculation.num_draft_tokens is not None:
        drafted = speculation.num_draft_tokens - 1
        if not depth <= drafted <= topk * depth:
            raise RefusedError(
                f"{_NAME} drafts between num_steps and eagle_topk × num_steps tokens in a tree ({depth} to "
                f"{topk * depth}), but num_draft_tokens {speculation.num_draft_tokens} means {drafted}"
            )
        tree["max_total_draft_tokens"] = drafted
    if speculation.schedule is not None:
        raise RefusedError(f"{_NAME} schedules chains only: leave eagle_topk or the schedule out")
    return tree


def _schedule(speculation: EngineSpeculation, keys: Literal["last", "first"]) -> dict[str, Any]:
    """A schedule that only stops somewhere is `max_concurrency`, which means the same in every version."""
    ranges, top = speculation.ranges, speculation.depth or 0
    if ranges[0][2] != top:
        raise RefusedError(
            f"{_NAME} wants the longest drafts at the smallest batches: {top} in the schedule's first row"
        )
    if len(ranges) == 2 and ranges[1][2] == 0 and ranges[0][1] is not None:
        return {"max_concurrency": ranges[0][1]}
    if keys == "first":
        return {"draft_len_schedule": {first: tokens for first, _, tokens in ranges}}
    # Beyond the last key nothing is drafted.
    drafting = [row for row in ranges if row[2] or row[1] is not None]
    return {"draft_len_schedule": {MAX_BATCH if last is None else last: tokens for _, last, tokens in drafting}}
