"""The verdict table in a terminal: readable at 80 columns, without colour, and where only ASCII can be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from breakeven.lab.report import policy, words
from breakeven.lab.summary import Comparison, Summary
from breakeven.lab.verdict import Verdict

STYLES: dict[Verdict, str] = {"pays": "green", "hurts": "red", "equivalent": "cyan", "undecided": "yellow"}
_SHOWN = 8  # invalid cells and notes that are listed; the report has them all


@dataclass(frozen=True, slots=True)
class _Signs:
    """The symbols a terminal can show."""

    verdicts: Mapping[Verdict, str]
    arrow: str
    nothing: str


_UNICODE = _Signs(words.SIGNS, "→", "–")
_ASCII = _Signs({"pays": "+", "hurts": "-", "equivalent": "=", "undecided": "~"}, "->", "-")


def print_summary(summary: Summary, console: Console | None = None, report: Path | None = None) -> None:
    """Print the verdicts. `report`: the page's path, printed last if given."""
    console = console or Console()
    signs = _UNICODE if console.encoding.lower().replace("-", "").startswith("utf") else _ASCII
    out = _Printer(console, signs)
    out.head(summary)
    for arm in summary.arms:
        out.arm(summary, arm)
    out.schedule(summary)
    out.controls(summary)
    out.legend(summary)
    out.invalid(summary)
    out.notes(summary)
    if report is not None:
        console.print()
        console.print(Text.assemble("Report: ", (clean(str(report)), "bold")), soft_wrap=True)


def clean(text: str) -> str:
    """Text of others without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


@dataclass(frozen=True, slots=True)
class _Printer:
    console: Console
    signs: _Signs

    def head(self, summary: Summary) -> None:
        c, run = summary.campaign, summary.run
        blocks = f"{words.blocks_compared(summary)} block{'s' if c.blocks != 1 else ''}"
        facts = (
            f"{blocks}, {len(c.levels)} level{'s' if len(c.levels) != 1 else ''}, {', '.join(c.conditions)};"
            f" margin {c.margin * 100:g}%, {c.confidence * 100:g}% intervals"
        )
        self.console.print()
        self.console.print(Text.assemble((clean(run.name), "bold"), "  ", (self._shown(clean(facts)), "dim")))
        if statement := words.statement(summary):
            self._say(statement)
        if warning := words.warning(summary):
            self.console.print(Text(self._shown(f"! {warning}"), style="bold red"))
        for sentence in words.regime(summary):
            self._say(clean(sentence))

    def arm(self, summary: Summary, arm: str) -> None:
        c = summary.campaign
        pooled = "" if len(c.conditions) == 1 else f", {'conditions' if c.factors else 'domains'} pooled"
        self.console.print()
        self.console.print(Text.assemble((arm, "bold"), f" against {c.baseline}{pooled}"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False)
        table.add_column(Text("\nstreams"), justify="right", no_wrap=True)
        table.add_column(Text(self._shown(f"tokens/s\n{c.baseline} → {arm}")), justify="right", max_width=19)
        table.add_column(Text(f"ratio\n[{c.confidence * 100:g}% interval]"), justify="left", no_wrap=True)
        table.add_column(Text("\nverdict"), justify="left", no_wrap=True)
        table.add_column(Text("accept.\nlength"), justify="right", no_wrap=True)
        table.add_column(Text("TTFT\nratio"), justify="right", no_wrap=True)
        table.add_column(Text("TPOT\nratio"), justify="right", no_wrap=True)
        for row in words.rows(summary, arm):
            accepted = row.acceptance
            length = self.signs.nothing
            if accepted is not None and accepted.length.value is not None:
                length = f"{accepted.length.value:.2f}" + ("" if accepted.valid else "?")
            table.add_row(
                str(row.level),
                Text(self._shown(f"{words.rate(row.baseline)} → {words.rate(row.arm)}")),
                Text(self._shown(_ratio(row.comparison))),
                self._verdict(row.comparison),
                length,
                self._short(row.ttft),
                self._short(row.tpot),
            )
        self.console.print(table)
        self._say(words.break_even_sentence(summary.break_even[arm], c.confidence), "bold")
        self._say(words.sure_ranges(summary.break_even[arm]))
        self._say(words.correction(summary, arm))
        for sentence in words.condition_sentences(summary, arm):
            self._say(sentence)
        if outlook := words.outlook(summary, arm):
            self._say(outlook)
        self._say(self._agreement(summary, arm))

    def _agreement(self, summary: Summary, arm: str) -> str:
        for row in summary.agreement:
            if (row.arm, row.condition, row.level) == (arm, "all", None):
                text = f"{row.identical} of {row.pairs} answers are identical to those of {summary.campaign.baseline}"
                if row.first_divergence_median is not None:
                    text += f" (the others part after {row.first_divergence_median:.0f} characters, median)"
                if row.expected and row.identical < row.pairs:
                    few = 2 * row.identical < row.pairs
                    text += "; do they run the same model?" if few else "; in low precision near-ties fall either way"
                    return text if few else text + "."
                return text + "."
        return ""

    def legend(self, summary: Summary) -> None:
        symbols = "  ".join(f"{self.signs.verdicts[v]} {v}" for v in STYLES)
        self.console.print()
        self._say(
            f"{symbols}. Ratios are arm ÷ {summary.campaign.baseline}; for TTFT and TPOT below 1 is better, and the"
            " symbol is their own verdict."
            + (f" {summary.multiplicity.statement}" if summary.multiplicity is not None else "")
            + (" A length with ? is not valid." if any(not a.valid for a in summary.acceptance) else ""),
            "dim",
        )

    def schedule(self, summary: Summary) -> None:
        """The policy by load, where the verdicts give one; `breakeven policy` prints it for an engine."""
        found = policy.deployable(summary)
        if found.words:
            self.console.print()
            self._say(f"As a schedule: {found.words}" + (" (breakeven policy RUN: as flags)" if found.flags else ""))

    def controls(self, summary: Summary) -> None:
        """A/A and tails, where there are any."""
        if summary.aa is not None:
            self.console.print()
            self._say(summary.aa.statement)
        known = [row for row in summary.tails if row.ratio is not None and row.verdict != "undecided"]
        if known:
            self.console.print()
            self.console.print(Text("Tails", style="bold"))
        for row in known[:_SHOWN]:
            name = f"p{row.quantile * 100:g} of {words.METRIC_WORDS[row.metric]}"
            interval = "" if row.ci_low is None or row.ci_high is None else f" [{row.ci_low:.2f}, {row.ci_high:.2f}]"
            self._item(f"{row.arm} at {row.level}: {name} ×{row.ratio or 0:.2f}{interval}, {row.verdict}")
        if len(known) > _SHOWN:
            self._item(f"and {len(known) - _SHOWN} more; summary.json has them all")

    def invalid(self, summary: Summary) -> None:
        if not summary.invalid:
            return
        self.console.print()
        self.console.print(Text("Invalid cells", style="bold red"))
        for cell in summary.invalid[:_SHOWN]:
            self._item(f"{cell.cell}: {'; '.join(cell.reasons)}")
        if len(summary.invalid) > _SHOWN:
            self._item(f"and {len(summary.invalid) - _SHOWN} more; the report lists them")

    def notes(self, summary: Summary) -> None:
        if not summary.lints:
            return
        self.console.print()
        self.console.print(Text("Worth knowing", style="bold"))
        for lint in summary.lints[:_SHOWN]:
            where = f" ({len(lint.cells)} cell{'s' if len(lint.cells) != 1 else ''})" if lint.cells else ""
            self._item(lint.message + where)
        if len(summary.lints) > _SHOWN:
            self._item(f"and {len(summary.lints) - _SHOWN} more; the report lists them")

    def _verdict(self, comparison: Comparison) -> Text:
        if comparison.synthetic:
            return Text(words.CONDITION)
        v = comparison.verdict
        return Text(f"{self.signs.verdicts[v]} {v}", style=STYLES[v])

    def _short(self, comparison: Comparison | None) -> Text:
        if comparison is None or comparison.ratio is None:
            return Text(self.signs.nothing)
        if comparison.synthetic:
            return Text(f"{comparison.ratio:.2f}")
        v = comparison.verdict
        return Text(f"{comparison.ratio:.2f} {self.signs.verdicts[v]}", style=STYLES[v])

    def _say(self, text: str, style: str = "") -> None:
        if text:
            self.console.print(Text(self._shown(text), style=style))

    def _item(self, text: str) -> None:
        self.console.print(Padding(Text(self._shown(f"- {clean(text)}")), (0, 0, 0, 2)))

    def _shown(self, text: str) -> str:
        if self.signs is _UNICODE:
            return text
        for ours, plain in (("→", "->"), ("÷", "/"), ("–", "-"), ("×", "x"), ("−", "-"), ("≤", "<="), ("±", "+/-")):
            text = text.replace(ours, plain)
        return text.encode("ascii", "replace").decode()


def _ratio(c: Comparison) -> str:
    if c.ratio is None:
        return "–"
    if c.ci_low is None or c.ci_high is None:
        return f"{_three(c.ratio)} [no interval]"
    return f"{_three(c.ratio)} [{_three(c.ci_low)}, {_three(c.ci_high)}]"


def _three(ratio: float) -> str:
    """Two decimals near 1; never wider than five characters where it can be helped."""
    if ratio >= 99.95:
        return f"{ratio:.3g}"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"
