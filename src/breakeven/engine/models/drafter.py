"""The EAGLE-3 head: one decoder layer over (embedding, fused target features), and the two flags of EAGLE-3.1.

Row i pairs the token t_i with the target's features h_{i-1} of the token before it, at rotary position i - 1, and
predicts t_{i+1} (EAGLE-3, arXiv 2503.01840, section 3; alignment as in the official code). Deeper rows have no target
features; they take the head's own output in their place. K and V of a row depend on its inputs only, not on any other
row, because there is one layer: rows whose prediction nobody needs are given K and V and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.engine.attention import KVCache
from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.linear import Linear
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.llama import rope_tables
from breakeven.engine.step_ops import rotate


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter's shape and its tensors under the official EAGLE-3 names (`fc.weight`, `midlayer.…`, `d2t`)."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]


@dataclass(slots=True)
class Workspace:
    """What the rows of one drafting round attend to, for a batch of requests; thrown away after the round.

    key and value [batch, columns, kv_heads, head_dim]: first each request's filed rows, `prefix` columns of which the
    bias hides those that do not count, then the columns of the rows drafted in this round.
    bias [batch, columns]: 0 where a column may be seen by every row of the request, else -inf; drafted columns are 0.
    """

    key: Tensor
    value: Tensor
    bias: Tensor
    prefix: int


class Drafter:
    """The head's weights and the parts of its forward. All rows are flat; `rows` of a batch lie request after request.

    ConfigError if the weights lack a tensor, or if the head cannot be used with this target.
    """

    def __init__(
        self,
        config: DrafterConfig,
        target: ModelConfig,
        weights: Mapping[str, Tensor],
        embedding: Tensor,
        device: torch.device,
        head: Tensor | None = None,
    ) -> None:
        """`embedding` [vocab, target hidden] and `head` [vocab, target hidden] are the target's, used where the
        checkpoint brings none of its own. The target's dtype is the drafter's."""
        dtype = embedding.dtype
        self.config = config
        self.dtype = dtype
        _check_target(config, target)

        def get(name: str) -> Tensor:
            if name not in weights:
                raise ConfigError(f"the drafter's weights lack the tensor {name}; it is not a complete EAGLE-3 drafter")
            return weights[name].to(device, dtype)

        def linear(*names: str) -> Linear:
            return Linear(torch.cat([get(f"midlayer.{name}.weight") for name in names]), None)

        self._fc = Linear(get("fc.weight"), get("fc.bias") if "fc.bias" in weights else None)
        self._taps_norm = get("input_norm.weight") if config.norm_before_fc else None
        self._tap_norms = [get(f"fc_norm.{index}.weight") for index in range(3)] if config.fc_norm else []
        self._embedding_norm = get("midlayer.input_layernorm.weight")
        self._hidden_norm = get("midlayer.hidden_norm.weight")
        self._qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._kv = linear("self_attn.k_proj", "self_attn.v_proj")  # again, for the rows that need nothing else
        self._output = linear("self_attn.o_proj")
        self._post_norm = get("midlayer.post_attention_layernorm.weight")
        self._gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self._down = linear("mlp.down_proj")
        self._final_norm = get("norm.weight")
        self._embedding = _own_or_targets(
            "embed_tokens.weight", weights, embedding, (config.vocab_size, config.hidden_size)
        ).to(device, dtype)
        self._head = Linear(
            _own_or_targets("lm_head.weight", weights, head, (config.draft_vocab_size, config.hidden_size)).to(
                device, dtype
            ),
            None,
        )
        self.target_ids = _target_ids(config, weights.get("d2t")).to(device)
        self._cos, self._sin = rope_tables(
            dataclasses.replace(target, head_dim=config.head_dim), dtype, device
        )  # the target's theta, scaling and length, whatever the drafter's own config says

    @property
    def feature_size(self) -> int:
        """Width of a row of target features: three tapped states side by side."""
        return 3 * self.config.target_hidden_size

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        """The head's KV for as many pages as the target has: the same page tables serve both."""
        config = self.config
        return KVCache(
            1, num_pages, page_size, config.num_kv_heads, config.head_dim, self.dtype, self.target_ids.device
        )

    def fuse(self, features: Tensor) -> Tensor:
        """g [rows, hidden] of target features [rows, 3 * target hidden]."""
        eps = self.config.rms_norm_eps
        if self._taps_norm is not None:
            features = F.rms_norm(features, (features.shape[1],), self._taps_norm, eps)
        elif self._tap_norms:
            width = self.config.target_hidden_size
            parts = zip(features.chunk(3, dim=-1), self._tap_norms, strict=True)
            features = torch.cat([F.rms_norm(part, (width,), norm, eps) for part, norm in parts], dim=-1)
        return self._fc(features)

    def inputs(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(x [rows, 2 * hidden], residual [rows, hidden]) of g or the head's own output, and token ids int64 [rows]."""
        width, eps = (self.config.hidden_size,), self.config.rms_norm_eps
        embedded = F.rms_norm(F.embedding(tokens, self._embedding), width, self._embedding_norm, eps)
        normed = F.rms_norm(hidden, width, self._hidden_norm, eps)
        return torch.cat((embedded, normed), dim=-1), (normed if self.config.norm_before_residual else hidden)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, 1, head_dim] at int64 [rows]; beyond the table (drafts past the context) its last row."""
        positions = positions.clamp(max=self._cos.shape[0] - 1)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def extend(self, x: Tensor, positions: Tensor, slots: Tensor, cache: KVCache) -> None:
        """File rows: their K and V go into the cache, and nothing else is computed. positions, slots int64 [rows]."""
        heads = self.config.num_kv_heads
        projected = self._kv(x).view(x.shape[0], 2 * heads, self.config.head_dim)
        cos, sin = self.rotary(positions)
        cache.write(0, slots, rotate(projected[:, :heads], cos, sin), projected[:, heads:])

    def workspace(self, cache: KVCache, pages: Tensor, lengths: Tensor, drafted: int) -> Workspace:
        """Gather the filed rows of a batch. pages int64 [batch, pages of the longest + pages for `drafted` columns];
        lengths int64 [batch]: slots below it count, but slot 0, which is never filed."""
        batch, num_pages = pages.shape
        page_size = cache.page_size
        columns = num_pages * page_size
        prefix = columns - -(-drafted // page_size) * page_size
        flat = pages.reshape(-1)
        shape = (batch, columns, self.config.num_kv_heads, self.config.head_dim)
        column = torch.arange(columns, device=pages.device)
        hidden = (column >= lengths.unsqueeze(1)) & (column < prefix)
        hidden[:, 0] = True
        bias = torch.zeros(batch, columns, dtype=self.dtype, device=pages.device).masked_fill_(hidden, float("-inf"))
        return Workspace(
            cache.k[0].index_select(0, flat).view(shape), cache.v[0].index_select(0, flat).view(shape), bias, prefix
        )

    def rows(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        workspace: Workspace,
        first: int,
        visible: Tensor | None = None,
    ) -> Tensor:
        """The layer in full, y [rows, hidden] un-normed, for as many rows per request as rows / batch.

        The rows take the workspace's drafted columns from `first` on. They see the request's filed rows and, of the
        drafted columns up to their own last one, those where `visible` [batch, rows per request, columns] is 0 rather
        than -inf; None: all of them.
        """
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        batch = workspace.key.shape[0]
        count = x.shape[0]
        width, fold = count // batch, heads // kv_heads
        qkv = self._qkv(x).view(count, heads + 2 * kv_heads, dim)
        query_key = rotate(qkv[:, : heads + kv_heads], *rotary)
        start, end = workspace.prefix + first, workspace.prefix + first + width
        workspace.key[:, start:end] = query_key[:, heads:].view(batch, width, kv_heads, dim)
        workspace.value[:, start:end] = qkv[:, heads + kv_heads :].view(batch, width, kv_heads, dim)
        bias = workspace.bias[:, None, None, :end]
        if visible is not None:
            own = torch.cat((workspace.bias[:, None, : workspace.prefix].expand(-1, width, -1), visible), dim=-1)
            bias = own.repeat(1, fold, 1).unsqueeze(1)
        query = query_key[:, :heads].reshape(batch, width, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            query.reshape(batch, kv_heads, fold * width, dim),
            workspace.key[:, :end].transpose(1, 2),
            workspace.value[:, :end].transpose(1, 2),
            attn_mask=bias.expand(-1, -1, fold * width, -1),
        )
        attended = attended.view(batch, kv_heads, fold, width, dim).permute(0, 3, 1, 2, 4).reshape(count, heads * dim)
        hidden = self._output.add(attended, residual)
        normed = F.rms_norm(hidden, (config.hidden_size,), self._post_norm, config.rms_norm_eps)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return self._down.add(F.silu(gate) * up, hidden)

    def predict(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(logits [rows, draft vocab], what the next level takes for g [rows, hidden]) of the layer's output."""
        normed = F.rms_norm(y, (self.config.hidden_size,), self._final_norm, self.config.rms_norm_eps)
        return self._head(normed), (normed if self.config.norm_output else y)


