"""Chat templates: Jinja in a sandbox, with the helpers that transformers gives them.

The environment is that of transformers' `apply_chat_template`: blocks trimmed, `break` and `continue`, `tojson` without
HTML escapes, `raise_exception`, `strftime_now`, and `{% generation %}` (which marks text and prints it unchanged).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: which text is the assistant's matters to training, not here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template; compiled at its first use, so that a broken one does not keep a model from completing text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: texts that templates refer to by role, such as {"bos_token": "<s>"}."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt. ValueError if the template refuses the messages, fails on them, or is itself broken."""
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return self._compiled.render(
                {
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is broken (line {error.lineno}): {error.message}") from None
        except _Refused as error:
            raise ValueError(f"the model's chat template refuses these messages: {error.message}") from None
        except Exception as error:  # a template can make Python raise nearly anything
            raise ValueError(
                f"the model's chat template cannot render these messages: {error} "
                "(every message needs a role, and content of the kind that this template expects, mostly a string)"
            ) from None


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment
