"""Lints of a run: what makes no cell invalid, but a reader must know. docs/gates.md lists them beside the gates.

Each is a function of what was asked for and what was measured, and gives sentences. A lint accuses nobody without
figures: its sentence carries them.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from scipy.stats import f as f_distribution

from breakeven.lab.campaign import AttachArm, Campaign, CommandArm, EmbeddedArm, Speculation
from breakeven.lab.data_files import incomplete
from breakeven.lab.engines import EngineArm, EngineSpeculation
from breakeven.lab.engines.base import has_option, option_name, option_values
from breakeven.lab.engines.speculation import edges
from breakeven.lab.front_end import front_end_lints
from breakeven.lab.known_traps import started_with, trap_sentences
from breakeven.lab.metrics import CellMetrics, is_valid
from breakeven.lab.play import turn_of
from breakeven.lab.records import CellKey, CellRecord
from breakeven.lab.sent import unlike_prompts
from breakeven.lab.summary import ALL, AgreementSummary, Lint, Noise, Summary
from breakeven.lab.texts import COMMON_WORD_SHARE_MIN

MAX_LENGTH_STOPS = 0.95  # an arm that ends this share of its answers at max_tokens, where the other…
MIN_NATURAL_STOPS = 0.25  # …ends this share by itself, does not stop where it should
NOISY_TIMES = 3.0  # a level that scatters this many times as much as the calmest, …
NOISY_CONFIDENCE = 0.99  # …and by an F test of the two variances not by chance
WARMUP_DROP = 0.10  # how much slower the first cells of launches are than the same cells in other places
WARMUP_MIN_LAUNCHES = 3
CLOCK_DROP = 0.20  # of the run's median frequency
SAME_SAMPLES_MIN = 4  # pairs of one prompt under two seeds that must all agree before sampling is called greedy
SAME_SAMPLES_CHARACTERS = 40  # shorter answers may agree by chance
_SPECULATES = (
    *("--speculative-config", "-sc", "--speculative-algorithm"),  # vLLM, SGLang
    *("--spec-draft-model", "--model-draft", "-md"),  # llama.cpp, besides --spec-type
)


class Cell(Protocol):
    """A measured cell, reduced: its record (requests perhaps without chunks) and its metrics."""

    @property
    def record(self) -> CellRecord: ...

    @property
    def metrics(self) -> CellMetrics: ...


def cell_lints(campaign: Campaign, valid: Mapping[CellKey, Cell]) -> list[Lint]:
    """What the campaign and its valid cells give rise to, in a fixed order."""
    cells = list(valid.values())
    found = itertools.chain(
        _same(trap_sentences(campaign)),
        _same(thresholds(campaign)),
        _same(unlike_metrics(campaign)),
        unseen_cache(campaign, cells),
        _same(lengths_at_limit(campaign, cells)),
        _same(prompt_tokens(campaign, valid)),
        _same(unlike_prompts([cell.record for cell in cells], campaign.baseline)),
        _same(sampling_is_greedy(campaign, cells)),
        _same(speculation(campaign, cells)),
        impossible(cells),
        front_end_lints(campaign, [cell.record for cell in cells]),
        _same(ramps(campaign, cells)),
        _same(warm_up(campaign, cells)),
        throttled(cells),
        clocks_compared(campaign, cells),
        _same(unknown_servers(campaign, cells)),
    )
    return list(found)


def with_run_lints(campaign: Campaign, summary: Summary) -> Summary:
    """A measured run's summary, with what can be said of it as a whole.

    Acceptance on prompts that are no text is marked not valid.
    """
    found = itertools.chain(
        _same(prompts(summary.environment)),
        _same(incomplete(summary.environment)),
        _same(noisy_levels(campaign, summary.noise)),
        _same(texts_differ(summary.agreement)),
        _same(provenance(campaign, summary.environment)),
    )
    acceptance = summary.acceptance
    if random_suites(summary.environment):
        note = "acceptance not valid: the prompts are not real text"
        acceptance = [row.model_copy(update={"valid": False, "notes": [*row.notes, note]}) for row in acceptance]
    return summary.model_copy(update={"lints": [*summary.lints, *found], "acceptance": acceptance})


def _same(sentences: Iterator[str]) -> Iterator[Lint]:
    return (Lint(message=sentence, cells=[]) for sentence in sentences)


# The design


def thresholds(campaign: Campaign) -> Iterator[str]:
    """An arm that changes its speculation with the load is measured on both sides of each threshold, and near it."""
    for name, arm in campaign.arms.items():
        found = set(batch_thresholds(started_with(arm)[0]))
        if isinstance(arm, EngineArm) and isinstance(arm.speculation, EngineSpeculation):
            found |= set(edges(arm.speculation))
        if isinstance(arm, EmbeddedArm) and isinstance(arm.speculation, Speculation):
            rows = arm.speculation.schedule or ()
            found |= {last for (_, last, deep), (_, _, after) in itertools.pairwise(rows) if deep != after}
        for edge in sorted(found):
            below = [level for level in campaign.levels if edge / 2 < level <= edge]
            above = [level for level in campaign.levels if edge < level <= 2 * edge + 1]
            if not below or not above:
                side = "just below or above" if not below and not above else "just below" if not below else "just above"
                yield (
                    f"{name} changes its speculation between {edge} and {edge + 1} requests, and no level is measured"
                    f" {side} that: a policy may collapse at its own threshold, so add {edge} and {edge + 1} to the "
                    f"levels"
                )


def batch_thresholds(command: Sequence[str]) -> list[int]:
    """Batch sizes after which a server's flags change what is drafted.

    Read from vLLM's `num_speculative_tokens_per_batch_size`, a list of [first, last, tokens] with inclusive ranges, as
    JSON inside any flag.
    """
    edges: set[int] = set()
    for part in command:
        match = re.search(r'"num_speculative_tokens_per_batch_size"\s*:\s*(\[.*?\]\s*\])', part)
        if match is None:
            continue
        try:
            ranges = json.loads(match[1])
            rows = sorted((int(first), int(last), int(tokens)) for first, last, tokens in ranges)
        except (ValueError, TypeError):
            continue
        edges |= {last for (_, last, tokens), (_, _, after) in itertools.pairwise(rows) if tokens != after}
    return sorted(edges)


def _options(arm: object) -> set[str]:
    """The options of an arm's command line, by name; also those within one argument, as of `sh -c`."""
    words = " ".join(started_with(arm)[0]).replace("=", " ").split()
    return {option_name(word) for word in words if word.startswith("-")}


