"""The CPU kernels against PyTorch: each on random shapes, and a whole forward. Skipped where they cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.engine import cpu
from breakeven.engine.attention import KVCache, attend, plan_attention
from breakeven.engine.batch import SequenceRows, StepPlan
from breakeven.engine.config import EngineConfig, ModelConfig
from breakeven.engine.linear import GatedUnit, Linear
from breakeven.engine.models.weights import expected_shapes
from breakeven.engine.runner import Runner
from breakeven.engine.step_ops import rotate

if TYPE_CHECKING:
    from torch import Tensor

needs_kernels = pytest.mark.skipif(not cpu.available(), reason=f"no CPU kernels: {cpu.missing()}")

SMALL = ModelConfig(
    family="llama",
    vocab_size=112,
    hidden_size=96,
    intermediate_size=160,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position=512,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_tensor(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def close(ours: Tensor, exact: Tensor) -> None:
    """Within a rounding to bfloat16 of the float32 result, and a little for the sums before it."""
    torch.testing.assert_close(ours.float(), exact.float(), rtol=2**-7, atol=0.02)


def random_plan(seed: int, *, trees: bool) -> StepPlan:
    """Ragged sequences on scattered pages: decodes, chunks and, if asked for, trees."""
    random = np.random.default_rng(seed)
    free = random.permutation(64 * 4).tolist()
    sequences = []
    for _ in range(random.integers(1, 5)):
        rows, prefix = int(random.choice([1, 1, 4, 7, 20, 70])), int(random.choice([0, 1, 15, 16, 130, 255, 300]))
        pages = tuple(free.pop() for _ in range(-(-(rows + prefix) // 16)))
        positions, visible = tuple(range(prefix, prefix + rows)), None
        if trees and rows <= 64:
            seen = [1]
            for row in range(1, rows):
                seen.append(seen[int(random.integers(0, row))] | (1 << row))
            visible = tuple(seen)
            positions = tuple(prefix + bits.bit_count() - 1 for bits in seen)
        tokens = tuple(int(token) for token in random.integers(3, 100, rows))
        sequences.append(SequenceRows(tokens, positions, prefix, pages, min(rows, 8), visible))
    return StepPlan(tuple(sequences))


@needs_kernels
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 90]),
    st.integers(1, 6),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 99),
)
def test_products_agree_with_float32(rows: int, inputs: int, outputs: int, bias: bool, seed: int) -> None:
    inputs, outputs = 32 * inputs, 16 * outputs
    x = random_tensor(rows, inputs, seed=seed)
    weight, up = (random_tensor(outputs, inputs, seed=seed + n, scale=inputs**-0.5) for n in (1, 2))
    b = random_tensor(outputs, seed=seed + 3) if bias else None
    residual = random_tensor(rows, outputs, seed=seed + 4)

    def exact(matrix: Tensor, biases: Tensor | None) -> Tensor:
        return F.linear(x.float(), matrix.float(), None if biases is None else biases.float())

    linear = Linear(weight, b)
    close(linear(x), exact(weight, b))
    close(linear.add(x, residual), exact(weight, b) + residual.float())
    close(GatedUnit(weight, up, b, None)(x), F.silu(exact(weight, b)) * exact(up, None))


@needs_kernels
@pytest.mark.parametrize("rows", [2, 16, 17, 40])
def test_a_rows_product_does_not_depend_on_the_other_rows(rows: int) -> None:
    linear = Linear(random_tensor(80, 192, seed=0), None)
    x = random_tensor(rows, 192, seed=1)
    together = linear(x)
    for row in range(rows):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


@needs_kernels
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_rms_norm_agrees_with_float32(rows: int, width: int, seed: int) -> None:
    from breakeven.engine.cpu import ops

    x, weight = random_tensor(rows, 16 * width, seed=seed, scale=3.0), random_tensor(16 * width, seed=seed + 1)
    exact = F.rms_norm(x.float(), (16 * width,), weight.float(), 1e-5)
    close(ops.rms_norm(x, weight, 1e-5), exact)


@needs_kernels
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.sampled_from([64, 128]), st.integers(0, 99))
def test_rotation_agrees_and_fills_the_cache(rows: int, dim: int, seed: int) -> None:
    from breakeven.engine.cpu import ops

    generator = torch.Generator().manual_seed(seed)
    qkv = random_tensor(rows, 3 + 2 * 2, dim, seed=seed)
    cos, sin = (random_tensor(200, dim // 2, seed=seed + n).repeat(1, 2) for n in (1, 2))
    positions = torch.randint(0, 200, (rows,), generator=generator)
    slots = torch.randperm(80, generator=generator)[:rows]
    keys, values = torch.zeros(2, 5, 16, 2, dim, dtype=torch.bfloat16)
    expected = rotate(qkv[:, :5].float(), cos[positions].unsqueeze(1).float(), sin[positions].unsqueeze(1).float())
    value = qkv[:, 5:].clone()
    query = ops.rotate_and_store(qkv, cos, sin, positions, slots, keys, values)
    close(query, expected[:, :3])
    close(keys.view(80, 2, dim)[slots], expected[:, 3:])
    assert torch.equal(values.view(80, 2, dim)[slots], value)
    assert int((keys != 0).any(-1).any(-1).sum()) == rows, "slots of other rows were written"


@needs_kernels
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([(2, 3, 64), (1, 1, 128), (3, 4, 64)]))
def test_attention_agrees_with_pytorchs_on_ragged_rows_and_trees(
    seed: int, trees: bool, shape: tuple[int, int, int]
) -> None:
    from breakeven.engine.cpu import ops

    kv_heads, fold, dim = shape
    plan = random_plan(seed, trees=trees)
    cache = KVCache(1, 256, 16, kv_heads, dim, torch.bfloat16, torch.device("cpu"))
    cache.k.copy_(random_tensor(*cache.k.shape, seed=seed))
    cache.v.copy_(random_tensor(*cache.v.shape, seed=seed + 1))
    query = random_tensor(plan.num_rows, kv_heads * fold, dim, seed=seed + 2)
    exact = KVCache(1, 256, 16, kv_heads, dim, torch.float32, torch.device("cpu"))
    exact.k.copy_(cache.k)
    exact.v.copy_(cache.v)
    expected = attend(query.float(), 0, plan_attention(plan, exact, fold), exact)
    units = ops.plan_units(plan, kv_heads, fold)
    close(ops.attend(query, units, cache.k[0], cache.v[0]), expected)


def runner(config: ModelConfig, *, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> Runner:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_shapes(config).items():
        spread = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.1 * spread if len(shape) == 1 else spread * shape[-1] ** -0.5).bfloat16()
    if not kernels:
        for module in ("linear", "step_ops"):
            monkeypatch.setattr(f"breakeven.engine.{module}.available", lambda: False)
    made = Runner(config, EngineConfig(dtype="bfloat16"), weights, 256)
    monkeypatch.undo()
    return made


@needs_kernels
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_forward_agrees_with_pytorchs(seed: int, qk_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    config = dataclasses.replace(SMALL, qk_norm=qk_norm)
    plan = random_plan(seed, trees=seed % 2 == 1)
    logits = [
        runner(config, kernels=kernels, monkeypatch=monkeypatch).forward(plan).float() for kernels in (True, False)
    ]
    # Each layer rounds to bfloat16 in other places: a few units in the last place of the largest logit.
    assert float((logits[0] - logits[1]).abs().max()) < 0.05 * float(logits[1].abs().max())


@needs_kernels
def test_a_sequences_logits_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(3, trees=True)
    model = runner(SMALL, kernels=True, monkeypatch=monkeypatch)
    together = model.forward(plan)
    start = 0
    for sequence in plan.sequences:
        alone = model.forward(StepPlan((sequence,)))
        assert torch.equal(alone, together[start : start + sequence.sampled])
        start += sequence.sampled


@needs_kernels
@pytest.mark.parametrize("prefix", [5, 250])
def test_verifying_a_chain_gives_the_logits_of_decoding_it_row_by_row(
    prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runner(SMALL, kernels=True, monkeypatch=monkeypatch)
    tokens, pages = tuple(3 + 7 * i % 100 for i in range(prefix + 9)), tuple(range(100, 100 + (prefix + 25) // 16))

    def rows(start: int, end: int) -> Tensor:
        sequence = SequenceRows(tokens[start:end], tuple(range(start, end)), start, pages, end - start)
        return model.forward(StepPlan((sequence,)))

    rows(0, prefix)
    verified = rows(prefix, prefix + 9)
    decoded = torch.cat([rows(at, at + 1) for at in range(prefix, prefix + 9)])
    assert torch.equal(verified, decoded)


def _reason(environment: dict[str, str], code: str = "") -> str:
    command = f"{code}\nfrom breakeven.engine import cpu\nassert not cpu.available()\nprint(cpu.missing())"
    done = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_kernels_can_be_turned_off_and_say_so() -> None:
    assert _reason({"BREAKEVEN_CPU_KERNELS": "0"}) == "BREAKEVEN_CPU_KERNELS is 0"


def test_without_numba_pytorch_serves() -> None:
    hide = (
        "import importlib.util as u, sys\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'numba' else find(name, *rest)\nsys.modules['numba'] = None"
    )
    reason = _reason({}, hide)
    assert reason == "numba is not installed" or reason.startswith("the CPU lacks")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types_and_switched_off_kernels_fall_back(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "bfloat16":
        made = runner(SMALL, kernels=False, monkeypatch=monkeypatch)
    else:
        weights = {name: torch.zeros(shape) for name, shape in expected_shapes(SMALL).items()}
        made = Runner(SMALL, EngineConfig(dtype="float32"), weights, 256)
    assert not made._kernels
    assert made.forward(random_plan(0, trees=False)).shape[1] == SMALL.vocab_size
