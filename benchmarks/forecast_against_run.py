"""How wide `breakeven plan --pilot` says the intervals will be, against what the whole run then gave.

    python benchmarks/forecast_against_run.py RUN [--pilot-blocks 3 4 5]

The run's first blocks are taken as the pilot, and its forecast for all blocks is compared with the intervals of the
whole run: half-widths on the log scale, one row per arm and level, and the geometric mean of forecast over found.
A scatter that rests on few blocks is itself uncertain (by a factor of 1.3 either way at 5 blocks), so single rows
differ by more than their mean does.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from breakeven.lab.analysis import summarise
from breakeven.lab.pilot import outlook
from breakeven.lab.records import RunDirectory
from breakeven.lab.summary import ALL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pilot-blocks", type=int, nargs="+", default=[3, 4, 5])
    options = parser.parse_args()
    run = RunDirectory.open(options.run)
    cells = list(run.readable_cells())
    whole = summarise(run.campaign, run.environment, cells)
    found = {
        (c.arm, c.level): math.log(c.ci_high / c.ci_low) / 2
        for c in whole.comparisons
        if c.condition == ALL and c.metric == "throughput" and c.ci_low and c.ci_high
    }
    for blocks in options.pilot_blocks:
        pilot = summarise(run.campaign, run.environment, [cell for cell in cells if cell.key.block < blocks])
        print(f"\npilot of {blocks} blocks, forecast for {run.campaign.blocks}")
        print("arm       streams  forecast   found   forecast / found")
        logs = []
        for row in outlook(run.campaign, 0.03, pilot):
            actual = found.get((row.arm, row.level))
            if row.half_width is None or actual is None:
                continue
            forecast = math.log1p(row.half_width)
            logs.append(math.log(forecast / actual))
            print(f"{row.arm:9s} {row.level:7d} {forecast:9.1%} {actual:7.1%} {forecast / actual:14.2f}")
        print(f"geometric mean of {len(logs)}: {math.exp(sum(logs) / len(logs)):.2f}")


if __name__ == "__main__":
    main()
