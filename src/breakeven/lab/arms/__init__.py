"""Servers under test, behind one protocol: start, wait until ready, reset, read counters, stop, prove gone."""

from __future__ import annotations

from breakeven.lab.arms.base import Arm, ArmError, Probe, Ready, ResetError, StartError
from breakeven.lab.arms.make import make_arm
from breakeven.lab.arms.process import ProcessIdentity, StopReport

__all__ = [
    "Arm",
    "ArmError",
    "Probe",
    "ProcessIdentity",
    "Ready",
    "ResetError",
    "StartError",
    "StopReport",
    "make_arm",
]