def unlike_metrics(campaign: Campaign) -> Iterator[str]:
    """Collecting metrics costs time in some servers, so arms must agree in it."""
    by_engine: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)  # engines name such flags differently
    for name, arm in campaign.arms.items():
        if isinstance(arm, CommandArm | EngineArm):
            found = (option for option in _options(arm) if re.search(r"metrics|log-(stats|req)", option))
            by_engine[arm.type][name] = frozenset(found)
    for flags in by_engine.values():
        if len(set(flags.values())) < 2:
            continue
        told = "; ".join(f"{name}: {' '.join(sorted(own)) or 'none'}" for name, own in flags.items())
        yield (
            f"the arms do not collect metrics alike ({told}), which can cost a server time by itself: give all arms the"
            " same flags, unless that is what you compare"
        )


def prompts(environment: Mapping[str, Any]) -> Iterator[str]:
    """Prompts of random tokens."""
    for name in random_suites(environment):
        yield (
            f"the prompts of {name} do not read like text (hardly a word repeats): acceptance on random tokens says"
            " nothing of real traffic, so it is marked not valid"
        )


def random_suites(environment: Mapping[str, Any]) -> list[str]:
    """Suites whose prompts are no text, by what `environment.json` says of them."""
    suites = environment.get("suites")
    if not isinstance(suites, Mapping):
        return []
    shares = {str(name): facts.get("common_word_share") for name, facts in suites.items() if isinstance(facts, Mapping)}
    return sorted(n for n, share in shares.items() if isinstance(share, float) and share < COMMON_WORD_SHARE_MIN)


