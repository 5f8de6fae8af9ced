"""The Triton kernels of generation: in Triton's interpreter on any machine that has triton, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_tools import TINY, tiny_weights

from breakeven.engine.models.llama import LlamaModel
from breakeven.train import decode_attention, decode_sampling
from breakeven.train.fast_generate import FastGenerator, GenerationJob

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_triton
def test_in_tritons_interpreter_the_kernels_agree_with_pytorch() -> None:
    here = Path(__file__).resolve().parent
    paths = [str(here), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, str(here / "interpreted_kernels.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agreed"


def test_where_the_kernel_cannot_run_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = torch.bfloat16
    cuda = torch.device("cuda")
    assert "not CUDA" in (decode_attention.why_not(torch.device("cpu"), bf16, 9, 3, 64) or "")
    assert "80" in (decode_attention.why_not(cuda, bf16, 9, 3, 80) or "")
    assert "float64" in (decode_attention.why_not(cuda, torch.float64, 9, 3, 64) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decode_attention.why_not(cuda, bf16, 9, 3, 64) == "triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def broken(*_: object) -> float:
        raise RuntimeError("no ptxas\nand more")

    monkeypatch.setattr(decode_attention, "probe_error", broken)
    assert "RuntimeError: no ptxas" in (decode_attention.why_not(cuda, bf16, 9, 3, 64) or "")
    for wrong in (0.5, float("nan")):
        monkeypatch.setattr(decode_attention, "probe_error", lambda *_, wrong=wrong: wrong)
        assert "off by" in (decode_attention.why_not(cuda, bf16, 9, 3, 64) or "")
    monkeypatch.setattr(decode_attention, "probe_error", lambda *_: 1e-6)
    assert decode_attention.why_not(cuda, bf16, 9, 3, 64) is None


@needs_triton
@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("fold,kv_heads,dim", [(1, 2, 16), (3, 3, 64), (4, 2, 128), (8, 1, 256)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_on_a_gpu_it_agrees_with_pytorch(
    fold: int, kv_heads: int, dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    error = decode_attention.probe_error(torch.device("cuda"), dtype, fold * kv_heads, kv_heads, dim)
    assert error < tolerance


@needs_triton
@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [61, 49152, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_draws_invert_the_cumulated_softmax(vocab: int, dtype: torch.dtype) -> None:
    assert decode_sampling.probe_error(torch.device("cuda"), dtype, vocab) < 1e-4


@needs_triton
@needs_cuda
@pytest.mark.gpu
def test_on_a_gpu_graphs_of_the_kernels_give_the_greedy_tokens_of_pytorchs_attention() -> None:
    config = replace(TINY, head_dim=16)
    model = LlamaModel(config, tiny_weights(config), torch.device("cuda"))
    generator = torch.Generator().manual_seed(4)
    jobs = []
    for key in range(64):
        size = int(torch.randint(1, 60, (1,), generator=generator))
        prompt = torch.randint(3, TINY.vocab_size, (size,), generator=generator).tolist()
        jobs.append(GenerationJob(key, tuple(prompt), 0.0, 1 + key % 40))
    found = []
    for kernels in (False, None):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="generation falls back")
            fast = FastGenerator(
                model, (2,), slots=7, max_length=128, max_new_tokens=40, steps_per_sync=4, use_kernels=kernels
            )
        found.append({answer.job.key: answer.tokens for answer in fast.run(jobs)})
        assert fast.use_kernels is (kernels is None)
    assert len(found[0]) == 64
    assert found[0] == found[1]
