"""What every source of prompts gives."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from breakeven.train.config import Domain


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Messages to be answered. `source` says where the material came from, for the card."""

    domain: Domain
    messages: tuple[tuple[str, str], ...]  # (role, content)
    source: str

    @property
    def text(self) -> str:
        return "\n".join(content for _, content in self.messages)

    @property
    def id(self) -> str:
        """Of the messages alone: equal prompts have equal ids."""
        return hashlib.sha256(repr(self.messages).encode("utf-8", "replace")).hexdigest()[:16]

    def row(self) -> dict[str, Any]:
        """The JSON line."""
        return {
            "id": self.id,
            "domain": self.domain,
            "source": self.source,
            "messages": [{"role": role, "content": content} for role, content in self.messages],
        }


def user(domain: Domain, source: str, content: str, system: str | None = None) -> PromptRow:
    """A prompt of one user message, with an optional system message before it."""
    head = (("system", system),) if system is not None else ()
    return PromptRow(domain, (*head, ("user", content)), source)
