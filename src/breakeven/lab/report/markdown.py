"""The summary as a short Markdown text, to paste into a pull request."""

from __future__ import annotations

import re

from breakeven.lab.data_files import incomplete
from breakeven.lab.report import policy, words
from breakeven.lab.summary import ALL, Comparison, Summary

_SHOWN = 10


def markdown(summary: Summary) -> str:
    """The same summary gives the same text."""
    c = summary.campaign
    lines = [f"## breakeven: {plain(summary.run.name)}", ""]
    if statement := words.statement(summary):
        lines += [f"> {plain(statement)}", ""]
    if warning := words.warning(summary):
        lines += [f"> **{plain(warning)}**", ""]
    for sentence in words.regime(summary):
        lines += [f"> {plain(sentence)}", ""]
    if words.imported(summary):
        lines += [
            f"> Imported from {plain(', '.join(summary.environment['imported']['tools']))}: not measured here.",
            "",
        ]
    chosen = policy.sentence(summary, policy.choices(summary))
    lines += [f"**{plain(chosen)}**", ""]
    schedule = policy.deployable(summary)
    if schedule.words:
        lines += [f"As a schedule: {plain(schedule.words)}.", ""]
    if schedule.flags:
        lines += ["```", schedule.flags.replace("`", "'"), "```", ""]
    if schedule.content:
        lines += ["with `policy-file`:", "", "```", *schedule.content.replace("`", "'").splitlines(), "```", ""]
    if schedule.words and schedule.notes:
        lines += [*(f"- {plain(note)}" for note in schedule.notes), ""]
    for arm in summary.arms:
        lines += [
            f"**{plain(words.answer(summary, arm))}** "
            f"{plain(words.break_even_sentence(summary.break_even[arm], c.confidence))}",
            "",
            f"| streams | {plain(c.baseline)} tok/s | {plain(arm)} tok/s | ratio [{c.confidence * 100:g}%] | verdict"
            " | acceptance length | TTFT | TPOT |",
            "|---:|---:|---:|:---|:---|---:|:---|:---|",
        ]
        for row in words.rows(summary, arm):
            accepted = row.acceptance.length.value if row.acceptance else None
            lines.append(
                f"| {row.level} | {words.rate(row.baseline)} | {words.rate(row.arm)} | {_ratio(row.comparison)}"
                f" | {_verdict(row.comparison)} | {'–' if accepted is None else f'{accepted:.2f}'}"
                f" | {_time(row.ttft)} | {_time(row.tpot)} |"
            )
        lines.append("")
        domains = [d for d in c.conditions if len(c.conditions) > 1]
        if domains:
            kind = "condition" if c.factors else "domain"
            lines += [f"By {kind}, ratio of throughput at {', '.join(map(str, c.levels))} streams:", ""]
            for domain in domains:
                found = [row.comparison for row in words.rows(summary, arm, domain)]
                lines.append(f"- {plain(domain)}: " + ", ".join(f"{_number(x)} ({words.outcome(x)})" for x in found))
            lines.append("")
        for sentence in (*words.condition_sentences(summary, arm), words.correction(summary, arm)):
            lines += [plain(sentence), ""] if sentence else []
        if outlook := words.outlook(summary, arm):
            lines += [plain(outlook), ""]
        for a in summary.agreement:
            if (a.arm, a.condition, a.level) == (arm, ALL, None):
                lines += [f"{a.identical} of {a.pairs} answers are identical to those of {plain(c.baseline)}.", ""]
    if needed := words.needed_rows(summary):
        lines += [
            "Acceptance length that breaks even, from arms whose acceptance was set (a condition, not a result):",
            "",
            f"| streams | needed | {c.confidence * 100:g}% interval | reached by real drafters | note |",
            "|---:|---:|:---|:---|:---|",
            *(
                f"| {row.level} | {row.length} | {row.interval} | {plain(row.reached)} | {plain(row.note)} |"
                for row in needed
            ),
            "",
        ]
    if summary.invalid:
        lines += ["Invalid cells:", ""]
        lines += [f"- {plain(x.cell)}: {plain('; '.join(x.reasons))}" for x in summary.invalid[:_SHOWN]]
        if len(summary.invalid) > _SHOWN:
            lines.append(f"- and {len(summary.invalid) - _SHOWN} more")
        lines.append("")
    said = [lint.message for lint in summary.lints if "no interval" in lint.message][:1]
    said += incomplete(summary.environment)
    lines += [f"- {plain(message)}" for message in said] + [""] * bool(said)
    kind = "repetitions" if words.imported(summary) else "blocks of server launches"
    lines.append(
        f"{words.blocks_compared(summary)} {kind}, margin {c.margin * 100:g}%; ratios are arm ÷ {plain(c.baseline)},"
        f" for TTFT and TPOT below 1 is better. breakeven {summary.run.breakeven_version}, campaign {c.sha256[:12]},"
        f" {summary.run.started[:10]}."
    )
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text of others, with everything escaped that Markdown or HTML would obey."""
    one_line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return re.sub(r"([\\`*_{}\[\]<>#|~!&@])", lambda found: f"&#{ord(found.group())};", one_line)


def _number(c: Comparison) -> str:
    return "–" if c.ratio is None else f"{c.ratio:.2f}"


def _verdict(c: Comparison) -> str:
    return words.CONDITION if c.synthetic else f"{words.SIGNS[c.verdict]} {c.verdict}"


def _ratio(c: Comparison) -> str:
    if c.ratio is None:
        return "–"
    if c.ci_low is None or c.ci_high is None:
        return f"{c.ratio:.2f} (no interval)"
    return f"{c.ratio:.2f} [{c.ci_low:.2f}, {c.ci_high:.2f}]"


def _time(c: Comparison | None) -> str:
    if c is None or c.ratio is None:
        return "–"
    return f"{c.ratio:.2f}" if c.synthetic else f"{c.ratio:.2f} {_verdict(c)}"
