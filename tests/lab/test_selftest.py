"""The self-test: what it simulates is what it says, its rates are in bounds, and it finds statistics that are wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab.selftest import SCENARIOS, Scenario, run_scenario, score, table_rows, to_json
from breakeven.lab.selftest.simulate import LEVELS, simulate, true_interaction, true_logs

EVERYTHING = SCENARIOS[-1]


def test_without_noise_the_truth_is_in_every_campaign() -> None:
    silent = Scenario("silent", launch=0, cell=0, request=0, prompt=0.0)
    drawn = simulate(silent, "effect", 3, np.random.default_rng(0))
    ratios = drawn.pooled[:, :, 1] - drawn.pooled[:, :, 0]
    np.testing.assert_allclose(ratios, np.broadcast_to(true_logs("effect", 0.03), ratios.shape), atol=1e-12)
    by_condition = drawn.by_condition[:, :, 1] - drawn.by_condition[:, :, 0]
    contrast = by_condition[:, :, 0] - by_condition[:, :, 1]
    np.testing.assert_allclose(contrast, true_interaction(silent), atol=1e-12)
    assert drawn.pooled.shape == (3, 5, 2, len(LEVELS))


def test_the_same_seed_gives_the_same_rates_and_another_does_not() -> None:
    first, again, other = (run_scenario(EVERYTHING, 20, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.coverages != other.coverages


@pytest.mark.parametrize("scenario", [SCENARIOS[2], EVERYTHING], ids=lambda s: s.name)
def test_rates_are_near_their_nominal_values(scenario: Scenario) -> None:
    """With few campaigns, so within wide bounds: the full table is that of docs/statistics.md."""
    found = run_scenario(scenario, 120)
    assert found.false_positive_rate < 0.10
    for name, rate in found.coverages.items():
        assert rate is None or rate > 0.87, name
    assert found.wrong_verdicts["equivalent when hurts"] < 0.10
    assert found.wrong_verdicts["pays when hurts"] < 0.05


def test_it_finds_an_interval_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    right = score.ratio_from_logs

    def as_if_normal(logs: list[float], confidence: float = 0.95) -> object:
        """z in place of t: the mistake of treating few blocks as many."""
        return right(logs, 0.80)

    monkeypatch.setattr(score, "ratio_from_logs", as_if_normal)
    found = run_scenario(SCENARIOS[2], 60)
    assert not found.within_bounds
    assert any("ratio: coverage" in problem for problem in found.problems)


def test_requests_taken_as_replications_would_err_far_more_often() -> None:
    correlated = next(s for s in SCENARIOS if s.name == "autocorrelated requests")
    assert run_scenario(correlated, 40).naive_false_positive_rate > 0.3


def test_the_table_and_the_json_hold_every_scenario() -> None:
    results = [run_scenario(Scenario("one", blocks=2), 5), run_scenario(Scenario("two", blocks=3), 5)]
    rows = table_rows(results)
    assert [row[0] for row in rows] == ["scenario", "one", "two"]
    assert {len(row) for row in rows} == {len(rows[0])}
    document = json.loads(json.dumps(to_json(results, [], campaigns=5, seed=0), allow_nan=False))
    assert [s["name"] for s in document["scenarios"]] == ["one", "two"]
    assert {"false_positive_rate", "coverage", "coverages", "power", "wrong_verdicts"} <= set(document["scenarios"][0])


def test_no_campaign_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one campaign"):
        run_scenario(EVERYTHING, 0)


def test_the_command_prints_the_table_and_writes_the_file(tmp_path: Path) -> None:
    target = tmp_path / "rates.json"
    done = CliRunner().invoke(app, ["selftest", "--campaigns", "4", "--json", str(target)], env={"COLUMNS": "200"})
    assert done.exit_code in (0, 1)  # four campaigns may well be out of bounds
    document = json.loads(target.read_text(encoding="utf-8"))
    assert len(document["scenarios"]) == len(SCENARIOS)
    assert document["campaigns"] == 4
    assert all(math.isfinite(s["coverage"]) for s in document["scenarios"])
    assert all(s.name.split()[0] in done.output for s in SCENARIOS)


def test_a_file_that_cannot_be_written_is_said_plainly(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["selftest", "--campaigns", "1", "--json", str(tmp_path / "no" / "x.json")])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
