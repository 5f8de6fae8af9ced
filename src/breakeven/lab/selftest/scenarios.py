"""The kinds of trouble a campaign can be in, each a set of numbers for `simulate`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """How blocks, launches and requests scatter. Standard deviations are of logs.

    `block`: shared by both arms of a block. `launch`: of each launch. `arm_launch`: further, of the arm's launches
    alone. `cell`: of each cell. `request`: of each request's time; `prompt`: the part of it that both arms share.
    `correlation`: of successive requests of a cell. `drift`: change of log throughput from launch to launch.
    `tail`: normal, or Student's t with 3 degrees of freedom (of launches, cells and requests). `slow_request`,
    `slow_launch`, `slow_arm_launch`: probability that a request takes 5 times as long; that a launch (of either arm, or
    only of the arm) is 30% slower. `interaction`: the arm's advantage in the first condition where there is an effect.
    """

    name: str
    blocks: int = 5
    requests: int = 16
    block: float = 0.05
    launch: float = 0.02
    arm_launch: float = 0.0
    cell: float = 0.02
    request: float = 0.2
    prompt: float = 0.2
    correlation: float = 0.0
    drift: float = 0.0
    tail: str = "normal"
    slow_request: float = 0.0
    slow_launch: float = 0.0
    slow_arm_launch: float = 0.0
    interaction: float = 0.05


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("quiet machine", block=0.01, launch=0.005, cell=0.005),
    Scenario("two blocks", blocks=2),
    Scenario("three blocks", blocks=3),
    Scenario("launch effects", launch=0.05, block=0.1),
    Scenario("nine blocks", blocks=9, launch=0.05, block=0.1),
    Scenario("drift", drift=0.02),
    Scenario("autocorrelated requests", correlation=0.9, request=0.3),
    Scenario("heavy tails", tail="t3", launch=0.03, cell=0.03),
    Scenario("outlying requests", slow_request=0.02),
    Scenario("outlying launches", slow_launch=0.1),
    Scenario("one noisy arm", arm_launch=0.08),
    Scenario(
        "all at once", blocks=6, launch=0.04, block=0.1, correlation=0.8, drift=0.01, tail="t3", slow_request=0.02,
        slow_launch=0.05,
    ),
)  # fmt: skip

# Where no interval from so few blocks can hold; docs/statistics.md says so, and the analysis warns of what it can see.
KNOWN_LIMITS: tuple[Scenario, ...] = (
    Scenario("one arm's launches sometimes slow", slow_arm_launch=0.1),
    Scenario("the same on a quiet machine", slow_arm_launch=0.1, block=0.01, launch=0.005, cell=0.005),
)
