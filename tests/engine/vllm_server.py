"""A vLLM server in its own environment, for tests that compare this engine's drafters with it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_TIMEOUT_S = 300


@dataclass(frozen=True)
class SpeculativeRun:
    """Greedy answers, as token ids, and how the drafts fared. `drafts`: rounds that drafted."""

    answers: tuple[tuple[int, ...], ...]
    drafts: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Tokens per drafting round, the bonus token included."""
        return 1 + self.accepted / self.drafts


class VllmServer:
    """Talks to one server at `url`."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600, trust_env=False)

    def complete(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation, as token ids."""
        body = {
            "model": "target",
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = self._client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return tuple(answer.json()["choices"][0]["token_ids"])

    def counter(self, name: str) -> int:
        """The sum of a counter of /metrics over its labels; 0 if it is not there."""
        text = self._client.get("/metrics").text
        return round(sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)))

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, at_once: int = 8) -> SpeculativeRun:
        """All prompts, and the counters' growth over them."""
        names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
        before = [self.counter(name) for name in names]
        with ThreadPoolExecutor(at_once) as pool:
            answers = tuple(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))
        drafts, accepted = (self.counter(name) - old for name, old in zip(names, before, strict=True))
        return SpeculativeRun(answers, drafts, accepted)


@contextmanager
def vllm_server(python: str, target: Path, drafter: Path, log: Path, *, num_steps: int = 3) -> Iterator[VllmServer]:
    """Start `vllm serve` in fp32 on the CPU with an EAGLE-3 drafter; stop it afterwards. AssertionError with the log's
    end if it does not become ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": num_steps}
    command = [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(target), "--served-model-name", "target"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"),
        *("--max-num-seqs", "16", "--enforce-eager", "--speculative-config", json.dumps(speculation)),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, log)
            yield VllmServer(url)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"vLLM ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"vLLM was not ready within {START_TIMEOUT_S} s:\n{log.read_text()[-3000:]}")
