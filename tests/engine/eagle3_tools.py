"""EAGLE-3 in tests: drafters with random weights, one that is often right by construction, and a slow oracle.

The oracle is written from the formulas of EAGLE-3 (arXiv 2503.01840): dense, every row recomputed at every level, no
cache, no slots. Its row i pairs the target's features h_i with the embedding of t_{i+1}, at position i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from engine_tools import EAGLE3
from torch import Tensor

from breakeven.engine.config import EngineConfig, ModelConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter import DrafterCheckpoint
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.load import LoadedModel
from breakeven.engine.proposers.base import DraftContext
from breakeven.engine.proposers.eagle3 import Eagle3Proposer
from breakeven.engine.tree import DraftTree

CHAIN3, TREE = EAGLE3["eagle3 chain"], EAGLE3["eagle3 tree"]
DEEP_TREE = SpeculationConfig("eagle3", num_steps=4, eagle_topk=3, num_draft_tokens=12)
Trees = list[DraftTree | None]


def drafter_config(target: ModelConfig, taps: tuple[int, int, int] = (0, 1, 2), **changes: int | bool) -> DrafterConfig:
    """A head beside a tiny target, with a head shape of its own and not all of the vocabulary."""
    shape: dict[str, int | bool] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "draft_vocab_size": 200,
    }
    return DrafterConfig(
        target_hidden_size=target.hidden_size,
        rms_norm_eps=1e-5,
        vocab_size=target.vocab_size,
        tap_boundaries=taps,
        **(shape | changes),  # type: ignore[arg-type]
    )


def random_drafter(config: DrafterConfig, seed: int = 0) -> DrafterCheckpoint:
    """Random weights under the official names; embeddings of its own where its width is not the target's."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    width, inner, vocab = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kept = torch.randperm(config.vocab_size, generator=generator)[:vocab].sort().values
    weights = {
        "fc.weight": matrix(width, 3 * config.target_hidden_size),
        "midlayer.input_layernorm.weight": norm(width),
        "midlayer.hidden_norm.weight": norm(width),
        "midlayer.self_attn.q_proj.weight": matrix(query, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(kv, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(kv, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, query),
        "midlayer.post_attention_layernorm.weight": norm(width),
        "midlayer.mlp.gate_proj.weight": matrix(inner, width),
        "midlayer.mlp.up_proj.weight": matrix(inner, width),
        "midlayer.mlp.down_proj.weight": matrix(width, inner),
        "norm.weight": norm(width),
        "lm_head.weight": 2 * matrix(vocab, width),
        "d2t": kept - torch.arange(vocab),
    }
    if config.norm_before_fc:
        weights["input_norm.weight"] = norm(3 * config.target_hidden_size)
    if config.fc_norm:
        weights |= {f"fc_norm.{index}.weight": norm(config.target_hidden_size) for index in range(3)}
    if width != config.target_hidden_size:
        weights["embed_tokens.weight"] = matrix(config.vocab_size, width) * 5
    return DrafterCheckpoint(config, weights)


def predictable_weights(model: LoadedModel) -> dict[str, Tensor]:
    """The tiny target with its layers' contributions turned down: the next token then follows from the last one,
    f(t) = argmax head · norm(embedding of t), nearly always."""
    weights = model.weights(torch.float32)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.03
    return weights


def knowing_drafter(target: ModelConfig, weights: Mapping[str, Tensor]) -> DrafterCheckpoint:
    """A head that is often right about `predictable_weights`, built, not trained.

    fc passes on the tapped embedding of t_{i-1} (boundary 0). The MLP is a table: unit j responds to the embedding of
    token j and writes that of f(j). So the output of row i holds the embedding of t_i = f(t_{i-1}), the target's own
    head says f(t_i) of it, and as the next level's input it has the form that fc gives (the residual is normed, so that
    what the table wrote outweighs what it was asked). Attention adds nothing.
    """
    embedding, head, norm = (
        weights["model.embed_tokens.weight"],
        weights["lm_head.weight"],
        weights["model.norm.weight"],
    )
    vocab, width = embedding.shape
    unit = embedding / embedding.norm(dim=1, keepdim=True)
    following = (head @ (norm * unit).T).argmax(dim=0)
    config = drafter_config(target, intermediate_size=vocab, draft_vocab_size=vocab - 40, norm_before_residual=True)
    random = dict(random_drafter(config).weights)
    kept = torch.arange(vocab)[40:]
    random |= {
        "fc.weight": torch.eye(width, 3 * width),
        "midlayer.hidden_norm.weight": torch.ones(width),
        "midlayer.self_attn.o_proj.weight": torch.zeros(width, config.num_heads * config.head_dim),
        "midlayer.post_attention_layernorm.weight": torch.ones(width),
        "midlayer.mlp.gate_proj.weight": unit,
        "midlayer.mlp.up_proj.weight": unit,
        "midlayer.mlp.down_proj.weight": unit[following].T.contiguous(),
        "norm.weight": norm,
        "lm_head.weight": head[kept],
        "d2t": kept - torch.arange(len(kept)),
    }
    return DrafterCheckpoint(config, random)


def tiny_engine(
    model: LoadedModel,
    drafter: DrafterCheckpoint | None,
    config: EngineConfig,
    controller: ShapeController,
    weights: Mapping[str, Tensor] | None = None,
) -> Engine:
    weights = model.weights(torch.float32) if weights is None else weights
    return Engine(model.config, model.tokenizer, weights, config, controller, drafter)


class ShapeController:
    """`shape` is a function of the number of the step, from 0."""

    def __init__(self, shape: Callable[[int], SpeculationConfig | None]) -> None:
        self.shape = shape
        self.step = 0

    def restart(self, shape: Callable[[int], SpeculationConfig | None]) -> None:
        self.shape, self.step = shape, 0

    def choose(self, num_decoding: int) -> SpeculationConfig | None:
        self.step += 1
        return self.shape(self.step - 1)


@dataclass
class DraftLog:
    """Every draft made, by request: (all its tokens so far, tree or None)."""

    drafts: list[tuple[str, tuple[int, ...], int, DraftTree | None]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        propose = Eagle3Proposer.propose

        def logged(proposer: Eagle3Proposer, contexts: Sequence[DraftContext]) -> Trees:
            trees = propose(proposer, contexts)
            for context, tree in zip(contexts, trees, strict=True):
                self.drafts.append((context.request_id, tuple(context.tokens), context.max_depth, tree))
            return trees

        monkeypatch.setattr(Eagle3Proposer, "propose", logged)

    def by_tokens(self) -> dict[tuple[int, ...], DraftTree | None]:
        return {tokens: tree for _, tokens, _, tree in self.drafts}


class Oracle:
    """What the head drafts after some tokens, the slow way. features(tokens) gives [tokens, 3 * target hidden]."""

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        target: ModelConfig,
        embedding: Tensor,
        features: Callable[[Sequence[int]], Tensor],
    ) -> None:
        self.config = checkpoint.config
        self.weights = {name: tensor.double() for name, tensor in checkpoint.weights.items() if name != "d2t"}
        self.target_ids = [index + int(offset) for index, offset in enumerate(checkpoint.weights["d2t"])]
        self.embedding = self.weights.get("embed_tokens.weight", embedding.double())
        self.theta = target.rope_theta
        self.features = features

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[name]

    def fused(self, features: Tensor) -> Tensor:
        x = features.double()
        if self.config.norm_before_fc:
            x = self.norm(x, "input_norm.weight")
        if self.config.fc_norm:
            x = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(x.chunk(3, dim=1))], dim=1)
        return x @ self.weights["fc.weight"].T

    def rope(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """x [rows, heads, head_dim]."""
        half = x.shape[-1] // 2
        inverse = self.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.tensor(positions, dtype=torch.float64), inverse).unsqueeze(1)
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)

    def last_row(self, hidden: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(log-probabilities [draft vocab], hidden [H] for the next level) of the last of the rows (hidden_i, token_i)
        at positions 0, 1, ..., causally."""
        config, dim = self.config, self.config.head_dim
        normed = self.norm(hidden, "midlayer.hidden_norm.weight")
        embedded = self.norm(self.embedding[list(tokens)], "midlayer.input_layernorm.weight")
        x = torch.cat((embedded, normed), dim=1)
        residual = (normed if config.norm_before_residual else hidden)[-1]

        def project(name: str, heads: int) -> Tensor:
            return (x @ self.weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), heads, dim)

        last = len(x) - 1
        query = self.rope(project("q", config.num_heads)[last:], [last])[0]
        keys = self.rope(project("k", config.num_kv_heads), range(len(x)))
        values = project("v", config.num_kv_heads)
        heads = []
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            weights = (keys[:, shared] @ query[head] / dim**0.5).softmax(dim=0)
            heads.append(weights @ values[:, shared])
        a = self.weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads) + residual
        inner = self.norm(a, "midlayer.post_attention_layernorm.weight")
        gate, up = (self.weights[f"midlayer.mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        y = self.weights["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up) + a
        normed_y = self.norm(y, "norm.weight")
        log_probs = (self.weights["lm_head.weight"] @ normed_y).log_softmax(dim=0)
        return log_probs, normed_y if config.norm_output else y

    def chain(self, tokens: Sequence[int], length: int) -> DraftTree:
        hidden, tokens = self.fused(self.features(tokens[:-1])), tokens[1:]
        path: list[int] = []
        for _ in range(length):
            log_probs, own = self.last_row(hidden, tokens)
            path.append(self.target_ids[int(log_probs.argmax())])
            # The head's own last output takes the place of features in the next row.
            hidden, tokens = torch.cat((hidden, own.unsqueeze(0))), [*tokens, path[-1]]
        return DraftTree.chain(path)

    def tree(self, tokens: Sequence[int], shape: SpeculationConfig) -> DraftTree:
        """EAGLE-2: all paths as tuples, scored; each level continues the best of the one before."""
        pool: list[tuple[float, tuple[int, ...]]] = []
        rows = {(): self.fused(self.features(tokens[:-1]))}  # path -> hidden states of all rows up to its end
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(shape.num_steps):
            children = []
            for score, path in frontier:
                log_probs, own = self.last_row(rows[path], [*tokens[1:], *path])
                best = log_probs.topk(shape.eagle_topk)
                for value, index in zip(best.values, best.indices, strict=True):
                    child = (*path, self.target_ids[int(index)])
                    rows[child] = torch.cat((rows[path], own.unsqueeze(0)))
                    children.append((score + float(value), child))
            pool += children
            frontier = sorted(children, key=lambda item: -item[0])[: shape.eagle_topk]
        chosen = sorted(range(len(pool)), key=lambda place: (-pool[place][0], place))[: shape.num_draft_tokens - 1]
        paths = [pool[place][1] for place in sorted(chosen)]
        node = {(): 0} | {path: index for index, path in enumerate(paths, start=1)}
        return DraftTree(tuple(path[-1] for path in paths), tuple(node[path[:-1]] for path in paths))
