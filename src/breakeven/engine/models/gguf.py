"""Reading a GGUF of a Llama-shaped model: configuration, weights and chat template, in Hugging Face's terms.

Two things differ from a Hugging Face checkpoint. Weights are quantised in blocks: they are dequantised here to the very
numbers that llama.cpp defines for the format, in fp32. And the rows of q and k are stored permuted, for a rotary
embedding over interleaved pairs: they are put back for the half-rotated form that transformers uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from breakeven.engine.config import ConfigError, ModelConfig, RopeScaling

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class _TruncatedError(Exception):
    """The file ends where its header says that there is more."""


class _BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
    """gguf's reader takes slices beyond the end of the file for empty ones; this one says so at once."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise _TruncatedError
        return super()._get(offset, dtype, count, *args, **kwargs)


class GGUFModel:
    """An open GGUF. `read` checks everything that can be checked before any weight is touched."""

    def __init__(self, path: Path) -> None:
        """ConfigError if `path` is no GGUF, is truncated, or is of an architecture that is not served."""
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
        if magic != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file: it begins with {magic!r}; give a .gguf file or a directory")
        try:
            self._reader = _BoundedReader(path)
        except _TruncatedError:
            size = path.stat().st_size
            raise ConfigError(f"{path} is truncated: its header promises more than its {size} bytes") from None
        except Exception as error:  # the reader meets damage with whatever numpy or enum happens to raise
            raise ConfigError(f"{path} is damaged, or a kind of GGUF that gguf cannot read: {error}") from None
        architecture = self.require("general.architecture", str)
        if architecture != "llama":
            raise ConfigError(
                f"{path}: general.architecture is {architecture!r}; only llama is served from GGUF. Use the model's "
                "Hugging Face directory (Llama, Qwen2 and Qwen3 are served from it)"
            )

    def get(self, field: str) -> Any:
        """The value of a metadata field, None if it is absent; ConfigError if it is not a value of its type."""
        entry = self._reader.fields.get(field)
        try:
            return None if entry is None else entry.contents()
        except Exception as error:
            raise ConfigError(f"{self.path}: metadata field {field} is damaged: {error}") from None

    def require(self, field: str, kind: type) -> Any:
        """The value of a metadata field; ConfigError naming it if it is absent or not a `kind`."""
        value = self.optional(field, kind)
        if value is None:
            raise ConfigError(f"{self.path}: metadata field {field} is missing; convert or download the file again")
        return value

    def optional(self, field: str, kind: type) -> Any:
        """The value of a metadata field, None if it is absent; ConfigError naming it if it is not a `kind`."""
        value = self.get(field)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind):
            raise ConfigError(f"{self.path}: metadata field {field} must be {kind.__name__}, got {value!r:.80}")
        return value

    def config(self) -> ModelConfig:
        """The model's shape; ConfigError naming the metadata field that is missing or cannot be served."""
        if self.get("llama.expert_count"):
            raise ConfigError(f"{self.path}: llama.expert_count is set; mixture-of-experts models are not served")
        hidden_size = self._size("llama.embedding_length")
        num_heads = self._size("llama.attention.head_count")
        num_kv_heads = self._size("llama.attention.head_count_kv", num_heads)
        head_dim = self._size("llama.attention.key_length", hidden_size // num_heads)
        rotated = self._size("llama.rope.dimension_count", head_dim)
        if num_heads % num_kv_heads or head_dim % 2 or rotated != head_dim:
            raise ConfigError(
                f"{self.path}: {num_heads} heads, {num_kv_heads} KV heads, head size {head_dim}, of which "
                f"{rotated} rotated (llama.rope.dimension_count): heads must be a multiple of KV heads, and the head "
                "size even and rotated whole"
            )
        tokens = len(self.require("tokenizer.ggml.tokens", list))
        vocab_size = self._size("llama.vocab_size", tokens)
        eos = self.require("tokenizer.ggml.eos_token_id", int)
        bos = self.optional("tokenizer.ggml.bos_token_id", int)
        for name, token_id in (("eos", eos), ("bos", 0 if bos is None else bos)):
            if not 0 <= token_id < min(tokens, vocab_size):
                raise ConfigError(
                    f"{self.path}: tokenizer.ggml.{name}_token_id is {token_id}, but there are {tokens} tokens"
                )
        num_layers = self._size("llama.block_count")
        if num_layers > len(self._reader.tensors):
            raise ConfigError(f"{self.path}: llama.block_count is {num_layers}, but so many layers are not in the file")
        return ModelConfig(
            family="llama",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._size("llama.feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=self._size("llama.context_length"),
            rope_theta=_shortest(self.optional("llama.rope.freq_base", float) or 10_000.0),
            rms_norm_eps=_shortest(self.require("llama.attention.layer_norm_rms_epsilon", float)),
            tie_embeddings=all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            rope_scaling=self._rope_scaling(),
            eos_token_ids=(eos,),
            bos_token_id=bos,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's name and shape of each tensor; ConfigError naming one that has no place in the model."""
        shapes = {}
        for tensor in self._reader.tensors:
            name = _hugging_face_name(tensor.name)
            if name is None:
                advice = (
                    "; Llama 3's rope scaling is served from a Hugging Face directory"
                    if tensor.name == "rope_freqs.weight"
                    else "; use the model's Hugging Face directory"
                )
                raise ConfigError(f"{self.path}: tensor {tensor.name} is not one of a plain Llama{advice}")
            shapes[name] = tuple(int(size) for size in reversed(tensor.shape))
        return shapes

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """(Hugging Face's name, fp32 values) of each tensor in turn, q and k un-permuted."""
        for tensor in self._reader.tensors:
            name = _hugging_face_name(tensor.name)
            assert name is not None, "shapes() was not called first"
            try:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(
                    f"{self.path}: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which gguf cannot "
                    f"dequantise ({error}); use another quantisation of the model, such as Q8_0"
                ) from None
            if name.endswith("q_proj.weight"):
                values = unpermute(values, config.num_heads)
            elif name.endswith("k_proj.weight"):
                values = unpermute(values, config.num_kv_heads)
            yield name, np.ascontiguousarray(values, dtype=np.float32)

    def _size(self, field: str, default: int | None = None) -> int:
        value = default if default is not None and self.get(field) is None else self.require(field, int)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: metadata field {field} must be a positive whole number, got {value!r}")
        return value

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self.get("llama.rope.scaling.type") or "none"
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling("linear", self.require("llama.rope.scaling.factor", float))
        raise ConfigError(
            f"{self.path}: llama.rope.scaling.type is {kind!r}; none and linear are served from GGUF. Use the model's "
            "Hugging Face directory (llama3 is served from it)"
        )


def unpermute(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """(heads * head_dim, in) with each head's rows interleaved as (0, d/2, 1, d/2 + 1, …) → in their own order."""
    out, columns = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, columns).swapaxes(1, 2).reshape(out, columns)


def _hugging_face_name(name: str) -> str | None:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.partition(".")
    layer, _, suffix = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or suffix not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[suffix]}"


def _shortest(value: float) -> float:
    """The shortest decimal that is `value` in fp32: GGUF stores 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))