def _check_target(config: DrafterConfig, target: ModelConfig) -> None:
    for name, ours, theirs in (
        ("hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the drafter was made for a target with {name} {ours}, but this model's is {theirs}; use the drafter "
                "that was trained for this model"
            )
    if config.tap_boundaries[-1] > target.num_layers:
        raise ConfigError(
            f"the drafter taps layers {config.tap_boundaries}, but this model has {target.num_layers}; use the drafter "
            "that was trained for this model, or correct its layer ids"
        )


def _own_or_targets(name: str, weights: Mapping[str, Tensor], targets: Tensor | None, shape: tuple[int, int]) -> Tensor:
    tensor = weights.get(name, targets)
    if tensor is None or tuple(tensor.shape) != shape:
        found = "nothing" if tensor is None else f"the target's, {tuple(tensor.shape)}"
        if name in weights and tensor is not None:
            found = f"{tuple(tensor.shape)}"
        raise ConfigError(f"the drafter needs {name} of shape {shape}, but there is {found}")
    return tensor


def _target_ids(config: DrafterConfig, offsets: Tensor | None) -> Tensor:
    """int64 [draft vocab]: the target's token id of each draft id. `d2t` holds offsets (target = i + d2t[i])."""
    size = config.draft_vocab_size
    if offsets is None:
        if size != config.vocab_size:
            raise ConfigError(
                f"the drafter has a draft vocabulary of {size} of the target's {config.vocab_size} tokens, but no d2t "
                "that says which"
            )
        return torch.arange(size)
    if tuple(offsets.shape) != (size,):
        raise ConfigError(f"the drafter's d2t has shape {tuple(offsets.shape)}, but its draft vocabulary is {size}")
    ids = torch.arange(size) + offsets.to("cpu", torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(torch.unique(ids)) != size:
        raise ConfigError(
            "the drafter's d2t must lead to distinct token ids of the target, "
            f"0 to {config.vocab_size - 1}; it holds offsets, target = draft + d2t"
        )
    return ids
