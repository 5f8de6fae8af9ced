"""Prometheus' text format of the engine's counters. Names follow vLLM's, after our prefix."""

from __future__ import annotations

from collections.abc import Iterable

from breakeven.engine.async_engine import EngineStatsProtocol
from breakeven.engine.config import SpeculationConfig

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def render_metrics(
    stats: EngineStatsProtocol, speculation: SpeculationConfig | None, model_name: str, waiting_for_place: int
) -> bytes:
    """The body of /metrics. Speculation counters appear only where speculation is configured, from zero on."""
    label = f'model_name="{_escape(model_name)}"'
    lines: list[str] = []

    def metric(kind: str, name: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP breakeven:{name} {help_text}")
        lines.append(f"# TYPE breakeven:{name} {kind}")
        lines.extend(f"breakeven:{name}{{{label}{extra}}} {value}" for extra, value in samples)

    def gauge(name: str, help_text: str, value: float) -> None:
        metric("gauge", name, help_text, [("", value)])

    def counter(name: str, help_text: str, value: float) -> None:
        metric("counter", f"{name}_total", help_text, [("", value)])

    gauge("num_requests_running", "Sequences being decoded or prefilled.", stats.running)
    gauge("num_requests_waiting", "Sequences waiting to run.", stats.waiting + waiting_for_place)
    used = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
    gauge("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", used)
    counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
    counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
    counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens)
    counter("num_preemptions", "Sequences put back for want of KV.", stats.preemptions)
    if speculation is not None:
        totals = stats.speculation
        counter("spec_decode_num_drafts", "Rounds that drafted at least one token.", totals.drafts)
        counter("spec_decode_num_draft_tokens", "Tokens drafted.", totals.draft_tokens)
        counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", totals.accepted_tokens)
        accepted = list(totals.accepted_per_position)
        accepted += [0] * (speculation.num_steps - len(accepted))
        metric(
            "counter",
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Drafted tokens accepted, by position in the draft (0: the first).",
            ((f',position="{position}"', count) for position, count in enumerate(accepted)),
        )
    return ("\n".join(lines) + "\n").encode()
