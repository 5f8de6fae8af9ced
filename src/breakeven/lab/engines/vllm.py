"""vLLM: `vllm serve`, flags and speculation of 0.32 (docs.vllm.ai, configuration of speculative decoding). Pure."""

from __future__ import annotations

import json
from typing import Any, Literal

from breakeven.lab.engines.base import HOST, PORT, EngineArm, Launch, rank_flags
from breakeven.lab.engines.speculation import EngineSpeculation, RefusedError, refuse, refuse_trees

_NAME = "vLLM"
_RESET_VARIABLE = "VLLM_SERVER_DEV_MODE"  # without it there is no /reset_prefix_cache


class VllmArm(EngineArm):
    """`vllm serve`. Its expert parallelism is on or off, over all tensor and data parallel ranks."""

    type: Literal["vllm"]

    def launch(self) -> Launch:
        return launch(self)


def launch(arm: VllmArm) -> Launch:
    """The launch. RefusedError for what vLLM does not have."""
    command = [*arm.program("vllm"), "serve", arm.model, "--host", HOST, "--port", PORT]
    command.append("--enable-prompt-tokens-details")  # hits of the prefix cache, in each answer's usage
    if arm.served_model_name is not None:
        command += ["--served-model-name", arm.served_model_name]
    if arm.dtype != "auto":
        command += ["--dtype", arm.dtype]
    if arm.max_model_len is not None:
        command += ["--max-model-len", str(arm.max_model_len)]
    command += rank_flags(
        ("--tensor-parallel-size", arm.tensor_parallel),
        ("--pipeline-parallel-size", arm.pipeline_parallel),
        ("--data-parallel-size", arm.data_parallel),
    )
    if arm.expert_parallel > 1:
        if arm.expert_parallel != (ranks := arm.tensor_parallel * arm.data_parallel):
            raise RefusedError(
                f"{_NAME} spreads experts over all its ranks: expert_parallel must be tensor_parallel × data_parallel "
                f"({ranks}), or 1"
            )
        command.append("--enable-expert-parallel")
    if isinstance(arm.speculation, EngineSpeculation):
        command += ["--speculative-config", json.dumps(speculative_config(arm.speculation))]
    env = arm.environment(**{_RESET_VARIABLE: "1"})
    return Launch(
        (*command, *arm.flags),
        env,
        reset_path="/reset_prefix_cache" if env[_RESET_VARIABLE] == "1" else None,
        why_no_reset=f"{_RESET_VARIABLE} is not 1",
    )


def speculative_config(speculation: EngineSpeculation) -> dict[str, Any]:
    """The mapping that `--speculative-config` takes. RefusedError for what vLLM does not have."""
    refuse_trees(_NAME, speculation)
    refuse(
        _NAME,
        speculation,
        adaptive="it follows a schedule by batch size (schedule: [[first, last, tokens], …])",
        acceptance_threshold="its rejection sampler is exact",
        acceptance_threshold_acc="its rejection sampler is exact",
    )
    config: dict[str, Any] = {"method": speculation.method}
    if speculation.draft_model_path is not None:
        config["model"] = speculation.draft_model_path
    if speculation.depth is not None:
        config["num_speculative_tokens"] = speculation.depth
    elif speculation.method == "ngram":
        raise RefusedError(f"{_NAME} wants to be told how many tokens ngram drafts: set num_steps")
    if speculation.ngram_max is not None:
        config["prompt_lookup_max"] = speculation.ngram_max
    if speculation.ngram_min is not None:
        config["prompt_lookup_min"] = speculation.ngram_min
    if speculation.schedule is not None:
        config["num_speculative_tokens_per_batch_size"] = [list(row) for row in speculation.schedule]
    if speculation.synthetic_acceptance_length is not None:
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_length"] = speculation.synthetic_acceptance_length
    return {**config, **speculation.extra}
