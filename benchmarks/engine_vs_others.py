"""The engine, speculation off, against vLLM on CPU and transformers' generate: same model, prompts and cores.

    python benchmarks/engine_vs_others.py --vllm PATH/TO/vllm-venv [--streams 1 10 30] [--rounds 3] [--json FILE]

Servers are driven over HTTP by the lab's own client (closed loop, greedy, natural text, a fixed number of tokens per
answer). transformers' generate runs in this process on a padded batch of the same prompts. In each round the three
take turns in a rotated order; what is printed is the median over rounds and the median of the paired ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from breakeven.lab.client import parse_exchange, run_closed_loop
from breakeven.lab.client.types import Endpoint, RequestSpec
from breakeven.lab.workload.suite import load_suite

TOKENS = 64


def prompts(model_dir: Path, count: int, offset: int) -> list[list[int]]:
    """Token ids, so that every contender gets the very same prompt."""
    from breakeven.engine.models.load import load_model

    tokenizer = load_model(str(model_dir)).tokenizer
    pool = [p for domain in ("coding", "encyclopedic", "chat") for p in load_suite(domain).prompts]
    chosen = [pool[(offset + 7 * i) % len(pool)] for i in range(count)]
    return [tokenizer.encode(tokenizer.render_chat(p.messages), add_special_tokens=False) for p in chosen]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: list[str], port: int, environment: dict[str, str]) -> Iterator[str]:
    log = open(f"/tmp/benchmark-server-{port}.log", "wb")  # noqa: SIM115
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended; its log is {log.name}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.5)
        else:
            raise RuntimeError(f"the server never got ready; its log is {log.name}")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def drive(url: str, model: str, token_ids: list[list[int]], streams: int) -> float:
    """Tokens per second, closed loop, over the whole run."""
    specs = [
        RequestSpec(
            f"r{i}",
            f"p{i}",
            json.dumps(
                {
                    "model": model,
                    "prompt": ids,
                    "max_tokens": TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode(),
        )
        for i, ids in enumerate(token_ids)
    ]
    load = run_closed_loop(Endpoint(f"{url}/v1/completions"), specs, streams, timeout_s=300)
    results = [parse_exchange(exchange) for exchange in load.exchanges]
    failed = [r.error for r in results if r.error is not None or r.completion_tokens != TOKENS]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return sum(r.completion_tokens or 0 for r in results) / ((load.end_ns - load.start_ns) / 1e9)


def generate(model: object, token_ids: list[list[int]], streams: int) -> float:
    """transformers' generate on left-padded batches of `streams` prompts."""
    import torch

    start = time.perf_counter()
    for first in range(0, len(token_ids), streams):
        batch = token_ids[first : first + streams]
        width = max(map(len, batch))
        ids = torch.tensor([[2] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        model.generate(  # type: ignore[attr-defined]
            ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=2
        )
    return len(token_ids) * TOKENS / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM for CPU; left out: not compared")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 30])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from breakeven.engine.models.load import load_model

    directory = load_model("smollm2-135m").directory
    threads = str(len(os.sched_getaffinity(0)))
    torch.set_num_threads(int(threads))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    ours_port, vllm_port = free_port(), free_port()
    ours = [sys.executable, "-m", "breakeven.cli.main", "serve", "--model", str(directory), "--served-model-name"]
    ours += ["smol", "--dtype", "bfloat16", "--port", str(ours_port), "--disable-prefix-cache"]
    contenders: dict[str, object] = {}
    rates: dict[str, dict[int, list[float]]] = {}
    from contextlib import ExitStack

    with ExitStack() as stack:
        # All are up at once, so that rounds can alternate; the idle ones use no CPU.
        url = stack.enter_context(server(ours, ours_port, {}))
        contenders["breakeven"] = lambda ids, n, url=url: drive(url, "smol", ids, n)
        if arguments.vllm:
            command = [str(arguments.vllm / "bin/vllm"), "serve", str(directory), "--host", "127.0.0.1"]
            command += ["--port", str(vllm_port), "--served-model-name", "smol", "--dtype", "bfloat16"]
            command += ["--max-model-len", "2048", "--max-num-seqs", "32", "--no-enable-prefix-caching"]
            environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
            openmp = arguments.vllm / "lib/libiomp5.so"
            if openmp.exists():
                environment["LD_PRELOAD"] = str(openmp)
            url = stack.enter_context(server(command, vllm_port, environment))
            contenders["vllm"] = lambda ids, n, url=url: drive(url, "smol", ids, n)
        contenders["transformers"] = lambda ids, n: generate(reference, ids, n)
        names = list(contenders)
        for round_index in range(-1, arguments.rounds):  # the first round warms up and is not counted
            for streams in arguments.streams:
                count = max(3, streams) if streams < 30 else streams
                ids = prompts(directory, count, offset=31 * (round_index + 1))
                turn = round_index % len(names)
                for name in names[turn:] + names[:turn]:
                    rate = contenders[name](ids, streams)  # type: ignore[operator]
                    print(f"round {round_index} {streams:3d} streams {name:13s} {rate:7.1f} tok/s", flush=True)
                    if round_index >= 0:
                        rates.setdefault(name, {}).setdefault(streams, []).append(rate)
    print(f"\n{'streams':>8s}" + "".join(f"{name:>15s}" for name in names) + "   ratio to each (median of pairs)")
    table = []
    for streams in arguments.streams:
        row: dict[str, object] = {"streams": streams}
        line = f"{streams:8d}"
        for name in names:
            row[name] = statistics.median(rates[name][streams])
            line += f"{row[name]:15.1f}"
        for name in names[1:]:
            pairs = [a / b for a, b in zip(rates["breakeven"][streams], rates[name][streams], strict=True)]
            row[f"ratio_to_{name}"] = statistics.median(pairs)
            line += f"   {name} {statistics.median(pairs):.2f} [{min(pairs):.2f}, {max(pairs):.2f}]"
        table.append(row)
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": table, "rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
