"""The Triton kernels on the CPU, in Triton's interpreter. Run by test_decode_kernels.py in a process of its own, since
TRITON_INTERPRET is read when triton is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton.runtime.interpreter as interpreter
from train_tools import TINY, tiny_model

from breakeven.train import decode_sampling
from breakeven.train.decode_attention import append_and_attend, probe_error
from breakeven.train.fast_generate import FastGenerator, GenerationJob

CPU = torch.device("cpu")


def allow_new_numpy() -> None:
    """The interpreter calls int() on arrays of one element, as bounds of loops are; NumPy 2.4 does that no more."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch


def attention_is_pytorchs() -> None:
    for fold, kv_heads, dim in ((1, 2, 32), (3, 3, 64), (4, 1, 128), (17, 1, 16)):
        # the interpreter has no products of bfloat16
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 5e-3)):
            error = probe_error(CPU, dtype, fold * kv_heads, kv_heads, dim)
            assert error < tolerance, (fold, kv_heads, dim, dtype, error)


def every_length_and_only_the_new_rows_are_written() -> None:
    generator = torch.Generator().manual_seed(1)
    slots, max_length, dim = 16, 320, 16
    lengths = torch.randint(0, 301, (slots,), generator=generator)
    lengths[:6] = torch.tensor([0, 1, 63, 64, 65, 300])
    active = torch.rand(slots, generator=generator) > 0.25
    active[:6] = True
    query, key, value = torch.randn(slots, 5, dim, generator=generator).split((3, 1, 1), dim=1)
    keys, values = (torch.randn(slots * max_length, 1, dim, generator=generator) for _ in range(2))
    expected_keys, expected_values = keys.clone().view(slots, -1, dim), values.clone().view(slots, -1, dim)
    # what no slot may see poisons whatever looks at it
    beyond = torch.arange(max_length) >= lengths.unsqueeze(1)
    keys.view(slots, max_length, dim)[beyond] = float("nan")
    expected_keys[beyond] = float("nan")
    held = torch.where(active, lengths, -1)
    out = append_and_attend(query, key, value, keys, values, held, max_length)
    assert bool(out.isfinite().all())
    for slot in range(slots):
        if active[slot]:
            length = int(lengths[slot])
            expected_keys[slot, length], expected_values[slot, length] = key[slot, 0], value[slot, 0]
            seen_keys, seen_values = expected_keys[slot, : length + 1], expected_values[slot, : length + 1]
            weights = (query[slot] @ seen_keys.T * dim**-0.5).softmax(-1)
            torch.testing.assert_close(out[slot], weights @ seen_values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(keys.view(slots, -1, dim), expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values.view(slots, -1, dim), expected_values, rtol=0, atol=0)


def greedy_answers_are_those_of_pytorchs_attention() -> None:
    model = tiny_model(replace(TINY, head_dim=16, num_layers=2))
    jobs = [GenerationJob(key, tuple(range(3, 4 + key * 5)), 0.0, 2 + key) for key in range(5)]
    found = []
    for kernels in (False, True):
        fast = FastGenerator(
            model, (2,), slots=3, max_length=64, max_new_tokens=12, steps_per_sync=3, use_kernels=kernels
        )
        found.append({answer.job.key: answer.tokens for answer in fast.run(jobs)})
    assert len(found[0]) == 5
    assert found[0] == found[1]


def draws_are_the_inverse_of_the_cumulated_softmax() -> None:
    for vocab in (3, 9001):
        assert decode_sampling.probe_error(CPU, torch.float32, vocab) < 1e-5, vocab
    # on a grid of uniform numbers each token is drawn as often as its probability says; equal maxima: the first
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(13, generator=generator) * 2
    grid = (torch.arange(200) + 0.5) / 200
    ones = torch.ones(200)
    tokens = decode_sampling.invert(row.expand(200, 13).contiguous(), ones / 0.7, ones, grid)
    shares = tokens.bincount(minlength=13) / 200
    assert bool(((shares - (row / 0.7).softmax(-1)).abs() <= 1 / 200 + 1e-6).all())
    ties = torch.zeros(2, 9001)
    ties[0, [5000, 8999]] = 1.0
    assert decode_sampling.invert(ties, ones[:2], 0 * ones[:2], grid[:2]).tolist() == [5000, 0]


if __name__ == "__main__":
    allow_new_numpy()
    attention_is_pytorchs()
    every_length_and_only_the_new_rows_are_written()
    greedy_answers_are_those_of_pytorchs_attention()
    draws_are_the_inverse_of_the_cumulated_softmax()
    print("agreed")
