"""The weight files of a drafter: safetensors, single or sharded, or pytorch_model.bin read without running code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from breakeven.engine.config import ConfigError
from breakeven.engine.models.weights import indexed_files, opened, safetensors_files

_TYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, by the file's name for it; `kind` in safetensors' words (F32, BF16, I64, …)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str


def stored_tensors(directory: Path) -> list[StoredTensor]:
    """Every tensor in the weight files of `directory`. ConfigError if they are missing or damaged."""
    found: list[StoredTensor] = []
    for file in _weight_files(directory):
        if file.suffix == ".safetensors":
            with opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    part = handle.get_slice(name)
                    found.append(StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype()))
        else:
            for name, tensor in _unpickled(file).items():
                kind = _TYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
                found.append(StoredTensor(file, name, tuple(tensor.shape), kind))
    return found


def read_stored(tensors: Iterable[StoredTensor]) -> dict[StoredTensor, torch.Tensor]:
    """The tensors' values, on the CPU, as they are stored. ConfigError if a file is damaged or has changed."""
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    values: dict[StoredTensor, torch.Tensor] = {}
    for file, wanted in by_file.items():
        if file.suffix == ".safetensors":
            with opened(file) as handle:
                values |= {tensor: handle.get_tensor(tensor.name) for tensor in wanted}
        else:
            loaded = _unpickled(file)
            for tensor in wanted:
                if tensor.name not in loaded:
                    raise ConfigError(f"{file}: tensor {tensor.name} has gone since the drafter was loaded")
                values[tensor] = loaded[tensor.name]
    return values


def _weight_files(directory: Path) -> list[Path]:
    """safetensors where there are any; else the pickled files of older checkpoints, the official ones among them."""
    has_safetensors = any((directory / f"model.safetensors{suffix}").is_file() for suffix in ("", ".index.json"))
    single, index = directory / "pytorch_model.bin", directory / "pytorch_model.bin.index.json"
    if has_safetensors or not (single.is_file() or index.is_file()):
        return safetensors_files(directory)
    return [single] if single.is_file() else indexed_files(index)


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled state dict. `weights_only`: a file that would run code is refused, not run."""
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{file} is damaged, or holds more than tensors ({reason[0][:200]}); download it again, or convert it to "
            "safetensors where you trust it"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ConfigError(f"{file} does not hold a state dict of tensors; convert it to safetensors")
    return {str(name): value for name, value in loaded.items()}
