"""The training file: a frozen, strict schema. Paths that only exist on one machine come from the command line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.drafter_config import DrafterConfig

Domain = Literal["coding", "agentic", "encyclopedic", "chat"]
DOMAINS: tuple[Domain, ...] = ("coding", "agentic", "encyclopedic", "chat")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptsConfig(_Strict):
    """How many prompts of which domain, and from where. Shares are weights; they need not sum to 1."""

    total: int = Field(default=60_000, ge=1)
    self_prompts: int = Field(
        default=20_000, ge=0, description="prompts sampled from the target itself, beside `total`"
    )
    articles: int = Field(
        default=0,
        ge=0,
        description="articles that the target writes; each gives two reading tasks, beside `total`, most of them longer"
        " than answers.max_prompt_tokens by default: raise that and train.max_length with it",
    )
    article_tokens: int = Field(default=640, ge=1)
    shares: dict[Domain, float] = {"coding": 0.4, "agentic": 0.15, "encyclopedic": 0.2, "chat": 0.25}
    packages: tuple[str, ...] | None = Field(
        default=None, description="installed packages to read; None: permissive licences"
    )
    max_source_files: int = Field(default=4000, ge=0)
    max_characters: int = Field(default=1600, ge=80, description="longer prompts are left out")


class AnswersConfig(_Strict):
    """How the target answers. Prompts that a time box leaves unanswered are left out."""

    max_tokens: int = Field(default=384, ge=1)
    max_prompt_tokens: int = Field(default=384, ge=1)
    greedy_share: float = Field(default=0.4, ge=0, le=1)
    temperatures: tuple[float, ...] = (0.7, 1.0)
    slots: int = Field(default=2048, ge=1, description="sequences generated side by side")
    steps_per_sync: int = Field(default=16, ge=1)
    shard_megabytes: float = Field(default=12.0, gt=0, le=100)


class VocabConfig(_Strict):
    """Size of the draft vocabulary that is trained; exports may prune it."""

    size: int = Field(default=32_768, ge=1)


class ShapeConfig(_Strict):
    """The drafter's own width. None: the target's."""

    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tap_boundaries: tuple[int, int, int] | None = Field(default=None, description="None: 2, n/2 and n-3 layers")
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def drafter(self, target: ModelConfig, draft_vocab_size: int) -> DrafterConfig:
        """The drafter's full shape. ConfigError where it cannot be."""
        layers = target.num_layers
        taps = self.tap_boundaries or (2, layers // 2, layers - 3)
        if taps[2] > layers:
            raise ConfigError(f"tap_boundaries {taps} end above the target's {layers} layers; name lower ones")
        return DrafterConfig(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            num_heads=self.num_heads or target.num_heads,
            num_kv_heads=self.num_kv_heads or target.num_kv_heads,
            head_dim=self.head_dim or target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            tap_boundaries=taps,
            norm_before_residual=self.norm_before_residual,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
        )


class OptimConfig(_Strict):
    """Training-time test and optimiser. Tokens count padding out."""

    unrolled_steps: int = Field(default=7, ge=1)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    max_length: int = Field(default=768, ge=8, description="longer conversations are cut")
    batch_tokens: int = Field(default=16_384, ge=8, description="per step and process")
    micro_batch_tokens: int = Field(default=16_384, ge=8)
    epochs: float = Field(default=3, gt=0, description="a time box may end it earlier, with the whole schedule inside")
    lr: float = Field(default=2e-3, gt=0)
    head_lr: float = Field(default=1e-3, gt=0)
    warmup_share: float = Field(default=0.02, ge=0, lt=1)
    final_lr_share: float = Field(default=0.02, ge=0, le=1)
    clip: float = Field(default=0.5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    loop_weight: float = Field(default=1.0, ge=0, le=1, description="weight of tokens in loop tails; 0 leaves them out")
    held_out_conversations: int = Field(default=128, ge=0)
    log_every_seconds: float = Field(default=10, gt=0)
    evaluate_every_seconds: float = Field(default=90, gt=0)
    checkpoint_every_seconds: float = Field(default=120, gt=0)
    compile: bool = Field(default=True, description="fuse the loss with torch.compile on CUDA; falls back to eager")

    @model_validator(mode="after")
    def _batches(self) -> OptimConfig:
        if self.micro_batch_tokens > self.batch_tokens:
            raise ValueError("micro_batch_tokens must not exceed batch_tokens")
        if self.micro_batch_tokens < self.max_length:
            raise ValueError("micro_batch_tokens must be at least max_length, or long conversations fit no batch")
        return self


class ExportConfig(_Strict):
    """Which checkpoints are written: one per vocabulary size, pruned from the trained one; the first is the main."""

    name: str = "drafter"
    vocab_sizes: tuple[int, ...] = (32_768,)
    format: Literal["official", "vllm", "speculators"] = "official"


class EvaluateConfig(_Strict):
    """Evaluation through the engine, T=0."""

    max_tokens: int = Field(default=256, ge=1)
    max_running: int = Field(default=128, ge=1)
    kv_cache_tokens: int = Field(default=131_072, ge=64)
    shapes: tuple[tuple[str, int, int, int], ...] = Field(
        default=(("chain 3", 3, 1, 4), ("chain 7", 7, 1, 8), ("tree 2/4/16", 2, 4, 16)),
        description="name, num_steps, eagle_topk, num_draft_tokens",
    )
    bootstrap: int = Field(default=2000, ge=100)
    max_prompts: int | None = None


class TrainConfig(_Strict):
    """One drafter, from prompts to card."""

    target: str = "smollm2-135m"
    seed: int = 0
    device: str = Field(default="auto", description="auto: cuda where there is one")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    domains: tuple[Domain, ...] = DOMAINS
    prompts: PromptsConfig = PromptsConfig()
    answers: AnswersConfig = AnswersConfig()
    vocab: VocabConfig = VocabConfig()
    drafter: ShapeConfig = ShapeConfig()
    train: OptimConfig = OptimConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


def load_config(path: Path) -> TrainConfig:
    """Read a training file. ConfigError with the field and the reason for anything that is wrong in it."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(raw).__name__}")
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in item['loc']) or 'file'}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"{path}: " + "; ".join(lines)) from None


def fingerprint(*parts: object) -> str:
    """A short hash of settings (pydantic models or plain JSON values), the same on every machine."""
    plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