# What was measured


def _by_arm(campaign: Campaign, cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {name: [] for name in campaign.arms}
    for cell in cells:
        found[cell.record.key.arm].append(cell)
    return found


_NO_CACHE = {"--no-enable-prefix-caching", "--disable-radix-cache"}  # of vLLM and SGLang


def unseen_cache(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[Lint]:
    """A server that does not report its prefix cache's hits could be warm without anybody noticing, if it has one.

    One whose cache is switched off is cold, hits or no hits, whatever its cells are declared to be.
    """
    for name, own in _by_arm(campaign, cells).items():
        warm = [c.record.key.id for c in own if campaign.setting(c.record.key.condition).cache == "warm"]
        if off := sorted(_NO_CACHE & _options(campaign.arms[name])):
            if warm:
                yield Lint(
                    message=f"{name} has its prefix cache switched off ({' '.join(off)}), though cells are declared"
                    " warm: they were measured cold",
                    cells=warm,
                )
            continue
        blind = [c for c in own if c.metrics.cached_share.value is None]
        if own and len(blind) == len(own):
            how = "resets" if own[0].record.extra.get("cache") == "reset" else "salts"
            rests = [f"that it was cold rests on {how}"] if len(warm) < len(own) else []
            rests += ["that it was warm, as declared, rests on sending its prompts beforehand"] if warm else []
            yield Lint(
                message=f"{name} does not report hits of its prefix cache: {' and '.join(rests)} alone"
                " (vLLM reports them with --enable-prompt-tokens-details)",
                cells=[],
            )


def lengths_at_limit(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[str]:
    """An arm that runs to max_tokens where the baseline stops by itself."""
    natural = [c for c in cells if campaign.setting(c.record.key.condition).natural]
    shares = {}
    for name, own in _by_arm(campaign, natural).items():
        reasons = [r.finish_reason for c in own for r in c.record.requests if is_valid(r)]
        if reasons:
            shares[name] = sum(reason == "length" for reason in reasons) / len(reasons)
    base = shares.get(campaign.baseline)
    for name, share in shares.items():
        if base is None or name == campaign.baseline:
            continue
        for runs_on, stops, high, low in (
            (name, campaign.baseline, share, base),
            (campaign.baseline, name, base, share),
        ):
            if high >= MAX_LENGTH_STOPS and low <= 1 - MIN_NATURAL_STOPS:
                yield (
                    f"{high:.0%} of {runs_on}'s answers end at max_tokens, {low:.0%} of {stops}'s: {runs_on} ignores "
                    f"the"
                    " end of text, so it does other work and its acceptance means nothing"
                )


def prompt_tokens(campaign: Campaign, valid: Mapping[CellKey, Cell]) -> Iterator[str]:
    """One request must be one prompt in every arm: another template, or a doubled BOS, shows in its token count."""
    sessions = campaign.workload.sessions
    own_context = sessions is not None and sessions.answers == "own"  # then only first turns are the same request
    different: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for key, cell in valid.items():
        other = valid.get(CellKey(key.block, campaign.baseline, key.condition, key.level))
        if other is None or key.arm == campaign.baseline:
            continue
        theirs = {
            (r.request_id.removeprefix(other.record.key.id), r.prompt_id): r.prompt_tokens
            for r in other.record.requests
        }
        for r in cell.record.requests:
            if own_context and turn_of(r.request_id) > 1:
                continue
            base = theirs.get((r.request_id.removeprefix(key.id), r.prompt_id))
            if base is not None and r.prompt_tokens is not None and base != r.prompt_tokens:
                different[key.arm].append((r.prompt_id, r.prompt_tokens, base))
    for arm, found in different.items():
        prompt, ours, base = found[0]
        yield (
            f"{arm} and {campaign.baseline} do not see the same prompts: {len(found)} requests differ in prompt tokens"
            f" ({prompt}: {ours} against {base}). Look at their chat templates, its arguments and BOS"
        )


def sampling_is_greedy(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[str]:
    """One prompt under several seeds, always the same text: sampling was asked for and not done."""
    sampled = {name: campaign.setting(name).sampling for name in {c.record.key.condition for c in cells}}
    drawn = {name: s for name, s in sampled.items() if s.temperature and not isinstance(s.seed, int)}
    for name, own in _by_arm(campaign, [c for c in cells if c.record.key.condition in drawn]).items():
        texts: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        for cell in own:
            for r in cell.record.requests:
                if is_valid(r) and len(r.text) >= SAME_SAMPLES_CHARACTERS:
                    texts[cell.record.key.condition, r.prompt_id, turn_of(r.request_id)].append(r.text)
        pairs = [(a, b) for found in texts.values() for a, b in itertools.pairwise(found)]
        if len(pairs) >= SAME_SAMPLES_MIN and all(a == b for a, b in pairs):
            yield (
                f"{name} gives one text per prompt whatever the seed, at temperature "
                f"{' and '.join(f'{t:g}' for t in sorted({s.temperature or 0.0 for s in drawn.values()}))}:"
                " it is greedy although sampling was asked for (top_k=1 in the model's generation_config.json does "
                "that)"
            )


def speculation(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[str]:
    """Arms that should draft and do not, should not and do, or cannot be seen to."""
    for name, own in _by_arm(campaign, cells).items():
        meant = speculates(campaign.arms[name])
        if not own or meant is None:
            continue
        known = [c for c in own if "num_drafts" in c.record.counters]
        drafts = sum(c.record.counters["num_drafts"] for c in known)
        if meant and not known:
            if all(c.metrics.acceptance_length.value is None for c in own):
                yield (
                    f"{name} is started with speculation, and its server has no counters of it: neither acceptance nor"
                    " whether anything was drafted can be seen"
                )
        elif meant and not drafts:
            yield (
                f"{name} is started with speculation, and its counters stood still in every cell: speculation was"
                " silently off, so the comparison is one of off with off (look for a warning in the server's log)"
            )
        elif not meant and drafts:
            yield f"{name} is started without speculation, and its counters show {drafts:g} drafts"


def speculates(arm: object) -> bool | None:
    """Whether an arm is started with speculation; None where that cannot be told (a server that is not ours)."""
    if isinstance(arm, EmbeddedArm):
        return isinstance(arm.speculation, Speculation) or any("--speculative-algorithm" in flag for flag in arm.flags)
    if isinstance(arm, EngineArm) and isinstance(arm.speculation, EngineSpeculation):
        return True
    if not isinstance(arm, CommandArm | EngineArm):
        return None  # attached, or imported from somebody else's file
    command = started_with(arm)[0]
    kind = next(option_values(command, "--spec-type"), None)
    if kind == "none":
        return False
    if kind is not None or has_option(command, *_SPECULATES):
        return True
    if isinstance(arm, EngineArm):
        return any(content.get("speculative_config") for content in arm.launch().files.values())
    return None


def impossible(cells: Sequence[Cell]) -> Iterator[Lint]:
    """Figures that cannot be."""
    where: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        for sentence in cannot_be(cell.metrics):
            where[sentence].append(cell.record.key.id)
    return (Lint(message=message, cells=names) for message, names in where.items())


def cannot_be(metrics: CellMetrics) -> Iterator[str]:
    """What of a cell's figures contradicts the rest, beyond rounding."""

    def above(a: float | None, b: float | None) -> bool:
        return a is not None and b is not None and a > b * (1 + 1e-6) + 1e-9

    for name in ("ttft", "tpot", "latency", "inter_chunk"):
        part = getattr(metrics, name)
        if above(part.p50.value, part.p90.value) or above(part.p90.value, part.p99.value):
            yield f"the quantiles of {name} fall: that cannot be"
        if part.mean.value is not None and part.mean.value < 0:
            yield f"the mean {name} is negative: that cannot be"
    if above(metrics.ttft.mean.value, metrics.latency.mean.value):
        yield "the mean TTFT is above the mean latency: that cannot be"
    whole, duration = metrics.throughput_whole_tok_s.value, metrics.duration_s.value
    tokens = metrics.completion_tokens.value
    if whole is not None and duration and tokens is not None and whole * duration < 0.5 * tokens:
        yield "the whole window's throughput times its duration is far below the tokens received: that cannot be"
    if above(metrics.cached_share.value, 1.0):
        yield "more prompt tokens are said to be cached than there are: that cannot be"


def ramps(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[str]:
    """Levels whose throughput includes ramp-up and drain."""
    levels = sorted({c.record.key.level for c in cells if c.metrics.throughput_window == "whole"} - {1})
    if levels:
        yield (
            f"at {_list(levels)} streams a cell has fewer than 2 requests a stream, so its throughput is taken over the"
            " whole cell, ramp-up and drain included, in which fewer streams are busy: raise requests_per_stream"
        )


def warm_up(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[str]:
    """Are cells measured first after a launch slower than the same cells elsewhere? Then the warm-up was too short."""
    for name, own in _by_arm(campaign, cells).items():
        groups: dict[tuple[str, int], list[tuple[bool, float]]] = defaultdict(list)
        for cell in own:
            position, rate = cell.record.extra.get("cell_position"), cell.metrics.throughput_tok_s.value
            if isinstance(position, int) and rate:
                groups[cell.record.key.condition, cell.record.key.level].append((position == 0, rate))
        shifts = [
            rate / statistics.median(later) - 1
            for found in groups.values()
            if (later := [r for first, r in found if not first])
            for first, rate in found
            if first
        ]
        if len(shifts) >= WARMUP_MIN_LAUNCHES and statistics.median(shifts) < -WARMUP_DROP:
            yield (
                f"{name}: the first cell after a launch is {-statistics.median(shifts):.0%} slower than the same "
                f"cell in"
                f" other places (median of {len(shifts)}): raise warmup.requests and warmup.max_tokens"
            )


def throttled(cells: Sequence[Cell]) -> Iterator[Lint]:
    """Cells during which the processor was much slower than in the rest of the run."""
    speeds = {c.record.key.id: mhz for c in cells if (mhz := _mhz(c.record)) is not None}
    if len(speeds) < 3:
        return
    usual = statistics.median(speeds.values())
    slow = [name for name, mhz in speeds.items() if mhz < usual * (1 - CLOCK_DROP)]
    if slow:
        lowest = min(speeds[name] for name in slow)
        yield Lint(
            message=f"the processor ran below {1 - CLOCK_DROP:.0%} of its usual {usual:.0f} MHz (down to {lowest:.0f}):"
            " it was throttled or saved power; fix its clock, or cool it",
            cells=slow,
        )


def clocks_compared(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[Lint]:
    """Cells of a client on several machines, whose clocks could not be compared as well as the campaign wants."""
    limit = campaign.client.max_clock_error_ms
    beyond: dict[str, float] = {}
    for cell in cells:
        client = cell.record.extra.get("client")
        clocks = client.get("clocks", ()) if isinstance(client, Mapping) else ()
        worst = max((float(clock["bound_ms"]) for clock in clocks), default=0.0)
        if worst > limit:
            beyond[cell.record.key.id] = worst
    if beyond:
        yield Lint(
            message=f"the clocks of the client's nodes are known to within {max(beyond.values()):.1f} ms only (limit: "
            f"{limit:g} ms, client.max_clock_error_ms): times within a request are not affected, but the common start, "
            f"the steady window and the streams in flight are; synchronise the nodes' clocks, or shorten their network",
            cells=list(beyond),
        )


def _mhz(record: CellRecord) -> float | None:
    found = [
        float(moment["cpu_mhz"])
        for name in ("before", "after")
        if isinstance(moment := record.extra.get(name), Mapping) and isinstance(moment.get("cpu_mhz"), (int, float))
    ]
    return min(found) if found else None


# What was concluded


def noisy_levels(campaign: Campaign, noise: Sequence[Noise]) -> Iterator[str]:
    """Levels that scatter so much more than others that they need more blocks.

    An F test of the two variances keeps a few blocks' chance apart from a noisy level; which level is the calmest is
    chosen by looking, so it is a lint and no verdict.
    """
    arms = dict.fromkeys(n.arm for n in noise)
    for arm in arms:
        own = [n for n in noise if n.arm == arm and n.condition == ALL and n.sd_log is not None and n.blocks > 2]
        if len(own) < 2:
            continue
        calmest = min(own, key=lambda n: n.sd_log or 0.0)
        calm = max(calmest.sd_log or 0.0, 1e-4)
        for n in own:
            times, found = (n.sd_log or 0.0) / calm, n.smallest_detectable
            sure = float(f_distribution.ppf(NOISY_CONFIDENCE, n.blocks - 1, calmest.blocks - 1))
            if found is None or found <= campaign.margin or times < NOISY_TIMES or times**2 < sure:
                continue
            yield (
                f"{arm} at {n.level} stream{'s' if n.level > 1 else ''}: launches scatter by {n.sd_log:.1%},"
                f" {times:.0f} times as much as at the calmest level, and {n.blocks} "
                f"blocks"
                f" show a change of {found:.0%} at the least there: add blocks before believing a smaller one"
            )


def texts_differ(agreement: Sequence[AgreementSummary]) -> Iterator[str]:
    """Greedy texts that should be the same and are not."""
    pooled = {row.arm for row in agreement if row.condition == ALL and row.level is None and row.expected}
    for row in agreement:
        # Where only some conditions are greedy, these are looked at one by one.
        if (row.condition == ALL) is not (row.arm in pooled) or row.level is not None:
            continue
        if not row.expected or row.identical == row.pairs:
            continue
        where = "" if row.condition == ALL else f", {row.condition}"
        lengths = f", {row.token_mismatches} of them in length" if row.token_mismatches else ""
        yield (
            f"{row.arm}{where}: {row.pairs - row.identical} of {row.pairs} greedy answers differ from the baseline's"
            f"{lengths}. Lossless speculation changes none; rounding in bf16 changes some even between two launches of "
            "one arm, so hold it against an arm that repeats the baseline"
        )


def unknown_servers(campaign: Campaign, cells: Sequence[Cell]) -> Iterator[str]:
    """Servers of which the run does not know the version, or how they were started."""
    for name, own in _by_arm(campaign, cells).items():
        if not own or isinstance(campaign.arms[name], EmbeddedArm):
            continue
        unknown = []
        if not any(c.record.extra.get("server_version") for c in own):
            unknown.append("its version (neither the server nor its log tells it)")
        if isinstance(campaign.arms[name], AttachArm):
            unknown.append("how it was started")
        if unknown:
            yield f"nobody can repeat {name} exactly: the run does not know {' and '.join(unknown)}"


def provenance(campaign: Campaign, environment: Mapping[str, Any]) -> Iterator[str]:
    """What another laboratory would need to repeat this and will not find."""
    missing = []
    versions = environment.get("versions")
    if not (isinstance(versions, Mapping) and versions.get("breakeven")):
        missing.append("the version of breakeven")
    processor = environment.get("cpu")
    if not (isinstance(processor, Mapping) and processor.get("model")) and not environment.get("gpus"):
        missing.append("the hardware")
    if not isinstance(environment.get("suites"), Mapping):
        missing.append("the hashes of the prompts")
    commands = environment.get("commands")
    commands = commands if isinstance(commands, Mapping) else {}
    missing += [
        f"the command of {name}"
        for name, arm in campaign.arms.items()
        if not isinstance(arm, AttachArm) and not commands.get(name)
    ]
    if missing:
        yield f"nobody can repeat this exactly, because the run does not record {', '.join(missing)}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
