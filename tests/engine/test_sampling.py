from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest
from toy_target import warp

from breakeven.engine import warp as warp_module
from breakeven.engine.gumbel import argmax_rows, draw, row_keys, token_hash, uniform
from breakeven.engine.request import SamplingParams, TokenOutput
from breakeven.engine.sampling import (
    RowSpec,
    SampleResult,
    SamplingBatch,
    build_batch,
    profile,
    sample,
    unique_tokens,
)

VOCAB = 5000
EOS = (3, 9)
_MASK = (1 << 64) - 1


def splitmix_finaliser(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def noise(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """Gumbel noise of a row, from Python integers."""
    step = 0x9E3779B97F4A7C15
    key = splitmix_finaliser(splitmix_finaliser((seed + step) & _MASK) + (position + 1) * step & _MASK)
    hashes = [splitmix_finaliser((token + 1) * step + key & _MASK) for token in range(vocab_size)]
    uniforms = np.array([(2 * (value >> 12) + 1) * 2.0**-53 for value in hashes])
    return -np.log(-np.log(uniforms))


def expected_token(logits: NDArray[np.float32], row: RowSpec, eos: Sequence[int] = EOS) -> int:
    """The dense float64 oracle: warp, add the noise, take the best."""
    params = row.profile.params
    output = [*Counter(dict(row.output_counts or {})).elements(), *row.path]
    assert len(output) == row.emitted
    x = warp(logits, params, () if row.prompt_tokens is None else row.prompt_tokens.tolist(), output, eos)
    if params.temperature == 0 or params.top_k == 1:
        return int(x.argmax())
    return int((x + noise(row.seed, row.position, len(logits))).argmax())


def random_row(rng: np.random.Generator, vocab_size: int = VOCAB) -> RowSpec:
    """A row with any mixture of parameters, its output concentrated on a few likely tokens."""

    def maybe(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.4 else otherwise

    params = SamplingParams(
        temperature=float(rng.choice([0, 0.5, 1, 1.4])),
        top_p=maybe(float(rng.choice([0.3, 0.9, 0.99])), 1.0),
        top_k=int(maybe(float(rng.choice([1, 2, 50, 200, 1500, 4999, 9999])), 0)),
        min_p=maybe(float(rng.choice([1e-6, 0.01, 0.3])), 0.0),
        presence_penalty=maybe(0.8, 0),
        frequency_penalty=maybe(0.6, 0),
        repetition_penalty=maybe(1.5, 1),
        logit_bias={int(token): float(rng.normal() * 4) for token in rng.integers(30, size=3)},
        min_tokens=int(maybe(6, 0)),
        stop_token_ids=(1, 2),
        ignore_eos=bool(rng.random() < 0.3),
        logprobs=[None, 0, 3, 20][rng.integers(4)],
    )
    output = Counter(rng.integers(20, size=rng.integers(8)).tolist())
    path = tuple(rng.integers(20, size=rng.integers(4)).tolist())
    return RowSpec(
        profile=profile(params),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        position=int(rng.integers(1 << 20)),
        output_counts=output,
        prompt_tokens=unique_tokens(rng.integers(vocab_size, size=40)),
        path=path,
        emitted=output.total() + len(path),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int = VOCAB) -> torch.Tensor:
    """Peaked, middling and flat rows, so that truncation needs few, many and nearly all tokens; low ids likely."""
    scale = np.array([4.0, 1.5, 0.2])[np.arange(rows) % 3, None]
    logits = rng.normal(size=(rows, vocab_size)) * scale
    logits[:, :30] += 1.5 * scale
    return torch.from_numpy(logits.astype(np.float32))


def one(logits: Sequence[float] | torch.Tensor, params: SamplingParams, **row: object) -> int:
    """The token of a single row."""
    tensor = torch.as_tensor(logits, dtype=torch.float32)[None]
    spec = RowSpec(profile(params), **({"seed": 0, "position": 0} | row))  # type: ignore[arg-type]
    return sample(tensor, build_batch([spec], tensor.shape[1], EOS)).token_list()[0]


# --- noise


def test_the_hash_is_splitmix64_whatever_the_seed_and_position() -> None:
    seeds, positions = [0, 1, -1, 2**63, 2**64 - 1, 12345678901234567890], [0, 1, 2, 131071, 2**40, 7]
    keys = torch.from_numpy(row_keys(seeds, positions))
    hashes = token_hash(keys, torch.arange(300))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        step = 0x9E3779B97F4A7C15
        key = splitmix_finaliser(splitmix_finaliser((seed + step) & _MASK) + (position + 1) * step & _MASK)
        expected = [splitmix_finaliser((token + 1) * step + key & _MASK) for token in range(300)]
        assert [value & _MASK for value in hashes[row].tolist()] == expected
        gumbel = -np.log(-np.log(uniform(keys[row : row + 1], torch.arange(300)).numpy()[0]))
        np.testing.assert_allclose(gumbel, noise(seed, position, 300), rtol=1e-12)


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert row_keys([-1, 5], [3, 3]).tolist() == row_keys([2**64 - 1, 5 + 2**64], [3, 3]).tolist()


def test_the_noise_is_uniform_and_strictly_inside_the_unit_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = uniform(torch.from_numpy(row_keys(range(40), [17] * 40)), torch.arange(1000)).flatten().numpy()
    assert kstest(values, "uniform").pvalue > 1e-3
    for bits, extreme in ((0, 2.0**-53), (-1, 1 - 2.0**-53)):
        monkeypatch.setattr(
            "breakeven.engine.gumbel.token_hash", lambda keys, ids, bits=bits: torch.full_like(ids, bits)
        )
        (value,) = uniform(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).tolist()
        assert value == extreme


@pytest.mark.parametrize("neighbour", ["seed", "position", "token"])
def test_neighbouring_noise_is_independent(neighbour: str) -> None:
    steps = np.arange(20_001)
    zero = np.zeros_like(steps)
    seeds, positions = (steps if neighbour == "seed" else zero), (steps if neighbour == "position" else zero)
    ids = torch.from_numpy(steps if neighbour == "token" else zero)
    values = uniform(torch.from_numpy(row_keys(seeds.tolist(), positions.tolist())), ids[:, None]).squeeze(1).numpy()
    cells, *_ = np.histogram2d(values[:-1], values[1:], bins=8, range=[[0, 1], [0, 1]])
    assert chisquare(cells.flatten()).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [1, 255, 1024, 1025, 3000])
def test_the_two_level_argmax_is_the_argmax_with_ties_to_the_lowest_index(dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    for levels in (2, 40, 10**6):
        values = torch.randint(levels, (50, columns), generator=generator).to(dtype)
        values[0] = float("-inf")
        expected = [row.index(max(row)) for row in values.tolist()]
        assert argmax_rows(values).tolist() == expected


def test_noise_made_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, keys = random_logits(np.random.default_rng(0), 7, 100), torch.from_numpy(row_keys(range(7), range(7)))
    whole = draw(logits, keys)
    monkeypatch.setattr("breakeven.engine.gumbel._CHUNK_ELEMENTS", {"cpu": 250})
    assert torch.equal(draw(logits, keys), whole)


# --- the whole sampler against a dense oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("candidates", [(128, 1024), (4, 16), ()], ids=str)
def test_every_mixture_of_parameters_draws_what_the_dense_oracle_draws(
    candidates: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warp_module, "CANDIDATES", candidates)
    rng = np.random.default_rng(5)
    rows = [random_row(rng) for _ in range(90)]
    logits = random_logits(rng, len(rows)).to(dtype)
    untouched = logits.clone()
    result = sample(logits, build_batch(rows, VOCAB, EOS))
    expected = [expected_token(logits[index].float().numpy(), row) for index, row in enumerate(rows)]
    assert result.token_list() == expected
    assert torch.equal(logits, untouched)


def test_a_row_gets_bit_for_bit_the_same_in_any_batch() -> None:
    rng = np.random.default_rng(8)
    rows = [random_row(rng) for _ in range(60)]
    logits = random_logits(rng, len(rows)).bfloat16()

    def results(order: Sequence[int]) -> list[TokenOutput]:
        batch = build_batch([rows[index] for index in order], VOCAB, EOS)
        return sample(logits[list(order)], batch).outputs()

    together = results(range(len(rows)))
    assert [results([index])[0] for index in range(len(rows))] == together
    shuffled = rng.permutation(len(rows)).tolist()[:37]
    assert results(shuffled) == [together[index] for index in shuffled]


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    rows = [random_row(rng) for _ in range(30)]
    logits = random_logits(rng, len(rows))
    whole = sample(logits, build_batch(rows, VOCAB, EOS)).token_list()
    monkeypatch.setattr("breakeven.engine.sampling_batch._BLOCK_ELEMENTS", {"cpu": 3 * VOCAB})
    assert sample(logits, build_batch(rows, VOCAB, EOS)).token_list() == whole


def test_a_token_on_the_path_counts_exactly_like_one_already_emitted() -> None:
    rng = np.random.default_rng(10)
    logits = random_logits(rng, 200)
    params = SamplingParams(frequency_penalty=0.37, presence_penalty=0.11, repetition_penalty=1.23, min_tokens=5)
    emitted, drafted = [], []
    for seed in range(len(logits)):
        output, path = rng.integers(12, size=4).tolist(), rng.integers(12, size=3).tolist()
        common = (profile(params), seed, 40)
        emitted.append(RowSpec(*common, Counter(output + path), None, (), 7))
        drafted.append(RowSpec(*common, Counter(output), None, tuple(path), 7))
    edited = []
    for rows in (emitted, drafted):
        x = logits.clone()
        for block in build_batch(rows, VOCAB, EOS).blocks:
            part = x[block.rows]
            assert block.edits is not None
            block.edits.apply_(part)
            x[block.rows] = part
        edited.append(x)
    assert torch.equal(*edited)
    assert not torch.equal(edited[0], logits)


# --- single parameters


def test_greedy_takes_the_lowest_id_of_a_tie_and_ignores_the_seed() -> None:
    logits = [0.0, 2.0, 2.0, 1.0]
    assert {one(logits, SamplingParams(temperature=0), seed=seed) for seed in range(20)} == {1}
    assert {one(logits, SamplingParams(temperature=1e-9), seed=seed) for seed in range(20)} == {1}
    assert {one(logits, SamplingParams(top_k=1), seed=seed) for seed in range(20)} == {1}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1, 2}),  # 2 ties with 1
        (SamplingParams(top_k=100), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.39), {0}),
        (SamplingParams(top_p=0.41), {0, 1, 2}),
        (SamplingParams(top_p=0.85), {0, 1, 2, 3}),
        (SamplingParams(top_k=3, top_p=0.49), {0}),  # 0.4 of the 0.8 that top-k kept
        (SamplingParams(min_p=0.49), {0, 1, 2}),
        (SamplingParams(min_p=0.51), {0}),
        (SamplingParams(min_p=1.0), {0}),
        (SamplingParams(temperature=0.5, min_p=0.3), {0}),  # 0.25 of the best once the temperature is applied
        (SamplingParams(top_p=1e-9), {0}),
    ],
)
def test_truncation_keeps_exactly_these(params: SamplingParams, kept: set[int]) -> None:
    logits = torch.log(torch.tensor([0.4, 0.2, 0.2, 0.11, 0.09]))
    assert {one(logits, params, seed=seed) for seed in range(400)} == kept


