"""A server on another machine: started over ssh in a process group of its own there, and ended with it.

The far side runs a short shell script. It writes the server's files, starts it in a session of its own, says the number
of its process group, and holds its own standard input: when that ends (the lab stops the server, or has died, or sshd
has noticed that the connection is gone), it ends the group, first with SIGTERM and after a while with SIGKILL.

Variables may be secrets, and command lines are seen by everybody on a machine, so they come as the first line of the
standard input.
"""

from __future__ import annotations

import base64
import re
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence

_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_GROUP = re.compile(r"^breakeven: process group (\d+)$", re.M)
_ASK_TIMEOUT_S = 20.0


def remote_folder() -> str:
    """Where the server's files are put on the far side: a name that nobody there can have taken beforehand."""
    return f"/tmp/breakeven-{secrets.token_hex(8)}"


def ssh_command(destination: str, script: str) -> list[str]:
    """The local command line that runs a script on the far side."""
    return ["ssh", *_OPTIONS, destination, script]


def start_script(
    command: Sequence[str],
    env: Mapping[str, str | None],
    files: Mapping[str, str],
    folder: str,
    stop_timeout_s: float,
) -> str:
    """The script that starts a server and ends it with its own standard input. For any POSIX shell.

    Where `env` sets variables, their values must be the first line of that input: see `first_line`.
    """
    lines = ["exec 3<&0"]
    sets = any(value is not None for value in env.values())
    if sets:
        lines.append('IFS= read -r v <&3 || exit 1; v=$(echo "$v" | base64 -d) || exit 1')
    if files:
        lines.append(f"mkdir -m 700 {shlex.quote(folder)} || exit 1")
    for name, text in files.items():
        encoded = base64.b64encode(text.encode()).decode()
        lines.append(f"echo {encoded} | base64 -d > {shlex.quote(f'{folder}/{name}')} || exit 1")
    unset = [part for name, value in env.items() if value is None for part in ("-u", name)]
    given = 'eval "$v"; ' if sets else ""
    lines += [
        f"( {given}exec setsid env {shlex.join([*unset, *command])} ) </dev/null 3<&- &",
        "g=$!",
        'echo "breakeven: process group $g"',
        # Without the output of the connection, which sshd would else keep open for as long as this runs.
        f"( cat <&3; {_end_group(stop_timeout_s)} ) >/dev/null 2>&1 &",
        "w=$!",
        "wait $g; s=$?",
        "exec 3<&-",
        f"{_end_group(stop_timeout_s)}",
        "kill $w 2>/dev/null",
        *([f"rm -rf {shlex.quote(folder)}"] if files else []),
        "exit $s",
    ]
    return "\n".join(lines)


def first_line(env: Mapping[str, str | None]) -> bytes:
    """What `start_script` reads first: the variables that are set, as commands of a shell; empty if there are none."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items() if value is not None]
    return base64.b64encode("\n".join(exports).encode()) + b"\n" if exports else b""


def _end_group(timeout_s: float) -> str:
    """SIGTERM to the group $g, SIGKILL to what is left of it after so many seconds; as dash and bash take it."""
    tenths = max(10, round(10 * timeout_s))
    return (
        "kill -TERM -$g 2>/dev/null || kill -TERM $g 2>/dev/null; n=0; "
        f"while kill -0 -$g 2>/dev/null && [ $n -lt {tenths} ]; do sleep 0.1; n=$((n+1)); done; "
        "kill -KILL -$g 2>/dev/null"
    )


def process_group(log: str) -> int | None:
    """The number of the server's process group on the far side, from the launch's log."""
    found = _GROUP.findall(log)
    return int(found[-1]) if found else None


def group_is_gone(destination: str, group: int) -> bool | None:
    """Whether no process of the group is left on the far side; None if that cannot be asked."""
    script = f"if kill -0 -{group} 2>/dev/null; then echo left; else echo gone; fi"
    try:
        answer = subprocess.run(
            ssh_command(destination, script),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    word = answer.stdout.split()[-1:]  # a shell's greetings may come before it
    return {"gone": True, "left": False}.get(word[0]) if word else None
