"""The checks, in the order in which they run. Each asks one question of a live server and never raises.

A check is a function of a `Patient`; what it needs of the server is what any OpenAI-compatible server has. Where a
server does not show what a check looks for, the finding is "unknown", not "fine".
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from breakeven.lab.arms.prometheus import rise
from breakeven.lab.client.parse import OVERLONG, error_code, says_overlong
from breakeven.lab.client.types import RequestResult
from breakeven.lab.doctor.finding import Finding, Status
from breakeven.lab.doctor.patient import ANSWER_TOKENS, QUESTION, Patient, Whole

FINE, NOTE, WRONG, UNKNOWN = Status.FINE, Status.NOTE, Status.WRONG, Status.UNKNOWN

_BUFFERED_SHARE = 0.1  # of an answer's time, from its first chunk to its last: less is not a stream
_WARM_RATIO = 0.6  # of the first TTFT: a repeated long prompt that answers faster than that was cached
_CACHED_NOISE = 0.2  # share of a fresh prompt that a template's common beginning may be
_DATE_TOLERANCE_S = 3.0
_MAX_OVERLONG = 300_000  # words; no body beyond a few MB is sent
# Text that any n-gram drafter continues with ease.
_REPETITIVE = "Repeat exactly this line ten times, and write nothing else: " + "red blue green red blue green " * 6
_NEUTRAL: Mapping[str, Any] = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
_LONG = " ".join(f"Item {n} of the list is number {n * 7919 % 1000}." for n in range(40))


def _failed(check: str, answer: RequestResult) -> Finding:
    return Finding(check, WRONG, f"the request failed: {answer.error}", "mend this first: nothing can be measured")


def health(patient: Patient) -> Finding:
    """Is there a route that says when the server is ready?"""
    answer = patient.get("/health")
    if answer is None:
        return Finding(
            "health", WRONG, "/health does not answer in time", "look at the server's log: is it overloaded?"
        )
    if answer.status_code in (404, 405):
        return Finding("health", NOTE, "there is no /health; a campaign asks for a first token instead")
    if answer.status_code in (401, 403):
        return Finding("health", NOTE, f"/health refuses access (status {answer.status_code})")
    if answer.status_code >= 300:
        return Finding(
            "health", WRONG, f"/health says {answer.status_code}", "wait until the server is ready, or read its log"
        )
    return Finding("health", FINE, "/health says that the server is ready")


def server_date(patient: Patient) -> Finding:
    """Does the server's clock agree with ours? (Log lines and journals are compared by eye.)"""
    answer = patient.get("/v1/models")
    try:
        theirs = parsedate_to_datetime(answer.headers["date"]).timestamp() if answer is not None else None
    except (KeyError, ValueError, TypeError):
        theirs = None
    if theirs is None:
        return Finding("date", UNKNOWN, "the server's answers carry no date")
    off = theirs - time.time()
    if abs(off) <= _DATE_TOLERANCE_S:
        return Finding("date", FINE, "the server's clock agrees with this machine's")
    return Finding(
        "date",
        NOTE,
        f"the server's clock is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}: results use this machine's clock "
        f"alone, but its log lines will not match the journal",
        "set both by one time service",
    )


def streaming(patient: Patient) -> Finding:
    """Do tokens come as they are made, or all at the end?"""
    answer = patient.greedy
    if answer.error:
        return _failed("streaming", answer)
    if not answer.chunks:
        return Finding(
            "streaming", WRONG, "stream=true gave an answer without chunks", "use a server (and a proxy) that streams"
        )
    total = answer.end_ns - answer.send_ns
    span = answer.chunks[-1].arrival_ns - answer.chunks[0].arrival_ns
    tokens = answer.completion_tokens or len(answer.chunks)
    if tokens < ANSWER_TOKENS // 2:
        return Finding("streaming", UNKNOWN, f"the answer has only {tokens} tokens, too few to tell")
    if span >= _BUFFERED_SHARE * total:
        return Finding("streaming", FINE, f"{len(answer.chunks)} chunks over {span / 1e6:.0f} ms")
    short = patient.stream(max_tokens=1)
    if short.error is None and short.end_ns - short.send_ns >= total / 2:
        return Finding("streaming", UNKNOWN, "the prompt takes longer than the answer, too long to tell")
    return Finding(
        "streaming",
        WRONG,
        f"all chunks came within {span / 1e6:.0f} ms, after {(total - span) / 1e6:.0f} ms of silence: the stream is "
        f"buffered, so TTFT and TPOT are those of the buffer",
        "ask the server itself instead of a proxy, or turn the proxy's buffering off (nginx: proxy_buffering off)",
    )


