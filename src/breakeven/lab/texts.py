"""What can be said of generated texts without knowing what they mean: do they loop, and do two arms agree?"""

from __future__ import annotations

import re
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOOP_TAIL_CHARACTERS = 4000  # how much of the end is looked at
LOOP_MIN_SPAN = 120  # a repeated tail shorter than this is a list or a table, not a loop
LOOP_MIN_REPEATS = 4
LOOP_COMPRESSION_MIN_CHARACTERS = 500  # below this zlib's ratio says little
LOOP_COMPRESSION_RATIO = 0.15  # prose is near 0.5, source code near 0.3

COMMON_WORDS = 20
COMMON_WORD_SHARE_MIN = (
    0.10  # of all words, the commonest 20: natural text and code have 0.2 to 0.45, random tokens 0.02
)
COMMON_WORD_MIN_WORDS = 300


def common_word_share(texts: Sequence[str]) -> float | None:
    """The share of all words that the 20 commonest make up; None below 300 words, which say too little.

    Text repeats itself by nature (Zipf's law), randomly drawn tokens do not. Scripts without spaces between words give
    few "words" and mostly None.
    """
    words = re.findall(r"\w+", " ".join(texts).lower())
    if len(words) < COMMON_WORD_MIN_WORDS:
        return None
    return sum(count for _, count in Counter(words).most_common(COMMON_WORDS)) / len(words)


def is_looping(text: str) -> bool:
    """Has the text fallen into repetition? Speculation accepts loops far too well, so their share is reported.

    True by either of two rules, fixed beforehand:
    1. the text ends in at least `LOOP_MIN_REPEATS` (4) copies of one unit (the last may be cut) that span at least
       `LOOP_MIN_SPAN` (120) characters;
    2. zlib shrinks the last 4,000 characters, of at least 500, below 15% of their UTF-8 size (loops with small
       changes, such as a counter).
    """
    tail = text[-LOOP_TAIL_CHARACTERS:]
    repeats = _prefix_matches(tail[::-1])
    for period in range(1, len(tail) // LOOP_MIN_REPEATS + 1):
        if repeats[period] + period >= max(LOOP_MIN_REPEATS * period, LOOP_MIN_SPAN):
            return True
    if len(tail) < LOOP_COMPRESSION_MIN_CHARACTERS:
        return False
    raw = tail.encode(errors="replace")
    return len(zlib.compress(raw, 9)) < LOOP_COMPRESSION_RATIO * len(raw)


def _prefix_matches(text: str) -> list[int]:
    """The Z function: at i, the length of the longest common prefix of `text` and `text[i:]`, in linear time."""
    size = len(text)
    z = [size] + [0] * (size - 1) if size else [0]
    left = right = 0
    for i in range(1, size):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < size and text[length] == text[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two arms' texts for the same requests agree.

    `first_divergence_median`: characters before the first difference, median over the pairs that differ (None: none
    does). `common_prefix_share`: of all characters (of the longer of each pair), the share before the first
    difference. `length_mismatches`: pairs of different length in characters; `token_mismatches`: in completion
    tokens, None where counts were not given.
    """

    pairs: int
    identical: int
    identical_share: float | None  # None: no pairs
    first_divergence_median: float | None
    common_prefix_share: float | None  # None: no characters
    length_mismatches: int
    token_mismatches: int | None


def first_divergence(a: str, b: str) -> int | None:
    """Characters before the first difference; None if equal. A prefix differs where it ends."""
    if a == b:
        return None
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def agreement(
    texts_a: Sequence[str],
    texts_b: Sequence[str],
    tokens_a: Sequence[int | None] | None = None,
    tokens_b: Sequence[int | None] | None = None,
) -> Agreement:
    """Compare texts pair by pair: `texts_a[i]` and `texts_b[i]` answer the same request.

    Raises ValueError when the sequences differ in length.
    """
    if len(texts_a) != len(texts_b):
        raise ValueError(f"texts must be paired, but there are {len(texts_a)} and {len(texts_b)}")
    divergences = [first_divergence(a, b) for a, b in zip(texts_a, texts_b, strict=True)]
    different = [d for d in divergences if d is not None]
    longest = [max(len(a), len(b)) for a, b in zip(texts_a, texts_b, strict=True)]
    common = sum(size if d is None else d for d, size in zip(divergences, longest, strict=True))
    token_mismatches = None
    if tokens_a is not None and tokens_b is not None:
        if not len(tokens_a) == len(tokens_b) == len(texts_a):
            raise ValueError(
                f"token counts must be paired with the texts, but there are {len(tokens_a)} and {len(tokens_b)} counts"
                f" for {len(texts_a)} pairs"
            )
        token_mismatches = sum(
            a is not None and b is not None and a != b for a, b in zip(tokens_a, tokens_b, strict=True)
        )
    pairs = len(texts_a)
    identical = pairs - len(different)
    return Agreement(
        pairs=pairs,
        identical=identical,
        identical_share=identical / pairs if pairs else None,
        first_divergence_median=statistics.median(different) if different else None,
        common_prefix_share=common / sum(longest) if sum(longest) else None,
        length_mismatches=sum(len(a) != len(b) for a, b in zip(texts_a, texts_b, strict=True)),
        token_mismatches=token_mismatches,
    )
