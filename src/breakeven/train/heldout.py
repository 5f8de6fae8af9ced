"""Held-out prompts from files named on the command line: HumanEval, Spec-Bench, or JSON lines with messages.

They are evaluated on and never trained on: the prompts stage is given their texts to keep clear of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breakeven.engine.config import ConfigError
from breakeven.train.conversations import messages_of
from breakeven.train.files import read_rows

MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Spec-Bench takes MT-bench's eight categories as one of its six tasks."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """One prompt to evaluate on. `suite` is the file's kind or name, `category` a part of it."""

    id: str
    suite: str
    category: str
    messages: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return "\n".join(content for _, content in self.messages)


def human_eval_request(prompt: str) -> str:
    """HumanEval in chat form: the user asks for the function whose head is given."""
    return f"Complete the following Python function.\n\n```python\n{prompt.strip()}\n```"


def read_held_out(path: Path) -> list[HeldOutPrompt]:
    """The prompts of a file; its kind is seen from its first row. ConfigError if it is none of the kinds."""
    found = [_prompt(row, f"{path}, row {number}", path) for number, row in enumerate(read_rows(path), 1)]
    if not found:
        raise ConfigError(f"{path} holds no prompts")
    return found


def raw_texts(path: Path) -> list[str]:
    """Everything of the file that must not be trained on: prompts as they are asked, HumanEval's own text, and
    Spec-Bench's later turns too."""
    texts = [prompt.text for prompt in read_held_out(path)]
    for row in read_rows(path):
        if "task_id" in row and isinstance(row.get("prompt"), str):
            texts.append(row["prompt"])
        if isinstance(row.get("turns"), list):
            texts += [turn for turn in row["turns"] if isinstance(turn, str)]
    return texts


def _prompt(row: Mapping[str, Any], where: str, path: Path) -> HeldOutPrompt:
    if "task_id" in row and isinstance(row.get("prompt"), str):
        return HeldOutPrompt(
            str(row["task_id"]), "HumanEval", "HumanEval", (("user", human_eval_request(row["prompt"])),)
        )
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        category = str(row.get("category", "all"))
        return HeldOutPrompt(str(row.get("question_id", where)), "Spec-Bench", category, (("user", turns[0]),))
    if "messages" in row or "conversations" in row:
        messages = messages_of(row, where)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise ConfigError(f"{where}: there is no user message")
        return HeldOutPrompt(
            str(row.get("id", where)),
            path.name.split(".")[0],
            str(row.get("domain", "all")),
            tuple((message["role"], message["content"]) for message in messages),
        )
    raise ConfigError(
        f"{where}: neither HumanEval ('task_id', 'prompt') nor Spec-Bench ('question_id', 'turns') nor 'messages'"
    )
