"""SGLang: `python -m sglang.launch_server`, flags and speculation of 0.5.23. Pure."""

from __future__ import annotations

from typing import Any, Literal

from breakeven.lab.engines.base import FILES, HOST, PORT, EngineArm, Launch, rank_flags
from breakeven.lab.engines.speculation import EngineSpeculation, Method, RefusedError, refuse, refuse_trees

_NAME = "SGLang"
_ADAPTIVE_FILE = "sglang-adaptive.json"
_ALGORITHMS: dict[Method, str] = {
    "ngram": "NGRAM",
    "draft_model": "STANDALONE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "dflash": "DFLASH",
}


class SglangArm(EngineArm):
    """SGLang's server."""

    type: Literal["sglang"]

    def launch(self) -> Launch:
        return launch(self)


def launch(arm: SglangArm) -> Launch:
    """The launch. RefusedError for what SGLang does not have."""
    command = [*arm.program("python", "-m", "sglang.launch_server"), "--model-path", arm.model]
    command += ["--host", HOST, "--port", PORT, "--enable-metrics", "--enable-cache-report"]
    if arm.served_model_name is not None:
        command += ["--served-model-name", arm.served_model_name]
    if arm.dtype != "auto":
        command += ["--dtype", arm.dtype]
    if arm.max_model_len is not None:
        command += ["--context-length", str(arm.max_model_len)]
    command += rank_flags(
        ("--tp-size", arm.tensor_parallel),
        ("--pp-size", arm.pipeline_parallel),
        ("--dp-size", arm.data_parallel),
        ("--ep-size", arm.expert_parallel),
    )
    env: dict[str, str] = {}
    files: dict[str, dict[str, Any]] = {}
    speculation = arm.speculation
    if isinstance(speculation, EngineSpeculation):
        command += speculation_flags(speculation)
        if (config := adaptive_config(speculation)) is not None:
            command += ["--speculative-adaptive-config", f"{FILES}/{_ADAPTIVE_FILE}"]
            files[_ADAPTIVE_FILE] = config
        if speculation.synthetic_acceptance_length is not None:
            env["SGLANG_SIMULATE_ACC_LEN"] = str(speculation.synthetic_acceptance_length)
    return Launch((*command, *arm.flags), arm.environment(**env), files, reset_path="/flush_cache?timeout=5")


def speculation_flags(speculation: EngineSpeculation) -> list[str]:
    """The flags of a speculation, but for the adaptive configuration. RefusedError for what SGLang does not have."""
    method = speculation.method
    refuse(_NAME, speculation, extra="give further options as flags")
    refuse(
        _NAME,
        speculation,
        ngram_min="it drafts from a trie; set --speculative-ngram-max-trie-depth among the flags",
        ngram_max="it drafts from a trie; set --speculative-ngram-max-trie-depth among the flags",
    )
    algorithm = _ALGORITHMS[method]
    adaptive = speculation.schedule is not None or bool(speculation.adaptive)
    if adaptive:
        if method not in ("eagle3", "mtp"):
            raise RefusedError(f"{_NAME} adapts the depth of EAGLE, EAGLE3 and MTP only, not of {algorithm}")
        if speculation.is_tree:
            raise RefusedError(
                f"{_NAME} adapts chains only: with eagle_topk {speculation.eagle_topk} it would run static without a "
                f"word: set eagle_topk to 1"
            )
        algorithm = "EAGLE" if method == "mtp" else algorithm  # older versions do not take the alias for this
    if method in ("draft_model", "dflash"):
        refuse_trees(f"{_NAME}'s {algorithm}", speculation)
    flags = ["--speculative-algorithm", algorithm]
    if speculation.draft_model_path is not None:
        flags += ["--speculative-draft-model-path", speculation.draft_model_path]
    flags += _shape(speculation, algorithm)
    for flag, threshold in (
        ("--speculative-accept-threshold-single", speculation.acceptance_threshold),
        ("--speculative-accept-threshold-acc", speculation.acceptance_threshold_acc),
    ):
        if threshold is not None:
            flags += [flag, str(threshold)]
    return [*flags, "--speculative-adaptive"] if adaptive else flags


def _shape(speculation: EngineSpeculation, algorithm: str) -> list[str]:
    """Depth, breadth and size. SGLang takes all three of EAGLE's or none."""
    depth, topk, nodes = speculation.depth, speculation.eagle_topk, speculation.num_draft_tokens
    if depth is None and topk is None and nodes is None:
        return []
    if speculation.method == "ngram":
        # --speculative-eagle-topk is overwritten by the breadth of the search.
        breadth = topk or 1
        wanted = nodes or (None if depth is None or breadth > 1 else depth + 1)
        flags = ["--speculative-ngram-max-bfs-breadth", str(breadth)]
        flags += ["--speculative-num-steps", str(depth)] if depth is not None else []
        return [*flags, "--speculative-num-draft-tokens", str(wanted)] if wanted is not None else flags
    if speculation.method == "dflash":
        verified = nodes if nodes is not None else None if depth is None else depth + 1
        return [] if verified is None else ["--speculative-num-draft-tokens", str(verified)]
    if depth is None:
        raise RefusedError(f"{_NAME}'s {algorithm} needs num_steps beside eagle_topk and num_draft_tokens")
    if speculation.is_tree and nodes is None:
        raise RefusedError(f"{_NAME} needs num_draft_tokens for a tree: how many of its nodes are verified")
    flags = ["--speculative-num-steps", str(depth), "--speculative-eagle-topk", str(topk or 1)]
    return [*flags, "--speculative-num-draft-tokens", str(nodes or depth + 1)]


def adaptive_config(speculation: EngineSpeculation) -> dict[str, Any] | None:
    """What the file of `--speculative-adaptive-config` holds; None if the engine's own settings are to be used.

    A schedule becomes one fixed depth for each range: SGLang takes the largest key that is not above the batch size
    (padded to a captured graph), and chooses among that entry's `candidate_steps` by acceptance.
    """
    if speculation.schedule is not None:
        return {str(first): {"candidate_steps": [tokens]} for first, _, tokens in speculation.ranges}
    return dict(speculation.adaptive) if isinstance(speculation.adaptive, dict) else None
