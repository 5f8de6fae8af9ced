"""The design is balanced, fresh where it can be, and a function of the seed alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakeven.lab import design


@given(st.integers(2, 13))
def test_a_williams_square_balances_position_and_carry_over(n: int) -> None:
    rows = design.williams_square(n)
    assert len(rows) == (n if n % 2 == 0 else 2 * n)
    assert all(sorted(row) == list(range(n)) for row in rows)
    times = len(rows) // n
    positions = Counter((entry, place) for row in rows for place, entry in enumerate(row))
    assert set(positions.values()) == {times}
    successions = Counter(pair for row in rows for pair in itertools.pairwise(row))
    assert len(successions) == n * (n - 1)
    assert set(successions.values()) == {times}
    assert {row[::-1] for row in rows} == set(rows)


def test_one_treatment_has_one_order_and_none_is_refused() -> None:
    assert design.williams_square(1) == ((0,),)
    assert design.arm_orders(["off"], 3, 7) == (("off",),) * 3
    with pytest.raises(ValueError, match="at least one"):
        design.williams_square(0)


@given(st.integers(2, 6), st.integers(0, 2**40))
def test_orders_over_a_whole_cycle_are_balanced(n: int, seed: int) -> None:
    arms = [f"arm{i}" for i in range(n)]
    cycle = len(design.williams_square(n))
    assert design.balance(design.arm_orders(arms, cycle, seed)).complete
    assert design.balance(design.arm_orders(arms, 2 * cycle, seed)).complete


@given(st.lists(st.integers(1, 500), min_size=2, max_size=9, unique=True), st.integers(1, 6), st.integers())
def test_every_second_block_mirrors_the_one_before_so_that_linear_drift_cancels(
    levels: list[int], pairs: int, seed: int
) -> None:
    orders = design.level_orders(levels, 2 * pairs, seed)
    assert all(orders[2 * i + 1] == orders[2 * i][::-1] for i in range(pairs))
    assert all(sorted(order) == sorted(levels) for order in orders)


def test_a_longer_campaign_begins_as_the_shorter_one() -> None:
    assert design.arm_orders(["a", "b", "c"], 20, 5)[:7] == design.arm_orders(["a", "b", "c"], 7, 5)


def test_orders_depend_on_the_seed_and_on_what_is_ordered() -> None:
    names = ["a", "b", "c", "d"]
    assert len({design.arm_orders(names, 4, seed) for seed in range(20)}) > 5
    assert any(design.arm_orders(names, 4, seed) != design.condition_orders(names, 4, seed) for seed in range(5))


def test_an_incomplete_cycle_is_reported_as_unbalanced() -> None:
    assert not design.balance(design.arm_orders(["a", "b", "c"], 2, 0)).complete


@pytest.mark.parametrize("items", [[], ["a", "a"]])
def test_no_or_equal_arms_are_refused(items: list[str]) -> None:
    with pytest.raises(ValueError, match="arms"):
        design.arm_orders(items, 2, 0)


def test_seeds_do_not_depend_on_pythons_hash() -> None:
    code = (
        "from breakeven.lab import design as d; print(d.block_seed(1, 2), d.request_seed(1, 2, 'chat', 10, 3), "
        "d.arm_orders(['a','b','c'], 5, 9), d.select_prompts(list('abcdef'), 2, 3, 4).blocks)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": value, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for value in ("1", "2")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert runs[0].startswith(str(design.block_seed(1, 2)))


def test_seeds_differ_between_blocks_and_fit_31_bits() -> None:
    seeds = [design.block_seed(0, block) for block in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert design.stable_hash("ab", "c") != design.stable_hash("a", "bc")


supplies = st.integers(1, 12)
cell_needs = st.dictionaries(st.sampled_from([1, 2, 5, 10]), st.integers(0, 15), min_size=1)


@settings(max_examples=60)
@given(supplies, cell_needs, st.integers(0, 5), st.integers())
def test_prompts_are_used_evenly_and_repeat_in_a_cell_only_after_all_were_used(
    supply: int, needs: dict[int, int], blocks: int, seed: int
) -> None:
    ids = [f"p{i}" for i in range(supply)]
    selection = design.select_cell_prompts(ids, needs, blocks, seed)
    used: Counter[str] = Counter(dict.fromkeys(ids, 0))
    within = 0
    for cells in selection.cells:
        for key, need in needs.items():
            cell = cells[key]
            assert len(cell) == need
            counts = Counter(dict.fromkeys(ids, 0)) + Counter()
            counts.update(dict.fromkeys(ids, 0))
            counts.update(cell)
            assert max(counts.values()) - min(counts.values()) <= 1
            for start in range(0, need, supply):  # each pass takes every prompt before any comes again
                assert len(set(cell[start : start + supply])) == len(cell[start : start + supply])
            within += need - len(set(cell))
            used.update(cell)
    assert max(used.values()) - min(used.values()) <= 1  # never one twice while another is unused
    total = sum(needs.values()) * blocks
    assert selection.reuse.within_cell == within
    assert (selection.reuse.note == "") == (total <= supply)
    assert selection == design.select_cell_prompts(ids, needs, blocks, seed)


def test_blocks_get_fresh_prompts_while_the_supply_lasts_and_reuse_is_reported() -> None:
    ids = [f"p{i}" for i in range(60)]
    fresh = design.select_prompts(ids, 20, 3, 1)
    assert len({name for block in fresh for name in block}) == 60
    assert fresh.reuse == design.Reuse(0, 0, 0, "")
    worn = design.select_prompts(ids, 20, 4, 1)
    assert worn.blocks[:3] == fresh.blocks
    assert worn.reuse.across_blocks == 20
    assert "60 prompts" in worn.reuse.note
    assert len(worn) == 4
    assert worn[3] == worn.blocks[3]


def test_prompts_that_cannot_be_chosen_from_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        design.select_prompts([], 1, 1, 0)
    with pytest.raises(ValueError, match="distinct"):
        design.select_prompts(["a", "a"], 1, 1, 0)
    with pytest.raises(ValueError, match="negative"):
        design.select_prompts(["a"], -1, 1, 0)
