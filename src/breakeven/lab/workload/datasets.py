"""Local files of public data sets as prompts. Nothing is downloaded; every error names the file and the line.

| format | what is read | recognised by |
|---|---|---|
| prompts | JSONL of `id`, `domain`, `messages` or `prompt` (docs/workload.md) | `id` with `messages` or `prompt` |
| sharegpt | `conversations` of `from`/`value` (or `role`/`content`), up to a user's turn | `conversations` |
| humaneval | `prompt`, a function to complete | `task_id`, `entry_point` |
| mbpp | `text` (or `prompt`) and the first of `test_list` | `test_list` |
| spec-bench | `turns`, the first of them; also MT-bench; `category` becomes the domain | `turns`, `question_id` |
| speed-bench | `turns` or `messages`, the first question; `category` becomes the domain | `turns` |
| gsm8k | `question` | `question`, `answer` |
| bfcl | `question` (turns of messages) with the functions described in a system message | `question` as a list |
| swe-bench | a trajectory's `messages`, `trajectory` or `history`, up to the assistant's last turn | these |
| csv | a column `prompt`, `question`, `instruction`, `text` or `input`; `id`, `domain` | .csv, .tsv |
| text | one prompt a line, or separated by lines of `---` | anything else |

A file is JSONL or one JSON list, either of them gzipped. A conversation is cut so that it ends with a user's turn:
what is asked must be open. Tool output counts as a user's turn, as small models' templates know no other.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from breakeven.lab.workload.files import read_text
from breakeven.lab.workload.prompt import Prompt, PromptError, prompt_from_record

Record = Mapping[str, Any]
Message = dict[str, str]
Conversation = tuple[list[Message], str | None]  # messages, and the domain if the record names one

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_COLUMNS = ("prompt", "question", "instruction", "text", "input")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "user",
    "function": "user",
    "observation": "user",
    "environment": "user",
}


def read_dataset(
    path: str | Path, format: str = "auto", domain: str | None = None, limit: int | None = None
) -> list[Prompt]:
    """The prompts of a file, in its order. `domain` overrides what the records say; `limit`: the first so many.

    Ids are the file's own where it has them, else its name and the record's number. Raises PromptError for a file that
    cannot be read, a format that is not known or not recognised, and for a record that is not of that format.
    """
    path = Path(path)
    text = read_text(path)
    if not text.strip():
        raise PromptError(f"{path}: holds no prompts")
    suffix = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    if format == "csv" or (format == "auto" and suffix in ("csv", "tsv")):
        return _named(path, list(_csv_prompts(text, path, domain, limit, "\t" if suffix == "tsv" else ",")), limit)
    if format == "text" or (format == "auto" and text.lstrip()[:1] not in ("{", "[")):
        return _named(path, list(_text_prompts(text, path, domain)), limit)
    if format != "auto" and format not in READERS:
        raise PromptError(f"{path}: the format {format!r} is not known: choose one of auto, {', '.join(FORMATS)}")
    prompts: list[tuple[int, Prompt]] = []
    reader = format
    for number, record in _records(text, path):
        where = f"{path}, {'line' if text.lstrip()[:1] == '{' else 'record'} {number}"
        if not isinstance(record, dict):
            raise PromptError(f"{where}: expected a JSON object, found {type(record).__name__}")
        if reader == "auto":
            reader = recognise(record)
            if reader == "":
                raise PromptError(f"{where}: not recognised; name its format: {', '.join(FORMATS)}")
        try:
            prompt = _prompt(READERS[reader], reader, record, path, number, domain)
        except PromptError as problem:
            raise PromptError(f"{where}: {problem}") from None
        except (KeyError, TypeError, IndexError, AttributeError, ValueError):
            raise PromptError(f"{where}: not a record of the format {reader}") from None
        if prompt is not None:
            prompts.append((number, prompt))
        if limit is not None and len(prompts) >= limit:
            break
    return _named(path, prompts, limit)


def recognise(record: Record) -> str:
    """The format of a record, by its keys; empty if none fits."""
    keys = set(record)
    question = record.get("question")
    for name, fits in (
        ("humaneval", {"prompt", "entry_point"} <= keys),
        ("mbpp", "test_list" in keys),
        ("sharegpt", "conversations" in keys or "conversation" in keys),
        ("spec-bench", {"turns", "question_id"} <= keys),
        ("swe-bench", bool({"trajectory", "history"} & keys) or {"messages", "instance_id"} <= keys),
        ("bfcl", isinstance(question, list)),
        ("gsm8k", isinstance(question, str) and "answer" in keys),
        (
            "prompts",
            "id" in keys and bool({"messages", "prompt"} & keys) and keys <= {"id", "domain", "messages", "prompt"},
        ),
        ("speed-bench", bool({"turns", "messages"} & keys)),
    ):
        if fits:
            return name
    return ""


def _records(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    if text.lstrip()[:1] == "[":
        try:
            found = json.loads(text)
        except json.JSONDecodeError as problem:
            raise PromptError(f"{path}, line {problem.lineno}: not JSON: {problem.msg}") from None
        except RecursionError:
            raise PromptError(f"{path}: JSON nested too deeply") from None
        yield from enumerate(found, start=1)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as problem:
            raise PromptError(f"{path}, line {number}: not JSON: {problem.msg} (column {problem.colno})") from None
        except RecursionError:
            raise PromptError(f"{path}, line {number}: JSON nested too deeply") from None


def _prompt(
    read: Callable[[Record], Conversation | None], format: str, record: Record, path: Path, number: int,
    domain: str | None,
) -> Prompt | None:  # fmt: skip
    """One prompt; None for a record that asks nothing, such as a conversation without a user's turn."""
    if format == "prompts":
        given = {**record, "domain": domain} if domain is not None else dict(record)
        return prompt_from_record(given, _fit(_stem(path)))
    found = read(record)
    if found is None:
        return None
    messages = _open_ended(found[0])
    if messages is None:
        return None
    own = next(
        (record[key] for key in ("id", "task_id", "question_id", "instance_id") if record.get(key) is not None), None
    )
    name = f"{_stem(path)}-{number:06d}" if own is None else f"{_stem(path)}-{own}"
    chosen = domain or found[1] or _stem(path)
    return prompt_from_record({"id": _fit(name, 100), "domain": _fit(chosen), "messages": messages})


