"""The prompt suites that ship with breakeven, and prompt files of the user's own.

`python -m breakeven.lab.workload.suite` lists the suites; with `--write-hashes` it records their hashes, which a test
compares with the prompts, so that no prompt changes unnoticed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from breakeven.lab.workload.prompt import Prompt, PromptError, Suite, make_suite, prompt_from_record, salted
from breakeven.lab.workload.retrieval import BANDS, PREFIX, retrieval_prompts

__all__ = [
    "Prompt",
    "PromptError",
    "Suite",
    "domains",
    "load_suite",
    "read_prompts_file",
    "recorded_hashes",
    "salted",
    "stored_domains",
]

HASHES_FILE = "hashes.txt"
_SUFFIX = ".jsonl"


def domains() -> list[str]:
    """The domains that have a suite: those on file in alphabetical order, then the generated ones by length."""
    return stored_domains() + [PREFIX + band for band in BANDS]


def stored_domains() -> list[str]:
    """The domains whose prompts are on file."""
    return sorted(entry.name.removesuffix(_SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(_SUFFIX))


def load_suite(domain: str) -> Suite:
    """The suite of one domain, prompts sorted by id. PromptError if there is no such suite."""
    if domain not in domains():
        raise PromptError(f"there is no suite for the domain {domain!r}: choose from {', '.join(domains())}")
    if domain.startswith(PREFIX):
        return make_suite(domain, retrieval_prompts(domain))
    name = domain + _SUFFIX
    return make_suite(domain, _parse(_folder().joinpath(name).read_text(encoding="utf-8"), name, domain))


def read_prompts_file(path: str | Path) -> Suite:
    """A suite from a JSONL file: one object a line with `id`, optional `domain`, and `messages` or `prompt`.

    Blank lines are skipped. The suite is named after the file, its prompts are sorted by id. PromptError, with the
    line's number, for anything that cannot be used, and for a file that cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise PromptError(f"{path}: not UTF-8 (byte {problem.start}): save the file as UTF-8") from None
    except OSError as problem:
        raise PromptError(f"{path}: cannot be read: {problem.strerror or problem}") from None
    prompts = list(_parse(text, str(path), None))
    if not prompts:
        raise PromptError(f"{path}: holds no prompts: write one JSON object a line, with an id and a prompt")
    return make_suite(path.stem, prompts)


def recorded_hashes() -> dict[str, str]:
    """The hashes on record: domain → SHA-256 of `canonical_sha256`."""
    lines = _folder().joinpath(HASHES_FILE).read_text(encoding="utf-8").splitlines()
    pairs = (line.split() for line in lines if line.strip() and not line.startswith("#"))
    return {domain: sha256 for sha256, domain in pairs}


def _folder() -> Traversable:
    return files("breakeven.lab.workload").joinpath("suites")


def _parse(text: str, source: str, only_domain: str | None) -> Iterator[Prompt]:
    first_seen: dict[str, int] = {}
    # Not splitlines: it also breaks at characters that JSON allows inside a string (U+2028 among them).
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = prompt_from_record(json.loads(line, object_pairs_hook=_no_repeats))
            if only_domain is not None and prompt.domain != only_domain:
                raise PromptError(f"'domain' must be {only_domain!r}, found {prompt.domain!r}")
            if prompt.id in first_seen:
                raise PromptError(f"the id {prompt.id!r} is already used on line {first_seen[prompt.id]}")
        except json.JSONDecodeError as problem:
            raise PromptError(f"{source}, line {number}: not JSON: {problem.msg} (column {problem.colno})") from None
        except RecursionError:
            raise PromptError(f"{source}, line {number}: JSON nested too deeply") from None
        except ValueError as problem:  # PromptError, and what json refuses without a position
            raise PromptError(f"{source}, line {number}: {problem}") from None
        first_seen[prompt.id] = number
        yield prompt


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON leaves a repeated key to the reader, and Python keeps the last: a prompt would be lost in silence."""
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise PromptError(f"the key {repeated!r} occurs twice in one object")
    return record


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m breakeven.lab.workload.suite", description="The prompt suites.")
    parser.add_argument("--write-hashes", action="store_true", help=f"record the suites' hashes in {HASHES_FILE}")
    options = parser.parse_args(arguments)
    suites = [load_suite(domain) for domain in domains()]
    for suite in suites:
        print(f"{suite.sha256}  {suite.name}  {len(suite.prompts)} prompts")
    if options.write_hashes:
        target = Path(__file__).parent / "suites" / HASHES_FILE
        head = "# SHA-256 of each suite's canonical JSON (not of the file); see docs/workload.md.\n"
        target.write_text(head + "".join(f"{s.sha256}  {s.name}\n" for s in suites), encoding="utf-8")
        print(f"written to {target}")


if __name__ == "__main__":
    _main()
