"""Campaigns of known truth, drawn many at a time: launches, cells and requests as arrays.

Two arms, two conditions, levels `LEVELS`, in the orders that the campaign's own design gives. A request takes
base · exp(noise) seconds; the throughput of a cell is its requests divided by the time they took in sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breakeven.lab.design import arm_orders
from breakeven.lab.selftest.scenarios import Scenario

LEVELS = (1, 2, 5, 10, 30)
BREAK_EVEN = 7.0
SLOPE = 0.1  # fall of the log ratio per unit of log load: 1.21 at 1 stream, 0.86 at 30
_ORDERS = 64  # distinct designs that campaigns draw from
_SLOW_REQUEST = math.log(5.0)
_SLOW_LAUNCH = math.log(1.3)

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Campaigns:
    """Log throughputs. `pooled`: shape (campaigns, blocks, 2 arms, levels), both conditions together; `by_condition`:
    (campaigns, blocks, 2 arms, 2 conditions, levels). `request_logs`: the log times of single requests of the first
    level and condition, (campaigns, blocks, 2 arms, requests)."""

    pooled: Values
    by_condition: Values
    request_logs: Values


def true_logs(effect: str, margin: float) -> Values:
    """The true log ratios by level: `null` 0; `effect` falls through 0 at BREAK_EVEN; `margin` just beyond hurting."""
    loads = np.log(np.asarray(LEVELS, dtype=np.float64))
    if effect == "null":
        return np.zeros(len(LEVELS))
    if effect == "effect":
        return np.asarray(-SLOPE * (loads - math.log(BREAK_EVEN)))
    return np.full(len(LEVELS), -math.log1p(margin) * (1 + 1e-9))


def true_interaction(scenario: Scenario) -> float:
    """The true contrast of the first condition against the second, where there is an effect."""
    return scenario.interaction + math.log(2 - math.exp(-scenario.interaction))


def simulate(
    scenario: Scenario, effect: str, campaigns: int, generator: np.random.Generator, margin: float = 0.03
) -> Campaigns:
    """`campaigns` campaigns of the scenario."""
    s, levels = scenario, len(LEVELS)
    shape = (campaigns, s.blocks)
    truth = true_logs(effect, margin)
    slower = np.zeros((2, 2, levels))  # arm, condition, level: log time, without noise
    delta = s.interaction if effect == "effect" else 0.0
    slower[1, 0] = -truth - delta
    slower[1, 1] = -truth + math.log(2 - math.exp(-delta))  # so that both conditions pooled have the truth
    launches = _launches(s, shape, generator)
    cells = s.cell * _noise(s, (*shape, 2, 2, levels), generator)
    prompts = s.prompt * generator.standard_normal((*shape, 1, 2, levels, s.requests))
    requests = s.request * _correlated(s, (*shape, 2, 2, levels, s.requests), generator)
    if s.slow_request:
        requests += _SLOW_REQUEST * (generator.random(requests.shape) < s.slow_request)
    fixed = launches[..., None, None] + cells + slower
    times = np.exp(requests + prompts + fixed[..., None])
    sums = times.sum(axis=-1)
    by_condition = math.log(s.requests) - np.log(sums)
    pooled = math.log(2 * s.requests) - np.log(sums.sum(axis=3))
    return Campaigns(pooled, by_condition, np.log(times[:, :, :, 0, 0]))


def tails(scenario: Scenario, requests: int, effect: float, campaigns: int, generator: np.random.Generator) -> Values:
    """Log times of the requests of one cell per block and arm, (campaigns, blocks, 2, requests); the arm's are
    `effect` longer."""
    s, shape = scenario, (campaigns, scenario.blocks)
    logs = _launches(s, shape, generator)[..., None] + s.cell * _noise(s, (*shape, 2, 1), generator)
    logs = logs + s.prompt * generator.standard_normal((*shape, 1, requests))
    logs = logs + s.request * _correlated(s, (*shape, 2, requests), generator)
    if s.slow_request:
        logs += _SLOW_REQUEST * (generator.random(logs.shape) < s.slow_request)
    logs[:, :, 1] += effect
    return np.asarray(logs)


def _launches(s: Scenario, shape: tuple[int, int], generator: np.random.Generator) -> Values:
    """Log slowness of each launch: (campaigns, blocks, 2)."""
    logs = s.block * generator.standard_normal((*shape, 1)) + s.launch * _noise(s, (*shape, 2), generator)
    logs[:, :, 1] += s.arm_launch * generator.standard_normal(shape)
    if s.drift:
        logs += s.drift * _times(s.blocks)[generator.integers(0, _ORDERS, shape[0])]
    logs += _SLOW_LAUNCH * (generator.random(logs.shape) < s.slow_launch)
    slow = _SLOW_LAUNCH * (generator.random(shape) < s.slow_arm_launch)
    logs[:, :, 1] += slow - _SLOW_LAUNCH * s.slow_arm_launch  # so that its mean is 0, and the truth as stated
    return np.asarray(logs)


def _times(blocks: int) -> Values:
    """Number of the launch, in order, of each block's two arms, in designs of different seeds."""
    times = np.empty((_ORDERS, blocks, 2))
    for seed in range(_ORDERS):
        for block, order in enumerate(arm_orders(("off", "arm"), blocks, seed)):
            times[seed, block] = [2 * block + order.index(arm) for arm in ("off", "arm")]
    return times


def _noise(s: Scenario, shape: tuple[int, ...], generator: np.random.Generator) -> Values:
    """Of variance 1."""
    if s.tail == "t3":
        return np.asarray(generator.standard_t(3, shape) / math.sqrt(3))
    return generator.standard_normal(shape)


def _correlated(s: Scenario, shape: tuple[int, ...], generator: np.random.Generator) -> Values:
    """Along the last axis, an autoregression of first order and variance 1, begun in its stationary state."""
    noise = _noise(s, shape, generator)
    if s.correlation:
        fresh = math.sqrt(1 - s.correlation**2)
        for index in range(1, shape[-1]):
            noise[..., index] = s.correlation * noise[..., index - 1] + fresh * noise[..., index]
    return noise
