"""Quick checks of a live server before it is measured: `breakeven doctor`; docs/doctor.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from breakeven.lab.doctor.checks import CHECKS
from breakeven.lab.doctor.clock import Clocks
from breakeven.lab.doctor.finding import Diagnosis, Finding, Status
from breakeven.lab.doctor.patient import Options, Patient, UnreachableError

__all__ = ["CHECKS", "Diagnosis", "Finding", "Options", "Status", "UnreachableError", "diagnose"]

Check = Callable[[Patient], Finding]


def diagnose(
    options: Options, on_finding: Callable[[Finding], None] = lambda finding: None, checks: Sequence[Check] = CHECKS
) -> Diagnosis:
    """Every check, one after the other. Raises UnreachableError when nothing useful answers.

    `on_finding` is told each finding as it comes. Requests to the server: about forty short ones, and one prompt
    beyond its context limit.
    """
    began = time.monotonic()
    clocks = Clocks()
    findings: list[Finding] = []
    with Patient(options) as patient:
        for check in checks:
            findings.append(check(patient))
            on_finding(findings[-1])
        findings.append(clocks.finding())
        on_finding(findings[-1])
        return Diagnosis(patient.url, patient.model, tuple(findings), time.monotonic() - began)
