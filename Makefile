# Everyday commands. Everything is installed into $(VENV); a second call installs nothing unless pyproject.toml changed.
# PYTHON chooses the interpreter of a new environment. For a second one beside it: make test PYTHON=python3.13 VENV=.venv313

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
CREATED := $(VENV)/.stamp-created
DEMO_READY := $(VENV)/.stamp-demo
TEST_READY := $(VENV)/.stamp-test

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test stack lint format docs bench clean

help:
	@echo "make demo    run the demonstration"
	@echo "make test    run the tests"
	@echo "make stack   build real servers (minutes, the first time) and run the tests against them"
	@echo "make lint    check style, formatting and types"
	@echo "make format  put the code into the project's format"
	@echo "make docs    write what is generated under docs/ and collector-config/ anew"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove the environment and all caches"

demo: $(DEMO_READY)
	$(BIN)/otel-brick demo

test: $(TEST_READY)
	$(BIN)/python -m pytest

stack: $(TEST_READY)
	tests/stack/servers/build.sh
	$(BIN)/python -m pytest tests/stack

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python

format: $(TEST_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TEST_READY)
	$(BIN)/python docs/generate.py
	$(BIN)/python collector-config/generate.py

bench: $(TEST_READY)
	for script in tests/benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .benchmarks dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pip that came with an early Python 3.10 can not install a project of this kind in place, hence the upgrade.
$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "otel_brick needs Python 3.10 or newer; choose one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(DEMO_READY): pyproject.toml | $(CREATED)
	$(BIN)/python -m pip install --quiet --editable '.[cli]'
	@touch $@

# What the tests need includes what the demonstration needs, so both are ready afterwards.
$(TEST_READY): pyproject.toml | $(CREATED)
	$(BIN)/python -m pip install --quiet --editable '.[cuda,cli,dev]'
	@touch $(DEMO_READY) $@
