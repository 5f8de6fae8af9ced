"""A cell in the summary's terms: its figures with provenance, its counters and notes. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from breakeven.lab.front_end import lag
from breakeven.lab.quantity import Distribution, Provenance, Quantity
from breakeven.lab.records import CellRecord
from breakeven.lab.reduced import ReducedCell
from breakeven.lab.sent import rendered_sha256
from breakeven.lab.summary import CellSummary, Figure, InvalidCell


def invalid_cell(cell: ReducedCell) -> InvalidCell:
    """The reasons of an invalid cell."""
    key = cell.key
    return InvalidCell(
        cell=key.id, block=key.block, arm=key.arm, condition=key.condition, level=key.level,
        reasons=list(cell.record.invalid),
    )  # fmt: skip


def cell_summary(cell: ReducedCell) -> CellSummary:
    """The cell's row under `cells`."""
    key, m = cell.key, cell.metrics
    quantities: dict[str, Quantity] = {
        "throughput": m.throughput_tok_s,
        "throughput_whole": m.throughput_whole_tok_s,
        "throughput_steady": m.throughput_steady_tok_s,
        "requests_per_s": m.requests_per_s,
        "completion_tokens": m.completion_tokens,
        "prompt_tokens": m.prompt_tokens,
        "output_tokens_mean": m.output_tokens.mean,
        "duration": m.duration_s,
    }
    for name in ("ttft", "tpot", "latency", "inter_chunk", "token_gap", "send_lag"):
        part: Distribution = getattr(m, name)
        quantities |= {f"{name}_mean": part.mean, f"{name}_p50": part.p50, f"{name}_p90": part.p90}
        quantities[f"{name}_p99"] = part.p99
    quantities |= {
        "acceptance_length": m.acceptance_length,
        "draft_share": m.acceptance.draft_share,
        "tokens_per_step": m.acceptance.tokens_per_step,
        "looping_share": m.looping_share,
        "cached_share": m.cached_share,
        "client_cpu": Quantity(cell.record.client_cpu_s, "s", Provenance.MEASURED),
        **_load_quantities(cell.record),
        **_engine_quantities(cell.record),
    }
    return CellSummary(
        id=key.id,
        block=key.block,
        arm=key.arm,
        condition=key.condition,
        level=key.level,
        started=iso(cell.record.started_ns),
        valid=cell.valid,
        invalid=list(cell.record.invalid),
        requests=m.requests,
        failed=m.failed,
        metrics={name: figure(quantity) for name, quantity in quantities.items()},
        counters=dict(cell.record.counters),
        notes=notes(cell),
        bodies_sha256=cell.record.extra.get("bodies_sha256"),
        rendered_sha256=rendered_sha256(cell.record),
    )


def notes(cell: ReducedCell) -> list[str]:
    """The cell's own notes and those of its counters, each once."""
    problems = cell.record.extra.get("counter_problems") or []
    return list(dict.fromkeys([*cell.metrics.notes, *(str(problem) for problem in problems)]))


def _load_quantities(record: CellRecord) -> dict[str, Quantity]:
    """Offered and achieved rates, streams in flight and the client's headroom, as the runner noted them."""
    load = record.extra.get("load")
    if not isinstance(load, dict):
        return {}
    found = {
        name: Quantity(load.get(name), unit, provenance)
        for name, unit, provenance in (
            ("offered_per_s", "1/s", Provenance.DERIVED),
            ("sent_per_s", "1/s", Provenance.MEASURED),
            ("completed_per_s", "1/s", Provenance.MEASURED),
            ("in_flight_mean", "1", Provenance.MEASURED),
            ("in_flight_max", "1", Provenance.MEASURED),
        )
    }
    client = record.extra.get("client")
    if isinstance(client, dict):
        note = str(client.get("note", ""))
        found["client_events_per_s"] = Quantity(client.get("events_per_s"), "1/s", Provenance.MEASURED)
        found["client_capacity"] = Quantity(client.get("capacity_per_s"), "1/s", Provenance.ESTIMATED, note)
        found["client_headroom"] = Quantity(client.get("headroom"), "1", Provenance.ESTIMATED, note)
    return found


def _engine_quantities(record: CellRecord) -> dict[str, Quantity]:
    """The engine's own time for a request, and how many times as long answers took; nothing where it is not known."""
    if (found := lag(record)) is None:
        return {}
    times = record.extra["engine_times"]
    mean_ms = 1000 * times["engine_s"] / times["requests"]
    return {
        "engine_time_mean": Quantity(mean_ms, "ms", Provenance.SERVER_REPORTED, "queue and inference"),
        "engine_lag": Quantity(found, "1", Provenance.DERIVED, "from send to end, over the engine's own time"),
    }


def figure(quantity: Quantity) -> Figure:
    """A quantity as the summary writes it."""
    return Figure(value=quantity.value, unit=quantity.unit, provenance=quantity.provenance, note=quantity.note)


def iso(nanoseconds: int) -> str:
    """A moment in nanoseconds since 1970 as ISO 8601, UTC, to the millisecond."""
    moment = datetime.fromtimestamp(nanoseconds // 1_000_000_000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{nanoseconds // 1_000_000 % 1000:03d}Z"
