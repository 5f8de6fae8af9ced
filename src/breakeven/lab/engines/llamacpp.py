"""llama.cpp: `llama-server`, flags and speculation of build 11434 (docs/speculative.md there). Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakeven.lab.engines.base import HOST, PORT, EngineArm, Launch
from breakeven.lab.engines.speculation import EngineSpeculation, Method, RefusedError, refuse, refuse_trees

_NAME = "llama.cpp"
_TYPES: dict[Method, str] = {
    "ngram": "ngram-simple",
    "draft_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "dflash": "draft-dflash",
}


class LlamaCppArm(EngineArm):
    """`llama-server`; `model` and `draft_model_path` are .gguf files. `slots`: requests served at once (default 4)."""

    type: Literal["llamacpp"]
    slots: int | None = Field(default=None, ge=1, le=1024)
    threads: int | None = Field(default=None, ge=1, le=1024)

    def launch(self) -> Launch:
        return launch(self)


def launch(arm: LlamaCppArm) -> Launch:
    """The launch. RefusedError for what llama.cpp does not have."""
    if arm.dtype != "auto":
        raise RefusedError(f"{_NAME} computes in the types of the .gguf file: leave dtype out")
    for field in ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"):
        if getattr(arm, field) > 1:
            raise RefusedError(f"{_NAME} has no {field}: see --split-mode and --tensor-split, to be given as flags")
    command = [*arm.program("llama-server"), "-m", arm.model, "--host", HOST, "--port", PORT]
    command += ["--metrics", "--no-webui"]
    if arm.served_model_name is not None:
        command += ["--alias", arm.served_model_name]
    if arm.slots is not None:
        command += ["--parallel", str(arm.slots)]
    if arm.max_model_len is not None:  # its context is shared out among the slots
        if arm.slots is None:
            raise RefusedError(
                f"{_NAME} shares its context out among slots, 4 unless it is told: set slots beside max_model_len, "
                f"which is for each"
            )
        command += ["--ctx-size", str(arm.max_model_len * arm.slots)]
    if arm.threads is not None:
        command += ["--threads", str(arm.threads), "--threads-batch", str(arm.threads)]
    if isinstance(arm.speculation, EngineSpeculation):
        command += speculation_flags(arm.speculation)
    return Launch(
        (*command, *arm.flags),
        arm.environment(),
        why_no_reset="llama-server keeps prompts beyond its slots, and can erase slots only",
    )


def speculation_flags(speculation: EngineSpeculation) -> list[str]:
    """The flags of a speculation. RefusedError for what llama.cpp does not have."""
    refuse_trees(_NAME, speculation)
    refuse(
        _NAME,
        speculation,
        schedule="its draft length does not depend on the load",
        adaptive="its draft length does not adapt; --spec-draft-p-min among the flags ends unlikely drafts",
        acceptance_threshold="it verifies exactly",
        acceptance_threshold_acc="it verifies exactly",
        extra="give further options as flags",
    )
    depth = speculation.depth
    flags = ["--spec-type", _TYPES[speculation.method]]
    if speculation.method == "ngram":
        if speculation.ngram_min is not None and speculation.ngram_min != speculation.ngram_max:
            raise RefusedError(f"{_NAME} looks up n-grams of one length: set ngram_max only")
        if speculation.ngram_max is not None:
            flags += ["--spec-ngram-simple-size-n", str(speculation.ngram_max)]
        if depth is not None:
            flags += ["--spec-ngram-simple-size-m", str(depth)]
    elif depth is not None:
        flags += ["--spec-draft-n-max", str(depth)]
    if speculation.draft_model_path is not None:
        flags += ["--spec-draft-model", speculation.draft_model_path]
    if speculation.synthetic_acceptance_length is not None:
        flags += ["--spec-synth-len", str(speculation.synthetic_acceptance_length)]
    return flags
