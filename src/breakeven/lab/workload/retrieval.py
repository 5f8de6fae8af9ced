"""Long prompts with a question about what is in them: the suites retrieval-1k to retrieval-32k. Pure.

A prompt is a chronicle of an invented place (ferries, mills, gardens, choirs, …) and a question that one, two or
several of its entries answer. Everything is drawn from our own sentences by a fixed stream of bytes (SHAKE-256), so
the suites are the same on every machine and need no room in the package. Break-even moves with the context's length
(MagicDec, arXiv 2408.11049), so the bands differ in length and in nothing else.

A band's name is the number of tokens that its prompts stay within, at `CHARACTERS_PER_TOKEN`, which is cautious:
digits are tokens of their own in many vocabularies. Prompts fill 85 to 97% of the band by that measure, which leaves
room for the template. The model's context must hold the band and the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from breakeven.lab.workload.prompt import Prompt

PREFIX: Final = "retrieval-"
BANDS: Final = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}
PROMPTS: Final = 200
CHARACTERS_PER_TOKEN: Final = 3.2

_PEOPLE = (
    "Ada Fenwick", "Bruno Castel", "Clara Oyelaran", "Dmitri Voss", "Edda Lindqvist", "Farid Nasser", "Greta Holm",
    "Hugo Marchetti", "Ines Carvalho", "Jonas Adler", "Keiko Tanabe", "Luca Brandt", "Mira Solberg", "Nadim Haddad",
    "Olga Petrenko", "Pavel Novak", "Quirin Huber", "Rosa Delgado", "Samuel Okoro", "Tilda Karlsson", "Umar Siddiqui",
    "Vera Antonova", "Wim de Graaf", "Xenia Pappas", "Yusuf Demir", "Zora Milic", "Anselm Krug", "Beatrix Noor",
    "Caspar Iwu", "Delia Moreau", "Emil Sand", "Fiona Mac Rae",
)  # fmt: skip
_PLACES = (
    "Alder Quay", "Birch Lane", "the Cooper's Yard", "Dove Hill", "Eastgate", "the Fishmarket", "Gannet Rock",
    "Hollow Mill", "Ivy Court", "Juniper Row", "Kiln Street", "the Lower Weir", "Marsh End", "Northbank",
    "the Old Mint",
    "Plum Orchard", "Quarry Bridge", "Ropewalk", "Saltern", "the Tannery", "Upper Lock", "Vine Terrace", "Westering",
    "the Yew Gate",
)  # fmt: skip
_THINGS = (
    "brass compass", "walnut cabinet", "set of tide tables", "bundle of letters", "silver inkwell", "painted fan",
    "box of glass plates", "cello without strings", "ledger bound in green cloth", "ship's bell", "map of the marshes",
    "sack of seed potatoes", "pair of skates", "barometer", "copper still", "embroidered flag", "music stand",
    "chest of tea", "telescope", "wooden horse", "clock with one hand", "roll of sailcloth", "basket of pears",
    "lantern of blue glass",
)  # fmt: skip
_TRADES = (
    "ferryman", "glazier", "schoolteacher", "midwife", "carpenter", "beekeeper", "clockmaker", "gardener", "baker",
    "surveyor", "bookbinder", "lamplighter", "apothecary", "rope maker", "organist", "miller",
)  # fmt: skip
_WEATHER = (
    "a hard frost", "three days of rain", "fog that did not lift until noon", "the first warm wind of the year",
    "a thunderstorm", "snow to the window sills", "an unusually low tide", "a drought in its fifth week",
    "a clear night with many falling stars", "hail the size of cherries",
)  # fmt: skip
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_TOWNS = (
    "Vellmouth", "Sarnholm", "Ostrava Bay", "Little Pelham", "Grunau", "Castelmar", "Norrvik", "Tarn Bridge", "Almeida",
    "Kestrel Sound", "Brankow", "Lindos Reach",
)  # fmt: skip

# What happened, after who did it. The slots are filled from the lists above and with numbers.
_DEEDS = (
    "{person}, the {trade}, brought a {thing} to {place} and was paid {n} crowns for it.",
    "After {weather} the path to {place} was closed, and {person} led {n} people round by the upper road.",
    "At {place} {person} counted {n} herons before breakfast, which nobody believed until {other} had seen them too.",
    "{person} asked the council for {n} crowns to mend the roof at {place}; {other} spoke against it.",
    "A {thing} was found under the floor at {place}. {person} says that it belonged to the {trade} who lived there.",
    "{person} and {other} agreed to share the garden behind {place}, {n} rows for each.",
    "The {trade} of {place} took {person} as an apprentice for {n} months.",
    "During {weather} the boat from {place} was {n} minutes late, and {person} lost a {thing} overboard.",
    "{person} sold {n} jars of honey at {place} and kept the last one for {other}.",
    "The children of {place} put on a play in which {person} was the moon and {other} a reluctant {trade}.",
    "{person} has repaired the {thing} that stood in the window at {place}; it took {n} evenings.",
    "A letter for {person} lay at {place} for {n} days, because the {trade} could not read the name.",
    "{other} won the race from {place} to the harbour by {n} yards. {person} protested, and then laughed.",
    "In the evening {person} read aloud at {place} to {n} listeners, among them the {trade} and his dog.",
    "{person} planted {n} young trees along the wall of {place}, all of them quince.",
    "The bell at {place} rang {n} times for no reason that {person} could discover.",
    "{person} lent {other} a {thing} against a promise and the key to {place}.",
    "Because of {weather} the market moved to {place}, where {person} sold everything but a {thing}.",
)
_REMARKS = (
    "Nothing else of note.",
    "The water stood {n} inches above the mark.",
    "Bread is dearer again.",
    "The lamps were lit at half past {hour}.",
    "Two strangers asked for the way and were given soup.",
    "{other} was seen at the window, reading.",
    "The swallows are {gone}.",
    "I slept badly and dreamt of {place}.",
    "It is to be hoped that the {trade} returns before winter.",
    "The accounts are to be found with {other}.",
    "Those who were there will remember the smell of smoke and apples.",
    "An entry in another hand has been crossed out here.",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a chronicle, and the facts in it that questions ask about."""

    number: int
    date: str
    person: str
    other: str
    place: str
    text: str