def _named(path: Path, prompts: Sequence[tuple[int, Prompt]], limit: int | None) -> list[Prompt]:
    """Checks that ids are distinct, and gives the ones that repeat their record's number."""
    if not prompts:
        raise PromptError(f"{path}: holds no prompts of this format")
    seen: dict[str, int] = {}
    for number, prompt in prompts[:limit]:
        if prompt.id in seen:
            raise PromptError(f"{path}: records {seen[prompt.id]} and {number} have the same id {prompt.id!r}")
        seen[prompt.id] = number
    return [prompt for _, prompt in prompts[:limit]]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").partition(".")[0] or "file"


def _fit(name: object, most: int = 40) -> str:
    """A name as ids and domains may be: other characters become dashes."""
    return _UNFIT.sub("-", str(name)).strip("-._")[:most].strip("-._") or "file"


def _open_ended(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation up to its last user's turn, turns of one role joined; None if nobody asks anything."""
    joined: list[Message] = []
    for message in messages:
        if not message["content"].strip():
            continue
        role = message["role"] if message["role"] != "system" or not joined else "user"
        if joined and joined[-1]["role"] == role:
            joined[-1] = {"role": role, "content": joined[-1]["content"] + "\n\n" + message["content"]}
        elif role == "assistant" and (not joined or joined[-1]["role"] == "system"):
            continue  # an answer to nothing: the beginning of the conversation is missing
        else:
            joined.append({"role": role, "content": message["content"]})
    while joined and joined[-1]["role"] != "user":
        joined.pop()
    return joined or None


def _turns(messages: Sequence[Any]) -> list[Message]:
    """Messages of either habit: `from` and `value`, or `role` and `content` (a string or parts with a text)."""
    found = []
    for message in messages:
        role = str(message.get("role", message.get("from"))).lower()
        if role not in _ROLES:
            raise PromptError(f"a message is from {role!r}: known are {', '.join(_ROLES)}")
        content = message.get("content", message.get("value", message.get("text")))
        if isinstance(content, list):
            content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content = f"{content or ''}\n{function['name']}({function['arguments']})".strip()
        found.append({"role": _ROLES[role], "content": "" if content is None else str(content)})
    return found


def _user(text: object) -> list[Message]:
    if not isinstance(text, str) or not text.strip():
        raise PromptError("the question is missing or blank")
    return [{"role": "user", "content": text}]


def _sharegpt(record: Record) -> Conversation | None:
    return _turns(record.get("conversations", record.get("conversation"))), None


def _humaneval(record: Record) -> Conversation:
    prompt = _user(record["prompt"])[0]["content"]
    return _user(f"Complete this function. Answer with the whole function.\n\n```python\n{prompt.rstrip()}\n```"), None


def _mbpp(record: Record) -> Conversation:
    text = record.get("text", record.get("prompt"))
    tests = record["test_list"]
    example = f"\n\nIt must pass this test:\n\n```python\n{tests[0]}\n```" if tests else ""
    return _user(f"{_user(text)[0]['content']}{example}"), None


def _questions(record: Record) -> Conversation:
    category = record.get("category")
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        first = turns[0]
        text = first.get("content", first.get("value")) if isinstance(first, dict) else first
        return _user(text), None if category is None else str(category)
    return _turns(record["messages"]), None if category is None else str(category)


def _gsm8k(record: Record) -> Conversation:
    return _user(record["question"]), None


def _bfcl(record: Record) -> Conversation:
    turns = record["question"]
    first = turns[0] if isinstance(turns[0], list) else turns
    functions = record.get("function", record.get("functions")) or []
    described = json.dumps(functions, ensure_ascii=False, indent=1)
    system = (
        f"You can call these functions. Answer with the calls to make, one a line, and nothing else.\n\n{described}"
    )
    return [{"role": "system", "content": system}, *(m for m in _turns(first) if m["role"] != "system")], None


def _swe_bench(record: Record) -> Conversation:
    steps = next((record[key] for key in ("messages", "trajectory", "history") if record.get(key)), None)
    if not steps:
        raise PromptError("there are no messages, no trajectory and no history in it")
    steps = json.loads(steps) if isinstance(steps, str) else steps
    if steps and isinstance(steps[0], dict) and "role" not in steps[0] and "from" not in steps[0]:
        messages = _user(record.get("problem_statement") or "Mend the fault that the repository's issue describes.")
        for step in steps:  # SWE-agent's trajectories: what the model said, and what the shell answered
            messages.append({"role": "assistant", "content": str(step.get("response") or step.get("action") or "")})
            messages.append({"role": "user", "content": str(step.get("observation") or "")})
        return messages[:-2] if len(messages) > 2 else messages, None
    return _turns(steps), None


def _csv_prompts(
    text: str, path: Path, domain: str | None, limit: int | None, delimiter: str
) -> Iterator[tuple[int, Prompt]]:
    rows = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter)
    names = {str(name).strip().lower(): name for name in rows.fieldnames or ()}
    column = next((names[name] for name in _COLUMNS if name in names), None)
    if column is None:
        raise PromptError(f"{path}, line 1: no column to ask from: name one of {', '.join(_COLUMNS)}")
    for number, row in enumerate(rows, start=1):
        if limit is not None and number > limit:
            return
        try:
            own = row.get(names.get("id", "")) or f"{number:06d}"
            chosen = domain or row.get(names.get("domain", names.get("category", ""))) or _stem(path)
            name = _fit(f"{_stem(path)}-{own}", 100)
            yield number, prompt_from_record({"id": name, "domain": _fit(chosen), "messages": _user(row[column])})
        except (PromptError, TypeError) as problem:
            raise PromptError(f"{path}, line {rows.line_num}: {problem}") from None


