"""The engine's tiny models serve the training tests too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).resolve().parent.parent / "engine" / "conftest.py"
_spec = importlib.util.spec_from_file_location("engine_models", _path)
assert _spec is not None
assert _spec.loader is not None
_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_engine)

tiny_llama_dir = _engine.tiny_llama_dir
smol = _engine.smol
