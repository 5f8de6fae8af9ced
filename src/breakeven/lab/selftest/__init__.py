"""`breakeven selftest`: simulated campaigns of known truth, run through the functions that make a report's figures."""

from breakeven.lab.selftest.scenarios import KNOWN_LIMITS, SCENARIOS, Scenario
from breakeven.lab.selftest.score import Result, run_scenario, table_rows, to_json

__all__ = ["KNOWN_LIMITS", "SCENARIOS", "Result", "Scenario", "run_scenario", "table_rows", "to_json"]
