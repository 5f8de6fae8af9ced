"""Files of public data sets as prompts: local ones; `hub` fetches others. Every error names the file and the line.

| format | what is read | recognised by |
|---|---|---|
| prompts | JSONL of `id`, `domain`, `messages` or `prompt` (docs/workload.md) | `id`, and nothing but these fields |
| sharegpt | `conversations` of `from`/`value` (or `role`/`content`), up to a user's turn | `conversation(s)` |
| humaneval | `prompt`, a function to complete | `prompt`, `entry_point` |
| mbpp | `text` (or `prompt`) and the first of `test_list` | `test_list` |
| spec-bench | the first of `turns`; `category` is the domain | `turns`, `question_id` |
| (MT-bench) | the same of `prompt`, a list | `prompt` as a list, `category` |
| speed-bench | `turns` or `messages`, the first question; `category` is the domain | `turns` or `messages` |
| gsm8k | `question` | `question`, `answer` |
| bfcl | `question` (turns of messages) with the functions described in a system message | `question` as a list |
| swe-bench | these, up to the assistant's last turn | `trajectory`; `history`; `messages`, `instance_id` |
| csv | a column `prompt`, `question`, `instruction`, `text` or `input`; `id`, `domain` | .csv, .tsv |
| text | one prompt a line, or separated by lines of `---` | anything else |

A file is JSONL or one JSON list, either of them gzipped, or Parquet, whose rows are records. A conversation is cut so
that it ends with a user's turn: what is asked must be open. Tool output counts as a user's turn, as small models'
templates know no other.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


# What SPEED-Bench's files at the hub hold where a text is another data set's; its own tool puts the texts there.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
_LFS_POINTER = "version https://git-lfs.github.com/spec/"
_BATCH = 256  # rows of Parquet at a time, so that a limit spares the rest


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file gave. `placeholders`: records that were left out, since they do not hold the text they stand for."""

    prompts: tuple[Prompt, ...]
    placeholders: int = 0


@dataclass(frozen=True, slots=True)
class _Names:
    """What ids begin with, and the domain of records that name none."""

    ids: str
    domain: str


def read_dataset(
    path: str | Path, format: str = "auto", domain: str | None = None, limit: int | None = None
) -> list[Prompt]:
    """The prompts of a file, in its order. `domain` overrides what the records say; `limit`: the first so many.

    Ids are the file's own where it has them, else its name and the record's number. Raises PromptError for a file that
    cannot be read, a format that is not known or not recognised, and for a record that is not of that format.
    """
    return list(read_records(path, format, domain, limit).prompts)


def read_records(
    path: str | Path,
    format: str = "auto",
    domain: str | None = None,
    limit: int | None = None,
    *,
    data_set: str | None = None,
) -> Reading:
    """As `read_dataset`, and how many records were placeholders.

    `data_set`: the name of what the file is a part of. It is the domain of records that name none, and stands before
    the file's name in ids: files are called alike in many data sets (`test-00000-of-00001.parquet`).
    """
    path = Path(path)
    stem = _stem(path)
    names = _Names(stem, stem) if data_set is None else _Names(f"{_fit(data_set, 24)}-{_fit(stem)}", data_set)
    if format != "auto" and format not in FORMATS:
        raise PromptError(f"{path}: the format {format!r} is not known: choose one of auto, {', '.join(FORMATS)}")
    if _is_parquet(path):
        if format in ("csv", "text"):
            raise PromptError(f"{path}: is Parquet, which has no format {format}: choose auto, {', '.join(READERS)}")
        return _read(_parquet_records(path), path, "row", format, domain, limit, names)
    text = read_text(path)
    if not text.strip():
        raise PromptError(f"{path}: holds no prompts")
    if text.startswith(_LFS_POINTER):
        raise PromptError(f"{path}: is a pointer of Git LFS and not the data: fetch it (git lfs pull), or download it")
    suffix = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    if format == "csv" or (format == "auto" and suffix in ("csv", "tsv")):
        delimiter = "\t" if suffix == "tsv" else ","
        return Reading(_named(path, list(_csv_prompts(text, path, domain, limit, delimiter, names)), limit))
    if format == "text" or (format == "auto" and text.lstrip()[:1] not in ("{", "[")):
        return Reading(_named(path, list(_text_prompts(text, path, domain, names)), limit))
    kind = "line" if text.lstrip()[:1] == "{" else "record"
    return _read(_records(text, path), path, kind, format, domain, limit, names)


