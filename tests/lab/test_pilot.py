"""The plan foretells what a run then gives: intervals, durations, cost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import synthetic
from typer.testing import CliRunner

from breakeven.cli.main import app
from breakeven.lab.analysis import summarise
from breakeven.lab.pilot import duration_s, gpu_hours, outlook, upper_scatter
from breakeven.lab.plan import build_schedule, load_suites
from breakeven.lab.stats.power import blocks_needed, smallest_detectable
from breakeven.lab.summary import ALL, Summary


def summary_of(blocks: int, seed: int) -> Summary:
    given = synthetic.campaign(blocks=blocks)
    return summarise(given, synthetic.ENVIRONMENT, synthetic.cells(given, synthetic.by_level(), noise=0.03, seed=seed))


def test_the_predicted_interval_is_within_a_quarter_of_the_one_a_run_then_gives() -> None:
    """The median over levels, because each width is itself an estimate from few blocks."""
    pilot, run = summary_of(12, 1), summary_of(12, 2)
    predicted = {row.level: row.half_width for row in outlook(synthetic.campaign(blocks=12), 0.05, pilot)}
    ratios = []
    for c in run.comparisons:
        if (c.metric, c.condition) == ("throughput", ALL):
            assert c.ci_high is not None
            assert c.ratio is not None
            ratios.append(math.log1p(predicted[c.level] or 0.0) / math.log(c.ci_high / c.ratio))
    assert np.median(ratios) == pytest.approx(1, abs=0.25)


def test_a_stated_scatter_gives_the_powers_of_the_t_test() -> None:
    given = synthetic.campaign(assumptions={"launch_scatter": 0.04}, blocks=6)
    rows = outlook(given, 0.05)
    assert [row.level for row in rows] == sorted(given.levels)
    for row in rows:
        assert row.detectable == smallest_detectable(0.04, 6)
        assert row.blocks_needed == blocks_needed(0.04, 0.05)
        assert row.half_width == row.half_width_upper
    assert outlook(synthetic.campaign(), 0.05) == []


def test_levels_the_pilot_lacks_take_the_nearest_and_other_arms_stand_in() -> None:
    pilot = summary_of(4, 3)
    scatter = {n.level: n.sd_log for n in pilot.noise if n.condition == ALL}
    given = synthetic.campaign(levels=(1, 12, 40))
    assert [row.scatter for row in outlook(given, 0.05, pilot)] == [scatter[1], scatter[10], scatter[10]]


def test_the_upper_scatter_is_exceeded_one_time_in_ten() -> None:
    generator = np.random.default_rng(0)
    found = [upper_scatter(float(generator.normal(0, 1, 5).std(ddof=1)), 5) for _ in range(4000)]
    assert np.mean(np.asarray(found) < 1) == pytest.approx(0.10, abs=0.015)


def test_durations_are_those_of_the_pilots_cells() -> None:
    pilot = summary_of(3, 1)
    given = synthetic.campaign(blocks=6)
    schedule = build_schedule(given, load_suites(given))
    assert duration_s(given, schedule, pilot) != duration_s(given, schedule)
    twice = synthetic.campaign(blocks=12)
    longer = duration_s(twice, build_schedule(twice, load_suites(twice)), pilot)
    assert longer == pytest.approx(2 * duration_s(given, schedule, pilot))
    assert gpu_hours(7200, 8) == 16


def test_the_command_prints_the_table_and_the_cost(tmp_path: Path) -> None:
    given = synthetic.campaign(blocks=3)
    synthetic.write(tmp_path / "pilot", given, synthetic.cells(given, synthetic.by_level(), noise=0.03))
    file = tmp_path / "campaign.yaml"
    file.write_text(
        "arms:\n  off: {type: embedded}\n  ngram: {type: embedded, speculation: {algorithm: ngram}}\nbaseline: off\n"
        "blocks: 6\nlevels: [1, 5]\n",
        encoding="utf-8",
    )
    arguments = ["plan", str(file), "--pilot", str(tmp_path / "pilot"), "--effect", "0.05", "--gpus", "4"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "What 6 blocks show" in done.output
    assert "GPU hours (4 GPUs held throughout)" in done.output
    assert "pilot of 3 blocks" in done.output
    stated = CliRunner().invoke(app, ["plan", str(file), "--scatter", "0.03"], env={"COLUMNS": "120"})
    assert stated.exit_code == 0, stated.output
    assert "3.0%" in stated.output
    wrong = CliRunner().invoke(app, ["plan", str(file), "--pilot", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "holds no run" in wrong.output
