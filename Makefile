# make demo: train NAM56R on this machine.   make test: the whole CPU suite.   Both set everything up first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The Python that makes the virtual environment; the environment itself lies outside of the clone (requirements/environment.py).
BASE_PYTHON ?= python3.12
export PYTHONPATH := $(CURDIR)

# Shell text that leaves the environment's Python in $$python.
SETUP = "$(BASE_PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 12))" 2>/dev/null || { \
	echo "Python 3.12 or later was not found as '$(BASE_PYTHON)': install it, or say make BASE_PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	python="$$("$(BASE_PYTHON)" requirements/environment.py)"

.PHONY: help venv demo test test-exhaustive lint typecheck clean

help:
	@echo "make demo       set everything up, train nam56r_tiny, show the loss curve"
	@echo "make test       the CPU test suite (MEGATRON_LM=/path/to/Megatron-LM adds the tests on a checkout)"
	@echo "make test-exhaustive  every combination: patches by recompute, masks, schedules and layouts"
	@echo "make lint       ruff, check and format"
	@echo "make typecheck  mypy"
	@echo "make venv       the virtual environment alone"
	@echo "make clean      remove what builds and tests leave in the clone (runs/ is kept)"

venv:
	@$(SETUP); echo "$$python"

demo:
	@$(SETUP); exec "$$python" examples/demo.py

test:
	@$(SETUP); exec "$$python" -m pytest -n 2 --dist loadfile -m "not gpu and not exhaustive" tests

test-exhaustive:
	@$(SETUP); exec "$$python" -m pytest -n 2 --dist loadfile -m "exhaustive and not gpu" tests

lint:
	@$(SETUP); "$$python" -m ruff check . && "$$python" -m ruff format --check .

typecheck:
	@$(SETUP); exec "$$python" -m mypy

clean:
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
