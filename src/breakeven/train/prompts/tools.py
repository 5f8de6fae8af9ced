"""Agentic prompts: tool calls, plans and shell work; from the BFCL questions where given, and from own lists."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from breakeven.engine.config import ConfigError
from breakeven.train.prompts.types import PromptRow, user

_LEADS = (
    'You can call these functions. Answer with a JSON list of calls, each with "name" and "arguments".',
    "You are an assistant with tools. Reply with the call that answers the request, as JSON.",
    "You have access to the following tools. Choose the right one and give its arguments in JSON.",
)


def bfcl_prompts(folder: Path, seed: int) -> Iterator[PromptRow]:
    """The questions of a directory of the `bfcl-eval` package (Apache-2.0), with one function's schema where short.

    ConfigError if the directory holds none.
    """
    files = sorted(file for file in folder.rglob("BFCL_v*.json") if "possible_answer" not in file.parts)
    if not files:
        raise ConfigError(f"{folder} holds no BFCL_v*.json; give the unpacked bfcl-eval package")
    draw = random.Random(seed)
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # some files of the package are one JSON document, with no questions in it
            if isinstance(row, dict):
                yield from _bfcl_row(row, draw)


def _bfcl_row(row: dict[str, Any], draw: random.Random) -> Iterator[PromptRow]:
    turns = row.get("question")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], list):
        return
    asked = [item["content"] for item in turns[0] if isinstance(item, dict) and item.get("role") == "user"]
    if not asked or not isinstance(asked[0], str):
        return
    yield user("agentic", "bfcl-eval", asked[0])
    available = row.get("function")
    if isinstance(available, list) and available:
        schema = json.dumps(draw.choice(available))
        if len(schema) < 900:
            yield user("agentic", "bfcl-eval", f"{draw.choice(_LEADS)}\n\n{schema}\n\nRequest: {asked[0]}")
            yield user("agentic", "bfcl-eval", asked[0], system=f"{draw.choice(_LEADS)}\n\nTools: {schema}")


_TOOLS: tuple[tuple[str, str, tuple[tuple[str, str], ...], tuple[str, ...]], ...] = (
    ("get_weather", "Weather of a place on a day.", (("city", "string"), ("day", "string")),
     ("What will the weather be in {city} on {day}?", "Do I need an umbrella in {city} on {day}?")),
    ("search_files", "Find files by name or content.", (("pattern", "string"), ("folder", "string")),
     ("Find all files in {folder} that mention {word}.", "Where in {folder} is {word} used?")),
    ("send_email", "Send an e-mail.", (("to", "string"), ("subject", "string"), ("body", "string")),
     ("Tell {name} by e-mail that the {word} is ready.", "Write to {name} and ask about the {word} for {day}.")),
    ("create_event", "Put an event into the calendar.", (("title", "string"), ("day", "string"), ("hour", "integer")),
     ("Plan a meeting about the {word} with {name} on {day} at {number}.", "Remind me of the {word} on {day}.")),
    ("run_query", "Run SQL on the shop's database.", (("sql", "string"),),
     ("How many orders came from {city} last month?", "List the {number} customers who bought the most {word}s.")),
    ("convert", "Convert between units.", (("value", "number"), ("from_unit", "string"), ("to_unit", "string")),
     ("How many miles are {number} kilometres?", "Convert {number} pounds to kilograms.")),
    ("book_train", "Book a train ticket.", (("origin", "string"), ("destination", "string"), ("day", "string")),
     ("I want to go from {city} to {city2} on {day}.", "Get {number} tickets from {city2} to {city} for {day}.")),
    ("read_page", "Fetch a web page as text.", (("url", "string"),),
     ("Summarise the page example.org/{word}.", "Does example.org/{word} say anything about {city}?")),
    ("set_light", "Control a lamp.", (("room", "string"), ("brightness", "integer")),
     ("Dim the light in the {room} to {number} percent.", "Turn the lights in the {room} off.")),
    ("translate_text", "Translate a text.", (("text", "string"), ("language", "string")),
     ("How do I say 'the {word} is in the {room}' in Spanish?", "Translate '{name} lives in {city}' into Italian.")),
)  # fmt: skip
_SLOTS = {
    "city": ("Lagos", "Osaka", "Lima", "Bergen", "Tunis", "Quebec", "Hanoi", "Zagreb", "Perth", "Izmir", "Ghent"),
    "city2": ("Porto", "Kyoto", "Cusco", "Tromso", "Sfax", "Ottawa", "Hue", "Split", "Darwin", "Ankara", "Liege"),
    "day": ("Monday", "Friday", "the third of May", "tomorrow", "next Tuesday", "New Year's Eve", "Saturday"),
    "word": ("invoice", "report", "printer", "ticket", "bicycle", "parser", "budget", "lamp", "contract", "backup"),
    "name": ("Amira", "Tomas", "Mei", "Oluwaseun", "Greta", "Rafael", "Noor", "Pavel", "Ines", "Kofi"),
    "room": ("kitchen", "hall", "office", "cellar", "bedroom", "garage", "studio"),
    "folder": ("/srv/app", "src", "~/notes", "docs", "/var/log", "tests"),
}
_GOALS = (
    "clean up a folder with ten thousand photos", "find out why a web service became slow after a release",
    "move a small team's files to another server", "plan a three-day trip for four people",
    "compare three laptops and recommend one", "write release notes from a list of commits",
    "reply to twenty customer complaints", "set up continuous integration for a Python project",
    "find duplicate rows in a large CSV file", "prepare a weekly report from a database",
    "rename a function in a large code base", "schedule interviews with five candidates",
    "migrate a database table without downtime", "check a web site for broken links",
    "monitor disk space on ten servers", "translate a manual and keep its layout",
    "collect prices of a product every day", "sort a mailbox with a thousand unread messages",
    "make a backup and prove that it can be restored", "find the commit that broke a test",
)  # fmt: skip
_AGENT_FORMS = (
    "You are an agent with a shell. Your goal: {goal}. List the steps you would take, with the commands.",
    "Break this task into small steps: {goal}.",
    "You are an autonomous assistant. The task is to {goal}. Think step by step and say which tool you use first.",
    "Write a plan to {goal}. For each step give the tool, its input, and how you check the result.",
    "Observation: nothing has been done yet.\nTask: {goal}.\nThought:",
    "The last command failed with exit code {number}. The task was to {goal}. What do you do next?",
    "Write a bash script to {goal}.",
    "I asked an assistant to {goal}. It has used {number} tools so far and is stuck. Give it advice.",
    "Which information do you need from the user before you can {goal}? Ask up to {number} questions.",
)


def own_agentic_prompts(count: int, seed: int) -> Iterator[PromptRow]:
    """`count` prompts from tools and goals of our own; some may be equal."""
    draw = random.Random(seed)
    for _ in range(count):
        values = {name: draw.choice(options) for name, options in _SLOTS.items()} | {"number": draw.randint(2, 60)}
        if draw.random() < 0.4:
            yield user("agentic", "own", draw.choice(_AGENT_FORMS).format(goal=draw.choice(_GOALS), **values))
            continue
        chosen = draw.choice(_TOOLS)
        offered = draw.sample(_TOOLS, draw.randint(0, 2))
        shown = [tool for tool in (*offered, chosen) if tool is not chosen] + [chosen]
        draw.shuffle(shown)
        schema = json.dumps(
            [
                {"name": name, "description": text, "parameters": {key: {"type": kind} for key, kind in fields}}
                for name, text, fields, _ in shown
            ]
        )
        request = draw.choice(chosen[3]).format(**values)
        if draw.random() < 0.5:
            yield user("agentic", "own", f"{draw.choice(_LEADS)}\n\n{schema}\n\nRequest: {request}")
        else:
            yield user("agentic", "own", request, system=f"{draw.choice(_LEADS)}\n\nTools: {schema}")