def usage(patient: Patient) -> Finding:
    """Does a stream end with the number of its tokens?"""
    answer = patient.greedy
    if answer.error:
        return _failed("usage", answer)
    if answer.completion_tokens is None:
        return Finding(
            "usage",
            WRONG,
            "a stream carries no usage although stream_options.include_usage asks for it, so its tokens are not known",
            "update the server, or let its proxy pass stream_options; otherwise every cell is invalid (require_usage)",
        )
    if len(answer.chunks) > answer.completion_tokens + 1:
        return Finding(
            "usage",
            WRONG,
            f"usage counts {answer.completion_tokens} tokens, but {len(answer.chunks)} chunks came: it counts wrongly",
            "do not trust this server's token counts; report it to its makers",
        )
    if answer.prompt_tokens is None:
        return Finding("usage", NOTE, "usage has no prompt_tokens, so no cache hit rate can be computed")
    return Finding("usage", FINE, f"{answer.prompt_tokens} tokens in, {answer.completion_tokens} out")


def chunks(patient: Patient) -> Finding:
    """Is a chunk a token?"""
    answer = patient.greedy
    if answer.error:
        return _failed("chunks", answer)
    known = [chunk.tokens for chunk in answer.chunks if chunk.tokens is not None]
    if len(known) == len(answer.chunks) and known:
        if max(known) <= 1:
            return Finding("chunks", FINE, "every chunk holds one token, and the server counts them as it goes")
        return Finding(
            "chunks",
            NOTE,
            f"chunks are not tokens: up to {max(known)} in one, {len(answer.chunks)} chunks for "
            f"{answer.completion_tokens} tokens. The server counts per chunk, so TPOT is exact",
            "never read the time between chunks as the time between tokens",
        )
    if answer.completion_tokens is None:
        return Finding("chunks", UNKNOWN, "without usage the tokens of a chunk are not known")
    if answer.completion_tokens <= len(answer.chunks) + 1:
        return Finding(
            "chunks", FINE, f"{len(answer.chunks)} chunks for {answer.completion_tokens} tokens, not counted per chunk"
        )
    return Finding(
        "chunks",
        NOTE,
        f"chunks are not tokens: {len(answer.chunks)} for {answer.completion_tokens}, and the server does not say how "
        f"many each holds, so TPOT is estimated (one token in the first chunk) and token-weighted gaps are unavailable",
        "use a server that honours stream_options.continuous_usage_stats, and never read the time between chunks as "
        "the time between tokens",
    )


def max_tokens(patient: Patient) -> Finding:
    """Is the limit kept?"""
    answer = patient.stream(max_tokens=5)
    if answer.error:
        return _failed("max_tokens", answer)
    if answer.completion_tokens is None:
        return Finding("max_tokens", UNKNOWN, "without usage the length of an answer is not known")
    if answer.completion_tokens > 5:
        return Finding(
            "max_tokens",
            WRONG,
            f"max_tokens 5 gave {answer.completion_tokens} tokens: the limit is ignored, or tokens are counted wrongly",
            "arms that write different amounts do different work: mend the server, or choose one that keeps the limit",
        )
    if answer.finish_reason != "length" and answer.completion_tokens == 5:
        return Finding("max_tokens", NOTE, f"cut at 5 tokens, but the finish reason is {answer.finish_reason!r}")
    return Finding("max_tokens", FINE, "an answer ends at max_tokens")