def _text_prompts(text: str, path: Path, domain: str | None) -> Iterator[tuple[int, Prompt]]:
    """One prompt a line; or several lines each, between lines of three dashes."""
    lines = text.replace("\r\n", "\n").split("\n")
    blocks: list[tuple[int, str]] = []
    if any(line.strip() == "---" for line in lines):
        begun, held = 1, list[str]()
        for number, line in enumerate([*lines, "---"], start=1):
            if line.strip() == "---":
                blocks.append((begun, "\n".join(held).strip()))
                begun, held = number + 1, []
            else:
                held.append(line)
    else:
        blocks = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    for number, block in blocks:
        if block:
            try:
                yield (
                    number,
                    prompt_from_record(
                        {
                            "id": _fit(f"{_stem(path)}-{number:06d}", 100),
                            "domain": _fit(domain or _stem(path)),
                            "prompt": block,
                        }
                    ),
                )
            except PromptError as problem:
                raise PromptError(f"{path}, line {number}: {problem}") from None


READERS: Mapping[str, Callable[[Record], Conversation | None]] = {
    "prompts": lambda record: None,  # read by `prompt_from_record`
    "sharegpt": _sharegpt,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "spec-bench": _questions,
    "speed-bench": _questions,
    "gsm8k": _gsm8k,
    "bfcl": _bfcl,
    "swe-bench": _swe_bench,
}
FORMATS = (*READERS, "csv", "text")
