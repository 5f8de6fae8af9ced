"""A figure that says where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Provenance(StrEnum):
    """Where a quantity came from."""

    MEASURED = "measured"  # the client's own clock or count
    SERVER_REPORTED = "server-reported"  # taken from the server's word
    DERIVED = "derived"  # computed from measured and server-reported ones
    ESTIMATED = "estimated"  # rests on an assumption that `note` names


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with its unit and provenance. `value` None: unavailable, and `note` says why."""

    value: float | None
    unit: str
    provenance: Provenance
    note: str = ""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of a sample; percentiles by linear interpolation. They describe this sample and claim nothing beyond."""

    mean: Quantity
    p50: Quantity
    p90: Quantity
    p95: Quantity
    p99: Quantity
    maximum: Quantity
    count: int


def describe(
    values: Sequence[float] | NDArray[np.float64],
    unit: str,
    provenance: Provenance,
    *,
    note: str = "",
    absent: str = "no request has it",
) -> Distribution:
    """Summarise a sample. Empty: every value is None and its note is `absent`."""
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        nothing = Quantity(None, unit, provenance, absent)
        return Distribution(nothing, nothing, nothing, nothing, nothing, nothing, 0)

    def quantity(value: float, extra: str = "") -> Quantity:
        return Quantity(float(value), unit, provenance, "; ".join(part for part in (note, extra) if part))

    p50, p90, p95, p99 = np.percentile(data, (50, 90, 95, 99))
    few = "fewer than 100 values: little more than the largest of them" if data.size < 100 else ""
    return Distribution(
        quantity(data.mean()), quantity(p50), quantity(p90), quantity(p95), quantity(p99, few), quantity(data.max()),
        int(data.size),
    )  # fmt: skip
