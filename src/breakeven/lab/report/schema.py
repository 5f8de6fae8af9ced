"""`docs/summary-schema.md`, generated from the models.

`python -m breakeven.lab.report.schema > docs/summary-schema.md`
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from breakeven.lab.summary import SIGNIFICANT_DIGITS, Summary

_INTRODUCTION = f"""\
# `summary.json`

<!-- Generated: python -m breakeven.lab.report.schema > docs/summary-schema.md -->

What `breakeven report` computes from a run's directory, and the only thing the reports are made from. The same
directory gives the same file, byte for byte, whenever and wherever it is computed. Numbers have {SIGNIFICANT_DIGITS}
significant digits; there is no NaN or infinity, and what is unknown is `null`. Every field is always there.

A script that wants the verdicts reads `comparisons` and `break_even`:

```python
import json

summary = json.load(open("summary.json", encoding="utf-8"))
for row in summary["comparisons"]:
    if (row["metric"], row["condition"]) == ("throughput", "all"):
        print(row["arm"], row["level"], row["ratio"], row["ci_low"], row["ci_high"], row["verdict"])
```

Condition "all" pools the domains of a block: throughput is the sum of their tokens divided by the sum of their windows,
times are means over the requests of all. A block counts only where every domain's cell is valid in both arms. How the
figures, intervals and verdicts come about: [statistics.md](statistics.md). How to read the report:
[reading-a-report.md](reading-a-report.md).
"""


def schema_markdown() -> str:
    """The page: one section for each model, in the order in which `Summary` first mentions them."""
    sections = [_INTRODUCTION]
    for model in _models(Summary):
        rows = [
            f"| `{name}` | {_type_words(field.annotation)} | {_cell(field.description or '')} |"
            for name, field in model.model_fields.items()
        ]
        title = "The file" if model is Summary else _title(model)
        sections.append(
            "\n".join(
                [f"## {title}", "", _first_line(model), "", "| field | type | meaning |", "|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(sections)


def _models(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`root` and every model it holds, breadth first, each once."""
    waiting, seen = [root], {root}
    while waiting:
        model = waiting.pop(0)
        yield model
        for field in model.model_fields.values():
            for found in _within(field.annotation):
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)


def _within(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _within(argument)


def _title(model: type[BaseModel]) -> str:
    return re.sub(r"Summary$", "", model.__name__)


def _first_line(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _type_words(annotation: Any) -> str:
    """A type in the words of JSON."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_words(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type_words(arguments[0])}"
    if origin is dict:
        return "object" if arguments[1] is Any else f"object: {_type_words(arguments[0])} → {_type_words(arguments[1])}"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        title = _title(annotation)
        return f"[{title}](#{title.lower()})"
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    return names.get(annotation, "string")


if __name__ == "__main__":
    print(schema_markdown(), end="")
