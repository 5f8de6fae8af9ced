"""How often does the interval of the break-even hold the true one? Simulated campaigns of known truth.

    python benchmarks/interval_coverage.py [--campaigns N] [--blocks B ...] [--noise S] [--seed N]

Each campaign has 8 levels; the true log ratio falls linearly in log load and is 0 at 40 streams. A block's launch
shifts all its levels by one normal error, and each cell has one of its own, both of standard deviation `--noise`.
Compared are the interval of the report (a t test at every load) and the percentile interval of resampled blocks, on the
same campaigns. Pure arithmetic on one core; the same arguments give the same figures on any machine.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from breakeven.lab.stats.breakeven import break_even, resampled_interval

LEVELS = (1, 2, 5, 10, 30, 70, 100, 250)
BREAK_EVEN = 40.0
SLOPE = 0.1  # fall of the log ratio per unit of log load: 1.45 at 1 stream, 0.83 at 250


@dataclass(frozen=True)
class Coverage:
    """Shares of campaigns. `open_ended`: the report's interval is open on a side; `width`: median high ÷ low of the
    others; `rejected`: no interval, because the ratio did not seem to fall (counted as not covering)."""

    blocks: int
    campaigns: int
    report: float
    resampled: float
    open_ended: float
    rejected: float
    width: float

    @property
    def error(self) -> float:
        """Standard error of `report`."""
        return math.sqrt(self.report * (1 - self.report) / self.campaigns)


def holds(low: float | None, high: float | None) -> bool:
    """Is the truth inside? An open end (None) holds everything on its side."""
    return (low is None or low <= BREAK_EVEN) and (high is None or high >= BREAK_EVEN)


def simulate(blocks: int, campaigns: int, noise: float, seed: int, resamples: int) -> Coverage:
    """`campaigns` campaigns of `blocks` blocks each."""
    generator = np.random.default_rng([seed, blocks])
    truth = -SLOPE * np.log(np.asarray(LEVELS) / BREAK_EVEN)
    report = resampled = open_ended = rejected = 0
    widths = []
    for number in range(campaigns):
        logs = truth + generator.normal(0, noise, (blocks, 1)) + generator.normal(0, noise, (blocks, len(LEVELS)))
        found = break_even(LEVELS, logs.tolist())
        if not found.monotone:
            rejected += 1
        else:
            report += holds(found.ci_low, found.ci_high)
        if found.ci_low is None or found.ci_high is None:
            open_ended += found.monotone
        else:
            widths.append(found.ci_high / found.ci_low)
        interval = resampled_interval(LEVELS, logs.tolist(), seed=number, resamples=resamples)
        resampled += interval is not None and holds(*interval)
    return Coverage(
        blocks=blocks,
        campaigns=campaigns,
        report=report / campaigns,
        resampled=resampled / campaigns,
        open_ended=open_ended / campaigns,
        rejected=rejected / campaigns,
        width=float(np.median(widths)) if widths else math.nan,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=1000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 6])
    parser.add_argument("--noise", type=float, default=0.03)
    parser.add_argument("--resamples", type=int, default=500, help="where B^B would be more than 5,000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.campaigns < 1 or min(options.blocks) < 2 or options.noise < 0 or options.resamples < 1:
        parser.error("--campaigns and --resamples take at least 1, --blocks at least 2, --noise at least 0")
    print(f"nominal 95%; {options.campaigns} campaigns each; noise {options.noise:.1%} per launch and per cell")
    print("blocks  report's interval  resampled  open  no single crossing  median high ÷ low")
    for blocks in options.blocks:
        began = time.monotonic()
        c = simulate(blocks, options.campaigns, options.noise, options.seed, options.resamples)
        print(
            f"{blocks:6}  {c.report:10.1%} ± {2 * c.error:.1%}  {c.resampled:9.1%}  {c.open_ended:4.0%}"
            f"  {c.rejected:18.1%}  {c.width:17.2f}   ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