def _read(
    records: Iterator[tuple[int, Any]], path: Path, kind: str, format: str, domain: str | None, limit: int | None,
    names: _Names,
) -> Reading:  # fmt: skip
    """The prompts of numbered records; `kind`: what a record is called in messages."""
    prompts: list[tuple[int, Prompt]] = []
    placeholders = 0
    reader = format
    for number, record in records:
        where = f"{path}, {kind} {number}"
        if not isinstance(record, dict):
            raise PromptError(f"{where}: expected a JSON object, found {type(record).__name__}")
        if reader == "auto":
            reader = recognise(record)
            if reader == "":
                raise PromptError(f"{where}: not recognised; name its format: {', '.join(FORMATS)}")
        try:
            prompt = _prompt(READERS[reader], reader, record, number, domain, names)
        except PromptError as problem:
            raise PromptError(f"{where}: {problem}") from None
        except (KeyError, TypeError, IndexError, AttributeError, ValueError):
            raise PromptError(f"{where}: not a record of the format {reader}") from None
        if prompt is not None and prompt.messages[-1]["content"].lstrip().startswith(_PLACEHOLDER):
            placeholders += 1
        elif prompt is not None:
            prompts.append((number, prompt))
        if limit is not None and len(prompts) >= limit:
            break
    if placeholders and not prompts:
        raise PromptError(
            f"{path}: all of its {placeholders} records hold a placeholder instead of their text: complete them with "
            f"the data set's own tool, and give what it writes as `path`"
        )
    return Reading(_named(path, prompts, limit, attempts=reader == "swe-bench"), placeholders)


def recognise(record: Record) -> str:
    """The format of a record, by its keys; empty if none fits."""
    keys = set(record)
    question, prompt = record.get("question"), record.get("prompt")
    for name, fits in (
        ("humaneval", {"prompt", "entry_point"} <= keys),
        ("mbpp", "test_list" in keys),
        ("sharegpt", "conversations" in keys or "conversation" in keys),
        ("spec-bench", {"turns", "question_id"} <= keys or ("category" in keys and isinstance(prompt, list))),
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


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as problem:
        raise PromptError(f"{path}: cannot be read: {problem.strerror or problem}") from None


def _parquet_records(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows from 1, as JSON would have them: what is null is not there."""
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=_BATCH) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield number, _without_nulls(row)
    except (pa.ArrowException, OSError, ValueError, ArithmeticError) as problem:
        first = (str(problem).splitlines() or [""])[0]
        raise PromptError(f"{path}: the Parquet file is cut short or damaged: {first[:200]}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _prompt(
    read: Callable[[Record], Conversation | None], format: str, record: Record, number: int, domain: str | None,
    names: _Names,
) -> Prompt | None:  # fmt: skip
    """One prompt; None for a record that asks nothing, such as a conversation without a user's turn."""
    if format == "prompts":
        given = {**record, "domain": domain} if domain is not None else dict(record)
        return prompt_from_record(given, _fit(names.domain))
    found = read(record)
    if found is None:
        return None
    messages = _open_ended(found[0])
    if messages is None:
        return None
    own = next(
        (record[key] for key in ("id", "task_id", "question_id", "instance_id") if record.get(key) is not None), None
    )
    name = f"{names.ids}-{number:06d}" if own is None else f"{names.ids}-{own}"
    chosen = domain or found[1] or names.domain
    return prompt_from_record({"id": _fit(name, 100), "domain": _fit(chosen), "messages": messages})


def _named(
    path: Path, prompts: Sequence[tuple[int, Prompt]], limit: int | None, *, attempts: bool = False
) -> tuple[Prompt, ...]:
    """Checks that ids are distinct. `attempts`: one task may have several; those after the first get their number."""
    if not prompts:
        raise PromptError(f"{path}: holds no prompts of this format")
    seen: dict[str, int] = {}
    named = []
    for number, prompt in prompts[:limit]:
        given = prompt
        if attempts and given.id in seen:
            given = replace(prompt, id=f"{prompt.id[:90]}-{number:06d}")
        if given.id in seen:
            raise PromptError(f"{path}: records {seen[given.id]} and {number} have the same id {given.id!r}")
        seen[given.id] = number
        named.append(given)
    return tuple(named)


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
    turns = record.get("turns", record.get("prompt"))
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
    text: str, path: Path, domain: str | None, limit: int | None, delimiter: str, names: _Names
) -> Iterator[tuple[int, Prompt]]:
    rows = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter)
    fields = {str(name).strip().lower(): name for name in rows.fieldnames or ()}
    column = next((fields[name] for name in _COLUMNS if name in fields), None)
    if column is None:
        raise PromptError(f"{path}, line 1: no column to ask from: name one of {', '.join(_COLUMNS)}")
    for number, row in enumerate(rows, start=1):
        if limit is not None and number > limit:
            return
        try:
            own = row.get(fields.get("id", "")) or f"{number:06d}"
            chosen = domain or row.get(fields.get("domain", fields.get("category", ""))) or names.domain
            name = _fit(f"{names.ids}-{own}", 100)
            yield number, prompt_from_record({"id": name, "domain": _fit(chosen), "messages": _user(row[column])})
        except (PromptError, TypeError) as problem:
            raise PromptError(f"{path}, line {rows.line_num}: {problem}") from None


def _text_prompts(text: str, path: Path, domain: str | None, names: _Names) -> Iterator[tuple[int, Prompt]]:
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
                            "id": _fit(f"{names.ids}-{number:06d}", 100),
                            "domain": _fit(domain or names.domain),
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
