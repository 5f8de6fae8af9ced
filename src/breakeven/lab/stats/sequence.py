"""A confidence sequence for the mean paired log ratio: valid at every block at once, so one may look and stop at any.

The t mixture: for a mean mu0 let t be the one-sample t statistic of the first n blocks. The Bayes factor of
"mean ≠ mu0" against "mean = mu0", with the standardised effect drawn from N(0, g) and the scale's invariant prior,

    E = (1 + n g)^(-1/2) · [ (1 + t² / ν) / (1 + t² / (ν (1 + n g))) ]^(n / 2),   ν = n − 1,

is, under mu0, a non-negative martingale of expectation 1 whatever the variance. By Ville's inequality it ever reaches
1 / alpha with probability alpha at most. The sequence is all mu0 that do not reach it. It assumes, as the t interval,
normal block log ratios (their variance unknown); `breakeven selftest` checks it elsewhere.
Sources: T. L. Lai, "On confidence sequences" (1976); M. Gönen et al., "The Bayesian two-sample t test" (2005), for E;
H. Wang and A. Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance" (2023,
arXiv 2310.03722).
"""

from __future__ import annotations

import math

from breakeven.lab.stats.student import check_confidence

# Variance of the standardised effect under the mixture. Effects of speculation are several times the scatter between
# launches, so it is wide: the sequence is tighter after few blocks than with 1, and costs 5% of width after many.
MIXTURE_VARIANCE = 10.0


def log_e_value(t: float, blocks: int, variance: float = MIXTURE_VARIANCE) -> float:
    """ln E of the t statistic of at least 2 blocks."""
    if blocks < 2:
        return 0.0
    degrees, shrink = blocks - 1, 1 + blocks * variance
    square = t * t
    return 0.5 * blocks * (math.log1p(square / degrees) - math.log1p(square / (degrees * shrink))) - 0.5 * math.log(
        shrink
    )


def critical_t(blocks: int, confidence: float = 0.95, variance: float = MIXTURE_VARIANCE) -> float:
    """The |t| at which E reaches 1 / (1 − confidence), in closed form; infinite where no t does (two blocks)."""
    check_confidence(confidence)
    if blocks < 2:
        return math.inf
    shrink = 1 + blocks * variance
    reach = math.exp(2 / blocks * (0.5 * math.log(shrink) - math.log1p(-confidence)))
    if reach >= shrink:
        return math.inf
    return math.sqrt((blocks - 1) * (reach - 1) / (1 - reach / shrink))
