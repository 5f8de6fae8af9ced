"""`python -m breakeven.lab.mock --port 8000 --script '{"chunks": 20}'`: prints where it listens, then serves."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from pathlib import Path

from breakeven.lab.mock.script import MockScript
from breakeven.lab.mock.server import MockServer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m breakeven.lab.mock", description="A mock OpenAI server of known truth."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--script", default="{}", help="JSON of MockScript's fields, or @FILE")
    parser.add_argument("--cpu", type=int, help="pin the server to this core (Linux)")
    options = parser.parse_args(arguments)
    try:
        text = Path(options.script[1:]).read_text() if options.script.startswith("@") else options.script
        script = MockScript.from_json(text)
        if options.cpu is not None:
            os.sched_setaffinity(0, {options.cpu})
        server = MockServer(script, options.host, options.port)
    except (OSError, ValueError, AttributeError) as problem:
        print(f"mock: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, lambda *_: server.stop())
    print(json.dumps({"url": server.url, "port": server.port}), flush=True)
    gc.disable()  # what it records grows and holds no cycles; a collection would show as a pause in its pace
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
