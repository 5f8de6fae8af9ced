"""The tensors of an EAGLE-3 drafter: one set of names and shapes, whatever a checkpoint calls them."""

from __future__ import annotations

import re

from breakeven.engine.models.drafter_config import DrafterConfig

LAYER = "midlayer."  # the official name of the one decoder layer; vLLM and speculators say `layers.0.`
HEAD, EMBEDDING, OFFSETS, MEMBERS = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
_UNUSED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^verifier_(norm|lm_head)\.weight$")
_RENAMED = {"draft_id_to_target_id": OFFSETS}


def canonical_name(stored: str) -> str | None:
    """The official name of a tensor that a file calls `stored`; None for one that is derived or of no use.

    >>> canonical_name("layers.0.self_attn.q_proj.weight"), canonical_name("model.fc.weight")
    ('midlayer.self_attn.q_proj.weight', 'fc.weight')
    """
    if _UNUSED.search(stored):
        return None
    name = stored.removeprefix("model.")
    if name.startswith("layers.0."):
        name = LAYER + name.removeprefix("layers.0.")
    return _RENAMED.get(name, name)


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape, (out, in) for matrices, of every floating-point tensor that each drafter of this shape has.

    Not among them, as a checkpoint may lack them: `embed_tokens.weight` [vocab_size, H], `fc.bias` [H], and the integer
    `d2t` [draft_vocab_size] and boolean `t2d` [vocab_size].
    """
    hidden, taps, inner = config.hidden_size, 3 * config.target_hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps)}
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(3)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps,)
    shapes |= {
        LAYER + "input_layernorm.weight": (hidden,),
        LAYER + "hidden_norm.weight": (hidden,),
        LAYER + "self_attn.q_proj.weight": (width, 2 * hidden),
        LAYER + "self_attn.k_proj.weight": (kv_width, 2 * hidden),
        LAYER + "self_attn.v_proj.weight": (kv_width, 2 * hidden),
        LAYER + "self_attn.o_proj.weight": (hidden, width),
        LAYER + "post_attention_layernorm.weight": (hidden,),
        LAYER + "mlp.gate_proj.weight": (inner, hidden),
        LAYER + "mlp.up_proj.weight": (inner, hidden),
        LAYER + "mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        HEAD: (config.draft_vocab_size, hidden),
    }
    return shapes


def optional_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors that a checkpoint may have or lack."""
    return {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "fc.bias": (config.hidden_size,),
        OFFSETS: (config.draft_vocab_size,),
        MEMBERS: (config.vocab_size,),
    }