class _Draw:
    """Numbers from one stream of bytes, the same for the same name."""

    def __init__(self, name: str, size: int = 65536) -> None:
        self._data = hashlib.shake_256(f"breakeven retrieval 1 {name}".encode()).digest(size)
        self._at = 0

    def below(self, bound: int) -> int:
        """A whole number from 0 to bound − 1. The stream begins again at its end, longer than any use of it."""
        if self._at + 4 > len(self._data):
            self._at = 1  # out of step with the first round
        value = int.from_bytes(self._data[self._at : self._at + 4], "big")
        self._at += 4
        return value * bound >> 32

    def of(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def several(self, items: Sequence[str], count: int) -> list[str]:
        """`count` different ones."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def _entry(draw: _Draw, number: int, year: int, day: int) -> Entry:
    person = draw.of(_PEOPLE)
    other = draw.of([name for name in _PEOPLE if name != person])
    place = draw.of(_PLACES)
    month, of_month = divmod(day, 28)  # no month is shorter
    date = f"{of_month + 1} {_MONTHS[month % 12]} {year + month // 12}"

    def fill(template: str) -> str:
        return template.format(
            person=person,
            other=other,
            place=place,
            thing=draw.of(_THINGS),
            trade=draw.of(_TRADES),
            weather=draw.of(_WEATHER),
            n=draw.below(87) + 3,
            hour=draw.of(("four", "five", "six", "seven", "eight")),
            gone=draw.of(("gone", "back", "late this year", "nesting under the bridge")),
        )

    sentences = [fill(template) for template in draw.several(_DEEDS, 2)]
    sentences += [fill(template) for template in draw.several(_REMARKS, draw.below(3))]
    body = " ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)
    return Entry(number, date, person, other, place, f"Entry {number}. {date}, {place}. {body}")


def _ask_date(draw: _Draw, entries: Sequence[Entry]) -> str:
    entry = entries[draw.below(len(entries))]
    return f"What happened on {entry.date} at {entry.place}? Answer in one or two sentences, from the chronicle only."


def _ask_quote(draw: _Draw, entries: Sequence[Entry]) -> str:
    entry = entries[draw.below(len(entries))]
    return f"Quote entry {entry.number} word for word, and nothing else."


def _ask_person(draw: _Draw, entries: Sequence[Entry]) -> str:
    person = entries[draw.below(len(entries))].person
    return f"List the numbers and dates of all entries that mention {person}, with a few words on each."


def _ask_place(draw: _Draw, entries: Sequence[Entry]) -> str:
    place = entries[draw.below(len(entries))].place
    return f"Who is named in connection with {place}? Give each name once, in the order in which they appear."


def _ask_two(draw: _Draw, entries: Sequence[Entry]) -> str:
    one, two = (entries[draw.below(len(entries))] for _ in range(2))
    return (
        f"Compare entries {one.number} and {two.number}: which people, places and numbers do they have in common, and "
        f"where do they differ?"
    )


def _ask_summary(draw: _Draw, entries: Sequence[Entry]) -> str:
    start = draw.below(max(1, len(entries) - 4))
    last = entries[min(len(entries) - 1, start + 4)].number
    return f"Summarise entries {entries[start].number} to {last} for a reader who was away, in at most eighty words."


def _ask_table(draw: _Draw, entries: Sequence[Entry]) -> str:
    start = draw.below(max(1, len(entries) - 5))
    last = entries[min(len(entries) - 1, start + 5)].number
    return f"Make a table of entries {entries[start].number} to {last} with the columns number, date, place and people."


def _ask_first(draw: _Draw, entries: Sequence[Entry]) -> str:
    person = entries[draw.below(len(entries))].other
    return f"When does {person} appear for the first time, when for the last, and what is reported on each occasion?"


_QUESTIONS: tuple[Callable[[_Draw, Sequence[Entry]], str], ...] = (
    _ask_date, _ask_quote, _ask_person, _ask_place, _ask_two, _ask_summary, _ask_table, _ask_first,
)  # fmt: skip
_OPENINGS = (
    "Below is a part of the chronicle of {town}, kept by its {trade}. Read it and answer the question at its end.",
    "The following notes were made in {town}. They are complete for the time they cover. A question follows them.",
    "Here is what the {trade} of {town} wrote down. Afterwards I have a question about it.",
    "From the town book of {town}, copied without changes:",
)


def chronicle(band: str, index: int) -> tuple[str, tuple[Entry, ...], str]:
    """Opening, entries and question of prompt `index` (from 0) of a band. KeyError for a band that there is not."""
    limit = BANDS[band] * CHARACTERS_PER_TOKEN
    draw = _Draw(f"{band} {index}", size=4 * 40 * (int(limit) // 150 + 40))
    opening = draw.of(_OPENINGS).format(town=draw.of(_TOWNS), trade=draw.of(_TRADES))
    room = limit * (0.85 + 0.12 * draw.below(1000) / 1000) - len(opening) - 200
    year, day = 1790 + draw.below(120), draw.below(28)
    entries: list[Entry] = []
    while room > 0:
        entry = _entry(draw, len(entries) + 1, year, day)
        room -= len(entry.text) + 2
        if room < 0 and entries:
            break
        entries.append(entry)
        day += draw.below(6) + 1
    question = _QUESTIONS[index % len(_QUESTIONS)](draw, entries)
    return opening, tuple(entries), question


def retrieval_prompts(domain: str) -> list[Prompt]:
    """The prompts of `retrieval-1k` and so on. KeyError for a band that there is not."""
    band = domain.removeprefix(PREFIX)
    prompts = []
    for index in range(PROMPTS):
        opening, entries, question = chronicle(band, index)
        text = "\n\n".join([opening, *(entry.text for entry in entries), question])
        prompts.append(Prompt(f"{domain}-{index + 1:03d}", domain, ({"role": "user", "content": text},)))
    return prompts
