"""Reading tasks over articles that the target wrote itself: summaries, and questions about several passages.

Real use puts a long text before the drafter. Local material holds few long texts in plain prose, so the target writes
them, at temperature 1, and is then asked about them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from breakeven.train.prompts.catalogue import PEOPLE, PLACES, TOPICS
from breakeven.train.prompts.types import PromptRow, user

_SOURCE = "articles written by the target itself"
_MIN_WORDS = 60  # of an article that is worth a summary
_MAX_CHARACTERS = 4600

_ARTICLE_FORMS = (
    "Write a news article about {topic}.", "Write a long news report about an accident in {place}.",
    "Write a local news story in which {who} and {who2} disagree about {topic}. Quote both.",
    "Write a newspaper article about a trial. The accused is called {who}. Give names, dates and places.",
    "Write a report about a football match that {who} decided in the last minutes.",
    "Write an encyclopedia article about {topic}.", "Write an encyclopedia article about the history of {topic}.",
    "Write a detailed biography of {who}, who became famous for {topic}.",
    "Write a press report: scientists publish a new study about {topic}.",
    "Write an article for a magazine about a family from {place} and {topic}.",
    "Write a long paragraph of plain text about {topic} and {topic2}.",
    "Write a report on how {topic} changed between 1950 and today, with numbers.",
    "Write a news article about a politician called {who} who visited {place}.",
    "Write a story of several paragraphs about {who}, {who2} and {topic}.",
)  # fmt: skip
_SUMMARY_FORMS = (
    "Summarize: {text}", "Summarize the following article.\n\n{text}", "{text}\n\nTL;DR:",
    "Give a short summary of this text: {text}", "What are the main points of this article?\n\n{text}",
    "Summarise this in three sentences.\n\n{text}", "{text}\n\nSummarize the article above.",
    "Write a headline and two bullet points for this report:\n{text}",
)  # fmt: skip
_READING_LEADS = (
    "Use the following passages to answer the question.", "Context:", "Here are some documents.",
    "Answer the question from the passages below. If they do not hold the answer, say so.",
    "Answer the question based on the context below.", "You are given several search results.",
)  # fmt: skip
_QUESTIONS = (
    "What do the passages say about {word}?", "what is {word}", "who is {word}", "Why is {word} important?",
    "When did this happen: {word}?", "Which passage is about {word}, and what does it say?",
    "how does {word} relate to {word2}", "What is the connection between {word} and {word2}?",
)  # fmt: skip


def article_requests(count: int, seed: int) -> list[str]:
    """`count` requests for an article; some may be equal, as their answers are sampled."""
    draw = random.Random(f"articles/{seed}")
    made = []
    for _ in range(count):
        topic, topic2 = draw.sample(TOPICS, 2)
        who, who2 = draw.sample(PEOPLE, 2)
        form = draw.choice(_ARTICLE_FORMS)
        made.append(form.format(topic=topic, topic2=topic2, who=who, who2=who2, place=draw.choice(PLACES)))
    return made


def worth_reading(article: str) -> bool:
    """Long enough, and not looping: two words in five are new."""
    words = article.split()
    varied = len(words) >= _MIN_WORDS and len(set(words)) >= 0.4 * len(words)
    return varied and "\N{REPLACEMENT CHARACTER}" not in article


def reading_prompts(articles: Sequence[str], seed: int) -> Iterator[PromptRow]:
    """Two prompts for each article: a summary of it, and a question about passages of it and of others."""
    draw = random.Random(f"reading/{seed}")
    for article in articles:
        text = article
        if draw.random() < 0.4:  # two articles on: what is read is often longer than what one answer holds
            text = f"{article}\n\n{draw.choice(articles)}"
        yield user("chat", _SOURCE, draw.choice(_SUMMARY_FORMS).format(text=text[:_MAX_CHARACTERS]))
        yield _question(article, articles, draw)


def _question(article: str, articles: Sequence[str], draw: random.Random) -> PromptRow:
    passages = [_passage(draw.choice(articles), draw) for _ in range(draw.randint(1, 4))] + [_passage(article, draw)]
    words = [word.strip(".,:;*\"'()") for word in passages[-1].split()]
    words = [word for word in words if len(word) > 5 and word.isalpha()] or ["this"]
    question = draw.choice(_QUESTIONS).format(word=draw.choice(words), word2=draw.choice(words))
    draw.shuffle(passages)
    if draw.random() < 0.5:
        body = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
    else:
        body = "\n".join(passages)
    text = f"{draw.choice(_READING_LEADS)}\n\n{body[:_MAX_CHARACTERS]}\n\nQuestion: {question}"
    return user("chat", _SOURCE, text + draw.choice(("", "\nAnswer:", "\n\nAnswer:")))


def _passage(article: str, draw: random.Random) -> str:
    """Some neighbouring paragraphs, at most about 900 characters."""
    parts = [part.strip() for part in article.split("\n") if len(part.strip()) > 40] or [article]
    start = draw.randrange(len(parts))
    text = parts[start]
    for part in parts[start + 1 :]:
        if len(text) + len(part) > 900:
            break
        text += " " + part
    return text[:1400]
