"""Run by vLLM's own Python: parses command lines as `vllm serve` does, all in one process. No GPU is needed.

Standard input: a JSON list of argument lists, each without the leading "serve". Standard output, its last line: a JSON
list with null for each that is accepted, and what vLLM said of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
from typing import Any


def unknown_keys(args: argparse.Namespace) -> str | None:
    """Keys of the JSON mappings that vLLM has no field for. The parser takes any; the engine refuses them at start."""
    from vllm.config import CompilationConfig, SpeculativeConfig

    for name, kind in (("speculative_config", SpeculativeConfig), ("compilation_config", CompilationConfig)):
        given: Any = getattr(args, name, None)
        if isinstance(given, dict):
            unknown = set(given) - {field.name for field in dataclasses.fields(kind)}
            if unknown:
                return f"{name} has no {', '.join(sorted(unknown))}"
    return None


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    answers: list[str | None] = []
    for command in json.load(sys.stdin):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                args = parser.parse_args(["serve", *command])
                serve.validate(args)
            answers.append(unknown_keys(args))
        except SystemExit:
            answers.append(said.getvalue().strip().rpartition("\n")[2] or "refused without a word")
        except (TypeError, ValueError) as problem:
            answers.append(str(problem))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
