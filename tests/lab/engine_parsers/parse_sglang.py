"""Run by a Python that has SGLang: parses command lines as `python -m sglang.launch_server` does. No GPU is needed.

Standard input and output are those of parse_vllm.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys


def main() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    answers: list[str | None] = []
    for command in json.load(sys.stdin):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(command)
            answers.append(None)
        except SystemExit:
            answers.append(said.getvalue().strip().rpartition("\n")[2] or "refused without a word")
        except (TypeError, ValueError) as problem:
            answers.append(str(problem))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
