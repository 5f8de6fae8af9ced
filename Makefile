# make quickstart   set up, then compare speculation off and on under load (about 5 minutes on 2 cores)
# make test         set up, then run the tests
# make test-engines install vLLM, SGLang, llama.cpp and Ray in .engines (6 GB) and run the tests that need them
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= runs/quickstart
PYTEST_ARGS ?=

ENGINES_DIR ?= .engines

.PHONY: setup quickstart test test-slow test-engines lint format clean help

help:
	@grep -E '^# make' Makefile | sed 's/^# //'

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup.sh

quickstart: setup
	@$(BIN)/breakeven quickstart --out "$(OUT)"

# One thread each: the small models of the tests gain nothing from more, and spinning threads starve each other.
test: export OMP_NUM_THREADS = 1
test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu and not engines" $(PYTEST_ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-engines: setup
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/engines.sh "$(ENGINES_DIR)" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
