"""What every section of a campaign file shares."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """What every section shares: strict types, no unknown fields, no changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def rows_as_tuples(rows: Any) -> Any:
    """Lists of lists as tuples, for a field whose section may be read as Python, where strictness takes no list."""
    return tuple(tuple(row) if isinstance(row, list) else row for row in rows) if isinstance(rows, list) else rows