@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=0.95), SamplingParams(top_k=40), SamplingParams(min_p=0.05)], ids=["p", "k", "min"]
)
def test_a_few_likely_tokens_are_drawn_from_without_a_sort_or_noise_for_the_rest(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []

    def recording(logits: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        widths.append(logits.shape[1])
        return draw(logits, keys, ids)

    monkeypatch.setattr(warp_module, "draw", recording)
    logits = torch.linspace(0, -0.2 * VOCAB, VOCAB).expand(6, VOCAB)
    sample(logits, build_batch([RowSpec(profile(params), seed, 0) for seed in range(6)], VOCAB, EOS))
    assert widths == [{0.95: 15}.get(params.top_p, params.top_k or 15)]  # exp(-0.2 * 15) is just below 0.05


def test_ties_reaching_beyond_the_candidates_are_all_kept() -> None:
    logits = torch.zeros(3000)
    drawn = {one(logits, SamplingParams(top_k=5), seed=seed) for seed in range(60)}
    assert len(drawn) > 50


def test_a_flat_nucleus_wider_than_the_candidates_is_kept_whole() -> None:
    logits = torch.zeros(3000)
    logits[::2] = -30.0
    drawn = {one(logits, SamplingParams(top_p=0.999), seed=seed) for seed in range(60)}
    assert len(drawn) > 50
    assert all(token % 2 for token in drawn)


def test_eos_and_stop_ids_are_masked_until_min_tokens_are_emitted() -> None:
    logits = [0.0] * 12
    for token in (3, 5, 9):
        logits[token] = 50.0 + token
    params = SamplingParams(temperature=0, min_tokens=4, stop_token_ids=(5, 9999))
    assert one(logits, params, emitted=3, path=(7,)) == 0
    assert one(logits, params, emitted=4) == 9
    heedless = SamplingParams(temperature=0, min_tokens=4, stop_token_ids=(5,), ignore_eos=True)
    assert one(logits, heedless, emitted=3) == 9


def test_a_bias_on_a_token_that_does_not_exist_is_passed_over() -> None:
    assert one([0.0, 1.0, 0.5], SamplingParams(temperature=0, logit_bias={2: 3.0, 7: 100.0})) == 2


def test_the_prompt_counts_for_repetition_but_not_for_presence() -> None:
    row = {"prompt_tokens": unique_tokens([1, 1]), "output_counts": {2: 1}, "emitted": 1}
    logits = [1.0, 1.9, 2.0]
    assert one(logits, SamplingParams(temperature=0, repetition_penalty=2.0), **row) == 0
    assert one(logits, SamplingParams(temperature=0, presence_penalty=1.5), **row) == 1


# --- batches and results


def test_plain_greedy_needs_nothing_but_the_argmax() -> None:
    logits = random_logits(np.random.default_rng(1), 5)
    rows = [RowSpec(profile(SamplingParams(temperature=0)), seed=0, position=0)] * 5
    assert all(row.profile.plain_greedy for row in rows)
    assert build_batch(rows, VOCAB, EOS) == SamplingBatch.greedy(5)
    assert sample(logits, SamplingBatch.greedy(5)).token_list() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, min_tokens=1),
        SamplingParams(temperature=0, logit_bias={1: 1.0}),
        SamplingParams(temperature=0, presence_penalty=1.0),
        SamplingParams(temperature=0, repetition_penalty=1.1),
        SamplingParams(temperature=0, logprobs=0),
    ],
)
def test_whatever_needs_more_is_not_plain_greedy(params: SamplingParams) -> None:
    assert not profile(params).plain_greedy


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 rows, but the logits' shape is \(3, 8\)"):
        sample(torch.zeros(3, 8), SamplingBatch.greedy(2))
    assert sample(torch.zeros(0, 8), SamplingBatch.greedy(0)).outputs() == []


