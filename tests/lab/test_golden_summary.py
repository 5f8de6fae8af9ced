"""A run's summary stays what it was, section by section, whatever is moved or added in the code that makes it.

The hashes are of what the figures were before; a section that is meant to change gets a new hash together with the
change. Fields at their default do not count, so that a field may be added.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import synthetic

from breakeven.lab.analysis import summarise
from breakeven.lab.campaign import SENTINEL, Campaign
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.summary import Summary

GOLDEN: dict[str, str] = {
    "schema_version": "6b86b273ff34fce1",
    "run": "44843a980dab1634",
    "campaign": "2209b386de7c2a58",
    "environment": "0d44a7f0c7b256ca",
    "comparisons": "b90655678aa8c84f",
    "break_even": "02d1c809f82a6c1b",
    "break_even_by_condition": "35c55372282a122a",
    "levels": "be388e9d98caafe7",
    "acceptance": "28201b0b19860517",
    "agreement": "64677cee353fada2",
    "distributions": "b16b756c0475aea8",
    "noise": "bb054d3e5e600da7",
    "invalid": "f40e0dfec2471554",
    "missing": "6f052882247a7161",
    "lints": "7b94c690b990af2d",
    "cells": "ba29b6e47c5a86ea",
    "interactions": "7160ca6f3dbe308e",
    "main_effects": "210d478c56bf8e13",
    "tails": "5401130bd1b3c61e",
    "multiplicity": "3023a862867c2d2a",
    "aa": "5a654daebfcdb68e",
    "sentinel": "287053677edac74d",
}


def _records(given: Campaign) -> list[CellRecord]:
    """Two domains, an A/A arm, sentinels, an invalid cell and one that is missing."""
    records = synthetic.cells(given, synthetic.by_level(), noise=0.03)
    records = [
        replace(r, started_ns=r.started_ns + 60_000_000_000 * n, ended_ns=r.ended_ns + 60_000_000_000 * n)
        for n, r in enumerate(records)
    ]
    records[5] = synthetic.spoil(records[5], "the server ended during the cell")
    del records[-1]
    for block in range(given.blocks):
        for number, arm in enumerate(given.arms):
            found = synthetic.cell(CellKey(block, arm, SENTINEL, 1), 30.0 + block / 4 + number, ttft_s=0.05)
            hours = 3_600_000_000_000 * block
            records.append(replace(found, started_ns=found.started_ns + hours, ended_ns=found.ended_ns + hours))
    return records


@pytest.fixture(scope="module")
def summary() -> Summary:
    given = synthetic.campaign(levels=(1, 5), blocks=4, aa=True, sentinel={"requests": 2})
    return summarise(given, synthetic.ENVIRONMENT, _records(given))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def test_every_section_of_a_summary_is_what_it_was(summary: Summary) -> None:
    whole = summary.model_dump(mode="json", exclude_defaults=True, exclude={"run": {"breakeven_version"}})
    assert {name: _hash(section) for name, section in whole.items()} == GOLDEN