def stop_strings(patient: Patient) -> Finding:
    """Does a stop string end an answer before it is shown?"""
    answer = patient.greedy
    if answer.error:
        return _failed("stop", answer)
    middle = answer.text[len(answer.text) // 2 :].split()
    if len(middle) < 2:
        return Finding("stop", UNKNOWN, "the answer is too short to choose a stop string from")
    stop = middle[1]
    stopped = patient.stream(stop=[stop])
    if stopped.error:
        return Finding("stop", WRONG, f"a stop string is refused: {stopped.error}", "use a server that takes `stop`")
    if stop in stopped.text:
        return Finding(
            "stop",
            WRONG,
            f"the stop string {stop!r} is in the answer: stop strings are ignored, or shown when they should be held "
            f"back",
            "leave `stop` out of the campaign's sampling, or mend the server",
        )
    return Finding("stop", FINE, "a stop string ends the answer and is not shown")


def greedy(patient: Patient) -> Finding:
    """Does one request at temperature 0 give one text?"""
    answers = [patient.greedy, patient.stream(), patient.stream()]
    failed = next((answer for answer in answers if answer.error), None)
    if failed:
        return _failed("greedy", failed)
    if len({answer.text for answer in answers}) == 1:
        return Finding("greedy", FINE, "three times the same text at temperature 0")
    return Finding(
        "greedy",
        WRONG,
        "one request at temperature 0 gave different texts, so a difference between arms does not show that "
        "speculation "
        "changes the output",
        "compare texts in float32 or with the server's deterministic mode, and carry off against off as a third arm",
    )


def seed(patient: Patient) -> Finding:
    """Does one seed give one text at temperature 1?"""
    if patient.seed_is_honoured:
        return Finding("seed", FINE, "one seed gives one text at temperature 1")
    return Finding(
        "seed",
        WRONG,
        "the same seed gave two texts at temperature 1: `seed` is ignored",
        "set sampling.seed to null and use more blocks, or measure at temperature 0: arms do not get the same draws",
    )


def sampling(patient: Patient) -> Finding:
    """Does a temperature above 0 sample?"""
    texts = {patient.stream(temperature=1, seed=number).text for number in (101, 102, 103, 104)}
    if len(texts) > 1:
        return Finding("sampling", FINE, f"4 seeds at temperature 1 gave {len(texts)} texts")
    return Finding(
        "sampling",
        WRONG,
        "4 seeds at temperature 1 gave one text: it is greedy although sampling was asked for (top_k=1 in the model's "
        "generation_config.json does that)",
        "set top_k: -1 and top_p: 1 in the campaign's sampling, or start vLLM with --generation-config vllm",
    )


def defaults(patient: Patient) -> Finding:
    """Are sampling fields that a request leaves out neutral?"""
    if not patient.seed_is_honoured:
        return Finding("defaults", UNKNOWN, "without a seed that counts, two samples cannot be compared")
    for neutral in (_NEUTRAL, {"temperature": 1, "top_p": 1}):
        stated = patient.stream(seed=11, **neutral)
        if stated.error is None:
            break
    else:
        return Finding("defaults", UNKNOWN, f"the server refuses neutral sampling fields: {stated.error}")
    left_out = patient.stream(seed=11, temperature=None)
    if stated.text == left_out.text:
        return Finding("defaults", FINE, f"left out means neutral ({', '.join(neutral)})")
    return Finding(
        "defaults",
        WRONG,
        f"leaving out {', '.join(neutral)} gives another text than stating their neutral values: the server has "
        f"sampling "
        f"defaults of its own (such as the model's generation_config.json)",
        "state every sampling field in the campaign, or start the server without those (vLLM: --generation-config "
        "vllm)",
    )


def template(patient: Patient) -> Finding:
    """Do arguments of the chat template reach it?"""
    if not patient.options.chat:
        return Finding("template", UNKNOWN, "the completions route has no chat template")
    plain = _prompt(patient)
    if plain.prompt_tokens is None:
        return Finding("template", UNKNOWN, f"no prompt_tokens to tell by: {plain.words}")
    given = dict(patient.options.template_arguments)
    if given:
        changed = _prompt(patient, chat_template_kwargs=given)
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        if changed.status != 200:
            return Finding("template", WRONG, f"{named} is refused: {changed.words}", "leave it out of extra_body")
        if _differs(plain, changed):
            return Finding("template", FINE, f"{named} changes the prompt")
        return Finding(
            "template",
            WRONG,
            f"{named} leaves the prompt as it was, {plain.prompt_tokens} tokens: the argument is ignored, has its "
            f"default "
            f"value, or is not one of this template's",
            "look into the model's chat template for the name, and start the server so that it passes it on",
        )
    tried: list[tuple[str, dict[str, Any]]] = [
        ("add_generation_prompt", {"add_generation_prompt": False}),
        *((name, {"chat_template_kwargs": {name: True}}) for name in ("enable_thinking", "thinking")),
        *((name, {"chat_template_kwargs": {name: False}}) for name in ("enable_thinking", "thinking")),
    ]
    for name, fields in tried:
        changed = _prompt(patient, **fields)
        if changed.status == 200 and _differs(plain, changed):
            return Finding("template", FINE, f"{name} changes the prompt, so template arguments count")
    return Finding(
        "template",
        NOTE,
        "none of add_generation_prompt, enable_thinking and thinking changes the prompt: template arguments are "
        "ignored, "
        "or this template has none of these",
        "before you set chat_template_kwargs in a campaign, check yours with --template-arg NAME=VALUE",
    )


def _prompt(patient: Patient, **fields: Any) -> Whole:
    """An answer of one token, with the prompt's ids where the server takes that wish."""
    answer = patient.whole(max_tokens=1, return_token_ids=True, **fields)
    return answer if answer.status != 400 else patient.whole(max_tokens=1, **fields)


def _differs(a: Whole, b: Whole) -> bool:
    """Whether two answers came from different prompts."""
    return (a.prompt_tokens, a.prompt_ids) != (b.prompt_tokens, b.prompt_ids)


def bos(patient: Patient) -> Finding:
    """Does the prompt begin with the same token twice?"""
    ids = patient.whole("Hello", max_tokens=1, return_token_ids=True).prompt_ids
    if ids is None:
        body = patient.body("Hello")
        ids = patient.tokenize({name: body[name] for name in ("model", "messages", "prompt") if name in body})
    if ids is None or len(ids) < 2:
        return Finding(
            "bos",
            UNKNOWN,
            "the server shows no token ids of a prompt (return_token_ids, /tokenize), so a doubled BOS cannot be seen",
            "look at one tokenised prompt in the server's log",
        )
    if ids[0] == ids[1]:
        return Finding(
            "bos",
            WRONG,
            f"the prompt begins with token {ids[0]} twice: the template writes BOS and the tokenizer adds another, "
            f"which "
            f"costs quality and acceptance",
            "send add_special_tokens: false in extra_body, or take BOS out of the chat template",
        )
    return Finding("bos", FINE, f"the prompt begins with the tokens {ids[0]}, {ids[1]}")


def prefix_cache(patient: Patient) -> Finding:
    """Is the prefix cache warm where it should be cold, does the server say so, and can it be emptied?"""
    text = f"(reference {uuid.uuid4().hex[:12]})\n{_LONG}\nWhich item has the largest number?"
    first, second = patient.stream(text, max_tokens=2), patient.stream(text, max_tokens=2)
    for answer in (first, second):
        if answer.error:
            return _failed("prefix cache", answer)
    if first.cached_tokens and first.prompt_tokens and first.cached_tokens > _CACHED_NOISE * first.prompt_tokens:
        return Finding(
            "prefix cache",
            WRONG,
            f"{first.cached_tokens} of {first.prompt_tokens} tokens of a prompt never sent before are said to be "
            f"cached",
            "the hit rate cannot be trusted: report it to the server's makers",
        )
    reports = second.cached_tokens is not None
    ratio = _ttft(second) / max(1e-9, _ttft(first))
    warm = bool(second.cached_tokens) if reports else ratio < _WARM_RATIO
    seen = f"a repeated prompt is answered in {ratio:.2f} of the time" + (
        f", {second.cached_tokens} of its {second.prompt_tokens} tokens cached" if reports else ", no hits reported"
    )
    if not warm:
        off = "the prefix cache is off or not hit" if reports else "no sign of a prefix cache"
        return Finding("prefix cache", FINE, f"{off}: {seen}")
    reset = patient.reset()
    if reset is None or not 200 <= reset.status_code < 300:
        status = "nothing" if reset is None else f"status {reset.status_code}"
        return Finding(
            "prefix cache",
            NOTE,
            f"{seen}; it cannot be emptied (POST to the reset route gives {status}), so a campaign salts its prompts",
            "give --reset-url if there is another route; vLLM has it with VLLM_SERVER_DEV_MODE=1"
            + ("" if reports else ", and reports hits with --enable-prompt-tokens-details"),
        )
    third = patient.stream(text, max_tokens=2)
    fresh = (
        (third.cached_tokens or 0) <= _CACHED_NOISE * (third.prompt_tokens or 1)
        if reports
        else _ttft(third) > _WARM_RATIO * _ttft(first)
    )
    if not fresh:
        return Finding(
            "prefix cache",
            WRONG,
            f"{seen}; a reset says that it succeeded, but the prompt is still cached"
            + (f" ({third.cached_tokens} tokens)" if reports else ""),
            "leave reset_url out of the campaign, so that prompts are salted",
        )
    if not reports:
        return Finding(
            "prefix cache",
            NOTE,
            f"{seen}, and after a reset it takes as long as at first: there is a cache whose hit rate is not reported",
            "vLLM reports it with --enable-prompt-tokens-details; without it a warm cell passes unnoticed",
        )
    return Finding("prefix cache", FINE, f"{seen}; a reset empties it")


def _ttft(answer: RequestResult) -> float:
    return (answer.chunks[0].arrival_ns if answer.chunks else answer.end_ns) - answer.send_ns


def speculation(patient: Patient) -> Finding:
    """Are there counters of speculation, and do they move?"""
    expected = patient.options.expect_speculation
    before = patient.counters()
    answer = patient.stream(_REPETITIVE, max_tokens=2 * ANSWER_TOKENS)
    after = patient.counters()
    tokens = answer.completion_tokens
    several = tokens is not None and tokens > len(answer.chunks) + 1
    if after is None:
        return Finding(
            "speculation",
            WRONG if expected else NOTE,
            "there is no /metrics that can be read, so nothing is known of drafts and acceptance",
            "start the server with its metrics on (SGLang: --enable-metrics; llama.cpp: --metrics), or give "
            "--metrics-url",
        )
    if not after:
        if expected or (several and expected is None):
            why = "you say that it speculates" if expected else f"{len(answer.chunks)} chunks held {tokens} tokens"
            return Finding(
                "speculation",
                WRONG if expected else NOTE,
                f"/metrics has no counters of speculation, although {why}: acceptance cannot be measured, nor whether "
                f"anything is drafted at all",
                "check the server's speculation flags in its log; a server without such counters can be measured for "
                "speed only",
            )
        return Finding("speculation", FINE, "no counters of speculation: it is off")
    risen = rise(before or {}, after)
    if risen.problems:
        return Finding(
            "speculation",
            WRONG,
            f"the counters cannot be right: {risen.problems[0]}",
            "read them from one place, with nothing that resets them; report it to the server's makers",
        )
    drafts = risen.values.get("num_drafts", 0.0)
    if not drafts:
        return Finding(
            "speculation",
            NOTE if expected is False else WRONG,
            f"there are counters of speculation, and they stood still over {tokens} tokens of text that is easy to "
            f"draft: "
            f"speculation is silently off, or its drafter finds nothing",
            "look for a warning in the server's log (SGLang falls back when flags do not fit together; a batch-size "
            "schedule may say 0 tokens); if it is meant to be off, say --no-speculation",
        )
    if expected is False:
        return Finding(
            "speculation", WRONG, f"{drafts:g} drafts, though it should be off", "restart it without the flags"
        )
    accepted = risen.values.get("num_accepted_tokens", 0.0)
    if tokens is not None and accepted + drafts > max(tokens, 1) + risen.values.get("num_draft_tokens", 0.0) / drafts:
        return Finding(
            "speculation",
            WRONG,
            f"the counters claim {accepted + drafts:g} tokens from speculation, and {tokens} were received: tokens "
            f"behind "
            f"the end are counted, or someone else uses the server",
            "measure while nobody else does; compare acceptance with the requests' own counters",
        )
    beyond = max(0, (tokens or 0) - len(answer.chunks))
    if accepted < beyond / 2:
        return Finding(
            "speculation",
            WRONG,
            f"the counters claim {accepted:g} accepted tokens, but the chunks hold {beyond} beyond one each: a rank is "
            f"missing from them, or chunks gather several steps",
            "read the metrics of every rank (one URL that sums them)",
        )
    return Finding(
        "speculation",
        FINE,
        f"{drafts:g} drafts, {accepted:g} accepted tokens: {1 + accepted / drafts:.2f} tokens a step",
    )


def context(patient: Patient) -> Finding:
    """What happens to a prompt that does not fit?"""
    limit = patient.context_limit
    if limit is None:
        return Finding("context", UNKNOWN, "/v1/models tells no context limit, so none was tried")
    if limit > _MAX_OVERLONG:
        return Finding("context", UNKNOWN, f"the context limit is {limit} tokens, too long to try")
    answer = patient.whole(" ".join(f"w{n % 997}" for n in range(limit + 64)), max_tokens=1)
    if 400 <= answer.status < 500:
        code = error_code(answer.message)
        said = f"a prompt beyond the limit of {limit} tokens is refused ({answer.status}{', ' + code if code else ''})"
        if code != OVERLONG and not says_overlong(answer.words):
            return Finding(
                "context",
                NOTE,
                f"{said}, and neither its code nor its words tell that it was too long: {answer.words}",
                f"clients that shorten their prompt by themselves look for the code {OVERLONG}, as OpenAI's do",
            )
        return Finding("context", FINE, said)
    if answer.status == 200:
        return Finding(
            "context",
            WRONG,
            f"a prompt of more than {limit} tokens, the limit, is answered: it was cut in silence to "
            f"{answer.prompt_tokens} tokens",
            "turn the cutting off (SGLang: no --allow-auto-truncate), or keep prompts below the limit",
        )
    return Finding(
        "context",
        WRONG,
        f"a prompt beyond the limit of {limit} tokens ends in status {answer.status}: {answer.words}",
        "keep prompts below the limit: one that is longer fails, or takes the server down",
    )


def still_alive(patient: Patient) -> Finding:
    """Does it still answer as it did at first?"""
    answer = patient.stream(QUESTION, max_tokens=2)
    if answer.error:
        return Finding("alive", WRONG, f"it no longer answers: {answer.error}", "read the server's log")
    return Finding("alive", FINE, "it still answers after all of this")


CHECKS: tuple[Callable[[Patient], Finding], ...] = (
    health,
    server_date,
    streaming,
    usage,
    chunks,
    max_tokens,
    stop_strings,
    greedy,
    seed,
    sampling,
    defaults,
    template,
    bos,
    prefix_cache,
    speculation,
    context,
    still_alive,
)