def test_logprobs_are_of_the_raw_distribution_from_the_rows_asked_for() -> None:
    logits = random_logits(np.random.default_rng(2), 3, 50)
    asked = [
        SamplingParams(temperature=0, logit_bias={7: 90.0}, logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=0),
    ]
    rows = [RowSpec(profile(params), seed=index, position=index) for index, params in enumerate(asked)]
    result: SampleResult = sample(logits, build_batch(rows, 50, EOS))
    exact = torch.log_softmax(logits.double(), -1).numpy()
    last, first = result.outputs([2, 0])
    assert (first.token_id, last.top) == (7, ())
    assert first.logprob == pytest.approx(exact[0, 7], abs=1e-5)
    assert last.logprob == pytest.approx(exact[2, last.token_id], abs=1e-5)
    best = np.argsort(-exact[0])[:2].tolist()
    assert [token for token, _ in first.top] == best
    assert [value for _, value in first.top] == pytest.approx(exact[0, best].tolist(), abs=1e-5)
    assert result.outputs([1]) == [TokenOutput(result.token_list()[1])]


def test_tied_logprobs_are_listed_by_the_lowest_id() -> None:
    logits = torch.zeros(1, 600)
    logits[0, 400] = 1.0
    row = RowSpec(profile(SamplingParams(temperature=0, logprobs=4)), seed=0, position=0)
    (output,) = sample(logits, build_batch([row], 600, EOS)).outputs()
    assert [token for token, _ in output.top] == [400, 0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_what_the_cpu_draws() -> None:
    rng = np.random.default_rng(12)
    rows = [random_row(rng) for _ in range(60)]
    logits = random_logits(rng, len(rows))
    keys = torch.from_numpy(row_keys(range(50), range(50)))
    assert torch.equal(uniform(keys.cuda(), torch.arange(999).cuda()).cpu(), uniform(keys, torch.arange(999)))
    on_gpu = sample(logits.cuda(), build_batch(rows, VOCAB, EOS, "cuda"))
    assert on_gpu.token_list() == sample(logits, build_batch(rows, VOCAB, EOS)).token_list()
