"""The target's own answers to prompts, and prompts that it writes itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from breakeven.engine.tokenizer import Tokenizer
from breakeven.train.config import AnswersConfig, Domain
from breakeven.train.conversations import prompt_ids
from breakeven.train.fast_generate import FastGenerator, Generated, GenerationJob
from breakeven.train.prompts.reading import article_requests
from breakeven.train.prompts.types import PromptRow, user

SELF_PROMPT_TOKENS = 192

SEEDS: Mapping[Domain, tuple[str, ...]] = {
    "coding": (
        "Complete the following Python function", "Complete the following Python function.\n\n```python\ndef",
        "Write a Python function that", "Write a function", "Write a Python program that", "def ", "Given a list of",
        "Implement", "How can I", "Fix the bug in this code", "```python\n", "Write a SQL query", "Explain this code",
        "Create a class", "I have a Python script that", "Write a JavaScript function",
    ),
    "agentic": (
        "You are an assistant with access to", "Find", "Book", "Schedule", "Search for", "Given the following tools",
        "I need to automate", "Send", "List the steps to", "Use the function", "Convert", "Calculate",
    ),
    "encyclopedic": (
        "What is", "What are", "Who was", "When did", "Where is", "Why do", "How does", "Describe", "Explain",
        "Tell me about", "Write an article about", "Compare", "What is the capital", "Give an overview of",
    ),
    "chat": (
        "", "", "", "Hello", "Can you help me", "I am", "Write a story", "Write a poem", "Write an email",
        "Summarize", "Translate", "Rewrite", "Imagine", "Give me", "Suggest", "If", "A ", "Solve", "Question:",
        "Please", "Let's", "My ", "Read the passage", "Based on the",
    ),
}  # fmt: skip


def self_prompt_jobs(
    tokenizer: Tokenizer, domains: Sequence[Domain], count: int, seed: int
) -> list[tuple[GenerationJob, Domain, str]]:
    """What the target is to continue: its own rendering of a conversation up to where the user speaks, and the first
    words of the user (Magpie's idea, arXiv 2406.08464, with seeds to steer the domain)."""
    mark = "\N{SNOWMAN}"
    before, _, _ = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)
    draw = random.Random(seed)
    jobs = []
    for key in range(count):
        domain = domains[key % len(domains)]
        start = draw.choice(SEEDS[domain])
        ids = tokenizer.encode(before + start, add_special_tokens=False)
        temperature = draw.choice((0.8, 1.0))
        jobs.append((GenerationJob(key, tuple(ids), temperature, SELF_PROMPT_TOKENS), domain, start))
    return jobs


def self_prompt_row(tokenizer: Tokenizer, answer: Generated, domain: Domain, start: str) -> PromptRow | None:
    """The prompt that the target wrote; None if it did not end, or is no more than its seed."""
    text = (start + tokenizer.decode(answer.tokens)).strip()
    if not answer.stopped or len(text) < max(12, len(start) + 4) or "\N{REPLACEMENT CHARACTER}" in text:
        return None
    return user(domain, "the target itself", text)


def article_jobs(tokenizer: Tokenizer, count: int, max_tokens: int, seed: int) -> list[GenerationJob]:
    """Requests for articles, for reading tasks."""
    return [
        GenerationJob(key, tuple(prompt_ids(tokenizer, [{"role": "user", "content": text}])), 1.0, max_tokens)
        for key, text in enumerate(article_requests(count, seed))
    ]


def answer_jobs(
    tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]], config: AnswersConfig, seed: int
) -> tuple[list[GenerationJob], int]:
    """Jobs keyed by row, and how many rows were left out as too long or not renderable. A prompt's temperature depends
    on its id and the seed alone."""
    jobs, left_out = [], 0
    for key, row in enumerate(rows):
        try:
            ids = row.get("prompt_ids") or prompt_ids(tokenizer, row["messages"])
        except ValueError:
            left_out += 1
            continue
        if len(ids) > config.max_prompt_tokens:
            left_out += 1
            continue
        draw = random.Random(f"{seed}/{row['id']}")
        greedy = draw.random() < config.greedy_share or not config.temperatures
        temperature = 0.0 if greedy else draw.choice(config.temperatures)
        jobs.append(GenerationJob(key, tuple(ids), temperature, config.max_tokens))
    return jobs, left_out


def answered_rows(
    generator: FastGenerator,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    jobs: Sequence[GenerationJob],
    keep_on: Callable[[], bool],
) -> Iterator[dict[str, Any]]:
    """Training rows in the order in which answers finish."""
    for answer in generator.run(jobs, keep_on):
        row = rows[answer.job.key]
        yield {
            "id": row["id"],
            "domain": row["domain"],
            "source": row.get("source", ""),
            "temperature": answer.job.temperature,
            "conversations": [*row["messages"], {"role": "assistant", "content": tokenizer.decode(answer.tokens)}],
            "prompt_ids": list(answer.job.prompt),
            "answer_ids": list(answer.tokens),
        }
