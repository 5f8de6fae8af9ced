"""The shape of an EAGLE-3 drafter, with one meaning for every field whatever checkpoint it came from."""

from __future__ import annotations

from dataclasses import dataclass

from breakeven.engine.config import ConfigError


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """An EAGLE-3 head: one decoder layer over (embedding, fused target features); EAGLE-3.1 adds two flags.

    `tap_boundaries` name the target's residual stream after that many layers (0: the embedding), ascending. Rotary
    parameters are the target's own: a drafter's config often carries a shorter position cap (SpecForge PR 271).
    Raises ConfigError where the fields cannot belong together.
    """

    hidden_size: int  # H, the head's own width
    target_hidden_size: int  # width of each tapped state
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int  # the target's
    draft_vocab_size: int
    tap_boundaries: tuple[int, int, int]
    norm_before_residual: bool = False  # the residual is hidden_norm(g) instead of g
    norm_before_fc: bool = False  # one norm over the concatenated taps (`input_norm`)
    fc_norm: bool = False  # EAGLE-3.1: one norm per tap (`fc_norm.0..2`)
    norm_output: bool = False  # EAGLE-3.1: the recurrence takes norm(y) instead of y

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the drafter's num_attention_heads ({self.num_heads}) is not a multiple of its num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"the drafter's draft_vocab_size ({self.draft_vocab_size}) must be from 1 to the target's vocab_size "
                f"({self.vocab_size})"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("the drafter's norm_before_fc and fc_norm exclude each other; check its config.json")
        low, middle, high = self.tap_boundaries
        if not 0 <= low < middle < high:
            raise ConfigError(f"the drafter's tapped layers must ascend from 0, got {self.tap_boundaries}")
