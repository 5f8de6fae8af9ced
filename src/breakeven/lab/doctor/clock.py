"""Did this machine's wall clock jump while the checks ran? Requests are timed by it (the kernel stamps with it)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from breakeven.lab.doctor.finding import Finding, Status

STEP_S = 0.05  # more than a clock slewed by NTP (500 ppm) gains in a minute, or a busy machine takes between two reads


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks, read when this is made."""

    wall_s: float = field(default_factory=time.time)
    steady_s: float = field(default_factory=time.monotonic)

    def finding(self, wall_s: float | None = None, steady_s: float | None = None) -> Finding:
        """How far the two have drifted apart since, given their readings now."""
        passed = (time.monotonic() if steady_s is None else steady_s) - self.steady_s
        drift = (time.time() if wall_s is None else wall_s) - self.wall_s - passed
        if abs(drift) <= max(STEP_S, passed * 1e-3):
            return Finding("clock", Status.FINE, f"the wall clock kept pace over {passed:.0f} s")
        return Finding(
            "clock",
            Status.WRONG,
            f"the wall clock jumped by {drift * 1e3:+.0f} ms within {passed:.0f} s, and request times are taken from "
            f"it",
            "let one time service slew the clock (chronyd, systemd-timesyncd) and do not set it while measuring",
        )
