"""Statistics of paired blocks: ratios, intervals, tests, multiplicity, break-even, power. Pure; no I/O."""
