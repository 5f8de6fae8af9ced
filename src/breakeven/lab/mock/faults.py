"""The faults that a mock server can be told to have, by name. Pure data.

Each is something that a real server was seen to do (docs/gates.md says where each is caught). Faults of the wire and
of timing (broken JSON, cut streams, deaths, stalls) are fields of the script, because they take a number.
"""

from __future__ import annotations

from collections.abc import Mapping

FAULTS: Mapping[str, str] = {
    # What of a request is honoured
    "max_tokens_ignored": "answers go on for three tokens after max_tokens",
    "stop_ignored": "stop strings have no effect",
    "seed_ignored": "two requests with one seed give two texts",
    "greedy_forced": "a temperature above 0 has no effect, as with top_k=1 in the model's generation_config",
    "defaults_changed": "sampling fields that a request leaves out are not neutral",
    "template_ignored": "chat_template_kwargs and add_generation_prompt have no effect",
    "eos_ignored": "every answer goes on to max_tokens",
    "context_unchecked": "a prompt beyond the context limit is cut and answered, not refused",
    "bos_other": "a prompt begins with another token than in other servers of the model, and is as long",
    "context_uncoded": "a prompt beyond the context limit is refused without saying why",
    # What is answered
    "greedy_unsteady": "one request at temperature 0 gives two texts",
    "text_changed": "texts differ from those of a server without this fault: a drafter that is not lossless",
    "bos_doubled": "the prompt begins with two BOS tokens",
    "buffered": "a stream is sent in one piece when it is complete",
    # The prefix cache
    "cache_unreported": "usage does not say how many prompt tokens were cached",
    "cache_kept": "a reset of the prefix cache succeeds and empties nothing",
    "cache_without_reset": "there is no route that resets the prefix cache",
    # Counters
    "metrics_missing": "there is no /metrics",
    "counters_missing": "it drafts, and has no counters of it",
    "counters_still": "it has counters of speculation, and drafts nothing",
    "counters_of_one_rank": "only every second request is counted, as by one rank of two",
    "counters_past_end": "four accepted tokens a request are counted that lie behind its end",
    # Time
    "clock_skewed": "its Date header is an hour slow",
}
