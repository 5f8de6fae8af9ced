"""What a check of a live server says. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Status(Enum):
    """`WRONG` alone makes the doctor's exit code 1."""

    FINE = "fine"
    NOTE = "note"  # not wrong, but a campaign must take it into account
    WRONG = "wrong"
    UNKNOWN = "unknown"  # the server does not show it


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result: what was seen, in plain words, and the remedy (empty where there is nothing to mend)."""

    check: str
    status: Status
    seen: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about one server, in the order of the checks. `seconds`: how long they took."""

    url: str
    model: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def wrong(self) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.status is Status.WRONG]

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "url": self.url,
            "model": self.model,
            "seconds": round(self.seconds, 3),
            "healthy": not self.wrong,
            "findings": [{**asdict(finding), "status": finding.status.value} for finding in self.findings],
        }
