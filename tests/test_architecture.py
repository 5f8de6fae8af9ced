"""The house rules of docs/architecture.md, checked on the source: who may import whom, and what pure means."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "breakeven"
PAGE = ROOT / "docs" / "architecture.md"

# Files and folders, relative to the package. Those that do not exist (yet) are skipped.
PURE = (
    "lab/acceptance.py",
    "lab/breakeven.py",
    "lab/client/clocks.py",
    "lab/client/http1.py",
    "lab/client/parse.py",
    "lab/client/partition.py",
    "lab/client/sse.py",
    "lab/client/types.py",
    "lab/design.py",
    "lab/engines",
    "lab/gates.py",
    "lab/load.py",
    "lab/metrics.py",
    "lab/policy",
    "lab/quantity.py",
    "lab/section.py",
    "lab/selftest",
    "lab/servers.py",
    "lab/stats",
    "lab/texts.py",
    "lab/tune/choose.py",
    "lab/tune/halving.py",
    "lab/verdict.py",
    "lab/window.py",
    "lab/workload/arrivals.py",
    "lab/workload/prompt.py",
    "lab/workload/request.py",
    "lab/workload/retrieval.py",
    "engine/config.py",
    "engine/draft_tree.py",
    "engine/request.py",
    "engine/tree.py",
    "engine/verify.py",
    "train/loops.py",
    "predict",
)
# Not pure, but must work (and be tested, and replayed) without torch.
TORCH_FREE_ENGINE = ("engine/scheduler.py", "engine/control.py")

INPUT_OUTPUT = (
    # the standard library
    *("asyncio", "concurrent", "glob", "http", "io", "mmap", "multiprocessing", "os", "pathlib", "pty", "select"),
    *("selectors", "shutil", "signal", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess"),
    *("tempfile", "threading", "urllib.request"),
    # other packages
    *("aiohttp", "httpx", "matplotlib", "psutil", "pyarrow", "requests", "rich", "starlette", "typer", "uvicorn"),
    "yaml",
)
IO_BUILTINS = frozenset(("open", "print", "input", "breakpoint"))


@dataclass(frozen=True)
class Import:
    """One imported module. `lazy`: inside a function; `typing_only`: under `if TYPE_CHECKING`."""

    module: str
    line: int
    lazy: bool
    typing_only: bool

    def within(self, *packages: str) -> bool:
        return any(self.module == name or self.module.startswith(name + ".") for name in packages)


def _sources(*relative: str) -> list[Path]:
    """The Python files of the given files and folders of the package; of all of it by default."""
    found: list[Path] = []
    for name in relative or ("",):
        path = PACKAGE / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
    return found


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file_of(module: str) -> Path | None:
    base = PACKAGE.parent.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def _imports(path: Path) -> list[Import]:
    """All imports of a file of the package, as absolute names."""
    package = _module_name(path) if path.name == "__init__.py" else _module_name(path).rpartition(".")[0]
    return _imports_in(path.read_text(encoding="utf-8"), package)


def _imports_in(source: str, package: str) -> list[Import]:
    """All imports of a source; `from package import name` counts as both, the package and the name in it."""
    found: list[Import] = []

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            found.extend(Import(name, node.lineno, lazy, typing_only) for name in names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.body:
                walk(statement, lazy, True)
            for statement in node.orelse:
                walk(statement, lazy, typing_only)
        else:
            inner = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                walk(child, inner, typing_only)

    walk(ast.parse(source), False, False)
    return found


def _reached(path: Path, *, package_files: bool) -> Iterator[tuple[Path, Import]]:
    """What a module imports, in functions too, and what these import, through all modules of the package.

    Python also runs the `__init__` of every package above a module. With `package_files` these count; without, a
    package may offer its whole interface in one place though only some of its modules are pure.
    """
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if package_files:
            waiting += [folder / "__init__.py" for folder in current.parents if PACKAGE in (folder, *folder.parents)]
        for imported in _imports(current):
            if imported.typing_only:
                continue
            yield current, imported
            if imported.within("breakeven") and (target := _file_of(imported.module)):
                waiting.append(target)


def _where(path: Path, imported: Import) -> str:
    return f"{path.relative_to(ROOT)}:{imported.line} imports {imported.module}"


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in paths]


# Rooms


def test_lab_never_imports_engine_and_engine_never_imports_lab() -> None:
    faults = [
        _where(path, imported)
        for room, other in (("lab", "breakeven.engine"), ("engine", "breakeven.lab"))
        for path in _sources(room)
        for imported in _imports(path)
        if imported.within(other)
    ]
    assert faults == []


def test_training_knows_the_engine_and_nobody_but_the_command_line_knows_training() -> None:
    faults = [
        _where(path, imported)
        for rooms, others in ((("lab", "engine"), "breakeven.train"), (("train",), "breakeven.lab"))
        for path in _sources(*rooms)
        for imported in _imports(path)
        if imported.within(others)
    ]
    assert faults == []


def test_neither_lab_nor_engine_nor_training_knows_the_command_line() -> None:
    faults = [
        _where(path, imported)
        for path in _sources("lab", "engine", "train")
        for imported in _imports(path)
        if imported.within("breakeven.cli", "typer")
    ]
    assert faults == []


def test_the_command_line_imports_lab_engine_and_training_only_inside_functions() -> None:
    standard = set(sys.stdlib_module_names) | {"typer", "rich", "breakeven"}
    faults = [
        _where(path, imported)
        for path in _sources("cli")
        for imported in _imports(path)
        if not imported.lazy
        and not imported.typing_only
        and (
            imported.within("breakeven.lab", "breakeven.engine", "breakeven.train")
            or imported.module.split(".")[0] not in standard
        )
    ]
    assert faults == []


def test_lab_imports_no_torch_anywhere_and_nothing_that_a_plain_installation_lacks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    distributions = {re.split(r"[<>=~!\[; ]", line)[0] for line in project["dependencies"]}
    known = {"pyyaml": "yaml"}
    allowed = set(sys.stdlib_module_names) | {known.get(name, name) for name in distributions} | {"breakeven"}
    faults = [
        _where(path, imported)
        for path in _sources("lab")
        for imported in _imports(path)
        if imported.module.split(".")[0] not in allowed and not imported.typing_only
    ]
    assert faults == []


# Purity


@pytest.mark.parametrize("path", _sources(*PURE), ids=_names(_sources(*PURE)))
def test_a_pure_module_reaches_no_input_or_output(path: Path) -> None:
    reached = _reached(path, package_files=False)
    assert [_where(at, imported) for at, imported in reached if imported.within(*INPUT_OUTPUT)] == []


@pytest.mark.parametrize("path", _sources(*PURE), ids=_names(_sources(*PURE)))
def test_a_pure_module_calls_no_builtin_that_reads_or_writes(path: Path) -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno} calls {node.func.id}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IO_BUILTINS
    ]
    assert calls == []


_NO_TORCH = _sources(*PURE, *TORCH_FREE_ENGINE)


@pytest.mark.parametrize("path", _NO_TORCH, ids=_names(_NO_TORCH))
def test_modules_that_must_run_without_torch_reach_none(path: Path) -> None:
    reached = _reached(path, package_files=True)
    assert [_where(at, imported) for at, imported in reached if imported.within("torch")] == []


# Without torch

_BLOCKED = {"huggingface_hub", "torch", "transformers", "tokenizers", "safetensors", "gguf", "starlette", "uvicorn"}
_BLOCK = f"""
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {_BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Block())
"""
_IMPORT_LAB = """
import breakeven, breakeven.lab
for found in pkgutil.walk_packages(breakeven.lab.__path__, "breakeven.lab."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""


def _run_without_the_extras(code: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "MPLCONFIGDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", f"{_BLOCK}{code}\nprint('imported')"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "imported"), done.stderr


def test_breakeven_and_every_module_of_the_lab_import_without_torch(tmp_path: Path) -> None:
    _run_without_the_extras(_IMPORT_LAB, tmp_path)


def test_the_command_line_imports_without_torch(tmp_path: Path) -> None:
    _run_without_the_extras("import breakeven.cli.main", tmp_path)


def test_the_block_of_these_tests_blocks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="torch is blocked by the test"):
        _run_without_the_extras("import torch", tmp_path)


