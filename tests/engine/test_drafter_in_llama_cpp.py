"""Drafters that this project writes, converted for llama.cpp by its own script, and drafting in its server.

BREAKEVEN_LLAMA_CPP names its source directory, BREAKEVEN_LLAMA_CPP_PYTHON an interpreter with what the converter needs
(torch, transformers, sentencepiece; without it: this one), BREAKEVEN_LLAMA_SERVER a built llama-server.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from drafter_tools import config_for, random_weights

from breakeven.engine.models.drafter_save import save_drafter
from breakeven.engine.models.load import KNOWN_MODELS, LoadedModel

SOURCE = os.environ.get("BREAKEVEN_LLAMA_CPP", "")
PYTHON = os.environ.get("BREAKEVEN_LLAMA_CPP_PYTHON", sys.executable)
SERVER = os.environ.get("BREAKEVEN_LLAMA_SERVER", "")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not SOURCE, reason="BREAKEVEN_LLAMA_CPP names no source directory of llama.cpp"),
    pytest.mark.timeout(900),
]


def converted(smol: LoadedModel, folder: Path, **options: Any) -> Path:
    """A random drafter for SmolLM2 as a GGUF."""
    config = config_for(smol.config, 4096)
    drafter = save_drafter(folder / "drafter", config, smol.config, random_weights(config), **options)
    output = folder / "drafter.gguf"
    command = [
        *(PYTHON, str(Path(SOURCE) / "convert_hf_to_gguf.py"), str(drafter)),
        *("--target-model-dir", str(smol.directory), "--outtype", "bf16", "--outfile", str(output)),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


@pytest.mark.parametrize(
    "options",
    [{"format": "official"}, {"format": "vllm"}, {"format": "speculators"}, {"max_shard_bytes": 6_000_000}],
    ids=["official", "vllm", "speculators", "sharded"],
)
def test_the_converter_takes_every_tensor_and_the_taps(
    smol: LoadedModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(converted(smol, tmp_path, **options))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    assert fields["eagle3.target_layers"] == [2, 15, 27]
    assert fields["eagle3.rope.freq_base"] == smol.config.rope_theta
    assert len(reader.tensors) == 14  # 13 of floating point, and d2t


@pytest.mark.skipif(not SERVER, reason="BREAKEVEN_LLAMA_SERVER names no llama-server")
def test_its_server_drafts_with_the_converted_drafter(smol: LoadedModel, tmp_path: Path) -> None:
    packaged = KNOWN_MODELS["smollm2-135m"]
    spec = importlib.util.find_spec(packaged.module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    target = Path(spec.submodule_search_locations[0]) / packaged.file
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without --no-repack build 11434 ends with an illegal instruction on CPUs with AMX (tilezero, for a Q4_1 model).
    command = [
        *(SERVER, "-m", str(target), "-md", str(converted(smol, tmp_path)), "--spec-type", "draft-eagle3"),
        *("--spec-draft-n-max", "3", "--metrics", "-np", "1", "-c", "1024", "-t", "1", "-tb", "1", "--no-repack"),
        *("--host", "127.0.0.1", "--port", str(port), "--no-webui"),
    ]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
                _wait_until_ready(client, process, log)
                body = {"prompt": "The days of the week are", "n_predict": 16, "temperature": 0}
                assert client.post("/completion", json=body).json()["content"]
                metrics = client.get("/metrics").text
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    drafted = re.search(r"^llamacpp:spec_decode_num_draft_tokens_total(?:{.*})? (\S+)$", metrics, re.MULTILINE)
    assert drafted is not None, metrics
    assert float(drafted[1]) > 0


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, f"llama-server ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"llama-server was not ready within 120 s:\n{log.read_text()[-3000:]}")
