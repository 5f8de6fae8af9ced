"""A GGUF converted once to a Hugging Face directory in the cache, which transformers and vLLM load as it is.

A directory in the cache is whole or absent: it is written under a temporary name, flushed to the disk, and renamed. Two
processes that convert at once are safe: on POSIX the second waits for the first's lock and finds its work done; where
there is no locking both convert, and the first rename wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.gguf import GGUFModel
from breakeven.engine.models.gguf_tokenizer import build_tokenizer, tokenizer_settings
from breakeven.engine.models.weights import expected_shapes

_CONVERSION = 1  # raise it when the converted files change, so that old ones are not taken


def default_cache_dir() -> Path:
    """BREAKEVEN_CACHE, else XDG_CACHE_HOME/breakeven, else ~/.cache/breakeven."""
    if chosen := os.environ.get("BREAKEVEN_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "breakeven"
    return Path.home() / ".cache" / "breakeven"


def converted_directory(path: Path, cache_dir: Path) -> Path:
    """The Hugging Face directory of the GGUF at `path`, converted now if the cache does not have it.

    Keyed by the file's content (SHA-256), so a copy or a touched file is not converted again, and a changed one is.
    ConfigError if the file cannot be served, or the cache cannot be written (read-only, full disk).
    """
    models = cache_dir / "models"
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    final = models / f"{path.stem}-{digest[:16]}-v{_CONVERSION}"
    if final.is_dir():
        return final
    model = GGUFModel(path)
    config = _checked_config(model)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{final.name}.lock") as locked:
            if final.is_dir():
                return final
            if locked:  # whoever made these is gone
                for leftover in models.glob(f"{final.name}.partial-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _convert_into(model, config, final)
    except OSError as error:
        raise _cache_error(error, cache_dir, config) from None
    return final


def _checked_config(model: GGUFModel) -> ModelConfig:
    config = model.config()
    shapes, expected = model.shapes(), expected_shapes(config)
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"{model.path}: the tensor for {name} is missing; download the file again")
        if shapes[name] != shape:
            raise ConfigError(
                f"{model.path}: the tensor for {name} has shape {shapes[name]}, but the metadata imply {shape}"
            )
    if extra := shapes.keys() - expected.keys():
        raise ConfigError(f"{model.path}: tensor {min(extra)} is not part of a model with these metadata")
    return config


def _convert_into(model: GGUFModel, config: ModelConfig, final: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{final.name}.partial-", dir=final.parent))
    try:
        temporary.chmod(0o755)
        needed = 4 * sum(int(np.prod(shape)) for shape in expected_shapes(config).values())
        if shutil.disk_usage(temporary).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write_text(temporary / "tokenizer.json", build_tokenizer(model).to_str(pretty=True))
        _write_json(temporary / "tokenizer_config.json", tokenizer_settings(model, config.max_position))
        _write_json(temporary / "config.json", _config_json(config))
        _write_json(temporary / "generation_config.json", _generation_config_json(config))
        _write_weights(temporary / "model.safetensors", model, config)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(path: Path, model: GGUFModel, config: ModelConfig) -> None:
    """Write safetensors tensor by tensor: eight bytes of header length, a JSON header, little-endian fp32 data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in model.shapes().items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in model.tensors(config):  # in the order of shapes()
            file.write(values.astype("<f4", copy=False).data)
        file.flush()
        os.fsync(file.fileno())


def _config_json(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": scaling.kind, "factor": scaling.factor},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "torch_dtype": "float32",
    }


def _generation_config_json(config: ModelConfig) -> dict[str, Any]:
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0]}
    return ids | {"pad_token_id": config.eos_token_ids[0]}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False))


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on `path` for the block; False where the system or file system has no such locks."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # given up by the system when the process ends, however it ends
        except OSError:
            yield False
            return
        yield True


def _cache_error(error: OSError, cache_dir: Path, config: ModelConfig) -> ConfigError:
    advice = "set BREAKEVEN_CACHE to a directory that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        size = 4 * sum(int(np.prod(shape)) for shape in expected_shapes(config).values())
        advice = (
            f"the converted model takes {size / 1e6:.0f} MB: free some space, or set BREAKEVEN_CACHE to another disk"
        )
    return ConfigError(f"the model cannot be converted into the cache {cache_dir} ({error.strerror}); {advice}")