# The page


def _rows() -> dict[str, str]:
    """Room → whose job: the rows of the page's table whose first cell is a path in backquotes."""
    rows = re.findall(
        r"^\| `((?:lab|engine|train|cli)/[\w./]+)` \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name.rstrip("/"): job for name, job in rows}


def _top_level_modules() -> set[str]:
    found: set[str] = set()
    for room in ("lab", "engine", "train", "cli"):
        for path in (PACKAGE / room).iterdir():
            is_module = path.suffix == ".py" and path.name != "__init__.py"
            if is_module or (path.is_dir() and any(path.rglob("*.py"))):
                found.add(f"{room}/{path.name}")
    return found


def test_every_module_has_a_row_in_the_architecture_page() -> None:
    missing = sorted(_top_level_modules() - set(_rows()))
    assert missing == [], "add a row to docs/architecture.md for each"


def test_every_row_of_the_architecture_page_names_a_module_that_exists() -> None:
    stale = sorted(set(_rows()) - _top_level_modules())
    assert stale == [], "take the row out of docs/architecture.md"


def test_every_row_says_what_the_job_is() -> None:
    assert [name for name, job in _rows().items() if len(job.split()) < 3] == []


# The test's own tools


def test_the_import_reader_sees_relative_lazy_and_typing_only_imports() -> None:
    source = """
import os.path
from typing import TYPE_CHECKING
from ..client import types
if TYPE_CHECKING:
    import torch
else:
    import json
def f():
    from breakeven.engine import tree
class C:
    import csv
"""
    found = {(i.module, i.lazy, i.typing_only) for i in _imports_in(source, "breakeven.lab.stats")}
    assert found == {
        ("os.path", False, False),
        ("typing", False, False),
        ("typing.TYPE_CHECKING", False, False),
        ("breakeven.lab.client", False, False),
        ("breakeven.lab.client.types", False, False),
        ("torch", False, True),
        ("json", False, False),
        ("breakeven.engine", True, False),
        ("breakeven.engine.tree", True, False),
        ("csv", False, False),
    }


def test_what_a_module_reaches_includes_what_its_imports_import() -> None:
    path = PACKAGE / "lab" / "workload" / "request.py"
    reached = {imported.module for _, imported in _reached(path, package_files=False)}
    assert {"breakeven.lab.workload.prompt", "hashlib"} <= reached
