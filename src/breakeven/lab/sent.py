"""What was sent and what the servers made of it: sampling, seed rule, and whether all arms saw the same prompts. Pure.

From what the runner noted in each cell. A hash of the rendered prompt is known only where a server tells its token ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from breakeven.lab.records import CellRecord
from breakeven.lab.summary import SentSummary


def rendered_sha256(record: CellRecord) -> str | None:
    """The hash of the cell's rendered prompts; None where the server does not tell them."""
    found = record.extra.get("rendered")
    value = found.get("sha256") if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else None


def sent_summaries(records: Sequence[CellRecord]) -> list[SentSummary]:
    """A row for each condition, in the order of the records; those without a note of what was sent are passed over."""
    groups: dict[str, list[CellRecord]] = defaultdict(list)
    for record in records:
        if isinstance(record.extra.get("sampling"), Mapping):
            groups[record.key.condition].append(record)
    return [_summary(condition, found) for condition, found in groups.items()]


def seed_words(seed: object) -> str:
    """The campaign's seed rule in plain words."""
    if seed is None:
        return "none is sent"
    if seed == "per_request":
        return "one per request, from the campaign's seed, block, condition, level and number; the same for all arms"
    return f"always {seed}"


def unlike_prompts(records: Sequence[CellRecord], baseline: str) -> Iterator[str]:
    """Arms whose servers made other tokens of the same requests, though they may be as many."""
    different: dict[str, int] = defaultdict(int)
    for group in _same_requests(records).values():
        base = group.get(baseline)
        for arm, value in group.items():
            if base is not None and value != base:
                different[arm] += 1
    for arm, cells in different.items():
        yield (
            f"{arm} and {baseline} do not render the same prompts: their token ids differ in {cells} cells (by each"
            " server's /tokenize). Look at their chat templates, the date or system message in them, and BOS"
        )


def _same_requests(records: Sequence[CellRecord]) -> dict[tuple[Any, ...], dict[str, str]]:
    """Valid cells that were sent the same prompts → arm → hash, where known. Arms that share a server have salts apart.

    A session that ended early has turns that were never sent: a hash over fewer prompts tells nothing of the others.
    """
    groups: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for record in records:
        value = rendered_sha256(record)
        if value is not None and not record.invalid:
            key, sent = record.key, record.extra["rendered"].get("prompts")
            groups[key.block, key.condition, key.level, record.extra.get("salt"), sent][key.arm] = value
    return groups


def _summary(condition: str, records: Sequence[CellRecord]) -> SentSummary:
    sampling = records[0].extra["sampling"]
    known: dict[str, bool] = {}
    for record in records:
        known[record.key.arm] = known.get(record.key.arm, True) and rendered_sha256(record) is not None
    arms = [arm for arm, all_of_them in known.items() if all_of_them]
    groups = _same_requests([r for r in records if r.key.arm in arms]).values()
    compared = [group for group in groups if len(group) > 1]
    return SentSummary(
        condition=condition,
        template=str(sampling.get("template", "chat")),
        fields=dict(sampling.get("fields") or {}),
        seed=seed_words(sampling.get("seed")),
        extra_body=dict(sampling.get("extra_body") or {}),
        rendered=arms,
        rendered_alike=all(len(set(group.values())) == 1 for group in compared) if compared else None,
    )
